"""A real S3 server (moto's) on the loopback, with faults that tests plant."""

import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cogfast.core.addresses import CACHE_VARIABLE

_NUMBERS = count()
# {status: (the line of the answer, S3's code)}
_ERRORS = {
    301: ("301 Moved Permanently", "PermanentRedirect"),
    400: ("400 Bad Request", "ExpiredToken"),
    403: ("403 Forbidden", "SignatureDoesNotMatch"),
    429: ("429 Too Many Requests", "SlowDown"),
    501: ("501 Not Implemented", "NotImplemented"),
    503: ("503 Service Unavailable", "SlowDown"),
}


@dataclass
class Fault:
    """A fault of the server in the answers to requests of `method` whose path matches `path`.

    kind: a status of _ERRORS; "cut": closes the connection within the answer; "slow": answers after
    `seconds`; "no ranges": ignores the header Range. times: how often; None: always.
    """

    kind: int | str
    method: str = ".*"
    path: str = ""
    times: int | None = None
    seconds: float = 0.5

    def applies(self, environ: dict) -> bool:
        is_one = re.fullmatch(self.method, environ["REQUEST_METHOD"]) is not None
        is_one = is_one and re.search(self.path, environ["PATH_INFO"]) is not None
        if not is_one or self.times == 0:
            return False
        self.times = None if self.times is None else self.times - 1
        return True


class S3Server:
    """requests: (method, path) of each request. faults: those that are planted now."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        self.faults: list[Fault] = []
        self.watch: Callable[[str, str], None] = lambda method, path: None
        self._lock = threading.Lock()
        self.bucket = f"bucket-{next(_NUMBERS)}"
        self.port = 0
        self._app: Any = None

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def prepare(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Lead this process and those that it starts here, with `cache` as their local cache."""
        for key, value in self.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setenv(CACHE_VARIABLE, str(cache))
        self.faults, self.requests = [], []

    def __call__(self, environ: dict, start_response: Callable) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        with self._lock:
            self.requests.append((method, path))
            fault = next((f for f in self.faults if f.applies(environ)), None)
        self.watch(method, path)
        kind = None if fault is None else fault.kind
        if isinstance(kind, int):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            line, code = _ERRORS[kind]
            text = f"<Error><Code>{code}</Code><Message>planted</Message></Error>"
            headers = [("Content-Type", "application/xml")]
            headers += [("x-amz-bucket-region", "eu-west-1")] * (kind == 301)
            start_response(line, headers)
            return [b"" if method == "HEAD" else text.encode()]
        if kind == "slow":
            assert fault is not None
            time.sleep(fault.seconds)
        if kind == "no ranges":
            environ.pop("HTTP_RANGE", None)
        answer = self._app(environ, start_response)
        return _cut(answer) if kind == "cut" else answer


def _cut(answer: Iterable[bytes]) -> Iterator[bytes]:
    data = b"".join(answer)
    yield data[: len(data) // 2]
    raise ConnectionAbortedError("planted: the answer is cut")


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server with one empty bucket, whose address is server.url."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: object) -> None:
            pass

    app = S3Server()
    app._app = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Handler)
    app.port = server.port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    import s3fs

    try:
        import boto3

        # fsspec keeps file systems by their arguments, not by the environment that led them to a server,
        # or, in a test without one, to no credentials.
        s3fs.S3FileSystem.clear_instance_cache()
        given = app.environment
        boto3.client(
            "s3",
            endpoint_url=given["AWS_ENDPOINT_URL"],
            aws_access_key_id="test",
            aws_secret_access_key="test",
            region_name="us-east-1",
        ).create_bucket(Bucket=app.bucket)
        yield app
    finally:
        server.shutdown()
        thread.join()
        s3fs.S3FileSystem.clear_instance_cache()

"""Web servers on the loopback: of any handler, and one that serves a folder under any query."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class WebServer(ThreadingHTTPServer):
    """requests: "METHOD path?query" of each, where the handler keeps them. address: without a slash at the end.
    missing: the status for a file that is not there."""

    requests: list[str]
    missing: int

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(has_body=False)

    def do_GET(self) -> None:
        self._answer(has_body=True)

    def _answer(self, has_body: bool) -> None:
        assert isinstance(self.server, WebServer), "web_server makes one"
        self.server.requests.append(f"{self.command} {self.path}")
        file = Path(self.translate_path(self.path))
        if not file.is_file():
            self.send_error(self.server.missing)
            return
        data = file.read_bytes()
        start, end = 0, len(data)
        if given := self.headers["Range"]:
            first, _, last = given.removeprefix("bytes=").partition("-")
            start, end = int(first), min(end, int(last) + 1) if last else end
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{len(data)}"')
        if given:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(data)}")
        self.end_headers()
        if has_body:
            self.wfile.write(data[start:end])


@contextmanager
def serving(handler: Callable[..., BaseHTTPRequestHandler]) -> Iterator[WebServer]:
    """Let the handler answer in a thread."""
    with WebServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        try:
            yield server
        finally:
            server.shutdown()


@contextmanager
def web_server(folder: Path, missing: int = 404) -> Iterator[WebServer]:
    with serving(partial(_Handler, directory=str(folder))) as server:
        server.requests, server.missing = [], missing
        yield server

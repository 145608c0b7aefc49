"""A web server that a row of a manifest names may send anything: what is read ends at the size that it stated."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from fsspec.config import conf

from cogfast.core import files
from cogfast.core.addresses import CACHE_VARIABLE
from cogfast.core.run_lock import check_object
from cogfast.extensions.stores import ranges, store
from cogfast.extensions.stores.mirror import copy_of, download_run
from cogfast.extensions.stores.store import StoreError, local_copy
from tests.cli.hostile.bounds import GIB, bounded
from tests.cli.hostile.web_server import serving
from tests.support.refusals import assert_refused
from tests.support.s3_server import Fault, S3Server

CONTENT = bytes(range(256)) * 11  # 2,816 bytes
SIZE = len(CONTENT)
BLOCK = bytes(2**16)
MOST = 64 << 20  # bytes that a server may have sent before its client closes the connection


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("_PATIENCE", 0.5), ("_FIRST_PAUSE", 0.02)):
        monkeypatch.setattr(store, name, value)
    for name, value in (("_SILENCE", 1.0), ("_NOTED", 0.25)):
        monkeypatch.setattr(ranges, name, value)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "local"))


class _Hostile(BaseHTTPRequestHandler):
    """Answers GET in one of several ways, after a HEAD that states SIZE bytes. sent: to all clients."""

    sent = 0
    asked_for: set[str | None] = set()  # noqa: RUF012
    protocol_version = "HTTP/1.1"

    def __init__(self, kind: str, *arguments: object) -> None:
        self.kind = kind
        super().__init__(*arguments)  # pyright: ignore[reportArgumentType]

    def log_message(self, *_: object) -> None:
        pass

    def head(self, status: int, **headers: object) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()

    def do_HEAD(self) -> None:
        if self.kind == "no answer to HEAD":
            time.sleep(5)
        if self.kind.startswith("status"):
            self.head(int(self.kind[7:]), Content_Length=0)
            return
        size = {"states 1 TiB": 2**40, "states less": SIZE - 1000}.get(self.kind, SIZE)
        self.head(200, Content_Length=size, ETag='"1"')

    def do_GET(self) -> None:
        _Hostile.asked_for.add(self.headers.get("Accept-Encoding"))
        with suppress(OSError):
            getattr(self, "do_" + self.kind.split(" ")[0])()
        self.close_connection = True

    def write(self, data: bytes) -> None:
        self.wfile.write(data)
        _Hostile.sent += len(data)

    def part(self) -> tuple[int, bytes]:
        """Status and bytes of a good answer."""
        given = self.headers.get("Range")
        if given is None or self.kind == "ignores ranges":
            return 200, CONTENT
        start, _, end = given.removeprefix("bytes=").partition("-")
        return 206, CONTENT[int(start) : int(end) + 1]

    def do_good(self) -> None:
        status, data = self.part()
        self.head(status, Content_Length=len(data))
        self.write(data)

    do_ignores = do_states = do_no = do_good

    def do_status(self) -> None:
        self.head(int(self.kind[7:]), Content_Length=0)

    def do_endless(self) -> None:
        status, data = self.part()
        self.head(status, **({"Content_Length": 2**40} if self.kind == "long" else {}))
        self.write(data)
        while _Hostile.sent < 2 * MOST:
            self.write(BLOCK)

    do_long = do_endless

    def do_gzip(self) -> None:
        status, _ = self.part()
        self.head(status, Content_Encoding="gzip")
        packed = gzip.compress(bytes(64 << 20), 1)
        for _ in range(64):  # 4 GiB
            self.write(packed)

    def do_drips(self) -> None:
        status, data = self.part()
        self.head(status, Content_Length=len(data))
        for i in range(60):
            self.write(data[i : i + 1])
            time.sleep(0.3)

    def do_silent(self) -> None:
        status, data = self.part()
        self.head(status, Content_Length=len(data))
        time.sleep(5)

    def do_cut(self) -> None:
        status, data = self.part()
        self.head(status, Content_Length=len(data))
        self.write(data[:3])


@contextmanager
def _serving(kind: str) -> Iterator[str]:
    with serving(partial(_Hostile, kind)) as server:
        yield f"{server.address}/x.mp4"


@pytest.fixture
def web(request: pytest.FixtureRequest) -> Iterator[str]:
    _Hostile.sent, _Hostile.asked_for = 0, set()
    with _serving(request.param) as url:
        yield url


def _opened(url: str) -> bytes:
    with store.open_file(url, SIZE) as file:
        file.seek(100)
        return file.read(50)


CALLS: dict[str, tuple[Callable[[str], bytes], bytes]] = {
    "whole": (store.read, CONTENT),
    "start": (lambda url: store.read(url, 0, 10), CONTENT[:10]),
    "part": (lambda url: store.read(url, 100, 50), CONTENT[100:150]),
    "file": (_opened, CONTENT[100:150]),
    "copy": (lambda url: local_copy(url).read_bytes(), CONTENT),
    "copy of a part": (
        lambda url: local_copy(url, "-", (100, 50), SIZE).read_bytes(),
        CONTENT[100:150],
    ),
}
OF_PARTS = {"part", "file", "copy of a part"}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("web", ["good", "endless", "long", "ignores ranges"], indirect=True)
def test_an_answer_ends_at_its_stated_size(web: str, call: str, request, monkeypatch) -> None:
    kind = request.node.callspec.params["web"]
    monkeypatch.setattr(files, "MOST_BYTES", SIZE)
    read, wanted = CALLS[call]
    with bounded():
        if kind == "ignores ranges" and call in OF_PARTS:
            assert_refused(lambda: read(web), "a store must support HTTP ranges", StoreError)
        elif call == "whole" and kind in ("endless", "long"):
            assert_refused(
                lambda: read(web), f"has more than {SIZE} bytes; use a smaller", StoreError
            )
        else:
            assert read(web) == wanted
    assert _Hostile.sent < MOST
    assert _Hostile.asked_for == {"identity"}


SILENT = "nothing came for 1 s; the store does not answer"
ENDED = {"gzip": "its server compresses it", "drips": "", "silent": "", "cut": ""}
ENDED_CASES = [(kind, call, line) for kind, line in ENDED.items() for call in CALLS]
ENDED_CASES += [("no answer to HEAD", call, SILENT) for call in ("part", "copy")]


@pytest.mark.parametrize(("web", "call", "line"), ENDED_CASES, indirect=["web"])
def test_an_answer_that_is_packed_or_makes_no_progress_ends(
    web: str, call: str, line: str, request, caplog
) -> None:
    with bounded():
        assert_refused(lambda: CALLS[call][0](web), line or f"{web}: ", StoreError)
    if request.node.callspec.params["web"] in ("drips", "silent"):
        assert "nothing came for 0 s of 1" in caplog.text  # 0.25 of 1.0 s


@pytest.mark.parametrize("read", [store.stat, store.read])
@pytest.mark.parametrize(
    ("web", "line", "kind"),
    [
        ("status 404", "x.mp4: no such object", FileNotFoundError),
        ("status 401", "no such object or bucket, or its server refuses it", FileNotFoundError),
        ("status 403", "no such object or bucket, or its server refuses it", FileNotFoundError),
        ("status 410", "no such object or bucket, or its server refuses it", FileNotFoundError),
        ("status 500", "500<...>the store does not answer", StoreError),
        ("status 503", "the store asks for fewer requests or is not available", StoreError),
    ],
    indirect=["web"],
)
def test_only_an_object_that_is_not_there_is_missing(web: str, read, line: str, kind) -> None:
    if read is store.stat or "or its server" not in line:
        assert_refused(lambda: read(web), line, kind)
    else:  # the signature of an object that was there may have expired
        assert_refused(lambda: read(web), "its server refuses it (4", StoreError)
    if kind is FileNotFoundError:
        assert store.stats([web]) == {}
    else:
        assert_refused(lambda: store.stats([web]), line, kind)


@pytest.mark.parametrize("host", ["127.0.0.1:1", "no.such.host.invalid"])
def test_no_web_server_is_there(host: str) -> None:
    assert_refused(
        lambda: store.stats([f"http://{host}/x"]), "Cannot connect to host<...>network", StoreError
    )


@pytest.mark.parametrize("web", ["states 1 TiB", "states less"], indirect=True)
def test_a_wrong_size(web: str, request, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, f"{tmp_path / 'local'}:1GB")
    with bounded():
        if request.node.callspec.params["web"] == "states less":
            assert local_copy(web).read_bytes() == CONTENT[: SIZE - 1000]
        else:
            assert_refused(lambda: local_copy(web), "the local cache is too small", StoreError)


@pytest.mark.soak
@pytest.mark.parametrize("web", ["endless", "long", "gzip"], indirect=True)
def test_copies_from_many_threads(web: str) -> None:
    """32 readers at once, as for a data set of small objects, stay within a gigabyte."""

    def copy(number: int) -> int:
        with suppress(StoreError):
            return len(local_copy(f"{web}?{number}").read_bytes())
        return SIZE

    with bounded(GIB * 4):
        assert {*store.in_threads(copy, range(500))} == {SIZE}


def _written(server: S3Server, **contents: bytes) -> str:
    for name, content in contents.items():
        store.write(f"{server.url}/{name}", content)
    return server.url


def test_an_object_of_a_bucket_has_a_limit(server: S3Server, monkeypatch) -> None:
    url = f"{_written(server, large=CONTENT)}/large"
    monkeypatch.setattr(files, "MOST_BYTES", SIZE - 1)
    assert_refused(lambda: store.read(url), f"large: has more than {SIZE - 1} bytes", StoreError)
    assert store.read(url, 0, 10) == CONTENT[:10]
    monkeypatch.setattr(files, "MOST_BYTES", SIZE)
    assert store.read(url) == CONTENT
    assert store.read(f"{_written(server, empty=b'')}/empty") == b""


def test_a_bucket_that_ignores_ranges(server: S3Server) -> None:
    url = f"{_written(server, x=CONTENT)}/x"
    server.faults = [Fault("no ranges", method="GET")]
    assert local_copy(url).read_bytes() == CONTENT
    assert_refused(lambda: store.read(url, 5, 10), "must support HTTP ranges", StoreError)


def test_a_request_that_waits_for_a_connection_is_not_silent(server: S3Server, monkeypatch) -> None:
    urls = [f"{_written(server, **{f'x{i}': bytes(8192)})}/x{i}" for i in range(8)]
    monkeypatch.setattr(ranges, "_SILENCE", 3.0)
    monkeypatch.setitem(conf, "s3", {"config_kwargs": {"max_pool_connections": 1}})
    server.faults = [Fault("slow", method="GET")]  # 0.5 s each
    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(store.read, urls)] == [bytes(8192)] * 8


@pytest.mark.parametrize("web", ["silent"], indirect=True)
def test_a_silent_server_ends_beside_a_busy_one(web: str, monkeypatch) -> None:
    for name, value in (("_SILENCE", 0.1), ("_NOTED", 0.05), ("_PROGRESS", 1)):
        monkeypatch.setattr(ranges, name, value)
    is_over = threading.Event()
    with _serving("good") as busy, ThreadPoolExecutor(1) as pool:

        def read() -> None:
            while not is_over.is_set():
                store.read(busy)

        reads = pool.submit(read)
        try:
            with bounded():
                assert_refused(lambda: store.read(web, 100, 50), "nothing came for 0 s", StoreError)
        finally:
            is_over.set()
        reads.result()


def test_the_lock_of_a_run_is_read_to_its_limit(server: S3Server) -> None:
    store.write(f"{server.url}/run/run.lock", b"process 7 on a" + bytes(8 << 20))
    with pytest.raises(RuntimeError) as refused:
        check_object(f"{server.url}/run/run.lock", "process 1")
    assert "process 7" in str(refused.value) and len(str(refused.value)) < 600


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (["a", "a/b"], "exists|directory"),
        (["x" * 300], "too long"),
        (["x" * 300 + "/y"], "too long"),
        (["a/b", "a/b/c/d"], "exists|directory"),
    ],
)
def test_keys_that_no_file_can_have(server: S3Server, tmp_path: Path, names, reason) -> None:
    folder = f"{server.url}/{tmp_path.name}"
    for name in ["ok.json", *names]:
        store.write(f"{folder}/{name}", b"{}")
    rule = rf"^{folder}/.*{names[0][:9]}.*: no file can have this name .*(?i:{reason}).*; rename the object$"
    with pytest.raises(StoreError, match=rule):
        copy_of(folder, is_whole=True)
    place = tmp_path / "local" / "runs" / folder
    place.mkdir(parents=True)
    with pytest.raises(StoreError, match=rule):
        download_run(place)

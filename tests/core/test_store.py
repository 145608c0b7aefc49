"""core/store.py against a real S3 server with planted faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cogfast.core import store
from cogfast.core.store import StoreError, local_copy, parse_cache
from tests.support.s3_server import Fault, S3Server, s3_server

_CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def running():
    with s3_server() as server:
        yield server


@pytest.fixture
def server(running: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for key, value in running.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(store, "_PATIENCE", 1.0)
    running.faults, running.requests = [], []
    yield running
    running.faults = []


def _written(server: S3Server, name: str, content: bytes = _CONTENT) -> str:
    url = f"{server.url}/{name}"
    store.write(url, content)
    server.requests.clear()
    return url


def test_what_is_written_is_read_listed_and_removed(server, tmp_path):
    url = _written(server, "a/x.bin")
    (tmp_path / "y").write_bytes(b"other")
    store.upload(tmp_path / "y", f"{server.url}/a/b/y.bin")
    assert store.read(url) == _CONTENT
    assert store.read(url, 1000, 77) == _CONTENT[1000:1077]
    assert store.read(url, len(_CONTENT) - 3, 77) == _CONTENT[-3:]
    with store.open_file(url) as file:
        file.seek(-5, os.SEEK_END)
        assert file.read() == _CONTENT[-5:]
        file.seek(300_000)
        assert file.read(10) == _CONTENT[300_000:300_010]
    found = store.find(f"{server.url}/a")
    assert list(found) == [f"{server.url}/a/b/y.bin", url]
    assert found[url] == store.stat(url)
    assert found[url].num_bytes == len(_CONTENT)
    store.remove([url])
    assert not store.exists(url)
    assert store.find(f"{server.url}/none") == {}
    with pytest.raises(FileNotFoundError, match="a/x.bin: no such object"):
        store.read(url)


def test_a_version_changes_with_the_content(server):
    url = _written(server, "v.bin", b"1")
    before = store.stat(url)
    store.write(url, b"2")
    assert store.stat(url) != before
    assert store.find(server.url)[url] == store.stat(url)


@pytest.mark.parametrize("kind", [503, 429, "cut"])
def test_errors_that_pass_are_tried_again(server, kind, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 20.0)
    url = _written(server, "t.bin")
    server.faults = [Fault(kind, method="GET", times=2)]
    assert local_copy(url, "-").read_bytes() == _CONTENT


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (503, "does not answer; check its address"),
        ("cut", "does not answer; check its address"),
        (403, "access denied .*; check the credentials"),
        ("no ranges", "must support HTTP ranges"),
    ],
)
def test_errors_that_stay_name_the_fix(server, kind, text):
    url = _written(server, "f.bin")
    server.faults = [Fault(kind, method="GET")]
    with pytest.raises(StoreError, match=text) as caught:
        store.read(url, 5, 10)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(url)


def test_without_credentials_and_bucket(server, monkeypatch):
    with pytest.raises(StoreError, match="no such bucket; create it"):
        store.write("s3://no-such-bucket/x", b"")
    with pytest.raises(StoreError, match="install the package"):
        store.read("nosuchscheme://x/y")
    script = "from cogfast.core import store; store.read('s3://bucket-0/x')"
    given = {k: v for k, v in os.environ.items() if not k.startswith("AWS")}
    given |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}
    ended = subprocess.run(
        [sys.executable, "-c", script], env=given, capture_output=True, text=True
    )
    assert "no credentials" in ended.stderr.splitlines()[-1]
    assert "AWS_ACCESS_KEY_ID" in ended.stderr.splitlines()[-1]


def test_local_copies_are_shared_and_follow_the_object(server):
    url = _written(server, "c.mp4")
    version = store.stat(url).version
    server.requests.clear()
    copies = {local_copy(url, version) for _ in range(3)}
    assert [method for method, _ in server.requests].count("GET") == 1
    (copy,) = copies
    assert copy.suffix == ".mp4" and copy.read_bytes() == _CONTENT
    assert local_copy(url, version, (10, 20)).read_bytes() == _CONTENT[10:30]
    store.write(url, b"changed")
    with pytest.raises(StoreError, match="changed since it was listed"):
        local_copy(url, version, (0, 3))
    assert local_copy(url).read_bytes() == b"changed"


def test_processes_of_a_machine_download_an_object_once(server):
    url = _written(server, "p.bin")
    server.faults = [Fault("slow", method="GET", seconds=0.5)]
    script = "import sys; from cogfast.core.store import *; print(local_copy(sys.argv[1], '-'))"
    started = [
        subprocess.Popen([sys.executable, "-c", script, url], stdout=subprocess.PIPE)
        for _ in range(3)
    ]
    assert len({process.communicate()[0] for process in started}) == 1
    assert [method for method, _ in server.requests].count("GET") == 1


def test_the_local_cache_is_bounded_and_keeps_what_was_used_last(server, monkeypatch, tmp_path):
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{tmp_path / 'small'}:10KB")
    urls = [_written(server, f"{i}.bin", bytes([i]) * 1000) for i in range(20)]
    used = lambda: sum(f.stat().st_size for f in (tmp_path / "small").glob("[0-9a-f][0-9a-f]/*"))
    for number, url in enumerate(urls):
        copy = local_copy(url, "-")
        # The least recently used ones are the oldest; the first is used again and again.
        os.utime(copy, (0, time.time() - 10_000 + number))
        first = local_copy(urls[0], "-")
        assert used() <= 10_000
    server.requests.clear()
    assert local_copy(urls[0], "-") == first and not server.requests
    with pytest.raises(StoreError, match="too small.*args.local_cache=FOLDER:SIZE"):
        local_copy(_written(server, "large.bin"), "-")


def test_sizes_of_local_caches():
    assert parse_cache("/nvme:500GB") == (Path("/nvme"), 500 * 10**9)
    assert parse_cache("/nvme:1.5T") == (Path("/nvme"), 15 * 10**11)
    assert parse_cache("/nvme") == (Path("/nvme"), None)
    # core/mirror.py reads the URL of a run from the folder's whole path.
    assert parse_cache(".") == (Path.cwd(), None)
    assert parse_cache(".:1GB") == (Path.cwd(), 10**9)
    for text in ("/nvme:", "/nvme:0", "/nvme:5X", ":5G"):
        with pytest.raises(ValueError, match="must be FOLDER or FOLDER:SIZE"):
            parse_cache(text)


def test_folders_are_whole_and_stay_in_place(server):
    for name in ("w/a.json", "w/sub/b.bin", "wrong/c"):
        _written(server, name, name.encode())
    folder = store.local_folder(f"{server.url}/w")
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert found == {"a.json": "w/a.json", "sub/b.bin": "w/sub/b.bin"}
    with pytest.raises(FileNotFoundError, match="no such folder"):
        store.local_folder(f"{server.url}/nothing")

"""extensions/stores/store.py against a real S3 server with planted faults."""

import errno
import os
import pwd
import re
import subprocess
import sys
import threading
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace

import pytest
from s3fs import S3FileSystem

from cogfast.core.addresses import url_of
from cogfast.core.files import UNFINISHED
from cogfast.extensions.stores import store
from cogfast.extensions.stores.keys import parse_cache
from cogfast.extensions.stores.mirror import copy_of, named_by_urls
from cogfast.extensions.stores.store import StoreError, local_copy
from cogfast.extensions.stores.store_errors import diagnosis
from tests.cli.hostile.web_server import serving
from tests.support.refusals import assert_refused, refusals
from tests.support.s3_server import Fault, S3Server

_CONTENT = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_PATIENCE", 0.2)
    monkeypatch.setattr(store, "_FIRST_PAUSE", 0.02)


def _written(server: S3Server, name: str, content: bytes = _CONTENT) -> str:
    url = f"{server.url}/{name}"
    store.write(url, content)
    server.requests.clear()
    return url


TABLE = Path(__file__).with_name("refusals.txt")


@refusals(TABLE, "a wrong setting")
def test_a_wrong_setting_is_not_tried_again(server, refusal, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 1000.0)
    monkeypatch.setenv(*refusal.words[0].split("="))
    S3FileSystem.clear_instance_cache()
    assert_refused(lambda: store.find(f"{server.url}/x"), refusal.line, StoreError)


CALLS = [store.find, store.list_folder, store.stat, store.exists, store.read]
CALLS += [lambda url: store.create(url, b""), lambda url: store.write(url, b"")]


@pytest.mark.parametrize("call", CALLS)
def test_a_missing_bucket_is_one_line(server, call):
    line = "^s3://no-such-bucket/x: no such bucket; create it, or correct"
    assert_refused(lambda: call("s3://no-such-bucket/x"), line, StoreError)


def test_addresses_that_no_package_or_server_takes():
    line = "Install adlfs <...>; install the package for its scheme (docs/data.md"
    assert_refused(lambda: store.find("abfs://c@a/x"), line, StoreError)
    assert_refused(lambda: store.read("nosuchscheme://x/y"), "install the package", StoreError)
    line = "a web server is only read; write to s3://, gs:// or a folder"
    assert_refused(lambda: store.write("https://127.0.0.1/x", b""), line, StoreError)


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
    assert_refused(lambda: store.read(url), "a/x.bin: no such object", FileNotFoundError)


def test_names_are_no_patterns_and_markers_of_folders_no_files(server, tmp_path):
    odd, other = f"{server.url}/n/[1]*?.bin", _written(server, "n/1ab.bin")
    (tmp_path / "[y]").write_bytes(b"odd")
    store.upload(tmp_path / "[y]", odd)
    for folder in ("n/", "n/sub/"):  # as the console of S3 makes a folder
        address = f"http://127.0.0.1:{server.port}/{server.bucket}/{folder}"
        urllib.request.urlopen(urllib.request.Request(address, b"", method="PUT")).close()
    copy = Path(copy_of(f"{server.url}/n")) / "[1]*?.bin"
    assert store.read(odd) == b"odd" == copy.read_bytes()
    assert [*store.find(f"{server.url}/n")] == [other, odd]
    assert {*store.list_folder(f"{server.url}/n")} == {other, odd, f"{server.url}/n/sub"}
    store.remove([odd])
    assert [*store.find(f"{server.url}/n")] == [other]


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


@refusals(TABLE, "a store that fails")
def test_errors_that_stay_name_the_fix(server, refusal):
    url, (kind,) = _written(server, "f.bin"), refusal.words
    server.faults = [Fault(int(kind) if kind.isdigit() else kind, method="GET")]
    found = assert_refused(lambda: store.read(url, 5, 10), refusal.line, StoreError)
    assert found.startswith(url)


def test_an_unknown_host_is_named_without_the_request(server, monkeypatch):
    host = "no.such.host.invalid:9000"
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
    S3FileSystem.clear_instance_cache()
    line = f'endpoint URL: "http://{host}"; <...>AWS_ENDPOINT_URL and the network'
    assert_refused(lambda: store.list_folder("s3://data/clips"), line, StoreError)
    S3FileSystem.clear_instance_cache()


def test_an_unknown_host_is_not_tried_for_long(monkeypatch):
    error = OSError(-2, "Name or service not known")
    assert diagnosis("hf://a/b", error)[2] < 10
    assert "GOOGLE" not in diagnosis("hf://a/b", error)[1]
    assert diagnosis("s3://a/b", OSError("cut"))[2] > 60


def test_errors_without_a_text_and_wrong_addresses_name_the_fix(server, tmp_path):
    url = _written(server, "g.bin")
    server.faults = [Fault(400)]
    with pytest.raises(StoreError, match="correct the address, or renew the credentials"):
        store.stat(url)
    server.faults, server.requests = [Fault(501)], []
    assert_refused(lambda: store.write(url, b""), "use another store", StoreError)
    assert len(server.requests) == 1
    assert_refused(lambda: store.upload(tmp_path / "nothing", url), "nothing", FileNotFoundError)
    assert_refused(lambda: store.find("s3://"), "names no bucket", StoreError)
    for scheme, user in (("http", "user:secret"), ("https", "secret"), ("s3", "key:secret")):
        with pytest.raises(StoreError, match="/x: was given with a user") as caught:
            store.read(f"{scheme}://{user}@host/x")
        assert "secret" not in str(caught.value)


class _Web(SimpleHTTPRequestHandler):
    """A web server without ETag, of which a folder `chunked` has no Content-Length."""

    active, most, lock = 0, 0, threading.Lock()

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        with self.lock:
            _Web.active += 1
            _Web.most = max(self.most, self.active)
        time.sleep(0.06)  # of a request to a far machine
        super().do_HEAD()
        with self.lock:
            _Web.active -= 1

    def send_header(self, keyword: str, value: str) -> None:
        if keyword != "Content-Length" or "chunked" not in self.path:
            super().send_header(keyword, value)


def test_web_servers(server, tmp_path):
    (tmp_path / "chunked").mkdir()
    for name in ("0", "1", "2", "3", "chunked/0"):
        (tmp_path / name).write_bytes(b"old")
    with serving(partial(_Web, directory=str(tmp_path))) as web:
        url = web.address
        found = store.stats([f"{url}/{n}" for n in range(5)])
        assert [*found] == [f"{url}/{n}" for n in range(4)]
        # links, and `chunked/` is none of a file
        assert store.list_folder(url) == dict.fromkeys(found)
        assert _Web.most > 1
        assert Path(copy_of(f"{url}/0")).read_bytes() == b"old"
        (tmp_path / "1").write_bytes(b"new")
        os.utime(tmp_path / "1", (0, 0))
        version = found[f"{url}/1"].version
        assert_refused(lambda: local_copy(f"{url}/1", version), "changed since", StoreError)
        assert local_copy(f"{url}/1").read_bytes() == b"new"
        assert_refused(lambda: store.stat(f"{url}/chunked/0"), "does not tell its size", StoreError)


def test_without_credentials(server):
    script = "from cogfast.extensions.stores import store; store.read('s3://bucket-0/x')"
    given = {k: v for k, v in os.environ.items() if not k.startswith("AWS")}
    given |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, env=given, capture_output=True, text=True)
    assert re.search("no credentials.*AWS_ACCESS_KEY_ID", ended.stderr.splitlines()[-1])


def test_local_copies_are_shared_and_follow_the_object(server):
    url = _written(server, "c.mp4")
    version = store.stat(url).version
    server.requests.clear()
    copies = {local_copy(url, version) for _ in range(3)}
    assert [method for method, _ in server.requests].count("GET") == 1
    (copy,) = copies
    assert copy.suffix == ".mp4" and copy.read_bytes() == _CONTENT
    os.truncate(copy, 3)  # as a crash of the machine may leave it
    assert local_copy(url, version, num_bytes=len(_CONTENT)).read_bytes() == _CONTENT
    assert local_copy(url, version, (10, 20)).read_bytes() == _CONTENT[10:30]
    store.write(url, b"changed")
    with pytest.raises(StoreError, match="changed since it was listed"):
        local_copy(url, version, (0, 3))
    assert local_copy(url).read_bytes() == b"changed"
    # It became shorter after its size was asked.
    assert local_copy(url, "-", num_bytes=100).read_bytes() == b"changed"


def test_processes_of_a_machine_download_an_object_once(server):
    url = _written(server, "p.bin")
    server.faults = [Fault("slow", method="GET", seconds=0.5)]
    script = "import sys; from cogfast.extensions.stores.store import *; print(local_copy(sys.argv[1], '-'))"
    command = [sys.executable, "-c", script, url]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert len({process.communicate()[0] for process in started}) == 1
    assert [method for method, _ in server.requests].count("GET") == 1


def test_the_local_cache_is_bounded_and_keeps_what_was_used_last(server, monkeypatch, tmp_path):
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{tmp_path / 'small'}:10KB")
    urls = [_written(server, f"{i}.bin", bytes([i]) * 1000) for i in range(20)]
    copies = lambda: (tmp_path / "small").glob("[0-9a-f][0-9a-f]/*.bin")
    used = lambda: sum(file.stat().st_size for file in copies())
    # A slow download writes it.
    draft = tmp_path / "small" / "00" / f"{'0' * 32}.bin.{'0' * 12}{UNFINISHED}"
    draft.parent.mkdir(parents=True)
    draft.touch()
    os.utime(draft, (0, time.time() - 60))
    for number, url in enumerate(urls):
        copy = local_copy(url, "-")
        # The least recently used ones are the oldest; the first is used again and again.
        os.utime(copy, (0, time.time() - 10_000 + number))
        first = local_copy(urls[0], "-")
        assert used() <= 10_000
    server.requests.clear()
    assert local_copy(urls[0], "-") == first and not server.requests
    assert draft.exists()
    with pytest.raises(StoreError, match="too small.*args.local_cache=FOLDER:SIZE"):
        local_copy(_written(server, "large.bin"), "-")
    assert "GET" not in [method for method, _ in server.requests]


def test_a_copy_that_is_taken_while_others_are_removed_stays(server, monkeypatch, tmp_path):
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{tmp_path / 'small'}:2500")
    first, second = (local_copy(_written(server, f"{i}.bin", b"x" * 1000), "-") for i in range(2))
    for age, copy in ((60, first), (30, second)):
        os.utime(copy, (0, time.time() - age))
    listed = sorted

    def take_meanwhile(found: list) -> list:
        os.utime(first)  # as another process that finds the copy
        return listed(found)

    monkeypatch.setattr(store, "sorted", take_meanwhile, raising=False)
    local_copy(_written(server, "2.bin", b"x" * 1000), "-")
    assert first.exists() and not second.exists()


def test_after_an_error_no_other_piece_is_asked_for(server, monkeypatch):
    monkeypatch.setattr(store, "_PIECE", 100)
    url = _written(server, "pieces.bin", b"x" * 20_000)
    server.faults = [Fault(403, "GET")]
    assert_refused(lambda: local_copy(url), "access denied", StoreError)
    assert [method for method, _ in server.requests].count("GET") < 100


def test_on_a_full_disk_the_oldest_copies_make_place(server, monkeypatch):
    old, new = (local_copy(_written(server, f"{i}.bin"), "-") for i in range(2))
    os.utime(old, (0, 0))
    errors, download = [OSError(errno.ENOSPC, "No space left on device")], store.download

    def fail_once(*args) -> None:
        if errors:
            raise errors.pop()
        download(*args)

    monkeypatch.setattr(store, "download", fail_once)
    assert local_copy(_written(server, "2.bin"), "-").read_bytes() == _CONTENT
    assert new.exists() and not old.exists()


def test_a_local_cache_that_cannot_be_written_is_named(server, monkeypatch, tmp_path):
    url = _written(server, "o.bin")
    (tmp_path / "file").touch()
    for cache in ("/proc/none", f"{tmp_path}/file/x"):
        monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:1GB")
        for call in (store.check_local_cache, lambda: local_copy(url), lambda: copy_of(url)):
            line = f"^{cache}: the local cache cannot <...> set args.local_cache"
            assert_refused(lambda call=call: call(), line, StoreError)


@pytest.mark.parametrize("has_name", [True, False])
def test_a_local_cache_of_another_user_is_named_with_its_owner(tmp_path, monkeypatch, has_name):
    """It was made with umask 022."""
    names = {os.stat(tmp_path).st_uid: SimpleNamespace(pw_name="alice")} if has_name else {}
    monkeypatch.setattr(pwd, "getpwuid", lambda number: names[number])
    owner = "alice" if has_name else f"user {os.stat(tmp_path).st_uid}"
    line = f"{tmp_path}/size: the local cache cannot be written (Permission denied); {owner} can share it "
    line += f"(chmod -R g+w {tmp_path}, umask 002 in all runs), or set args.local_cache=FOLDER:SIZE"
    for number, cache in (
        (errno.EACCES, tmp_path),
        (errno.ENOSPC, tmp_path),
        (errno.EACCES, tmp_path / "x"),
    ):
        with pytest.raises(StoreError) as error, store.writing_cache(cache):
            raise OSError(number, os.strerror(number), f"{tmp_path}/size")
        assert str(error.value).startswith(line) == (number == errno.EACCES and cache == tmp_path)


def test_sizes_of_local_caches():
    assert parse_cache("/nvme:500GB") == (Path("/nvme"), 500 * 10**9)
    assert parse_cache("/nvme:1.5T") == (Path("/nvme"), 15 * 10**11)
    assert parse_cache("/nvme") == (Path("/nvme"), None)
    # extensions/stores/mirror.py reads the URL of a run from the folder's whole path.
    assert parse_cache(".") == (Path.cwd(), None)
    assert parse_cache(".:1GB") == (Path.cwd(), 10**9)
    assert parse_cache("~/c:1GB")[0] == parse_cache("~/c")[0] == Path.home() / "c"
    for text in ("/nvme:", "/nvme:0", "/nvme:5X", ":5G"):
        assert_refused(lambda text=text: parse_cache(text), "must be FOLDER or FOLDER:SIZE")


def test_folders_are_whole_and_stay_in_place(server):
    for name in ("w/a.json", "w/sub/b.bin", "wrong/c"):
        _written(server, name, name.encode())
    folder = Path(copy_of(f"{server.url}/w"))
    found = {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}
    assert found == {"a.json": "w/a.json", "sub/b.bin": "w/sub/b.bin"}
    assert_refused(lambda: copy_of(f"{server.url}/nothing"), "no such folder", StoreError)


def test_a_file_of_weights_stays_and_is_known_by_its_url(server, tmp_path):
    url = _written(server, "m/w.bin")
    left = tmp_path / "local" / "folders" / "1-0123456789ab"
    left.mkdir(parents=True)
    (left / "lock").touch()
    copy = copy_of(url)
    assert not left.exists()
    for file in (tmp_path / "local").glob("[0-9a-f][0-9a-f]/*"):
        file.unlink()
    copy_of(f"{server.url}/m")  # another folder of this process
    assert url_of(copy) == url
    assert named_by_urls(f"a={copy}: is damaged") == f"a={url}: is damaged"
    assert Path(copy).read_bytes() == _CONTENT


def test_an_object_that_comes_while_its_folder_is_listed(server: S3Server) -> None:
    """The folder itself is no object: s3fs asks for it if a listing is empty."""
    url = f"{server.url}/late"

    def watch(method: str, path: str) -> None:
        if method == "HEAD" and path.endswith("/late"):
            server.watch = lambda method, path: None
            store.write(f"{url}/a", b"a")

    server.watch = watch
    assert set(store.find(url)) <= {f"{url}/a"}
    assert ("PUT", f"/{server.bucket}/late/a") in server.requests
    assert set(store.find(url)) == {f"{url}/a"}

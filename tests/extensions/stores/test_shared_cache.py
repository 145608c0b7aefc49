"""A local cache into which other users write, whose machine crashed, or whose processes froze or were killed."""

import errno
import fcntl
import os
import subprocess
import threading
import uuid
from pathlib import Path

import pytest

from cogfast.core import files
from cogfast.core.files import checksum_of
from cogfast.extensions.stores import copies, mirror, store
from cogfast.extensions.stores.copies import CHECKSUM
from cogfast.extensions.stores.mirror import copy_of
from cogfast.extensions.stores.store import StoreError, local_copy
from tests.support.refusals import assert_refused

CONTENT = bytes(range(1, 256)) * 16


@pytest.fixture
def url(server) -> str:
    """An object; its copy is in the local cache."""
    address = f"{server.url}/weights.bin"
    store.write(address, CONTENT)
    local_copy(address)
    return address


@pytest.fixture
def cache(url: str) -> Path:
    return store.local_cache()[0]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder that links lead to: with a file of each name that a cache has."""
    folder = tmp_path / "victim"
    (folder / "mine").mkdir(parents=True)
    for name in ("file", "mine/lock", "mine/file", "0", "ab"):
        (folder / name).write_text("mine")
        os.utime(folder / name, (0, 0))
    return folder


def state(folder: Path) -> dict[str, str | None]:
    each = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in each}


def as_another_process() -> None:
    """Forget what this process has found whole, and its folders of copies."""
    copies._check_kept.cache_clear()
    mirror._local_folder.cache_clear()


@pytest.fixture
def restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A call of it is a start of the machine, after which copies are compared with their checksums."""
    monkeypatch.setattr(copies, "_BOOT", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")
    return lambda: (tmp_path / "boot_id").write_text(f"{uuid.uuid4()}\n")


def plant(place: Path, kind: str, victim: Path) -> None:
    place.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(victim / ("file" if kind == "link" else "nothing"))


KINDS = ("link", "pipe", "dangling")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["size", "lock", "copy", "checksum"])
def test_links_and_pipes_in_place_of_files(
    url: str, cache: Path, victim: Path, name: str, kind: str
) -> None:
    """A copy is made again, or one line names the link; nothing waits, nothing is written through."""
    copy, before = local_copy(url), state(victim)
    (lock,) = (cache / "locks").iterdir()
    places = {"size": cache / "size", "lock": lock, "copy": copy}
    places["checksum"] = Path(f"{copy}{CHECKSUM}")
    plant(places[name], kind, victim)
    as_another_process()
    if name in ("size", "lock"):
        copy.unlink()
    if name == "copy":
        assert local_copy(url).read_bytes() == CONTENT and not copy.is_symlink()
    else:
        what = "it is not a regular file" if kind == "pipe" else "it is a link"
        if kind == "pipe" and name == "checksum":
            what = "<...>"  # opening a pipe for writing fails without a reader
        line = f"{places[name]}: the local cache cannot be written ({what}); set args.local_cache"
        assert_refused(lambda: local_copy(url), line, StoreError)
    assert state(victim) == before


@pytest.mark.parametrize("name", ["locks", "folders", "part"])
def test_links_in_place_of_folders(url: str, cache: Path, victim: Path, name: str) -> None:
    copy, before = local_copy(url), state(victim)
    place = copy.parent if name == "part" else cache / name
    if place.exists():
        place.rename(cache / "aside")
    place.symlink_to(victim)
    as_another_process()
    line = f"{place}: the local cache cannot be written (it is a link)"
    for call in (local_copy, copy_of):
        assert_refused(lambda call=call: call(url), line, StoreError)
    assert state(victim) == before


@pytest.mark.parametrize("name", ["ab", "folders/1-0123456789ab", f"ab/{'ab' * 16}"])
def test_what_links_lead_to_is_not_removed_when_the_cache_is_full(
    url: str, cache: Path, victim: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, place = state(victim), cache / name
    place.parent.mkdir(exist_ok=True)
    if not place.exists():
        place.symlink_to(victim / "file" if name.startswith("ab/") else victim)
        Path(f"{place}{CHECKSUM}").touch()
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:{len(CONTENT) + 1}")
    monkeypatch.setattr(store, "_IN_USE", -1.0)
    store.write(f"{url}2", CONTENT)
    assert local_copy(f"{url}2").read_bytes() == CONTENT
    assert state(victim) == before


def test_other_files_in_the_folder_are_not_removed(
    url: str, cache: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has copies alone, whose names have a form and a checksum beside them, counted and removed."""
    names = (
        "ab/a.mp4",
        f"ab/{'ab' * 16}.mp4",
        "ab/a.incomplete",
        "folders/x/lock",
        "folders/1-2/lock",
    )
    for path in (cache / name for name in names):
        path.parent.mkdir(parents=True, exist_ok=True)
        (victim / "file").rename(path)
        (victim / "file").write_bytes(CONTENT)
        os.utime(victim / "file", (0, 0))
    copy = local_copy(url)
    os.utime(copy, (0, 0))
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:{len(CONTENT) + 1}")
    store.write(f"{url}2", CONTENT)
    assert local_copy(f"{url}2").exists() and not copy.exists()
    assert all((cache / name).exists() for name in names)


@pytest.mark.parametrize("left", ["too large a copy", "a killed process"])
def test_a_count_that_is_not_known_removes_nothing(
    url: str, cache: Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:{4 * len(CONTENT)}")
    copy = local_copy(url)
    os.utime(copy, (0, 0))
    if left == "a killed process":
        (cache / "size").write_text("process 7 on other")
    else:
        store.write(f"{url}2", 5 * CONTENT)
        assert_refused(lambda: local_copy(f"{url}2"), "the local cache is too small", StoreError)
    store.write(f"{url}3", CONTENT)
    assert local_copy(f"{url}3").exists() and copy.exists()
    assert (cache / "size").read_text() == str(2 * len(CONTENT))


DAMAGE = {
    "zeros in its second half": CONTENT[: len(CONTENT) // 2] + bytes(len(CONTENT) // 2),
    "a cut end": CONTENT[:100],
    "one other bit": bytes([CONTENT[0] ^ 1]) + CONTENT[1:],
    "nothing": b"",
}


@pytest.mark.parametrize("read", [local_copy, copy_of])
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_copy_is_made_again(url: str, damage: str, read, restart, caplog) -> None:
    copy = local_copy(url)
    about = copy.stat()
    copy.write_bytes(DAMAGE[damage])
    os.utime(copy, ns=(about.st_atime_ns, about.st_mtime_ns))
    as_another_process()
    restart()
    assert Path(read(url)).read_bytes() == CONTENT
    assert "is damaged: its checksum is" in caplog.text and "it is copied again" in caplog.text


LEFT = {"none": None, "empty": b"", "another": b"0123456789abcdef", "no text": b"\xff" * 32}


@pytest.mark.parametrize("left", LEFT.values(), ids=LEFT)
def test_a_copy_without_its_checksum_is_made_again(server, url: str, left: bytes | None) -> None:
    beside = Path(f"{local_copy(url)}{CHECKSUM}")
    beside.unlink()
    if left is not None:
        beside.write_bytes(left)
    as_another_process()
    server.requests.clear()
    assert local_copy(url).read_bytes() == CONTENT
    assert [method for method, _ in server.requests].count("GET") == 1
    assert beside.read_text()[:16] == checksum_of(local_copy(url))


@pytest.mark.parametrize("each", ["boot", "process: no right to note it", "process: no boot_id"])
def test_how_often_a_copy_is_read_for_its_checksum(
    url: str, each: str, restart, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each boot, or each process, but not each use. Another file in the place of the copy is read, too."""
    read, sums, opened = [], copies.check_checksum, copies.open_own
    monkeypatch.setattr(copies, "check_checksum", lambda *given: read.append(given) or sums(*given))

    def open_ours(path: Path, mode: str, **options):
        if "+" in mode and "right" in each:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, mode, **options)

    monkeypatch.setattr(copies, "open_own", open_ours)
    for number in range(1, 4):
        restart()
        if "no boot_id" in each:
            (tmp_path / "boot_id").unlink()
        for _ in range(2):
            as_another_process()
            copy = [local_copy(url) for _ in range(2)][0]
        assert len(read) == number * (1 if each == "boot" else 2)
    num_reads = len(read)
    (tmp_path / "another").write_bytes(CONTENT)
    (tmp_path / "another").replace(copy)
    local_copy(url)
    assert len(read) == num_reads + 1


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "SECONDS_OF_LINE", 0.1)
    monkeypatch.setattr(files, "SECONDS_OF_LOCK", 0.5)


HOLDER = "process 7 on other\x1b[31m\n"


@pytest.mark.parametrize("name", ["size", "every lock of copies", "folders"])
def test_a_process_that_holds_a_lock_for_ever_is_named_and_passed(
    url: str, cache: Path, name: str, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    """It is frozen, or its machine is cut off."""
    local_copy(url).unlink()
    locks = (
        [cache / "locks" / str(i) for i in range(4096)] if "copies" in name else [cache / "size"]
    )
    if name == "folders":
        locks = [cache / "folders" / "1-0123456789ab" / "lock"]
        locks[0].parent.mkdir(parents=True)
        (cache / "size").unlink()
    held = []
    for lock in locks if len(locks) == 1 else (cache / "locks").iterdir():
        held.append(lock.open("w"))
        held[-1].write(HOLDER)
        held[-1].flush()
        fcntl.flock(held[-1], fcntl.LOCK_EX)
    assert local_copy(url).read_bytes() == CONTENT
    if name != "folders":  # those of a process that lives stay, without a wait
        assert r"held by 'process 7 on other\x1b[31m', without progress for " in caplog.text
    assert name != "folders" or locks[0].exists()
    assert local_copy(url).read_bytes() == CONTENT
    for file in held:
        file.close()


def test_a_holder_that_moves_keeps_the_lock(
    tmp_path: Path, hurried: None, caplog: pytest.LogCaptureFixture
) -> None:
    path, entered = tmp_path / "lock", threading.Event()

    def wait() -> None:
        with files.locked(path):
            entered.set()

    with files.locked(path) as (lock, before, has_waited):
        assert before == "" and not has_waited
        inode = os.fstat(lock.fileno()).st_ino
        waiting = threading.Thread(target=wait)
        waiting.start()
        while caplog.text.count(f"held by 'process {os.getpid()} on ") < 12:
            os.utime(lock.fileno())
        assert not entered.is_set()
    waiting.join()
    assert path.stat().st_ino == inode


def test_one_of_those_that_pass_a_lock_works_at_a_time(tmp_path: Path, hurried: None) -> None:
    path, active, most = tmp_path / "lock", [], []
    frozen = path.open("w")
    fcntl.flock(frozen, fcntl.LOCK_EX)

    def work() -> None:
        with files.locked(path):
            active.append(1)
            most.append(len(active))
            active.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 4
    frozen.close()


def test_a_child_that_inherits_a_lock_and_freezes_does_not_keep_it(tmp_path: Path) -> None:
    with files.locked(tmp_path / "lock") as (lock, *_):
        child = subprocess.Popen(["sleep", "60"], pass_fds=[lock.fileno()])
    with open(tmp_path / "lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    child.kill()
    child.wait()


def test_a_command_that_reads_more_than_the_limit_is_refused_before(
    server, url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(5):
        store.write(f"{server.url}/run/{i}.json", CONTENT)
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:{3 * len(CONTENT)}")
    server.requests.clear()
    line = f"the local cache is too small: {5 * len(CONTENT)} bytes are more than its"
    assert_refused(lambda: copy_of(f"{server.url}/run"), line, StoreError)
    assert not any("GET" in method and ".json" in path for method, path in server.requests)


def test_what_commands_read_counts_until_they_end(
    server, url: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their links would keep what is removed: the limit would not hold."""
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{cache}:{2 * len(CONTENT)}")
    monkeypatch.setattr(store, "_IN_USE", -1.0)
    for name in ("a", "b", "c"):
        store.write(f"{server.url}/{name}/x.bin", CONTENT)
    used = lambda: sum({(s := p.stat()).st_ino: s.st_blocks for p in cache.rglob("*.bin")}.values())
    read = {name: Path(copy_of(f"{server.url}/{name}/x.bin")) for name in ("a", "b")}
    line = f"of which {2 * len(CONTENT)} are in use; set args.local_cache=FOLDER:SIZE"
    assert_refused(lambda: copy_of(f"{server.url}/c/x.bin"), line, StoreError)
    assert all(path.read_bytes() == CONTENT for path in read.values())
    assert used() <= 2 * (read["a"].stat().st_blocks)
    # One of the commands is killed: its lock ends with it.
    folder = next(p for p in read["a"].parents if p.parent.name == "folders")
    (folder / "lock").unlink()
    (folder / "lock").touch()
    assert Path(copy_of(f"{server.url}/c/x.bin")).read_bytes() == CONTENT
    assert not read["a"].exists() and read["b"].exists()

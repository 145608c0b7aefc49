"""All reads and writes of files that may lie in an object store: s3://, gs://, hf:// or any URL of fsspec.

A name is a path on this machine, or such a URL. Calls are repeated with growing pauses for errors that may
pass (429, 503, a cut or slow answer); what is left is a StoreError with one line that names the fix.
"""

from __future__ import annotations

import errno
import hashlib
import io
import logging
import os
import posixpath
import random
import re
import shutil
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cogfast.core import files
from cogfast.core.addresses import CACHE_VARIABLE, OF_CHAIN, is_url
from cogfast.extensions.stores import copies
from cogfast.extensions.stores.keys import parse_cache
from cogfast.extensions.stores.ranges import WEB, RangeFile, read_range, waited
from cogfast.extensions.stores.store_errors import NO_BUCKET, StoreError, brief, diagnosis

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")

# Read by every process of a run; args.local_cache sets it before the processes that read data begin.
_PATIENCE = 60.0  # seconds after which a call is not repeated
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds
_PIECE = 32 << 20  # bytes of a request of a large object
_READ_AHEAD = 1 << 18  # bytes of the least request of a file that is read in parts
_THREADS = 8  # requests of one object at once
_TRIAL, _BRIEF = 0.05, 2e-4  # seconds: of all calls in one thread before several, and of one
_MANY_THREADS = 32  # requests of small objects at once
_ONCE = {"retries": {"total_max_attempts": 1}}  # of botocore
_FEW = 8  # objects of a folder from which on a listing is fewer requests
_PART_TRIES = 5  # of each part of a long upload
_NUM_LOCKS = 4096
_IN_USE = 5.0  # seconds after its last use for which a local copy is not removed
_IN_WORK = 3600.0  # seconds after its last write for which an unfinished one is not
_KEPT = 0.9  # of the limit, to which the local cache is cut
_OURS = re.compile(r"[0-9a-f]{32}(\.[^.]*)?\.(xxh3|[0-9a-f]{12}\.incomplete)")  # checksums, drafts
# Fields of a listing that change with the object, by the names of the stores
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "sha256", "LastModified", "Last-Modified")
_VERSIONS += ("modify", "mtime", "created")
# The user of a web address, or user and password of another one: some stores have a bucket before the @.
_USER = re.compile(r"^(https?://|[^/]+://(?=[^/@]*:))[^/]*@")
_UNCHANGING = "-"  # the version of objects that never change under their name
_OWN = ("s3://", "gs://", "hf://")


@dataclass(frozen=True, slots=True)
class Stat:
    num_bytes: int
    version: str  # changes whenever the file does; of a URL 16 hexadecimal digits


def join(folder: str, name: str) -> str:
    """Return the path or URL of `name`, which may be absolute, in a folder."""
    if is_url(name) or os.path.isabs(name) or not is_url(folder):
        path = name if is_url(name) else os.path.join(folder, name)
        is_odd = path.startswith("./") or "/." in path or "//" in path
        return path if is_url(name) or not is_odd else str(Path(path))
    scheme, separator, place = folder.partition("://")
    return f"{scheme}{separator}{posixpath.normpath(f'{place}/{name}')}"


def without_query(name: str) -> str:
    """Return a path or URL whose end is that of the file's name: that of a web server may have a signature."""
    return re.split("[?#]", name)[0] if name.startswith(WEB) else name


def parent(name: str) -> str:
    """Return the folder of a file."""
    return without_query(name).rpartition("/")[0] if is_url(name) else str(Path(name).parent)


def stat(name: str) -> Stat:
    """Return size and version of a file; FileNotFoundError if there is none."""
    if not is_url(name):
        found = os.stat(name)
        return Stat(found.st_size, f"{found.st_size}-{found.st_mtime_ns}")
    info = lambda fs, path: waited(name, fs, fs._info(path)) if fs.async_impl else fs.info(path)
    if (about := _call(name, info))["type"] != "file":
        raise FileNotFoundError(f"{name}: not an object but a folder")
    return _stat_of(name, about)


class Versions:
    """The Stat of each of many URLs as of one moment, kept under hashes of the URLs: 24 bytes each."""

    def __init__(self, found: Mapping[str, Stat] = {}, *lists: Versions) -> None:
        rows = {(_hash(url), int(s.version, 16), s.num_bytes) for url, s in found.items()}
        rows.update(row for one in lists for row in zip(*one._columns, strict=True))
        ordered = sorted(rows)
        self._columns = [array("Q", (row[i] for row in ordered)) for i in range(3)]
        # {(URL, part): its error}. Who reads ahead has waited for it, so that the next read does not.
        self.given_up: dict[tuple, Exception] = {}

    @property
    def largest(self) -> int:
        """Most bytes of one of them."""
        return max(self._columns[2], default=0)

    def get(self, url: str) -> Stat | None:
        names, versions, sizes = self._columns
        at = bisect_left(names, key := _hash(url))
        is_there = at < len(names) and names[at] == key
        return Stat(sizes[at], f"{versions[at]:016x}") if is_there else None


def _hash(url: str) -> int:
    # surrogatepass: file names need not be valid UTF-8.
    text = url.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest())


def exists(name: str) -> bool:
    """Return whether there is a file of this name."""
    return name in stats([name]) if is_url(name) else os.path.isfile(name)


def stats(names: Iterable[str]) -> dict[str, Stat]:
    """Return {URL: Stat} of those URLs among `names` that are there. Folders with many of them are listed."""
    folders: dict[str, list[str]] = {}
    for name in dict.fromkeys(filter(is_url, names)):
        folders.setdefault(parent(name), []).append(name)
    groups: list[list[str]] = []
    for found in folders.values():
        is_listed = len(found) >= _FEW and not found[0].startswith(WEB)
        groups += [found] if is_listed else [[name] for name in found]

    def of_group(names: list[str]) -> Mapping[str, Stat | None]:
        if len(names) > 1:
            return list_folder(parent(names[0]))
        with suppress(FileNotFoundError):
            return {names[0]: stat(names[0])}
        return {}

    each = zip(groups, in_threads(of_group, groups), strict=True)
    return {name: about for names, found in each for name in names if (about := found.get(name))}


def in_threads(call: Callable[[S], T], items: Sequence[S]) -> Iterator[T]:
    """Yield call(item) of each item, in order, from several threads if the first calls show that it takes long."""
    start, done = time.monotonic(), 0
    while done < len(items) and time.monotonic() - start < _TRIAL:
        yield call(items[done])
        done += 1
    items = items[done:]
    if time.monotonic() - start < _BRIEF * done:  # on a disk threads would only wait for each other
        yield from map(call, items)
        return
    with ThreadPoolExecutor(_MANY_THREADS) as pool:
        for start in range(0, len(items), 10_000):  # each call in waiting takes a kilobyte
            yield from pool.map(call, items[start : start + 10_000])


def list_folder(folder: str) -> dict[str, Stat | None]:
    """Return {URL: Stat} of what lies in a folder's URL itself; {} if it is empty.

    The Stat is None for folders, and for the links of a web page.
    """
    found = _listed(folder, lambda fs, path: {x["name"]: x for x in fs.ls(path, detail=True)})
    is_file = lambda url: found[url]["type"] == "file" and not url.startswith(WEB)
    return {url: _stat_of(url, found[url]) if is_file(url) else None for url in found}


def find(folder: str) -> dict[str, Stat]:
    """Return {URL: Stat} of all objects below a folder's URL, in the order of their names; {} if there are none."""
    if folder.startswith(WEB):
        return stats([folder])
    found = _listed(folder, lambda fs, path: fs.find(path, detail=True))
    # s3fs returns the folder itself if its first object comes just after the listing.
    return {url: _stat_of(url, found[url]) for url in sorted(found) if found[url]["type"] == "file"}


def _listed(folder: str, call: Callable[[Any, str], Mapping[str, T]]) -> dict[str, T]:
    """Return {URL: value} of what call(file system, path) returns by names; {} if there is nothing."""
    try:
        found = _call(folder, lambda fs, path: call(fs, path.rstrip("/")))
    except FileNotFoundError:
        return {}
    scheme = folder.partition("://")[0]
    start = "" if folder.startswith(WEB) else f"{scheme}://"
    url = lambda name: start + (name if start in ("", "file://") else name.lstrip("/"))
    # A name with a slash at its end is an object that stands for a folder, as consoles write them.
    return {url(name): found[name] for name in found if not name.endswith("/")}


def read(name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
    """Read a file of at most MOST_BYTES, or `num_bytes` from `start` of it, or fewer if it ends before."""
    most = files.MOST_BYTES + 1 if num_bytes is None else num_bytes
    if not is_url(name):
        with files.open_regular(name) as file:
            # Python allocates as many bytes before it notices that the file is shorter.
            left = os.fstat(file.fileno()).st_size - start
            if num_bytes is None and left > files.MOST_BYTES:
                raise OSError(errno.EFBIG, f"more than {files.MOST_BYTES} bytes", name)
            file.seek(start)
            return file.read(max(0, min(most, left)))
    if start:
        return _range(name, start, min(stat(name).num_bytes, start + most))
    data = _call(name, lambda fs, path: read_range(name, fs, path, 0, most, is_whole=True))
    if num_bytes is None and len(data) > files.MOST_BYTES:
        raise StoreError(f"{name}: has more than {files.MOST_BYTES} bytes; use a smaller file")
    return data


def open_file(name: str, num_bytes: int | None = None) -> io.BufferedReader:
    """Open a file for reading at any position. num_bytes: its size, if it is known, which saves a request."""
    if not is_url(name):
        return files.open_regular(name)
    size = stat(name).num_bytes if num_bytes is None else num_bytes
    return io.BufferedReader(RangeFile(partial(_range, name), size), _READ_AHEAD)


def open_part(file: io.BufferedReader, start: int, num_bytes: int) -> io.BufferedReader:
    """Return a part of an open file as a file, whose end leaves the whole one open."""

    def read_range(begin: int, end: int) -> bytes:
        file.seek(start + begin)
        return file.read(end - begin)

    return io.BufferedReader(RangeFile(read_range, num_bytes))


def write(name: str, data: bytes) -> None:
    """Write a file. Readers see all of it or nothing. StoreError or WriteError if it cannot be written."""
    if is_url(name):
        _put(name, lambda fs, path: fs.pipe_file(path, data))
        return
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise files.WriteError(Path(name), error) from None
    files.write_whole(Path(name), lambda draft: draft.write_bytes(data))


def check_writable(folder: str) -> None:
    """Raise StoreError or WriteError if a folder, which is created, cannot be written."""
    test = join(folder, "write_test")
    try:
        write(test, b"")
        remove([test])
    except StoreError as error:
        reason = str(error).removeprefix(f"{test}: ")
        raise StoreError(f"{folder}: cannot be written: {reason}") from None


def create(name: str, data: bytes) -> bool:
    """Write an object unless there is one, and return whether its content is `data` then.

    In a store without conditional writes, two processes may both create it at once.
    """

    def put(fs: Any, path: str) -> None:
        try:
            fs.pipe_file(path, data, mode="create")
        except OSError as error:
            is_refused = "PreconditionFailed" in repr(error.__cause__)
            if not isinstance(error, FileExistsError) and not is_refused:
                raise

    _call(name, put)
    return read(name, num_bytes=len(data) + 1) == data


def upload(file: Path, url: str) -> None:
    """Write a file of this machine to an object, in parts if it is large. Readers see all of it or nothing."""
    size = file.stat().st_size
    _put(url, lambda fs, path: fs.put_file(str(file), path), is_long=True)
    if (there := stat(url).num_bytes) != size:
        raise StoreError(f"{url}: has {there} bytes after {size} were written; write it again")


def _put(url: str, call: Callable[[Any, str], object], is_long: bool = False) -> None:
    if url.startswith(WEB):
        raise StoreError(f"{url}: a web server is only read; write to s3://, gs:// or a folder")
    try:
        _call(url, call, is_long)
    except FileNotFoundError:
        raise StoreError(f"{url}: {NO_BUCKET}") from None


def remove(names: list[str]) -> None:
    """Remove files; those that are gone already are no error."""

    def remove_one(name: str) -> None:
        with suppress(FileNotFoundError):
            # Not rm, which takes * ? and [ for patterns.
            _call(name, lambda fs, path: fs.rm_file(path)) if is_url(name) else os.unlink(name)

    list(in_threads(remove_one, names))


def local_copy(
    name: str,
    version: str | None = None,
    part: tuple[int, int] | None = None,
    num_bytes: int | None = None,
) -> Path:
    """Return a file of this machine with the content of a file, or of (start, bytes) of it: that of a URL in
    the local cache, which all processes of the machine share.

    version: that of its Stat when the run began: StoreError if the object has changed since. None: its
    present one; "-": it never changes, so that no request is made if the copy is there. num_bytes: the size
    of the object, if it is known, which saves a request.
    """
    if not is_url(name):
        return Path(name)
    folder, limit = local_cache()
    if version is None:
        found = stat(name)
        version, num_bytes = found.version, found.num_bytes
    key = hashlib.blake2b(f"{name}\0{version}\0{part}".encode(), digest_size=16).hexdigest()
    copy = folder / key[:2] / (key + os.path.splitext(without_query(name))[1][:16])
    start, size = part or (0, num_bytes)
    if copies.is_kept(copy, size):
        return copy
    # One process downloads, while the others of this machine wait for it.
    with writing_cache(folder), files.locked(folder / f"locks/{int(key, 16) % _NUM_LOCKS}") as lock:
        if copies.is_kept(copy, size):
            return copy
        whole = stat(name).num_bytes if num_bytes is None else num_bytes
        size = max(0, min(whole if size is None else size, whole - start))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copies.check_no_link(copy.parent)
        draft = copy.with_name(f"{copy.name}.{os.urandom(6).hex()}{files.UNFINISHED}")
        try:
            for is_full in (False, True):
                make_place(folder, limit, size, is_full)
                try:
                    download(name, draft, start, size, part is None, lock[0])
                    break
                except OSError as error:
                    # Other files of the disk may leave less than the limit.
                    if is_full or not files.is_disk_full(error):
                        raise
            # Asked after it is read: a change before the last byte came shows.
            if version != _UNCHANGING and stat(name).version != version:
                text = "changed since it was listed; start again, with files that stay as they are"
                raise StoreError(f"{name}: {text}")
            copies.keep(draft, copy)
        finally:
            draft.unlink(missing_ok=True)
    return copy


def local_cache() -> tuple[Path, int]:
    """Return the folder of local copies, and how many bytes it may hold: half of its disk if that is not given."""
    folder, limit = parse_cache(os.environ.get(CACHE_VARIABLE) or f"{files.user_cache()}/objects")
    with writing_cache(folder):
        folder.mkdir(parents=True, exist_ok=True)
        copies.check_no_link(folder / "locks", folder / "folders")
        return folder, limit or shutil.disk_usage(folder).total // 2


def check_local_cache(num_bytes: int = 0) -> None:
    """Raise StoreError if this process cannot write a file of so many bytes into the local cache."""
    folder, limit = local_cache()
    with writing_cache(folder), files.open_own(folder / "size", "ab"):
        _check_fits(folder, limit, num_bytes)


def _check_fits(folder: Path, limit: int, num_bytes: int, in_use: int = 0) -> None:
    if num_bytes + in_use > limit:
        text = f"{folder}: the local cache is too small: {num_bytes} bytes are more than its {limit}, of which "
        fix = "set args.local_cache=FOLDER:SIZE to a larger SIZE, or a folder with more space"
        raise StoreError(f"{text}{in_use} are in use; {fix}")


@contextmanager
def writing_cache(cache: Path, name: str = "") -> Iterator[None]:
    """Name the local cache and the fix in errors of its disk; or the object `name`, which cannot be a file there."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # an error of the store
            raise
        if name and error.errno in (errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG):
            why = f"no file can have this name here ({error.strerror})"
            raise StoreError(f"{name}: {why}; rename the object") from None
        fix = "set args.local_cache=FOLDER:SIZE to a folder that you may write, with enough space"
        if isinstance(error, PermissionError) and os.path.exists(cache):
            owner = f"user {os.stat(cache).st_uid}"
            with suppress(KeyError):  # it has no name in this container
                owner = cache.owner()
            fix = f"{owner} can share it (chmod -R g+w {cache}, umask 002 in all runs), or {fix}"
        text = f"{error.filename or cache}: the local cache cannot be written ({error.strerror})"
        raise StoreError(f"{text}; {fix}") from None


def make_place(folder: Path, limit: int, num_bytes: int, is_full: bool) -> None:
    """Count a new copy; remove the least recently used ones if they are too many bytes or the disk is full."""
    _check_fits(folder, limit, num_bytes)
    with files.locked(folder / "size") as (file, text, _):
        # Killed processes leave the count too low or too high; it is right after each removal.
        used = num_bytes + (int(text) if text.isdigit() else limit + 1)
        if is_full or used > limit:
            used = num_bytes + _remove_oldest(folder, limit, num_bytes, is_full)
        file.truncate(0)
        file.write(b"%d" % used)


def _remove_oldest(folder: Path, limit: int, num_bytes: int, is_full: bool) -> int:
    """Remove the copies that were used least recently to have `num_bytes` free; return what is left."""
    found, in_use = [], 0
    copies.remove_abandoned(folder / "folders")
    for part in folder.glob("[0-9a-f][0-9a-f]"):
        there = {} if part.is_symlink() else {entry.name: entry for entry in os.scandir(part)}
        # The folder may hold files that are not cogfast's: a copy has its checksum beside it.
        names = {name.removesuffix(copies.CHECKSUM) for name in filter(_OURS.fullmatch, there)}
        for entry in [there[name] for name in names & there.keys()]:
            with suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                # mirror.copy_of has linked it, so that to remove it would free nothing.
                if about.st_nlink > 1:
                    in_use += about.st_size
                else:
                    found.append((about.st_mtime, about.st_size, entry.path))
    _check_fits(folder, limit, num_bytes, in_use * (not is_full))
    used = in_use + sum(size for _, size, _ in found)
    # After a process that was killed or refused, the count is not known and may be below the limit.
    limit = int(_KEPT * (min(limit, used) if is_full else limit)) - num_bytes
    for _, size, path in sorted(found):
        if used <= max(0, limit):
            break
        with suppress(FileNotFoundError):
            # A process may be about to open a copy that it was given since the listing.
            age = time.time() - os.stat(path).st_mtime
            if age < (_IN_WORK if path.endswith(files.UNFINISHED) else _IN_USE):
                continue
            os.unlink(path)
            os.unlink(path + copies.CHECKSUM)
        used -= size
    return used


def download(url: str, file: Path, start: int, size: int, is_whole: bool, lock: Any = None) -> None:
    """Write `size` bytes of an object from `start` to a file, in several requests at once if they are many."""
    with open(file, "wb") as out, ThreadPoolExecutor(_THREADS) as pool:

        def copy(at: int) -> None:
            os.pwrite(out.fileno(), _range(url, start + at, start + min(at + _PIECE, size)), at)
            if lock is not None:
                os.utime(lock.fileno())  # for those who wait

        if is_whole and size <= _PIECE:
            whole = lambda fs, path: read_range(url, fs, path, 0, size, is_whole=True)
            out.write(_call(url, whole))
        else:
            list(pool.map(copy, range(0, size, _PIECE)))  # after an error, it begins no other piece


def _range(url: str, start: int, end: int) -> bytes:
    if end <= start:
        return b""
    data = _call(url, lambda fs, path: read_range(url, fs, path, start, end))
    if len(data) != end - start:
        text = f"{url}: {len(data)} bytes came in place of {end - start}: it was changed just now, or its store"
        raise StoreError(f"{text} ignores ranges; a store must support HTTP ranges")
    return data


def _call(url: str, call: Callable[[Any, str], T], is_long: bool = False) -> T:
    """Return call(file system, path), repeated for errors that may pass. is_long: it makes many requests."""
    start, pause = time.monotonic(), _FIRST_PAUSE
    while True:
        began = time.monotonic()
        try:
            # A process that was forked gets a file system of its own from fsspec.
            return call(*_file_system(url, is_long))
        except StoreError:
            raise
        except FileNotFoundError as error:
            if "bucket does not exist" in str(error):
                raise StoreError(f"{url}: {NO_BUCKET}") from None
            text = ", or its server refuses it; renew a signed address, or" * url.startswith(WEB)
            text = f"{url}: no such object or bucket{text or ';'} correct the address"
            raise FileNotFoundError(text) from None
        # Stores raise errors of their HTTP libraries, too.
        except Exception as error:
            why, fix, most = diagnosis(url, error)
            # A call of minutes that fails once is not yet an outage.
            start += (time.monotonic() - began) * is_long
            seconds = time.monotonic() - start
            if seconds + pause > min(most, _PATIENCE):
                raise StoreError(f"{url}: {why}; {fix}") from None
            if pause == _LONGEST_PAUSE:
                logger.warning("%s: %s; trying again for %.0f s", url, why, _PATIENCE - seconds)
        time.sleep(pause * random.uniform(0.5, 1))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _file_system(url: str, is_long: bool) -> tuple[Any, str]:
    import fsspec.config

    if (shown := _USER.sub(r"\1", url)) != url:
        fix = "leave it out; the environment and ~/.config/fsspec hold credentials"
        raise StoreError(f"{shown}: was given with a user or password; {fix}")
    if not url.partition("://")[2].strip("/"):
        raise StoreError(f"{url}: names no bucket or file; correct the address")
    # Some file systems that fsspec puts on top of others run code that their files contain.
    if "::" in url:
        raise StoreError(f"{url}: {OF_CHAIN}")
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs errors with tracebacks, too
    # Listings that fsspec keeps would hide what other processes write.
    given: dict[str, Any] = {"use_listings_cache": False}
    if url.startswith("s3"):
        # `_call` alone repeats: three loops within each other would take minutes.
        kept = fsspec.config.conf.get("s3", {}).get("config_kwargs", {})
        given["config_kwargs"] = {"max_pool_connections": _MANY_THREADS, **kept} | _ONCE
        if is_long:  # fsspec has a file system for each set of options, here with repeated parts
            given["max_concurrency"] = _THREADS
    try:
        file_system, path = fsspec.core.url_to_fs(url, **given)
    # No installed package handles the scheme.
    except (ImportError, ValueError) as error:
        package = "pip install s3fs gcsfs" if url[:5] in _OWN else "docs/data.md"
        fix = f"install the package for its scheme ({package}), or correct it"
        raise StoreError(f"{url}: cannot be opened ({brief(error)}); {fix}") from None
    if url.startswith("s3"):
        file_system.retries = _PART_TRIES if is_long else 1
    return file_system, path


def _stat_of(url: str, about: Mapping[str, Any]) -> Stat:
    found = next((str(about[key]) for key in _VERSIONS if about.get(key)), None)
    if about["size"] is None or found is None:
        text = f"{url}: its server does not tell its size (Content-Length, without compression) or version (ETag, "
        text += "Last-Modified); use another server; of a folder, name the files in a manifest"
        raise StoreError(text)
    version = f"{about['size']}-{found.strip(chr(34))}".encode()
    return Stat(int(about["size"]), hashlib.blake2b(version, digest_size=8).hexdigest())

"""Atomic file writes, bounded reads of files from elsewhere, and 64-bit checksums of file contents.

Files are created with `open`, so that the umask decides their mode: temporary files of `tempfile`
and of safetensors' `save_file` have mode 0600, which a rename keeps.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

logger = logging.getLogger(__name__)

UNFINISHED = ".incomplete"  # suffix of files that are being written
# Between two lines about the lock of another process; until one that does not move is removed
SECONDS_OF_LINE, SECONDS_OF_LOCK = 60.0, 600.0
SECONDS_OF_NFS = 60.0  # for which it may answer from what it knew before another machine wrote
MOST_BYTES = 1 << 30  # of a file that is read into memory as a whole
MOST_LINE_BYTES = 8 << 20  # of a line; a caption of the longest kind in JSON has 6 MiB
# EFBIG means RLIMIT_FSIZE, which some clusters set as a quota.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LFS = "is a pointer of Git LFS, not the file itself; run git lfs pull in its folder"


class WriteError(RuntimeError):
    """A file cannot be written. The message is one line; an earlier file of that name is unchanged."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be written ({error.strerror or error})")


class DamageError(Exception):
    """A file differs from what was written. The message is one line that names the file."""


def is_disk_full(error: OSError) -> bool:
    """Return whether a write failed for lack of space, a quota or a size limit."""
    return error.errno in _NO_SPACE


def is_lfs_pointer(path: str | Path) -> bool:
    """Return whether a file has the few lines that Git LFS leaves in the place of a large file."""
    try:
        with open_regular(path) as file:
            return re.match(rb"version \S*git-lfs", file.read(40)) is not None
    except OSError:
        return False


def open_regular(path: str | Path, mode: str = "rb", buffering: int = -1, flags: int = 0) -> Any:
    """Open a file that may come from elsewhere, as `open` does. OSError if it is not a regular one, since a pipe or
    a device could block for ever or have no end. flags: further ones."""

    def opener(name: str, of_mode: int) -> int:
        descriptor = -1
        try:
            descriptor = os.open(name, of_mode | flags | os.O_NONBLOCK, 0o666)
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise OSError(errno.EISDIR, "")
            # /proc/kmsg counts as a file without bytes, and a read of it would wait.
            is_read = of_mode & os.O_ACCMODE == os.O_RDONLY
            if is_read and not about.st_size and os.pread(descriptor, 1, 0):
                raise OSError(errno.ESPIPE, "")
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            odd = errno.EISDIR, errno.ESPIPE, errno.EAGAIN
            kinds = dict.fromkeys(odd, "it is not a regular file") | {errno.ELOOP: "it is a link"}
            why = kinds.get(error.errno or 0, error.strerror)
            raise OSError(error.errno, why, name) from None
        return descriptor

    return open(path, mode, buffering, opener=opener)


def open_own(path: Path, mode: str, buffering: int = -1) -> Any:
    """Open a file that a run writes: writing through the links of a folder from elsewhere could damage any file."""
    return open_regular(path, mode, buffering, os.O_NOFOLLOW)


def read_limited(
    path: str | Path, most_bytes: int = MOST_BYTES, fix: str = "copy it again"
) -> bytes:
    """Read a regular file of at most `most_bytes`; ValueError for another one."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # A byte more than allowed shows a larger file, even one that is still growing.
            content = b"" if size > most_bytes else file.read(most_bytes + 1)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); {fix}") from None
    if max(size, len(content)) > most_bytes:
        text = f"larger than {most_bytes} bytes, the limit for this kind of file"
        raise ValueError(f"{path}: {text}; {fix}")
    return content


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of an open file; ValueError at one that is longer than any line should be."""
    while line := file.readline(MOST_LINE_BYTES + 1):
        if len(line) > MOST_LINE_BYTES:
            raise ValueError(f"it has a line of more than {MOST_LINE_BYTES} bytes")
        yield line


def refuse_links(run: Path) -> None:
    """Raise ValueError if a link, a pipe or a device lies below the folder of a run that is written to."""
    folders = [run]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if Path(entry) != run / "wandb":  # W&B makes links of its own there
                        folders.append(Path(entry))
                elif not entry.is_file(follow_symlinks=False):
                    kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    text = f"{entry.path} is {kind}; a run writes into its own folder alone: "
                    raise ValueError(text + "replace it by a file or a folder, or remove it")


@contextmanager
def locked(path: Path, notice: str = "") -> Iterator[tuple[Any, str, bool]]:
    """Hold the lock of a file between the processes and threads of this machine.

    Yields the file, what its last holder wrote, and whether another one had it first, which `notice` tells. A
    line a minute names that one. It loses the lock, for it may be frozen, once it has not touched the file for
    ten minutes: what holders write must be drafts of their own.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    moved = logged = time.monotonic()
    last = None
    while True:
        with open_own(path, "a+b", buffering=0) as file:
            is_held = False
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            about, text = os.fstat(file.fileno()), os.pread(file.fileno(), 255, 0)
            text = text.decode(errors="replace").strip()
            if is_held and about.st_nlink:  # it was not removed meanwhile
                with suppress(OSError):  # a full disk
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {os.uname().nodename}\n".encode())
                try:
                    yield file, text, last is not None
                finally:
                    # Closing alone leaves the lock to processes that were forked meanwhile.
                    fcntl.flock(file, fcntl.LOCK_UN)
                return
        now, mark = time.monotonic(), (about.st_ino, about.st_mtime_ns)
        if notice and last is None:
            logger.info(notice)
        moved, last = moved if mark == last else now, mark
        if (is_lost := now - moved >= SECONDS_OF_LOCK) or now - logged >= SECONDS_OF_LINE:
            logged = now
            what = "%s: held by %r, without progress for %.0f s; end it if it is frozen; at %.0f s it loses it"
            logger.warning(what, path, text, now - moved, SECONDS_OF_LOCK)
        if is_lost:
            path.unlink(missing_ok=True)
        time.sleep(0.02)


def is_private(path: Path) -> bool:
    """Whether only this user and root can have put a file there, by owners and modes up to the root.

    In a folder like /tmp, whose sticky bit is set, others cannot replace what is not theirs.
    """
    real, here = Path(os.path.realpath(path)), Path(os.path.abspath(path))
    # In a user namespace all who are outside of it, root among them, have one id. It counts as root's for folders
    # above alone: this user has chosen the path, and no other one can create what belongs to this user.
    root = os.stat("/proc/sys" if os.path.exists("/proc/sys") else "/").st_uid
    own = {0, os.geteuid()}
    for each in {real, here, *real.parents, *here.parents}:
        with suppress(FileNotFoundError):
            about = os.stat(each)
            others = stat.S_IWGRP | stat.S_IWOTH
            is_shared = about.st_mode & others and not about.st_mode & stat.S_ISVTX
            if is_shared or about.st_uid not in (own if each in (real, here) else {*own, root}):
                return False
    return True


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def own_temporary() -> Path:
    """Return this user's folder in that of temporary files."""
    return Path(tempfile.gettempdir(), f"cogfast-{os.geteuid()}")


def user_cache() -> Path:
    """Return cogfast's folder in XDG_CACHE_HOME or ~/.cache, which is made for this user alone.

    A user without a home, as a number in a container may be, has it in the folder of temporary files.
    """
    above = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = own_temporary() if above.startswith("~") else Path(above, "cogfast")
    with suppress(OSError):  # what needs it says so
        make_private(folder)
    return folder


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary name, sync the file and rename it to `path`."""
    # A random name, since processes of several machines may write the same file at once.
    draft = path.with_name(f"{path.name}.{os.urandom(6).hex()}{UNFINISHED}")
    try:
        try:
            write(draft)
            sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        # A rename is durable only once the folder is synced too.
        sync(path.parent)
    except OSError as error:
        raise WriteError(path, error) from None


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a text file atomically, in UTF-8. mode: without the bits of the umask."""
    write = lambda draft: draft.write_text(text, encoding="utf-8")
    write_whole(path, lambda draft: (draft.touch(mode), write(draft)))


def wait_until(is_there: Callable[[], bool]) -> bool:
    """Return whether a file that another machine has written is there, and ask again for some time."""
    end = time.monotonic() + SECONDS_OF_NFS
    while not (found := is_there()) and time.monotonic() < end:
        time.sleep(0.2)
    return found


def set_aside(path: Path) -> Path:
    """Rename a damaged file to an unused `<stem>.damaged-<n>` name and return the new path."""
    # An earlier damaged file may be the only copy of its readable part, so it is kept, too.
    number = 1
    while (free := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    path.rename(free)
    return free


def sync(path: Path) -> None:
    """Block until a file's contents, or a folder's entries, are on the disk (fsync)."""
    # A folder can be opened for reading only, which is enough for fsync.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_hashed(path: Path, parts: Iterable[bytes | memoryview]) -> str:
    """Write a new file to the disk, and return its checksum. The bytes are hashed while they are written, so that
    the disk is not read again."""
    made = xxhash.xxh3_64()
    with open_own(path, "wb") as file:  # after an error it is unfinished, and the caller deletes it
        for part in parts:
            made.update(part)
            file.write(part)
            del part  # so that the next one, which may be as large, is read without it
        file.flush()
        os.fsync(file.fileno())
    return made.hexdigest()


def checksum_of(path: Path) -> str:
    """Return the checksum of a file's bytes, 16 hexadecimal digits."""
    with open_regular(path, buffering=0) as file:
        made: Any = xxhash.xxh3_64  # which hashlib's stubs do not know
        return hashlib.file_digest(file, made).hexdigest()


def checksum_of_bytes(data: bytes) -> str:
    """Return the checksum that a file with these bytes has."""
    return xxhash.xxh3_64_hexdigest(data)


def check_size(path: Path, num_bytes: int) -> None:
    """Raise DamageError unless `path` is a regular file of that many bytes."""
    if not path.is_file():  # reading a pipe would block for ever
        raise DamageError(f"{path.name} is missing")
    if (found := path.stat().st_size) != num_bytes:
        raise DamageError(f"{path.name} has {found} bytes instead of {num_bytes}")


def check_checksum(path: Path, checksum: str, name: str | None = None) -> None:
    """Raise DamageError if `path` cannot be read or its bytes do not have this checksum. name: in messages."""
    name = name or path.name
    try:
        found = checksum_of(path)
    except OSError as error:
        raise DamageError(f"{name} cannot be read ({error.strerror})") from None
    if found != checksum:
        text = f"its checksum is {found}, it was written with {checksum}"
        raise DamageError(f"{name} is damaged: {text}")

"""Atomic file writes, and 64-bit checksums of file contents.

Files are created with `open`, so that the umask decides their mode: temporary files of `tempfile`
and of safetensors' `save_file` have mode 0600, which a rename keeps.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

UNFINISHED = ".incomplete"  # suffix of files that are being written
SECONDS_OF_NFS = 60.0  # for which it may answer from what it knew before another machine wrote
_BLOCK = 1 << 20  # bytes; stays in the processor's cache between the read and the hash
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
        with open(path, "rb") as file:
            return re.match(rb"version \S*git-lfs", file.read(40)) is not None
    except OSError:
        return False


def open_own(path: Path, mode: str, buffering: int = -1) -> Any:
    """Open a file that a run writes, as `open` does, but only a regular one.

    A run's folder may come from elsewhere: writing through its links could damage any file, and a pipe
    could block for ever. OSError names either.
    """

    def opener(name: str, flags: int) -> int:
        try:
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            kinds = {errno.ELOOP: "it is a link", errno.EISDIR: "it is not a regular file"}
            why = kinds.get(error.errno or 0, error.strerror)
            raise OSError(error.errno, why, name) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is not a regular file", name)
        return descriptor

    return open(path, mode, buffering, opener=opener)


def refuse_links(run: Path) -> None:
    """Raise ValueError if a link, a pipe or a device lies below the folder of a run that is written to."""
    folders = [run]
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name != "wandb":  # W&B makes links of its own there
                        folders.append(Path(entry))
                elif not entry.is_file(follow_symlinks=False):
                    kind = "a link" if entry.is_symlink() else "neither a file nor a folder"
                    text = f"{entry.path} is {kind}; a run writes into its own folder alone: "
                    raise ValueError(text + "replace it by a file or a folder, or remove it")


def is_private(path: Path) -> bool:
    """Whether only this user and root can have put a file there, by owners and modes up to the root.

    In a folder like /tmp, whose sticky bit is set, others cannot replace what is not theirs.
    """
    real, here = Path(os.path.realpath(path)), Path(os.path.abspath(path))
    for each in {real, here, *real.parents, *here.parents}:
        with suppress(FileNotFoundError):
            about = os.stat(each)
            is_shared = (
                about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX
            )
            if is_shared or about.st_uid not in (0, os.geteuid()):
                return False
    return True


def make_private(folder: Path) -> None:
    """Create a folder, and those above it that are missing, for this user alone."""
    for each in (*reversed(folder.parents), folder):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)


def user_cache() -> Path:
    """Return cogfast's folder in XDG_CACHE_HOME or ~/.cache, which is made for this user alone."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "cogfast")
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


class ChecksumFile:
    """A new file whose bytes are hashed while they are written, so the disk is not read again.

    A thread hashes a buffer while the caller writes it; both release the GIL. When the `with` block
    ends, the file is on the disk and `checksum` is set.
    """

    checksum: str

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, xxhash.xxh3_64()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._hashing: Future | None = None

    def __enter__(self) -> ChecksumFile:
        self._file: BinaryIO = open_own(self._path, "wb")  # closed by __exit__
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change until the next call or the end of the block."""
        # One buffer at a time, in order: the hash depends on it.
        self._wait()
        self._hashing = self._pool.submit(self._hash.update, data)
        self._file.write(data)

    def _wait(self) -> None:
        if self._hashing is not None:
            self._hashing.result()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            with self._file:
                # After an error the file is unfinished, and the caller deletes it.
                if error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            self._wait()
        finally:
            self._pool.shutdown()
        self.checksum = self._hash.hexdigest()


def checksum_of(path: Path) -> str:
    """Return the checksum of a file's bytes, 16 hexadecimal digits."""
    found, block = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            found.update(block[:count])
    return found.hexdigest()


def checksum_of_bytes(data: bytes) -> str:
    """Return the checksum that a file with these bytes has."""
    return xxhash.xxh3_64_hexdigest(data)


def check_size(path: Path, num_bytes: int) -> None:
    """Raise DamageError unless `path` is a regular file of that many bytes."""
    if not path.is_file():  # reading a pipe would block for ever
        raise DamageError(f"{path.name} is missing")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamageError(f"{path.name} has {found} bytes instead of {num_bytes}")


def check_checksum(path: Path, checksum: str, name: str | None = None) -> None:
    """Raise DamageError if `path` cannot be read or its bytes do not have this checksum. name: in messages."""
    name = name or path.name
    try:
        found = checksum_of(path)
    except OSError as error:
        raise DamageError(f"{name} cannot be read ({error.strerror})") from None
    if found != checksum:
        raise DamageError(
            f"{name} is damaged: its checksum is {found}, it was written with {checksum}"
        )

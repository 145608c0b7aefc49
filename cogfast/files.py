"""Files that are written whole or not at all, and 64-bit checksums of what is in them.

Every file is opened by its own name with the umask's mode: the temporary files of `tempfile`, and
of safetensors' `save_file`, have mode 0600, which a rename keeps.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import xxhash

UNFINISHED = ".incomplete"  # the end of a name that a file has while it is written
_BLOCK = 1 << 20  # bytes; stays in the processor's cache between the read and the hash
# EFBIG: RLIMIT_FSIZE, which some clusters set as a quota.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class WriteError(RuntimeError):
    """A file cannot be written. The message is one line; what was there before is as it was."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path} cannot be written ({error.strerror or error})")


class DamageError(Exception):
    """What is wrong with a file that was written earlier, in one line that names the file."""


def is_disk_full(error: OSError) -> bool:
    """Whether space, a quota or a size limit ended a write."""
    return error.errno in _NO_SPACE


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, and rename it once it is on the disk.

    The other name has the process's number: two processes may write the same file.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        try:
            write(draft)
            sync(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise WriteError(path, error) from None


def write_text(path: Path, text: str) -> None:
    """Write a text file whole."""
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def set_aside(path: Path) -> Path:
    """Rename a file that cannot be used to a name of its own, which is returned."""
    number = 1
    while (free := path.with_name(f"{path.stem}.damaged-{number}{path.suffix}")).exists():
        number += 1
    path.rename(free)
    return free


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_unfinished(folder: Path) -> None:
    """Remove the files that a killed writer left."""
    for path in folder.glob("*" + UNFINISHED):
        path.unlink(missing_ok=True)


class ChecksumFile:
    """A new file whose bytes are hashed while they are written: the disk is read no second time.

    A thread hashes a buffer while the caller writes it, since both release the interpreter. The
    file is on the disk when the `with` block ends; `checksum` is there from then on.
    """

    checksum: str

    def __init__(self, path: Path) -> None:
        self._path, self._hash = path, xxhash.xxh3_64()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checksum")
        self._hashing: Future | None = None

    def __enter__(self) -> ChecksumFile:
        self._file: BinaryIO = open(self._path, "wb")  # noqa: SIM115 - closed by __exit__
        return self

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`, which must not change before the next call or the end of the block."""
        self._wait()
        self._hashing = self._pool.submit(self._hash.update, data)
        self._file.write(data)

    def _wait(self) -> None:
        if self._hashing is not None:
            self._hashing.result()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            with self._file:
                if error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            self._wait()
        finally:
            self._pool.shutdown()
        self.checksum = self._hash.hexdigest()


def checksum_of(path: Path) -> str:
    """The checksum of a file's bytes, 16 hexadecimal digits."""
    found, block = xxhash.xxh3_64(), memoryview(bytearray(_BLOCK))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(block):
            found.update(block[:count])
    return found.hexdigest()


def checksum_of_bytes(data: bytes) -> str:
    """The checksum that a file with these bytes has."""
    return xxhash.xxh3_64_hexdigest(data)


def check_size(path: Path, num_bytes: int) -> None:
    """DamageError where `path` is not a regular file of that many bytes."""
    if not path.is_file():  # a pipe would be read for ever
        raise DamageError(f"{path.name} is missing")
    found = path.stat().st_size
    if found != num_bytes:
        raise DamageError(f"{path.name} has {found} bytes instead of {num_bytes}")


def check_checksum(path: Path, checksum: str) -> None:
    """DamageError where the bytes of `path` are not those that were written, or cannot be read."""
    try:
        found = checksum_of(path)
    except OSError as error:
        raise DamageError(f"{path.name} cannot be read ({error.strerror})") from None
    if found != checksum:
        raise DamageError(
            f"{path.name} is damaged: its checksum is {found}, it was written with {checksum}"
        )

"""Copies in a folder that several users may share: whole, checked, and behind no link."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cogfast.core.files import DamageError, check_checksum, checksum_of, open_own, sync

logger = logging.getLogger(__name__)

CHECKSUM = ".xxh3"  # suffix of a file that has the checksum of the one beside it
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def check_no_link(*folders: Path) -> None:
    """Raise OSError if a link is in the place of a folder that several users may write to."""
    for folder in filter(Path.is_symlink, folders):
        raise OSError(errno.ELOOP, "it is a link", str(folder))


def remove_abandoned(folders: Path) -> None:
    """Remove the folders in which no process holds the lock of the file `lock` any more."""
    for folder in folders.glob("[0-9]*-" + "[0-9a-f]" * 12):
        with suppress(OSError), open_own(folder / "lock", "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)


def keep(draft: Path, path: Path) -> None:
    """Give a draft its name, once it is on the disk and its checksum lies beside it."""
    sync(draft)
    with open_own(Path(f"{path}{CHECKSUM}"), "w") as file:
        file.write(checksum_of(draft))
    draft.replace(path)


def is_kept(path: Path, num_bytes: int | None) -> bool:
    """Return whether a file that `keep` has named is there and whole, and note its use."""
    try:
        with open_own(path, "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            with suppress(PermissionError):  # it is another user's
                os.utime(file.fileno())
        _check_kept(path, about.st_ino, about.st_size)
        return num_bytes is None or about.st_size == num_bytes
    except (OSError, DamageError) as error:
        if not isinstance(error, FileNotFoundError):
            logger.warning("%s: %s; it is copied again", path, getattr(error, "strerror", error))
        return False


@lru_cache(1 << 16)
def _check_kept(path: Path, inode: int, size: int) -> None:
    """Compare a file with its checksum once in each boot of the machine: a crash may have cut it."""
    boot = _BOOT.read_bytes() if _BOOT.exists() else os.urandom(36)
    # Its time says nothing, since each use sets it. Where the system has no boot_id, each process compares.
    mark, beside = b"%.36s %20d %20d" % (boot, inode, size), Path(f"{path}{CHECKSUM}")
    with open_own(beside, "rb") as file:
        checksum, checked = file.read(16), file.read(len(mark))
    if checked != mark:
        check_checksum(path, checksum.decode(errors="replace"))
        with suppress(OSError), open_own(beside, "r+b") as file:  # it may be another user's
            file.write(checksum + mark)

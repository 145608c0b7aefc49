"""Errors of a machine that refuses something, or has run out of it, in the words of one line.

The errors come from Python and from libraries. They are no faults of cogfast, so that a user needs
the line and no traceback. This file imports nothing heavy: the command line needs it at once.
"""

from __future__ import annotations

import errno
import os
import re
import resource

_LEAST_FILES = 64  # a small run with two reading processes needs up to 48
_ODD_PATHS = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)
_FIXES = dict.fromkeys(_ODD_PATHS, "correct the path, or give another one") | {
    errno.EACCES: "change its permissions, or give another path",
    errno.EPERM: "change its permissions, or give another path",
    errno.EROFS: "give a path on another file system",
    errno.EIO: "copy it again, or check the disk",
    errno.ESTALE: "mount its file system again",
}
_OPEN_FILES = "too many open files; raise the limit, such as by ulimit -n 65536"
_SHARED_MEMORY = (
    "/dev/shm, through which reading processes pass batches, is full; enlarge it (docker run "
    "--shm-size=8g), or lower args.num_workers or args.prefetch_factor"
)
_MEMORY = (
    "out of memory of this machine, or of the limit of ulimit -v; free memory, or raise the limit"
)
_THREADS = "too many processes or threads; raise the limit, such as by ulimit -u 65536"
# Texts of PyTorch, Python and the C library. The first that is found counts.
_TEXTS = (
    ("shared memory.*No space left|unable to (allocate|resize) shared memory", _SHARED_MEMORY),
    ("Too many open files", _OPEN_FILES),
    ("can't start new thread|pthread_create", _THREADS),
)
# PyTorch's allocator of host memory, oneDNN and C++ raise a plain RuntimeError with one of these.
_MEMORY_TEXTS = re.compile(
    "can't allocate memory|not enough memory|Cannot allocate memory|could not create a (primitive|memory object)"
    "|std::bad_alloc|failed to map segment from shared object"
)
_FULL = "a disk, or /dev/shm, is full or has a quota; free space on it"
_BY_NUMBER = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES,
    errno.ENOMEM: _MEMORY,
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
}


def check_open_files() -> None:
    """Raise ValueError if a process may open too few files to start, with libraries and readers."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY and most < _LEAST_FILES:
        text = f"ulimit -n is {most}, but a run opens {_LEAST_FILES} files and more"
        raise ValueError(f"{text}; raise the limit, such as by ulimit -n 65536")


def is_lack_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that the memory of the host is exhausted."""
    is_plain = type(error) in (RuntimeError, ImportError, OSError)
    return isinstance(error, MemoryError) or (is_plain and bool(_MEMORY_TEXTS.search(str(error))))


def describe_lack(error: BaseException) -> str | None:
    """Return what the machine refused or lacks, and the fix; None for any other error."""
    if isinstance(error, OSError):
        if error.errno in _BY_NUMBER:
            return _BY_NUMBER[error.errno]
        if error.errno in _FIXES and isinstance(error.filename, str | bytes):
            return f"{os.fsdecode(error.filename)}: {error.strerror}; {_FIXES[error.errno]}"
    if is_lack_of_memory(error):
        return _MEMORY
    return next((lack for text, lack in _TEXTS if re.search(text, str(error))), None)

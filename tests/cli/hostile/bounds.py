"""Limits under which hostile files are read: of memory, and of the time that a call may block."""

import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

GIB = 2**30
SECONDS = 60  # after which a call that waits for a pipe is ended


@contextmanager
def bounded(num_bytes: int = GIB) -> Iterator[None]:
    """Allow the block `num_bytes` of memory more than the process has (RLIMIT_AS), and no endless wait."""

    def end(*_: object) -> None:
        raise AssertionError("the call does not end")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, end)
    resource.setrlimit(
        resource.RLIMIT_AS, (pages * resource.getpagesize() + num_bytes + GIB // 4, hard)
    )
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def sparse(path: Path, num_bytes: int = 20 * GIB, start: bytes = b"") -> None:
    """A file of zeros behind `start` that takes no space on the disk."""
    path.write_bytes(start)
    os.truncate(path, num_bytes)


def _socket(path: Path) -> None:
    os.chdir(path.parent)  # its address may have 108 bytes at most
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


# {what stands in the place of a file: its maker}
ODD: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "socket": _socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "kernel log": lambda path: path.symlink_to("/proc/kmsg"),
}

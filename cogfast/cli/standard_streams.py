"""Standard input, output and error that a command can lose: a terminal that was closed, or a pipe
whose reader ended (`cogfast train | head`), ends no run."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys


class _Stream(io.FileIO):
    """A standard stream's file descriptor. What cannot be written is dropped."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            while (written := super().write(data)) is None:  # of a terminal that does not block
                select.select([], [self], [])
        except OSError:
            return memoryview(data).nbytes
        return written


def keep_streams() -> None:
    """Make stdout and stderr of this process drop what they cannot write, and open those of the
    three streams that were closed at the start.

    Files that are opened later would take the place of a closed stream, and C++ libraries would
    write their messages into them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - until the process ends
    sys.stdout = _kept(sys.stdout, 1)
    sys.stderr = _kept(sys.stderr, 2)


def _kept(stream: io.TextIOWrapper | None, descriptor: int) -> io.TextIOWrapper:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace" if descriptor == 2 or stream is None else stream.errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )

"""Keeps a command running when its standard streams break.

Examples are a terminal that was closed and a pipe whose reader has ended (`cogfast train | head`).
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class _Stream(io.FileIO):
    """A standard stream's file descriptor. Output that cannot be written is dropped."""

    def write(self, data: ReadableBuffer) -> int:
        try:
            # None: the terminal is non-blocking and its buffer is full.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
        except OSError:
            return memoryview(data).nbytes
        return written


def keep_streams() -> None:
    """Make stdout and stderr drop what they cannot write, and reopen closed standard streams.

    Otherwise a file opened later would get the descriptor of a closed stream, and C++ libraries
    would write their messages into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - until the process ends
    sys.stdout = _kept(sys.stdout, 1)
    sys.stderr = _kept(sys.stderr, 2)


def _kept(stream: TextIO | None, descriptor: int) -> io.TextIOWrapper:
    if stream is not None:
        with contextlib.suppress(OSError):
            stream.flush()
    # Over the same descriptor, so that child processes and C++ libraries write to the same place.
    return io.TextIOWrapper(
        io.BufferedWriter(_Stream(descriptor, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace" if descriptor == 2 or stream is None else stream.errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )

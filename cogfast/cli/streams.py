"""The streams of a command: log lines on stderr, and streams that keep it running when they break.

Log lines come from the first rank and have no control characters. A stream breaks when a terminal is closed
or the reader of a pipe ends (`cogfast train | head`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import numbers
import os
import select
import sys
import warnings
from typing import TYPE_CHECKING, TextIO

from cogfast.core.addresses import shown
from cogfast.core.values import printable
from cogfast.extensions.stores.mirror import named_by_urls

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _ToStderr(logging.Handler):
    """Writes to the sys.stderr of the time of writing, which a caller may have replaced.

    Escapes control characters and line breaks in log arguments, and names copies of a store by their URLs.
    File names and captions come from data and could otherwise send commands to the terminal or
    fake a log line. A message of several lines is therefore logged without arguments.
    """

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk, or a closed pipe
            sys.stderr.write(self.format(record) + "\n")

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(
                a if isinstance(a, numbers.Number) else printable(named_by_urls(str(a)))
                for a in record.args
            )
        return printable(super().format(record), keep="\n\t")


def start_logging() -> None:
    """Log to stderr: everything from INFO on rank 0, warnings on the other ranks."""
    logger = logging.getLogger("cogfast")
    # In place of earlier handlers, so that a second command of one process does not log twice.
    logger.handlers, logger.propagate = [_ToStderr()], False
    logger.setLevel(logging.INFO if is_first_rank() else logging.WARNING)
    # DeepSpeed calls a collective by its old name, and torch 2.13 warns about it on every rank.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.\w+` is deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
    )


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


class _ShownText(io.TextIOWrapper):
    """A standard stream that shows no secret, such as in a traceback."""

    def write(self, text: str) -> int:
        return super().write(shown(text))


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
    return _ShownText(
        io.BufferedWriter(_Stream(descriptor, "w", closefd=False)),
        encoding="utf-8" if stream is None else stream.encoding,
        errors="backslashreplace" if descriptor == 2 or stream is None else stream.errors,
        line_buffering=descriptor == 2 or os.isatty(descriptor),
    )

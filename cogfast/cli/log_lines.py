"""Log lines on stderr: one handler, the first rank's messages, no control characters."""

from __future__ import annotations

import contextlib
import logging
import numbers
import os
import sys
import warnings

from cogfast.config.values import printable


def is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


class _ToStderr(logging.Handler):
    """Writes to the current sys.stderr, which a progress bar replaces while it is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a log on a full disk, or a closed pipe
            sys.stderr.write(self.format(record) + "\n")


class _PlainText(logging.Formatter):
    """Escapes control characters and line breaks in log arguments.

    File names and captions come from data and could otherwise send commands to the terminal or
    fake a log line. A message of several lines is therefore logged without arguments.
    """

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(record.args, tuple):
            record.args = tuple(
                a if isinstance(a, numbers.Number) else printable(str(a)) for a in record.args
            )
        return printable(super().format(record), keep="\n\t")


def start_logging() -> None:
    """Log to stderr: everything from INFO on rank 0, warnings on the other ranks."""
    logger = logging.getLogger("cogfast")
    handler = _ToStderr()
    handler.setFormatter(_PlainText())
    # In place of earlier handlers, so that a second command of one process does not log twice.
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO if is_first_rank() else logging.WARNING)
    # DeepSpeed calls a collective by its old name, and torch 2.13 warns about it on every rank.
    warnings.filterwarnings(
        "ignore",
        message=r"`torch\.distributed\.\w+` is deprecated",
        category=FutureWarning,
        module=r"torch\.distributed\.c10d_logger",
    )

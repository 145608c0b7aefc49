"""The text of log lines, and of the command that a process runs."""

from __future__ import annotations

import logging
import numbers
import shlex
import sys
from pathlib import Path

from cogfast.config.values import printable


def command_line() -> str:
    """Return the command of this process as one would type it."""
    program = Path(sys.argv[0]).name
    name = "python -m cogfast" if program == "__main__.py" else program
    return printable(f"{name} {shlex.join(sys.argv[1:])}".strip())


class PlainText(logging.Formatter):
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

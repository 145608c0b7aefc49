"""log.txt of a run's folder: what rank 0 has logged, as on the screen, under the command line."""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from cogfast.config.values import one_line, printable
from cogfast.train.run.folder import command_line
from cogfast.train.run.trackers import LogFile


class RunLog(logging.Handler):
    """Keeps the lines of rank 0 from its start on, and writes them once the run's folder is known."""

    def __init__(self) -> None:
        super().__init__()
        self._file: LogFile | None = None
        self._lines = [f"\n{datetime.now():%Y-%m-%d %H:%M:%S}  {command_line()}"]
        if os.environ.get("RANK", "0") == "0":
            logging.getLogger("cogfast").addHandler(self)

    def open(self, folder: Path) -> None:
        """Write the lines so far, and from now on each line at once, to log.txt of the folder."""
        self._file = LogFile(folder / "log.txt")
        lines, self._lines = self._lines, []
        self._write("\n".join(lines))

    def emit(self, record: logging.LogRecord) -> None:
        # The screen's handler comes first, and has escaped the arguments.
        self._write(printable(record.getMessage(), keep="\n\t"))

    def end(self, error: BaseException | None = None) -> None:
        """Stop. error: what ends the run; it is written as the command prints it."""
        logging.getLogger("cogfast").removeHandler(self)
        if error is not None and self._file is not None:
            notes = getattr(error, "__notes__", ())
            self._write("cogfast: " + "; ".join(one_line(str(each)) for each in (error, *notes)))

    def _write(self, text: str) -> None:
        if self._file is None:
            self._lines.append(text)
        else:
            self._file.append(text.encode(errors="backslashreplace") + b"\n")

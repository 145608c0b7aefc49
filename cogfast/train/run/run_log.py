"""log.txt of a run's folder: what rank 0 has logged, as on the screen, under the command line."""

from __future__ import annotations

import logging
import os
from datetime import datetime
from pathlib import Path

from cogfast.core.values import one_line, printable
from cogfast.train.run.folder import command_line
from cogfast.train.run.trackers import LogFile


class RunLog(logging.Handler):
    """Keeps the lines of rank 0 from its start on, and writes them once the run's folder is known."""

    def __init__(self) -> None:
        super().__init__()
        self._file: LogFile | None = None
        self._is_writing = False
        self._lines = [f"\n{datetime.now():%Y-%m-%d %H:%M:%S}  {command_line()}"]
        logger = logging.getLogger("cogfast")
        for other in [each for each in logger.handlers if isinstance(each, RunLog)]:
            other.end()  # of a run that was built and not trained
        if os.environ.get("RANK", "0") == "0":
            logger.addHandler(self)

    def open(self, folder: Path) -> None:
        """Write the lines so far, and from now on each line at once, to log.txt of the folder."""
        self._file = LogFile(folder / "log.txt")
        self._flush()

    def emit(self, record: logging.LogRecord) -> None:
        # The screen's handler comes first, and has escaped the arguments.
        self._write(printable(record.getMessage(), keep="\n\t"))
        # Python prints warnings where there is no handler, as in a program that uses cogfast.
        last = logging.lastResort
        is_alone = logging.getLogger("cogfast").handlers == [self] and not logging.root.handlers
        if is_alone and last is not None and record.levelno >= last.level:
            last.handle(record)

    def end(self, error: BaseException | None = None) -> None:
        """Stop. error: what ends the run; it is written as the command prints it."""
        logging.getLogger("cogfast").removeHandler(self)
        if error is not None and self._file is not None:
            notes = getattr(error, "__notes__", ())
            self._write("cogfast: " + "; ".join(one_line(str(each)) for each in (error, *notes)))

    def _write(self, text: str) -> None:
        self._lines.append(text)
        self._flush()

    def _flush(self) -> None:
        if self._file is None or self._is_writing:
            return
        self._is_writing = True  # a full disk logs a line, which comes with the next one
        lines, self._lines = self._lines, []
        self._file.append("".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        self._is_writing = False

"""Remembers what was read from files, so that the next start reads only new and changed ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


# A line as `to_lines` writes it, to the end of the name
_LINE = re.compile(rb'^(\[".*?)", "', re.MULTILINE)


def to_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the lines of a file with these rows."""
    # Starting a new line ends a line that a killed process left unfinished.
    return "".join("\n" + json.dumps(list(row)) for row in rows).encode()


class FileIndex:
    """JSON lines [name, version, values...], to which any number of processes append.

    The last line of a name counts; one that is malformed, such as that of a killed process, says nothing. Lines
    stay as they are in the file until they are asked for, which takes 16 bytes more for each.

    further: a file whose lines come before those of `path`; nothing is added to it.
    """

    def __init__(self, path: Path | None, further: Path | None = None) -> None:
        """path: None keeps the rows in memory alone."""
        self.path = path
        self._data = b"\n".join([*(_read(file) for file in (further, path) if file), b""])
        found = ((hash(line[1]), line.start()) for line in _LINE.finditer(self._data))
        lines = np.fromiter(found, np.dtype([("hash", np.int64), ("start", np.int64)]))
        self._lines = lines[np.argsort(lines["hash"], kind="stable")]
        self._new: dict[str, list] = {}  # the rows that this process has added

    def get(self, name: str, version: str) -> list | None:
        """Return the values of a name; None if there are none for this version of its file."""
        row = self._row(name)
        return row[2:] if row and row[1] == version else None

    def last(self, name: str) -> list | None:
        """Return the values of a name, whichever version of its file they are from."""
        return self._row(name)[2:] or None

    def forget(self, name: str) -> None:
        self._new[name] = []

    def _row(self, name: str) -> list:
        """Return the row of a name; [] if there is none."""
        if name in self._new:
            return self._new[name]
        key = hash(b"[" + json.dumps(name).encode()[:-1])
        place = int(self._lines["hash"].searchsorted(key, side="right")) - 1
        row = self._row_at(int(self._lines["start"][place])) if place >= 0 else []
        return row if row[:1] == [name] else []

    def _row_at(self, start: int) -> list:
        """Return the row whose line begins at `start`; [] if it is malformed."""
        try:
            row = json.loads(self._data[start : self._data.find(b"\n", start)].decode())
        except (ValueError, RecursionError):
            return []
        return row if len(row) > 1 else []

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows (name, version, values...), also to the file. OSError if it cannot be written."""
        rows = list(rows)
        self._new |= {row[0]: [*row] for row in rows}
        if not rows or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A folder may come from elsewhere: writing through its links could damage any file, and writing to a
        # pipe could never end.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        data = to_lines(rows)
        with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
            # In one piece, between those of other processes. On a full disk a first write may end
            # early, and the second one raises the error.
            while data:
                data = data[file.write(data) :]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the last row of each name."""
        lines = map(self._row_at, np.sort(self._lines["start"]).tolist())
        return filter(None, ({row[0]: row for row in lines if row} | self._new).values())

    def keep(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows, if there are any; log a warning if the file cannot be written."""
        try:
            self.add(rows)
        except OSError as error:
            text = "%s cannot be written, so the next start reads the files again: %s"
            logger.warning(text, self.path, error)


def _read(path: Path) -> bytes:
    try:
        # A folder may come from elsewhere: its file could be a pipe or a link to a device.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            return file.read() if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    except OSError:
        return b""


def user_index(kind: str, names: Iterable[str], further: Path | None = None) -> FileIndex:
    """Open the index of `names` in the user's cache folder (XDG_CACHE_HOME or ~/.cache). further: as FileIndex."""
    # surrogatepass: file names need not be valid UTF-8.
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=10)
    return FileIndex(Path(folder) / "cogfast" / f"{kind}-{digest.hexdigest()}.jsonl", further)

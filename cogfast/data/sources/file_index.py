"""Remembers what was read from files, so that the next start reads only new and changed ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cogfast.core.files import MOST_LINE_BYTES, lines_of, open_own, user_cache

logger = logging.getLogger(__name__)


# A line as `to_lines` writes it, to the end of the name
_LINE = re.compile(rb'(\[".*?)", "')
_LINE_BYTES = 512  # of most lines
_FILE = 2**48  # above the size of a file


def to_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the lines of a file with these rows."""
    # Starting a new line ends a line that a killed process left unfinished.
    return "".join("\n" + json.dumps(list(row)) for row in rows).encode()


class FileIndex:
    """JSON lines [name, version, values...], to which any number of processes append.

    The last line of a name counts; one that is malformed, such as that of a killed process, says nothing. Lines
    stay in the file until they are asked for: 16 bytes of memory for each.
    path: None keeps the rows in memory alone. further: a file whose lines come before those of `path`; nothing is
    added to it.
    """

    def __init__(self, path: Path | None, further: Path | None = None) -> None:
        self.path = path
        self._files: list[int] = []
        for file in filter(None, (further, path)):
            with suppress(OSError), open_own(file, "rb") as opened:
                self._files.append(os.dup(opened.fileno()))
        found = ((hash(line), place) for line, place in self._names())
        lines = np.fromiter(found, np.dtype([("hash", np.int64), ("place", np.int64)]))
        self._lines = lines[np.argsort(lines["hash"], kind="stable")]
        self._new: dict[str, list] = {}  # the rows that this process has added

    def _names(self) -> Iterator[tuple[bytes, int]]:
        """Yield the beginning of each line that has one, with the number of its file and the place in it."""
        for number, file in enumerate(self._files):
            place = number * _FILE
            weakref.finalize(self, os.close, file)
            try:
                for line in lines_of(open(file, "rb", closefd=False)):  # noqa: SIM115
                    if found := _LINE.match(line):
                        yield found[1], place
                    place += len(line)
            except ValueError as error:
                logger.warning("%s: %s; remove it", os.readlink(f"/proc/self/fd/{file}"), error)

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
        row = self._row_at(int(self._lines["place"][place])) if place >= 0 else []
        return row if row[:1] == [name] else []

    def _row_at(self, place: int) -> list:
        """Return the row whose line begins at a place; [] if it is malformed."""
        number, start = divmod(place, _FILE)
        size = _LINE_BYTES
        try:
            while b"\n" not in (data := os.pread(self._files[number], size, start)):
                if len(data) < size or size > MOST_LINE_BYTES:
                    break
                size *= 8
            row = json.loads(data.partition(b"\n")[0].decode())
        except (OSError, ValueError, RecursionError):
            return []
        return row if len(row) > 1 else []

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows (name, version, values...), also to the file. OSError if it cannot be written."""
        rows = list(rows)
        self._new |= {row[0]: [*row] for row in rows}
        if not rows or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        data = to_lines(rows)
        with open_own(self.path, "ab", buffering=0) as file:
            # In one piece, between those of other processes. On a full disk a first write may end
            # early, and the second one raises the error.
            while data:
                data = data[file.write(data) :]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the last row of each name."""
        _, last = np.unique(self._lines["hash"][::-1], return_index=True)
        places = np.sort(self._lines["place"][::-1][last]).tolist()
        yield from (row for row in map(self._row_at, places) if row and row[0] not in self._new)
        yield from filter(None, self._new.values())

    def keep(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows, if there are any; log a warning if the file cannot be written."""
        try:
            self.add(rows)
        except OSError as error:
            text = "%s cannot be written, so the next start reads the files again: %s"
            logger.warning(text, self.path, error)


def user_index(kind: str, names: Iterable[str], further: Path | None = None) -> FileIndex:
    """Open the index of `names` in the user's cache folder (XDG_CACHE_HOME or ~/.cache). further: as FileIndex."""
    # surrogatepass: file names need not be valid UTF-8.
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=10)
    return FileIndex(user_cache() / f"{kind}-{digest.hexdigest()}.jsonl", further)

"""Remembers what was read from files, so that the next start reads only new and changed ones."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


def to_lines(rows: Iterable[Sequence[Any]]) -> bytes:
    """Return the lines of a file with these rows."""
    # Starting a new line ends a line that a killed process left unfinished.
    return "".join("\n" + json.dumps(list(row)) for row in rows).encode()


class FileIndex:
    """JSON lines [name, version, values...], to which any number of processes append.

    The last line of a name counts. Malformed lines, such as those of a killed process, do not.
    """

    def __init__(self, path: Path | None) -> None:
        """path: None keeps the rows in memory alone."""
        self.path = path
        self._rows: dict[str, tuple[str, list]] = {}
        try:
            lines = [] if path is None else path.read_bytes().split(b"\n")
        except OSError:
            return
        for line in lines:
            try:
                name, version, *values = json.loads(line)
                self._rows[str(name)] = str(version), values
            except (ValueError, TypeError, RecursionError):
                continue

    def get(self, name: str, version: str) -> list | None:
        """Return the values of a name; None if there are none for this version of its file."""
        known, values = self._rows.get(name, ("", None))
        return values if known == version else None

    def last(self, name: str) -> list | None:
        """Return the values of a name, whichever version of its file they are from."""
        return self._rows.get(name, ("", None))[1]

    def forget(self, name: str) -> None:
        self._rows.pop(name, None)

    def add(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows (name, version, values...), also to the file. OSError if it cannot be written."""
        rows = list(rows)
        for name, version, *values in rows:
            self._rows[name] = version, values
        if not rows or self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # A folder may come from elsewhere: writing through its links could damage any file.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        data = to_lines(rows)
        with open(os.open(self.path, flags, 0o666), "ab", buffering=0) as file:
            # In one piece, between those of other processes. On a full disk a first write may end
            # early, and the second one raises the error.
            while data:
                data = data[file.write(data) :]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield all rows."""
        return ((name, version, *values) for name, (version, values) in self._rows.items())

    def keep(self, rows: Iterable[Sequence[Any]]) -> None:
        """Add rows, if there are any; log a warning if the file cannot be written."""
        try:
            self.add(rows)
        except OSError as error:
            text = "%s cannot be written, so the next start reads the files again: %s"
            logger.warning(text, self.path, error)


def user_index(kind: str, names: Iterable[str]) -> FileIndex:
    """Open the index of `names` in the user's cache folder (XDG_CACHE_HOME or ~/.cache)."""
    # surrogatepass: file names need not be valid UTF-8.
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b("\n".join(names).encode("utf-8", "surrogatepass"), digest_size=10)
    return FileIndex(Path(folder) / "cogfast" / f"{kind}-{digest.hexdigest()}.jsonl")

"""Samples that cannot be read: logs them, lists them once per run, and limits their number."""

from __future__ import annotations

import fcntl
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from cogfast.core.addresses import distinct, shown
from cogfast.core.files import lines_of, open_own

logger = logging.getLogger(__name__)

_NUM_NAMED = 10  # samples that the error lists
# From this many bad samples on, the run ends if most samples tried so far are bad.
_NUM_HOPELESS = 10


class BadSample(Exception):
    """A sample that cannot be used: `path` names it, `reason` says why in one line."""

    def __init__(self, path: str, reason: str) -> None:
        # Both are passed on because pickle rebuilds an exception from its args.
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class Unavailable(BadSample):
    """A sample that its store does not give now, but may give later."""


class BadSampleLog:
    """The distinct bad samples of a run, in a JSON-lines file that all ranks share.

    file: one line {"path", "reason"} per bad sample; None keeps the list in memory only.
    num_samples: size of the data set. max_bad_fraction: the fraction of it that may be bad. One
    bad sample is always allowed, else a data set of ten could have none, unless all are bad.
    """

    def __init__(
        self, file: str | Path | None, num_samples: int, max_bad_fraction: float = 0.05
    ) -> None:
        self.file = None if file is None else Path(file)
        self.num_samples = num_samples
        self.max_bad_fraction = max_bad_fraction
        self.reasons: dict[str, str] = {}  # {path: reason} of this run, all ranks
        self._has_failed = False  # whether a write failed, which is logged once
        self._num_read = 0  # bytes of complete lines read from the file so far
        self._listed_before: set[str] = set()  # paths listed by the run that this one resumes
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with suppress(OSError), open_own(self.file, "rb") as listed:
                self._listed_before = set(self._read_on(listed))

    @property
    def limit(self) -> int:
        """The largest number of bad samples with which the run continues."""
        return max(1, int(self.max_bad_fraction * self.num_samples))

    def add(self, path: str, reason: str, is_logged: bool = True) -> bool:
        """List a bad sample and, if `is_logged`, log a warning.

        Returns False if this or another rank has listed it already.
        """
        path, reason = distinct(path), shown(reason)
        if path in self.reasons:
            return False
        is_new = path not in self._listed_before
        if is_new and self.file is not None:
            try:
                is_new = self._list(self.file, path, reason)
            except OSError as error:
                if not self._has_failed:
                    logger.warning("%s cannot be written (%s)", self.file, error.strerror)
                self._has_failed = True
        # A sample listed by the resumed run counts again only if it is still bad.
        self.reasons[path] = reason
        if is_new and is_logged:
            logger.warning("skipped %s: %s", path, reason)
        return is_new

    def _list(self, file: Path, path: str, reason: str) -> bool:
        """Append a line for the sample; returns False if another rank has done so."""
        with open_own(file, "a+b") as f:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(f, fcntl.LOCK_EX)  # released by the close
            listed = self._read_on(f)
            for other in listed.keys() - self._listed_before:
                self.reasons[other] = listed[other]
            if path in listed:
                return False
            # A process killed while writing leaves half a line: start a new one.
            start = "\n" if f.tell() > self._num_read else ""
            line = json.dumps({"path": path, "reason": reason}, ensure_ascii=False)
            # File names that are not valid UTF-8 become JSON escapes.
            f.write(f"{start}{line}\n".encode("utf-8", "backslashreplace"))
            self._num_read = f.tell()
        return True

    def _read_on(self, file: BinaryIO) -> dict[str, str]:
        """Read the lines that were added since the last call, but for torn ones: {path: reason}."""
        file.seek(self._num_read)
        reasons = {}
        with suppress(ValueError):  # a line of any length, in a run from elsewhere
            for line in lines_of(file):
                self._num_read += len(line) * line.endswith(b"\n")
                with suppress(ValueError, KeyError, TypeError, RecursionError):
                    entry = json.loads(line)
                    reasons[distinct(str(entry["path"]))] = shown(str(entry["reason"]))
        return reasons

    def check(self, own: tuple[int, int] = (0, 0)) -> None:
        """Raise ValueError if too many samples are bad.

        own: the numbers of distinct samples that this rank has found bad and that it has tried.
        """
        # Stop early where most of the samples are bad, say if a disk is not mounted.
        num_bad, (own_bad, own_tried) = len(self.reasons), own
        are_most_bad = own_bad >= _NUM_HOPELESS and 2 * own_bad > own_tried
        is_hopeless = self.max_bad_fraction < 0.5 and are_most_bad
        if num_bad <= self.limit and num_bad < self.num_samples and not is_hopeless:
            return
        named = "; ".join(f"{p}: {r}" for p, r in list(self.reasons.items())[:_NUM_NAMED])
        above = ""
        if num_bad > self.max_bad_fraction * self.num_samples:
            above = f" (>{100 * self.max_bad_fraction:g}%)"
        elif is_hopeless:
            above = f" ({own_bad} of the {own_tried} that one rank has read so far)"
        where = "" if self.file is None else f" (all in {self.file})"
        text = f"{num_bad}/{self.num_samples} videos unreadable{above}, args.max_bad_fraction={self.max_bad_fraction:g}"
        raise ValueError(f"{text}; repair or remove them, or raise it; first: {named}{where}")

"""Samples that cannot be read: how they are told, listed once per run, and when they end it."""

from __future__ import annotations

import fcntl
import json
import logging
from contextlib import suppress
from pathlib import Path

from cogfast.files import set_aside
from cogfast.schema.json_files import check, read_limited
from cogfast.schema.values import printable

logger = logging.getLogger(__name__)

_MOST_BYTES = 1 << 30  # of the list: millions of samples
_NUM_NAMED = 10  # samples that the error lists
_NUM_HOPELESS = (
    10  # from here on, a majority of bad samples ends the run whatever the data set's size
)


class BadSample(Exception):
    """A sample that cannot be used: `path` names it, `reason` says why in one line."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)  # both, so that it travels between processes
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


class BadSampleLog:
    """The distinct bad samples of a run, in a JSON-lines file that all ranks share.

    file: one line {"path", "reason"} per bad sample; None keeps the list in memory only.
    num_samples: size of the data set; max_bad_fraction: the part of it that may be bad. One bad
    sample is always borne, else a data set of ten could not have any; that all are bad is not.
    """

    def __init__(
        self, file: str | Path | None, num_samples: int, max_bad_fraction: float = 0.05
    ) -> None:
        if not 0.0 <= max_bad_fraction <= 1.0:
            raise ValueError(
                f"args.max_bad_fraction={max_bad_fraction} must be between 0 and 1; "
                "0.05 bears five bad samples of a hundred"
            )
        self.file = None if file is None else Path(file)
        self.num_samples = num_samples
        self.max_bad_fraction = max_bad_fraction
        self.reasons: dict[str, str] = {}  # path -> reason: this run's, those of other ranks too
        self._listed_before: set[str] = set()  # lines of the run that this one resumes
        self._has_failed = False  # to write the file
        self._num_read = 0  # bytes of the file's whole lines that we know
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self._read_earlier()

    def _read_earlier(self) -> None:
        """Note what the run that is resumed has listed; a damaged list is set aside."""
        if not self.file.exists():
            return
        try:
            text = read_limited(self.file, _MOST_BYTES)
            text.decode()
            self._listed_before = set(_read(text))
            self._num_read = _end_of_lines(text)
        except ValueError as error:
            with suppress(OSError):  # a folder that cannot be written, or another rank was first
                kept = set_aside(self.file).name
                logger.warning("%s is damaged (%s): it is now %s", self.file, error, kept)

    @property
    def limit(self) -> int:
        """The most bad samples that the run bears."""
        return max(1, int(self.max_bad_fraction * self.num_samples))

    def add(self, path: str, reason: str, is_told: bool = True) -> bool:
        """Take a bad sample down, with a line in the log where is_told; False when it is listed
        already, by this or another rank."""
        if path in self.reasons:
            return False
        is_new = path not in self._listed_before
        if is_new and self.file is not None:
            try:
                is_new = self._list(path, reason)
            except (OSError, ValueError) as error:  # a full disk, or damaged since it was opened
                if not self._has_failed:
                    why = getattr(error, "strerror", None) or error
                    logger.warning("%s cannot be written (%s)", self.file, why)
                self._has_failed = True
        # Listed before and still bad counts anew; listed before and mended does not.
        self.reasons[path] = reason
        if is_new and is_told:
            logger.warning("skipped %s: %s", printable(path), printable(reason))
        return is_new

    def _list(self, path: str, reason: str) -> bool:
        """Append a line for it, unless another rank has."""
        with open(self.file, "a+b") as f:
            with suppress(OSError):  # of a file system without locks
                fcntl.flock(f, fcntl.LOCK_EX)  # released by the close
            f.seek(self._num_read)
            text = f.read()  # what other ranks have added
            listed = _read(text)
            is_new = path not in listed
            for other in listed.keys() - self._listed_before:
                self.reasons[other] = listed[other]
            if is_new:
                # A process killed while it wrote leaves half a line: begin a new one.
                start = b"" if not text or text.endswith(b"\n") else b"\n"
                line = json.dumps({"path": path, "reason": reason}, ensure_ascii=False)
                # A name that is no UTF-8 comes out as the escape that JSON knows.
                line = start + line.encode("utf-8", "backslashreplace") + b"\n"
                f.write(line)
                text += line
            self._num_read += _end_of_lines(text)
        return is_new

    def check(self, num_seen: int | None = None) -> None:
        """Raise where too many are bad; num_seen: the distinct samples that this rank has tried."""
        num_bad = len(self.reasons)
        is_hopeless = (
            num_seen is not None
            and self.max_bad_fraction < 0.5
            and num_bad >= _NUM_HOPELESS
            and 2 * num_bad > num_seen
        )
        if num_bad <= self.limit and num_bad < self.num_samples and not is_hopeless:
            return
        named = "; ".join(f"{p}: {r}" for p, r in list(self.reasons.items())[:_NUM_NAMED])
        is_above = num_bad > self.max_bad_fraction * self.num_samples
        above = f" (>{100 * self.max_bad_fraction:g}%)" if is_above else ""
        where = "" if self.file is None else f" (all in {self.file})"
        raise ValueError(
            f"{num_bad}/{self.num_samples} videos unreadable{above}, "
            f"args.max_bad_fraction={self.max_bad_fraction:g}; mend or remove them, or raise it; "
            f"first: {named}{where}"
        )


def _end_of_lines(text: bytes) -> int:
    """Where its last whole line ends."""
    return text.rfind(b"\n") + 1


def _read(text: bytes) -> dict[str, str]:
    """{path: reason} of a log's lines; a line that a killed process left torn is passed over.

    ValueError for a line of anything else.
    """
    reasons = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        entry = check(entry, {"path": str, "reason": str}, f"line {number}")
        reasons[entry["path"]] = entry["reason"]
    return reasons

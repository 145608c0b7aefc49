"""A difference between what was recorded and what this tree does, and the form in which texts are compared."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "behaviour"
CHANGED = FIXTURES / "changed_texts.json"
ERROR_TEXT = "text of the error"  # the only kind of difference that CHANGED may list
MOST_CHANGED = 60

# A text may hold these of the moment and of the machine. Nothing else is loosened.
_MOMENT = (
    (r"\d{4}-\d\d-\d\d[T_ -]\d\d[:.-]?\d\d[:.-]?\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?", "<time>"),
    (r"\b\d{4}-\d\d-\d\d\b", "<date>"),
    (r"\b\d\d:\d\d:\d\d(?:[.,]\d+)?\b", "<time>"),
    (r"\b\d+\.\d+ (s|ms|min|h|hours|minutes|seconds)\b", r"<number> \1"),
    (r"\b(in|after|took) \d+ (s|ms|min|h|hours|minutes|seconds)\b", r"\1 <number> \2"),
    (r"\b(pid|PID|process|processes) \d+\b", r"\1 <pid>"),
    (r"\b(127\.0\.0\.1|localhost|0\.0\.0\.0):\d+", r"\1:<port>"),
    (r"\b[0-9a-f]{40}\b", "<commit>"),
    (r"\b(commit) [0-9a-f]{7,12}\b", r"\1 <commit>"),
    (r"\b0x[0-9a-f]{8,16}\b", "<address>"),
)


@dataclass(frozen=True)
class Difference:
    """part and case: where it is. what: which value differs, such as "exit status"."""

    part: str
    case: str
    what: str
    recorded: str
    found: str

    def __str__(self) -> str:
        recorded, found = _around(self.recorded, self.found)
        return f"{self.part}:{self.case}: {self.what}: recorded {recorded}, found {found}"


def normalized(text: str, work: Path, has_times: bool = True) -> str:
    """Replace what belongs to this machine and moment by placeholders.

    work: the scratch folder of the case or part. has_times: the text may have times, process ids and
    the like; otherwise its numbers all count.
    """
    for path, name in _places(work):
        # Not a part of a longer name.
        text = re.sub(re.escape(path) + r"(?![\w.-]*\w)", lambda _, name=name: name, text)
    for pattern, replacement in _MOMENT if has_times else ():
        text = re.sub(pattern, replacement, text)
    return text


def _places(work: Path) -> list[tuple[str, str]]:
    """Folders of this machine and their placeholders, the longest first."""
    names = {str(work): "<work>", str(work.resolve()): "<work>", str(ROOT): "<cogfast>"}
    for key in ("purelib", "platlib"):
        names.setdefault(sysconfig.get_paths()[key], "<packages>")
    for path in (sysconfig.get_paths()["stdlib"], sys.prefix, sys.base_prefix):
        names.setdefault(path, "<python>")
    names.setdefault(os.path.expanduser("~"), "<home>")
    # One-letter folders such as / are no sign of a machine.
    return sorted(((p, n) for p, n in names.items() if len(p) > 4), key=lambda it: -len(it[0]))


def _around(recorded: str, found: str) -> tuple[str, str]:
    """Both texts, each cut to what surrounds their first difference."""
    start = len(os.path.commonprefix([recorded, found]))
    start = max(0, start - 60) if max(len(recorded), len(found)) > 300 else 0
    cut = [("..." if start else "") + text[start : start + 240] for text in (recorded, found)]
    return repr(cut[0]), repr(cut[1])


def compare_values(
    part: str, case: str, recorded: object, found: object, what: str = ""
) -> Iterator[Difference]:
    """Yield one difference for each leaf of two JSON values that is not equal in both."""
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted(recorded.keys() | found.keys()):
            inner = f"{what}.{key}" if what else str(key)
            missing = "(nothing)"
            left, right = recorded.get(key, missing), found.get(key, missing)
            yield from compare_values(part, case, left, right, inner)
    elif type(recorded) is not type(found) or recorded != found:
        texts = [it if isinstance(it, str) else json.dumps(it) for it in (recorded, found)]
        yield Difference(part, case, what, *texts)


def without_listed(
    differences: Iterable[Difference], parts: Iterable[str], is_whole: bool = True
) -> list[Difference]:
    """Leave out the changes of error texts that CHANGED lists.

    A listed change that does not occur is a difference, if all cases of its part were compared
    (is_whole).
    """
    listed = {
        (row["case"], row["recorded"], row["found"])
        for row in json.loads(CHANGED.read_text(encoding="utf-8"))
    }
    left, seen = [], set()
    for it in differences:
        key = (f"{it.part}:{it.case}", it.recorded, it.found)
        if it.what == ERROR_TEXT and key in listed:
            seen.add(key)
        else:
            left.append(it)
    if len(listed) > MOST_CHANGED:
        left.append(
            Difference("", CHANGED.name, "rows", f"at most {MOST_CHANGED}", str(len(listed)))
        )
    names = tuple(f"{part}:" for part in parts)
    for case, recorded, _ in sorted(listed - seen):
        if is_whole and case.startswith(names):
            part, _, name = case.partition(":")
            left.append(
                Difference(
                    part, name, f"change listed in {CHANGED.name}", recorded, "does not occur"
                )
            )
    return left


def machine() -> dict[str, str]:
    """Return what rounding may depend on beside variables that pin instructions and threads."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("vendor_id", "model name", "cpu family", "model", "flags")
    found = {}
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key in names:
            found.setdefault(key, value)
    return found | {name: version(name) for name in ("torch", "numpy", "av")}

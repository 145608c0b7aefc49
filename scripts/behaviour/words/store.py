"""The file of recorded cases: one JSON object a line, sorted by id, and the long texts that they share.

A long text is stored once, as lines and ranges of lines of an earlier text that it resembles. Comments in
a column stand behind a tab and the column's number, as the column depends on the longest line.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

_SHORT = 160  # characters; shorter texts stand in the case itself
_ALIKE = 0.85  # share of lines; a text that is less like all others may be the model of later ones
_COMMENT = re.compile(r"([^\t]*?\S) +(# [^\t]*\n)", re.DOTALL)
_SHORTENED = re.compile(r"([^\t]*\S)\t(\d+)(# .*)", re.DOTALL)


def write_cases(folder: Path, cases: Iterable[dict]) -> None:
    """Write cases.jsonl and texts.jsonl."""
    cases = sorted(cases, key=lambda case: case["id"])
    texts = _Texts()
    rows = [json.dumps(texts.shortened(case, case["kind"]), sort_keys=True) for case in cases]
    (folder / "cases.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    rows = [json.dumps(row) for row in texts.rows]
    (folder / "texts.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")


def read_cases(folder: Path) -> list[dict]:
    """Read what write_cases wrote, with whole texts."""
    lines: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for row in (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines():
        name, like, columns, parts = json.loads(row)
        whole: list[str] = []
        for part in parts:
            whole += [part] if isinstance(part, str) else lines[like][part[0] : part[1]]
        lines[name] = whole
        texts[name] = "".join(_with_column(line, columns) for line in whole)

    def lengthened(value: object) -> object:
        if isinstance(value, dict):
            if value.keys() == {"text"}:
                return texts[value["text"]]
            return {key: lengthened(inner) for key, inner in value.items()}
        return [lengthened(inner) for inner in value] if isinstance(value, list) else value

    rows = (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [lengthened(json.loads(row)) for row in rows]  # type: ignore[misc]


def _without_column(line: str, columns: list[int]) -> str:
    """Replace the blanks in front of a comment by the number of its column in `columns`."""
    match = _COMMENT.fullmatch(line)
    if match is None:
        return line
    column = match.start(2)
    if column not in columns:
        columns.append(column)
    return f"{match[1]}\t{columns.index(column)}{match[2]}"


def _with_column(line: str, columns: list[int]) -> str:
    """Undo _without_column."""
    match = _SHORTENED.fullmatch(line) if columns else None
    return line if match is None else match[1].ljust(columns[int(match[2])]) + match[3]


class _Texts:
    def __init__(self) -> None:
        self.rows: list[tuple[str, str, list[int], list]] = []
        self._known: set[str] = set()
        self._models: dict[
            str, list[tuple[str, list[str], set[str]]]
        ] = {}  # texts of the same kind

    def shortened(self, value: object, kind: str) -> object:
        """Return a value with references in place of its long texts."""
        if isinstance(value, dict):
            return {key: self.shortened(inner, f"{kind} {key}") for key, inner in value.items()}
        if isinstance(value, list):
            return [self.shortened(inner, kind) for inner in value]
        if not isinstance(value, str) or len(value) <= _SHORT:
            return value
        return {"text": self._add(value, kind)}

    def _add(self, text: str, kind: str) -> str:
        name = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:10]
        if name not in self._known:
            self._known.add(name)
            columns: list[int] = []
            lines = [_without_column(line, columns) for line in text.splitlines(keepends=True)]
            like, parts = self._as_parts(name, lines, kind)
            self.rows.append((name, like, columns, parts))
        return name

    def _as_parts(self, name: str, lines: list[str], kind: str) -> tuple[str, list]:
        """Return the text that `lines` are most like, and their parts."""
        models = self._models.setdefault(kind.rpartition(" ")[2], [])
        if len(lines) < 8:
            return "", lines
        own = set(lines)
        best = max(models, key=lambda one: len(one[2] & own), default=None)
        shared = len(best[2] & own) / len(own) if best else 0
        if shared < _ALIKE:
            models.append((name, lines, own))
        if best is None or shared < 0.5:
            return "", lines
        parts: list = []
        match = difflib.SequenceMatcher(None, best[1], lines, autojunk=False)
        for tag, start, end, own_start, own_end in match.get_opcodes():
            if tag == "equal":
                parts.append([start, end])
            else:
                parts += lines[own_start:own_end]
        return best[0], parts

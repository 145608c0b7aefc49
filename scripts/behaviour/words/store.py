"""The file of recorded cases: one JSON object a line, sorted by id, and the long texts that they share.

A long text is stored once, as lines and ranges of lines of an earlier text that it resembles.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

_SHORT = 160  # characters; shorter texts stand in the case itself


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
    for row in (folder / "texts.jsonl").read_text(encoding="utf-8").splitlines():
        name, like, parts = json.loads(row)
        whole: list[str] = []
        for part in parts:
            whole += [part] if isinstance(part, str) else lines[like][part[0] : part[1]]
        lines[name] = whole

    def lengthened(value: object) -> object:
        if isinstance(value, dict):
            if value.keys() == {"text"}:
                return "".join(lines[value["text"]])
            return {key: lengthened(inner) for key, inner in value.items()}
        return [lengthened(inner) for inner in value] if isinstance(value, list) else value

    rows = (folder / "cases.jsonl").read_text(encoding="utf-8").splitlines()
    return [lengthened(json.loads(row)) for row in rows]  # type: ignore[misc]


class _Texts:
    def __init__(self) -> None:
        self.rows: list[tuple[str, str, list]] = []
        self._known: set[str] = set()
        self._models: dict[str, list[tuple[str, list[str]]]] = {}  # texts of the same kind

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
            lines = text.splitlines(keepends=True)
            self.rows.append((name, *self._as_parts(name, lines, kind)))
        return name

    def _as_parts(self, name: str, lines: list[str], kind: str) -> tuple[str, list]:
        """Return the text that `lines` are most like, and their parts."""
        models = self._models.setdefault(kind, [])
        if len(lines) < 8:
            return "", lines
        best = max(models, key=lambda one: len(set(one[1]) & set(lines)), default=None)
        shared = len(set(best[1]) & set(lines)) if best else 0
        if best is None or shared < len(set(lines)) / 2:
            models.append((name, lines))
            return "", lines
        parts: list = []
        match = difflib.SequenceMatcher(None, best[1], lines, autojunk=False)
        for tag, start, end, own_start, own_end in match.get_opcodes():
            if tag == "equal":
                parts.append([start, end])
            else:
                parts += lines[own_start:own_end]
        return best[0], parts

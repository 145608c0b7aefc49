"""Reads metrics.jsonl and turns its lines into columns of numbers for the plots of a page."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cogfast.schema.json_files import parse_json, read_limited
from cogfast.schema.values import counted

_MOST_BYTES = 1 << 30  # of metrics.jsonl, as for a run that resumes
_MOST_STEP = 2**53  # JavaScript's largest exact integer
_MOST_COLUMNS = 200
MOST_POINTS = 10_000  # of a column: a browser draws them within a frame
_DIGITS = 6  # significant ones; fine-tuning moves the third digit of the loss


@dataclass(frozen=True, slots=True)
class Column:
    """The numbers of one key of the metrics. None is a number that was not finite."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values if value is not None]

    @property
    def last(self) -> float:
        return self.finite[-1]


def read_lines(path: Path) -> tuple[list[dict], list[str]]:
    """Return the lines of a metrics file, and notes about lines that could not be read."""
    try:
        texts = read_limited(path, _MOST_BYTES).split(b"\n")
    except ValueError as error:
        return [], [str(error)]
    lines, reasons = [], []
    for number, text in enumerate(texts, 1):
        # Only a file without lines, and the end of the last line, are empty.
        if text.strip():
            try:
                lines.append(parse_json(text, {"step": int}, f"line {number}"))
            except ValueError as error:
                reasons.append(str(error))
    if not reasons:
        return lines, []
    left_out = counted(len(reasons), "line")
    return lines, [f"{path.name}: {left_out} left out, since they are damaged; first: {reasons[0]}"]


def to_columns(lines: Iterable[Mapping]) -> tuple[dict[str, Column], list[str]]:
    """Return a column for every key that has numbers, in the order of the keys, and notes.

    A step that occurs twice has the numbers of its last line.
    """
    found: dict[str, dict[int, float | None]] = {}
    notes = []
    for line in lines:
        step = line["step"]
        if not 0 <= step < _MOST_STEP:
            notes = ["metrics.jsonl: lines with an impossible step are left out"]
            continue
        for key, value in line.items():
            if key == "step" or isinstance(value, bool):
                continue
            if value is None or isinstance(value, int | float):
                if key not in found and len(found) == _MOST_COLUMNS:
                    notes = [f"metrics.jsonl: only its first {_MOST_COLUMNS} keys are shown"]
                    continue
                found.setdefault(key, {})[step] = _rounded(value)
    columns = {}
    for key, values in found.items():
        steps = tuple(values)
        # In order already, unless lines of several runs are mixed.
        if any(a > b for a, b in zip(steps, steps[1:], strict=False)):
            steps = tuple(sorted(steps))
        columns[key] = Column(steps, tuple(values[step] for step in steps))
    return {key: column for key, column in columns.items() if column.finite}, notes


def _rounded(value: float | None) -> float | None:
    try:
        number = float("nan" if value is None else f"{value:.{_DIGITS}g}")
    except OverflowError:  # an integer beyond the range of floats
        return None
    return number if math.isfinite(number) else None


def thinned(column: Column, most: int = MOST_POINTS) -> Column:
    """Return a column of at most `most` points, which has every peak and every dip of the given one.

    The steps are divided into intervals; each keeps its lowest and its highest value.
    """
    if len(column.steps) <= most:
        return column
    first, last = column.steps[0], column.steps[-1]
    num_intervals = max(1, most // 2)
    kept: list[int] = []
    start = 0
    for number in range(1, num_intervals + 1):
        limit = first + (last + 1 - first) * number // num_intervals
        end = bisect_left(column.steps, limit)
        points = [i for i in range(start, end) if column.values[i] is not None]
        if points:
            value = lambda i: column.values[i] or 0.0
            kept += sorted({min(points, key=value), max(points, key=value)})
        start = end
    return Column(tuple(column.steps[i] for i in kept), tuple(column.values[i] for i in kept))


def encode(columns: Mapping[str, Column], most: int = MOST_POINTS) -> dict[str, object]:
    """Return columns as JSON values: {"axes": lists of steps, "columns": {key: [axis, values]}}."""
    axes: dict[tuple[int, ...], int] = {}  # most columns share the steps of the logging lines
    encoded = {}
    for key, column in columns.items():
        column = thinned(column, most)
        axis = axes.setdefault(column.steps, len(axes))
        # 3.0 is written as 3, which is shorter.
        values = [v if v is None or v % 1 or abs(v) > 1e15 else int(v) for v in column.values]
        encoded[key] = [axis, values]
    return {"axes": [list(steps) for steps in axes], "columns": encoded}

"""Reads metrics.jsonl and turns its lines into columns of numbers for the plots of a page."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired

from cogfast.schema.json_files import parse_json, read_limited

_MOST_BYTES = 1 << 30  # limit on metrics.jsonl, millions of lines
_NUMBER = NotRequired[float | None]
_LINE = {"step": int, "loss": _NUMBER, "loss_running": _NUMBER, "valid_loss": _NUMBER}
_MOST_STEP = 2**53  # JavaScript's largest exact integer
_MOST_COLUMNS = 200
_NUMBERS = (float, int, type(None))
_LARGEST = sys.float_info.max
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


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """The lines of a metrics file that can be read.

    problems: why others cannot. cut: why the last one, which does not end in a newline, cannot.
    """

    lines: list[dict]
    problems: list[str]
    cut: str | None = None


def read_metrics(path: Path) -> MetricsFile:
    try:
        # The last newline is followed by nothing, or by a line that a crash has cut.
        *whole, last = read_limited(path, _MOST_BYTES).split(b"\n")
    except ValueError as error:
        return MetricsFile([], [str(error)])
    lines, problems, cut = [], [], None
    for number, text in enumerate(whole, 1):
        if not text.strip():
            continue
        try:
            lines.append(parse_json(text, _LINE, f"line {number}"))
        except ValueError as error:
            problems.append(str(error))
    if last.strip():
        try:
            lines.append(parse_json(last, _LINE, f"line {len(whole) + 1}"))
        except ValueError as error:
            cut = str(error)
    return MetricsFile(lines, problems, cut)


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
            # Not isinstance: a bool is no number here.
            if type(value) not in _NUMBERS:
                continue
            column = found.get(key)
            if column is None:
                if len(found) > _MOST_COLUMNS:
                    notes = [f"metrics.jsonl: only its first {_MOST_COLUMNS} keys are shown"]
                    continue
                column = found[key] = {}
            column[step] = value
    found.pop("step", None)
    columns = {}
    for key, values in found.items():
        # In order already, unless lines of several runs are mixed.
        steps = sorted(values)
        numbers = [values[step] for step in steps]
        # False for NaN, and for integers beyond the range of floats.
        finite = (v if v is not None and -_LARGEST <= v <= _LARGEST else None for v in numbers)
        columns[key] = Column(tuple(steps), tuple(finite))
    return {key: column for key, column in columns.items() if column.finite}, notes


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
        encoded[key] = [axis, [None if v is None else _shortened(v) for v in column.values]]
    return {"axes": [list(steps) for steps in axes], "columns": encoded}


def _shortened(value: float) -> float | int:
    """Round a number to its significant digits. 3.0 becomes 3, which is shorter in JSON."""
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < _MOST_STEP else rounded

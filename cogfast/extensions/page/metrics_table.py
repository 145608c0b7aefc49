"""Turns the lines of metrics.jsonl into columns of numbers for the plots of a page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cogfast.train.run.metrics_file import MOST_STEP

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


def to_columns(lines: Iterable[Mapping]) -> dict[str, Column]:
    """Return a column for every key that has numbers, in the order of the keys.

    A step that occurs twice has the numbers of its last line.
    """
    found: dict[str, dict[int, float | None]] = {}
    for line in lines:
        step = line["step"]
        for key, value in line.items():
            # Not isinstance: a bool is no number here.
            if type(value) in _NUMBERS:
                found.setdefault(key, {})[step] = value
    found.pop("step", None)
    columns = {}
    for key, values in found.items():
        # In order already, unless lines of several runs are mixed.
        steps = sorted(values)
        numbers = [values[step] for step in steps]
        # False for NaN, and for integers beyond the range of floats.
        finite = (v if v is not None and -_LARGEST <= v <= _LARGEST else None for v in numbers)
        columns[key] = Column(tuple(steps), tuple(finite))
    return {key: column for key, column in columns.items() if column.finite}


def thinned(column: Column, most: int = MOST_POINTS) -> Column:
    """Return a column of at most `most` points: the lowest and the highest of equally many points."""
    num_points, values = len(column.steps), column.values
    if num_points <= most:
        return column
    size = -(-2 * num_points // most)
    kept: list[int] = []
    for start in range(0, num_points, size):
        points = [i for i in range(start, min(start + size, num_points)) if values[i] is not None]
        if points:
            value = lambda i: values[i] or 0.0
            kept += sorted({min(points, key=value), max(points, key=value)})
    return Column(tuple(column.steps[i] for i in kept), tuple(values[i] for i in kept))


def encode(
    columns: Mapping[str, Column], keys: Iterable[str], most: int = MOST_POINTS
) -> dict[str, object]:
    """Return columns of these keys as JSON values: {"axes": [steps, hours] of each, "columns": {key: [axis, values]}}.

    Hours of training are those that all steps took; evaluations and checkpoints are not counted.
    """
    times = columns.get("step_ms", Column((), ()))
    steps, ms = np.array((0, *times.steps)), np.array((0, *times.values), dtype=float)
    hours = np.cumsum(np.diff(steps, prepend=0) * np.nan_to_num(ms)) / 3.6e6
    axes: dict[tuple[int, ...], int] = {}  # most columns share the steps of the logging lines
    encoded = {}
    for key in keys:
        if key not in columns:
            continue
        column = thinned(columns[key], most)
        axis = axes.setdefault(column.steps, len(axes))
        encoded[key] = [axis, [None if v is None else _shortened(v) for v in column.values]]
    at = lambda axis: [float(f"{hour:.6g}") for hour in np.interp(axis, steps, hours)]
    return {"axes": [[list(axis), at(axis)] for axis in axes], "columns": encoded}


def _shortened(value: float) -> float | int:
    """Round a number to its significant digits. 3.0 becomes 3, which is shorter in JSON."""
    rounded = float(f"{value:.{_DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < MOST_STEP else rounded

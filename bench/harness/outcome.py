"""Settings and outcome of a piece of bench.gpu_run, and the table of an outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from bench.harness.timing import num_buffer_sets

Row = Mapping[str, object]

WRONG = "WRONG"  # status of an op whose results are off; it is timed all the same
_CELL_WIDTH = 100  # characters; the JSON keeps longer values, such as names of CUDA kernels


@dataclass(frozen=True, slots=True)
class Settings:
    """Device, sizes and time limit of a piece.

    is_tiny: use sizes that a CPU runs in seconds, to test the bench itself.
    deadline: a time of time.perf_counter; a piece skips what would end later.
    keep: called with the outcome so far after each row, so that a killed run leaves its rows.
    """

    device: torch.device
    is_tiny: bool
    deadline: float = math.inf
    cases: Sequence[str] = ()  # words of bench.step's cases to measure; none: all
    keep: Callable[[Outcome], None] = lambda outcome: None

    @property
    def seconds(self) -> float:
        """Seconds of sampling for each figure."""
        return 0.03 if self.is_tiny else 0.4

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.perf_counter()

    def num_buffer_sets(self, bytes_per_set: int) -> int:
        """Return how many buffer sets a call cycles through; thousands of tiny ones would fill a cache."""
        return 2 if self.is_tiny else num_buffer_sets(bytes_per_set, self.device)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a piece. `numbers` and `rows` go into the JSON file, with units in their keys.

    shown: the keys of `rows` that the printed table has. problems: one sentence for each check that
    failed.
    """

    numbers: Row = field(default_factory=dict)
    rows: Sequence[Row] = ()
    shown: Sequence[str] = ()
    problems: Sequence[str] = ()


def table(outcome: Outcome) -> str:
    """Format the numbers, one per line, and then the rows under their keys."""
    lines = [f"  {key}: {_cell(value)}" for key, value in outcome.numbers.items() if value != []]
    if outcome.rows:
        cells = [list(outcome.shown)]
        cells += [[_cell(row.get(key)) for key in outcome.shown] for row in outcome.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(len(outcome.shown))]
        for row in cells:
            padded = (text.ljust(width) for text, width in zip(row, widths, strict=True))
            lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _CELL_WIDTH else text[: _CELL_WIDTH - 3] + "..."

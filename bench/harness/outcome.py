"""Settings and outcome of a piece of bench.gpu_run, and the table and plot of an outcome."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from cogfast.diagnostics.timing import num_buffer_sets

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
class Bars:
    """A bar plot: one bar for every label and series.

    marks: (name, one value per label), drawn across the bars of each label.
    """

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    marks: tuple[str, Sequence[float]] | None = None


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
    bars: Bars | None = None


def table(outcome: Outcome) -> str:
    """Format the numbers, one per line, and then the rows under their keys."""
    lines = [f"  {key}: {_cell(value)}" for key, value in outcome.numbers.items()]
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


def draw(bars: Bars, path: Path) -> str:
    """Draw a plot and return a line for the log. Without matplotlib nothing is drawn."""
    # Figures without pyplot: no display and no global state.
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no {path.name}: {error}"
    # Height in inches for the number of bars.
    figure = Figure(figsize=(8, 1.5 + 0.25 * len(bars.labels) * len(bars.series)))
    FigureCanvasAgg(figure)
    figure.set_layout_engine("constrained")
    axes = figure.add_subplot()
    # The bars of a label fill 0.8 of the distance to the next label.
    height = 0.8 / len(bars.series)
    for i, (name, values) in enumerate(bars.series.items()):
        places = [place + (i - (len(bars.series) - 1) / 2) * height for place in range(len(values))]
        drawn = axes.barh(places, values, height=0.9 * height, label=name)
        axes.bar_label(drawn, fmt="%.3g", padding=3)
    if bars.marks is not None:
        name, values = bars.marks
        # A mark spans the bars of its label and a little more.
        bottoms = [place - 0.45 for place in range(len(values))]
        tops = [place + 0.45 for place in range(len(values))]
        axes.vlines(values, bottoms, tops, color="black", lw=2, label=name)
    axes.set_yticks(range(len(bars.labels)), bars.labels)
    axes.invert_yaxis()
    axes.margins(x=0.1, y=0.02)
    axes.set(xlabel=bars.unit, title=bars.title)
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=120)
    return f"drew {path.name}"

"""Draws loss.png: training and held-out loss, and both by band of timesteps, over the steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOSS, RUNNING, HELD_OUT = "#9db8d9", "#1f4e9c", "#d1495b"
_MOST_BANDS = 8  # with a panel each; more would be too small to read
_NUM_MEANS = 25  # points of a band's curve; single values of few samples hide the trend
_MARGIN = 0.08  # of the axis, above and below
_OUTSIDE = 0.02  # of the noisy points at each end, which the axis may leave out
_FROM_ZERO = 0.5  # a curve that spans more than this share of its height starts at 0


def draw_losses(lines: Sequence[dict], title: str, path: Path) -> None:
    """Write a PNG file of `loss_figure`, whatever the user's or the current folder's matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context(matplotlib.rcParamsDefault):
        loss_figure(lines, title).savefig(path, dpi=120, format="png")


def loss_figure(lines: Sequence[dict], title: str) -> Figure:
    """Draw the lines of metrics.jsonl; at least one has a loss.

    Each axis is scaled by its own data: it starts at 0 only where the loss falls that far.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_bands = next((n for n in (_num_bands(line) for line in reversed(lines)) if n), 0)
    num_bands = num_bands if 1 < num_bands <= _MOST_BANDS else 0
    rows = math.ceil(num_bands / 4)
    figure = Figure(figsize=(9, 4.2 + 1.9 * rows))
    # Not pyplot, which keeps every figure of the process.
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        1 + rows,
        4,
        height_ratios=[3.2] + rows * [1.5],
        left=0.09,
        right=0.985,
        top=1 - 0.32 / figure.get_figheight(),
        bottom=(0.3 if rows else 0.5) / figure.get_figheight(),
        hspace=0.42,
        wspace=0.46,
    )
    loss, running, held_out = (_points(lines, k) for k in ("loss", "loss_running", "valid_loss"))
    has_own_axis = len(held_out[0]) > 1
    axes = figure.add_subplot(grid[0, :3] if has_own_axis else grid[0, :])
    axes.plot(*loss, color=LOSS, lw=0.9, label="loss")
    axes.plot(*running, color=RUNNING, lw=2, label="running mean")
    if held_out[0]:
        axes.plot(*held_out, "o-", color=HELD_OUT, ms=4, label="held out")
    axes.set_title(title, fontsize=10)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(fontsize=8)
    _scale(axes, loss[1], running[1] + held_out[1])
    # Fixed timesteps and noise: it shows changes that the noise of training hides.
    if has_own_axis:
        axes = figure.add_subplot(grid[0, 3])
        axes.plot(*held_out, "o-", color=HELD_OUT, ms=3, lw=1.2)
        _finish(axes, "held out")
        _scale(axes, [], held_out[1])
    for band in range(num_bands):
        _draw_band(figure.add_subplot(grid[1 + band // 4, band % 4]), lines, band, num_bands)
    return figure


def _draw_band(axes: Axes, lines: Sequence[dict], band: int, num_bands: int) -> None:
    training = _means(*_points(lines, f"train_loss_band_{band}"))
    held_out = _points(lines, f"valid_loss_band_{band}")
    axes.plot(*training, color=RUNNING, lw=1.2)
    axes.plot(*held_out, "o-", color=HELD_OUT, ms=3, lw=1.2)
    name = {0: " (least noise)", num_bands - 1: " (most noise)"}.get(band, "")
    _finish(axes, f"band {band}{name}")
    _scale(axes, training[1], held_out[1])


def _finish(axes: Axes, title: str) -> None:
    axes.set_title(title, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.locator_params(axis="x", nbins=4)


def _num_bands(line: dict) -> int:
    names = ("train_loss_band_", "valid_loss_band_")
    return max(sum(key.startswith(name) for key in line) for name in names)


def _points(lines: Sequence[dict], key: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a key, without lines in which it has none."""
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    found = [(step, value) for step, value in found if math.isfinite(value)]
    return [step for step, _ in found], [value for _, value in found]


def _means(steps: list[int], values: list[float]) -> tuple[list[float], list[float]]:
    """Average neighbouring points, so that about _NUM_MEANS are left."""
    size = math.ceil(len(steps) / _NUM_MEANS) or 1
    cut = [slice(i, i + size) for i in range(0, len(steps), size)]
    return [sum(steps[c]) / len(steps[c]) for c in cut], [
        sum(values[c]) / len(values[c]) for c in cut
    ]


def _scale(axes: Axes, noisy: list[float], smooth: list[float]) -> None:
    """Set the limits of the y axis: all of the smooth curves, and most points of the noisy one."""
    axes.grid(alpha=0.3)
    # Labels as 0.1234, not as differences from an offset.
    axes.ticklabel_format(axis="y", useOffset=False, style="plain")
    ordered = sorted(noisy)
    outside = int(_OUTSIDE * len(ordered))
    shown = [*ordered[outside : len(ordered) - outside], *smooth]
    if not shown:
        return
    low, high = min(shown), max(shown)
    # A constant has no height: give it some.
    height = high - low or abs(high) * 0.1 or 1.0
    bottom = low - _MARGIN * height
    if low >= 0 and (bottom < 0 or high - low > _FROM_ZERO * high):
        bottom = 0.0
    axes.set_ylim(bottom, high + _MARGIN * height)

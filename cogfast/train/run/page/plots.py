"""Which plots a page has: each with its keys of the metrics, in the order of the page."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cogfast.train.run.page.metrics_table import Column

_BAND = re.compile(r"(?:valid|train)_loss_band_(\d{1,4})")


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot. keys: patterns of whole keys. factor: multiplies the values.

    is_log: the axis of values is logarithmic at first.
    """

    name: str
    title: str
    keys: Sequence[str]
    about: str = ""
    unit: str = ""
    factor: float = 1.0
    is_log: bool = False


# The time of a step, and the parts of it that the run measures.
PARTS = (
    "step_ms",
    "data_wait_ms",
    "encode_ms",
    "forward_backward_ms",
    "optimizer_ms",
    "communication_ms",
)
PLOTS = (
    Plot("loss", "Loss", ("loss", "loss_running", "valid_loss")),
    Plot(
        "valid-bands",
        "Held-out loss by noise level",
        (r"valid_loss_band_\d+",),
        "Low timesteps have little noise: they show detail. High ones show composition and motion.",
    ),
    Plot("train-bands", "Training loss by noise level", (r"train_loss_band_\d+",)),
    Plot("lr", "Learning rate", ("lr",)),
    Plot("grad-norm", "Gradient norm", ("grad_norm",), "Before clipping.", is_log=True),
    Plot(
        "update-ratio",
        "Update-to-weight ratio",
        (r"update_ratio\w*",),
        "Size of a step's change relative to the weights.",
        is_log=True,
    ),
    Plot("step-time", "Time of a step", PARTS, unit="ms"),
    Plot("speed", "Throughput", ("samples_per_s",), unit="samples/s"),
    Plot("mfu", "Model FLOP utilization", ("mfu",), unit="%", factor=100),
    Plot(
        "exposed-communication",
        "Exposed communication",
        ("exposed_communication",),
        "Waits for other GPUs that no computation hides, as a part of the step.",
        unit="%",
        factor=100,
    ),
    Plot("memory", "Memory", (r"memory_\w+",), unit="GiB"),
)
_LABELS = {
    "loss": "logged steps",
    "loss_running": "running mean",
    "valid_loss": "held out",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "samples_per_s": "samples per second",
    "step_ms": "whole step",
    "data_wait_ms": "waiting for data",
    "encode_ms": "encoding",
    "forward_backward_ms": "forward and backward",
    "optimizer_ms": "optimizer",
    "communication_ms": "waiting for GPUs",
    "exposed_communication": "waiting for GPUs",
    "memory_allocated_gib": "allocated, peak",
    "memory_reserved_gib": "reserved, peak",
    "memory_rss_gib": "resident",
}
_TITLES = {
    "loss_running": "Loss, running mean",
    "valid_loss": "Held-out loss",
    "step_ms": "Time of a step",
}
_KINDS = {"loss": "thin", "valid_loss": "dots"}


def plots_of_run(columns: Mapping[str, Column], num_timesteps: object) -> Iterator[dict]:
    """Yield the plots of one run. Keys that no plot names get one each, marked `more`."""
    left = list(columns)
    for plot in PLOTS:
        keys = [key for key in columns if any(re.fullmatch(k, key) for k in plot.keys)]
        left = [key for key in left if key not in keys]
        if keys:
            bands = [key for key in keys if _BAND.fullmatch(key)]
            keys.sort(key=lambda key: _band(key) if _BAND.fullmatch(key) else -1)
            lines = [
                _line(key, i, _label(key, len(bands), num_timesteps), len(bands))
                for i, key in enumerate(keys)
            ]
            yield _encoded(plot, lines)
    for key in left:
        plot = Plot(f"more-{key}", key, ())
        yield {**_encoded(plot, [_line(key, 0, key, 0)]), "more": True}


def plots_of_runs(runs: Sequence[tuple[str, Mapping[str, Column]]]) -> Iterator[dict]:
    """Yield the plots of a comparison: one key in each, with a line for every run that has it."""
    keys = {key: None for _, columns in runs for key in columns}
    named: dict[str, Plot] = {}
    for plot in PLOTS:
        for key in keys:
            if any(re.fullmatch(pattern, key) for pattern in plot.keys):
                named[key] = plot
    # The running mean and the held-out loss are the ones to compare; details come later.
    first = [key for key in ("loss_running", "valid_loss") if key in named]
    bands = sorted((key for key in named if _BAND.fullmatch(key)), key=_band)
    later = [key for key in named if key not in (*first, *bands, *PARTS[1:], "loss")]
    for key in dict.fromkeys([*first, *later, *bands, *named, *keys]):
        lines = [
            {"run": i, "key": key, "label": name, "kind": "line", "tone": i}
            for i, (name, columns) in enumerate(runs)
            if key in columns
        ]
        plot = named.get(key, Plot("", key, (key,)))
        title = plot.title if plot.keys == (key,) else _TITLES.get(key, key)
        if plot.name == "memory":
            title = f"{plot.title}, {_LABELS.get(key, key)}"
        encoded = _encoded(replace(plot, name=f"key-{key}", title=title, about=""), lines)
        yield {**encoded, "more": key not in first and key not in later}


def _encoded(plot: Plot, lines: Sequence[dict]) -> dict:
    return {
        "name": plot.name,
        "title": plot.title,
        "about": plot.about,
        "unit": plot.unit,
        "factor": plot.factor,
        "log": plot.is_log,
        "more": False,
        "lines": lines,
    }


def _line(key: str, place: int, label: str, num_bands: int) -> dict:
    """Return a line of a run's plot. place: among the lines of the plot, which decides its colour."""
    kind = "dots" if key.startswith("valid_loss") else _KINDS.get(key, "line")
    line = {"run": 0, "key": key, "label": label, "kind": kind}
    if num_bands:
        return {**line, "tone": _band(key), "of": num_bands}
    # A loss and its running mean have one colour, lighter and darker.
    return {**line, "tone": int(key == "valid_loss") if "loss" in key else place}


def _band(key: str) -> int:
    match = _BAND.fullmatch(key)
    assert match is not None, "the caller checks"
    return int(match[1])


def _label(key: str, num_bands: int, num_timesteps: object) -> str:
    if not _BAND.fullmatch(key):
        return _LABELS.get(key, key)
    number = _band(key)
    if not isinstance(num_timesteps, int) or number >= num_bands:
        return f"band {number}"
    # The borders of a band, as an evaluation computes its middle.
    start, end = (round(i * num_timesteps / num_bands) for i in (number, number + 1))
    return f"t {start}–{end - 1}"

"""Rows of the README's table of results: what each shows, and how it follows from a piece's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.harness.outcome import WRONG

Row = Mapping[str, object]

# Ratios of bench.steps.cpu_peers, and as they are shown.
PEERS = {
    "speed-up over diffusers": "over diffusers",
    "over compiled diffusers": "over compiled diffusers",
}


_COMPILED = "vs torch.compile"


@dataclass(frozen=True, slots=True)
class CompactRow:
    """A row of the README's table; `summarize` returns None where the rows do not answer it."""

    what: str
    is_gpu: bool
    pieces: Sequence[str]
    summarize: Callable[[Sequence[Row]], str | None]


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _range(values: Sequence[float], unit: str) -> str | None:
    """The smallest and the largest value, as `1.01x to 1.02x`; None of no values."""
    shown = list(dict.fromkeys(f"{value:.2f}{unit}" for value in sorted(values)))
    return f"{shown[0]} to {shown[-1]}" if len(shown) > 1 else next(iter(shown), None)


def _peer_speed_up(rows: Sequence[Row]) -> str | None:
    found = []
    for dtype in sorted({row["dtype"] for row in rows}):
        eager, compiled = (_range([r[k] for r in rows if r["dtype"] == dtype], "x") for k in PEERS)
        found.append(f"{dtype}: {eager} ({compiled})")
    return "; ".join(found) or None


def _step_speed_up(rows: Sequence[Row]) -> str | None:
    timed = [row for row in rows if row["what"] == "step" and "ratio" in row]
    return _marked(_range([1 / row["ratio"] for row in timed], "x"), timed)


def _op_speed_up(rows: Sequence[Row]) -> str | None:
    timed = [row for row in rows if _COMPILED in row]
    return _marked(_range([row[_COMPILED] for row in timed], "x"), timed)


def _marked(text: str | None, rows: Sequence[Row]) -> str | None:
    """Mark a result whose rows include one with a wrong answer."""
    is_wrong = any("disagrees" in row or row.get("status") == WRONG for row in rows)
    return f"{text} (not all agree)" if is_wrong else text


def _reading_speed_up(above: tuple[str, int], below: tuple[str, int], key: str) -> Callable:
    def summarize(rows: Sequence[Row]) -> str | None:
        of = {(row["clip"], row["side"], row["readers"]): row[key] for row in rows}
        clips = [clip for clip, *side in of if tuple(side) == above and (clip, *below) in of]
        return _range([of[clip, *above] / of[clip, *below] for clip in clips], "x")

    return summarize


def _data_wait(rows: Sequence[Row]) -> str | None:
    waits = [
        f"{row['data_wait_percent']:.1f}% ({row['run'].removeprefix('training from ')})"
        for row in rows
        if "data_wait_percent" in row and "," not in row["run"]
    ]
    return ", ".join(waits) or None


def _attention_rate(rows: Sequence[Row]) -> str | None:
    rates = [row["forward_tflop_per_s"] for row in rows if "forward_tflop_per_s" in row]
    return f"{number(max(rates))} TFLOP/s forward" if rates else None


COMPACT_ROWS = (
    CompactRow("2B training step, speed-up over diffusers", True, ("2b",), _step_speed_up),
    CompactRow("5B training step, speed-up over diffusers", True, ("5b",), _step_speed_up),
    CompactRow(
        "fused operations, speed-up over torch.compile",
        True,
        ("op_times",),
        _op_speed_up,
    ),
    CompactRow("attention at 17,776 tokens, best backend", True, ("attention",), _attention_rate),
    CompactRow(
        "clips decoded by DALI, speed-up over 8 CPU readers",
        True,
        ("data",),
        _reading_speed_up(("DALI", 8), ("ours", 8), "clips_per_s"),
    ),
    CompactRow(
        "training step, speed-up over diffusers (compiled)", False, ("cpu_peers",), _peer_speed_up
    ),
    CompactRow(
        "clips read per CPU second, speed-up over decord",
        False,
        ("data",),
        _reading_speed_up(("ours", 0), ("decord", 0), "clips_per_cpu_s"),
    ),
    CompactRow("share of a step that waits for data", False, ("data_runs",), _data_wait),
)

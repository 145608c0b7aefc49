"""Time every fused op and compare it with the copy rate and with other packages.

    python -m bench.ops --out DIR       the piece op_times of bench.gpu_run: a table, JSON and a plot
    python -m pytest bench/ops.py       record the same figures with pytest-benchmark

First, an op is compared with float32 and float64 arithmetic: in bf16 at the timed shape, and in bf16,
fp16 and fp32 at a small one. An op that is wrong is timed all the same; its row has the status WRONG,
and the exit status is 1. GB/s always count the bytes that a perfect kernel would move.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from bench.harness.outcome import WRONG, Bars, Outcome, Row, Settings
from bench.harness.rates import copy_rate
from bench.kernel_ops.op_bench import OURS, Bench, OpBench, time_contestant
from bench.kernel_ops.op_cases import OPS, SHAPES, TINY_SHAPES
from bench.kernel_ops.optimizer_ops import optimizer_benches
from bench.kernel_ops.peers import Unavailable
from cogfast.diagnostics.timing import spread

_LEAST_SECONDS = 20  # time that an op with all its peers may need
_FOREIGN = re.compile("Liger|DeepSpeed")  # peers that bring GPU code of their own
_NOT_FOUND = (ImportError, Unavailable)


def benches(settings: Settings) -> list[Bench]:
    """Return all benchmarks; those of the largest shape come last, as they are skipped first."""
    of_blocks = [
        OpBench(settings, op, shape)
        for shape in (TINY_SHAPES if settings.is_tiny else SHAPES)
        for op in OPS
    ]
    num_first = 2 * len(OPS)  # the ops of the first two shapes
    return [*of_blocks[:num_first], *optimizer_benches(settings), *of_blocks[num_first:]]


@dataclass
class _Report:
    """The rows, problems and missing peers that measure_ops has collected."""

    copy: Row
    peers: Sequence[str]
    rows: list[dict[str, object]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    timed: list[tuple[Bench, dict[str, dict[str, object]]]] = field(default_factory=list)
    reasons: dict[str, str] = field(default_factory=dict)  # by peer: why a figure is missing
    absent: dict[str, str] = field(default_factory=dict)  # by peer: why it can never run here

    def outcome(self) -> Outcome:
        drawn = [row for row in self.rows if "percent_of_copy" in row]
        bars = Bars(
            title="fused ops, bf16",
            unit="percent of the copy rate of the same run",
            labels=[f"{row['op']} {row['way']}\n{row['model']}" for row in drawn],
            series={OURS: [row["percent_of_copy"] for row in drawn]},
            # The goals are drawn across the bars.
            marks=("goal", [row["goal_percent"] for row in drawn]),
        )
        shown = ("op", "model", "way", "status", "median_ms", "p10_ms", "p90_ms", "gb_per_s")
        shown += ("percent_of_copy", "goal_percent", *(f"vs {name}" for name in self.peers))
        numbers = {f"copy_{key}": value for key, value in self.copy.items()}
        numbers |= {f"no figure for {name}": reason for name, reason in self.reasons.items()}
        return Outcome(numbers, self.rows, shown, self.problems, bars if drawn else None)


def measure_ops(settings: Settings) -> Outcome:
    """Measure a row for every op, shape and way; `vs X` is the time of X over that of cogfast."""
    todo = benches(settings)
    peers = list(dict.fromkeys(name for bench in todo for name in bench.peers()))
    # Measure the copy rate of this run, since clocks differ from machine to machine and from day to day.
    report = _Report(copy_rate(settings), peers)
    for bench in todo:
        if settings.seconds_left < _LEAST_SECONDS:
            note = {"status": "left out: no time"}
            report.rows += [{**bench.describe(), "way": way, **note} for way in bench.ways]
        else:
            _measure(bench, report)
        settings.keep(report.outcome())
    # Other packages come last: what breaks the CUDA context costs no figure of ours.
    for bench, rows in report.timed:
        if settings.seconds_left >= _LEAST_SECONDS:
            _measure_peers(bench, rows, report, are_foreign=True)
            settings.keep(report.outcome())
    return report.outcome()


def _measure(bench: Bench, report: _Report) -> None:
    """Measure the rows of one op at one shape, and of PyTorch's; if the op is wrong, they are marked."""
    wrong = bench.check()
    report.problems += wrong
    status = WRONG if wrong else "ok"
    rows = {way: {**bench.describe(), "way": way, "status": status} for way in bench.ways}
    report.rows += rows.values()
    try:
        timed = time_contestant(bench, OURS, bench.ways)
    except Exception as error:  # the other ops are measured after any failure
        report.problems.append(f"{bench}: {why(error)}")
        for row in rows.values():
            row |= {"status": WRONG, "error": why(error)}
        return
    report.timed.append((bench, rows))
    for way, times_ms in timed.items():
        rows[way] |= spread(times_ms)
        rate = _gb_per_s(bench, way, times_ms)
        rows[way] |= {"bytes": bench.num_bytes(way), "gb_per_s": rate}
        rows[way] |= {"percent_of_copy": 100 * rate / report.copy["gb_per_s"]}
        rows[way] |= {"goal_percent": bench.goal(way), "peers": {}}
    _measure_peers(bench, rows, report, are_foreign=False)


def _measure_peers(
    bench: Bench, rows: dict[str, dict[str, object]], report: _Report, are_foreign: bool
) -> None:
    """Time the peers of an op that run PyTorch's GPU code, or those that bring their own."""
    names = [name for name in bench.peers() if (_FOREIGN.search(name) is not None) == are_foreign]
    for name in names:
        for way, times in _time_peer(bench, name, report.absent).items():
            rows[way]["peers"][name] = times
            if "median_ms" in times:
                rows[way][f"vs {name}"] = times["median_ms"] / rows[way]["median_ms"]
            else:
                report.reasons.setdefault(name, times["unavailable"])


def _time_peer(bench: Bench, name: str, absent: dict[str, str]) -> dict[str, Row]:
    # A package that is missing once is missing for every op.
    if name in absent:
        return dict.fromkeys(bench.ways, {"unavailable": absent[name]})
    try:
        timed = time_contestant(bench, name, bench.ways)
    except Exception as error:  # a failing peer must not cost other figures
        if isinstance(error, _NOT_FOUND):
            absent[name] = why(error)  # do not try this peer again
        return dict.fromkeys(bench.ways, {"unavailable": why(error)})
    return {way: spread(times_ms) for way, times_ms in timed.items()}


def _gb_per_s(bench: Bench, way: str, times_ms: Sequence[float]) -> float:
    return bench.num_bytes(way) / spread(times_ms)["median_ms"] / 1e6


def why(error: Exception) -> str:
    """Return one line that says why a peer has no figure."""
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, _NOT_FOUND) else f"{type(error).__name__}: {text}"


class _Clock:
    """A timer for pytest-benchmark that replays times measured on the device, one per round."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def play(self, times_ms: Sequence[float], benchmark) -> None:
        left = iter(times_ms)

        def advance() -> None:
            self._now += next(left) / 1e3

        benchmark.pedantic(advance, rounds=len(times_ms))


_CLOCK = _Clock()


@cache
def _settings_here() -> Settings:
    is_gpu = torch.cuda.is_available()
    return Settings(torch.device("cuda" if is_gpu else "cpu"), is_tiny=not is_gpu)


@cache
def _wrong_here(bench: Bench) -> list[str]:
    return bench.check()


def pytest_generate_tests(metafunc) -> None:
    import pytest

    # pytest-benchmark would time the host; the clock replays times of the device.
    clock = pytest.mark.benchmark(timer=_CLOCK.now)
    cases = [
        pytest.param(bench, way, name, marks=clock, id=f"{bench}-{way}-{name}")
        for bench in benches(_settings_here())
        for way in bench.ways
        for name in (OURS, *bench.peers())
    ]
    metafunc.parametrize(("bench", "way", "name"), cases)


def test_speed(benchmark, bench: Bench, way: str, name: str) -> None:
    """Record a figure with pytest-benchmark; a peer that cannot run is skipped."""
    import pytest

    wrong = _wrong_here(bench)
    assert not wrong, wrong
    try:
        times_ms = time_contestant(bench, name, (way,))[way]
    except _NOT_FOUND as error:
        if name == OURS:
            raise
        # A peer may be missing: an optional package, or one that needs a GPU. Ours would have raised.
        pytest.skip(f"{name} cannot be compared with here: {why(error)}")
    rate = _gb_per_s(bench, way, times_ms)
    benchmark.group = f"{bench} {way}"
    benchmark.extra_info |= {**bench.describe(), "way": way, "by": name}
    benchmark.extra_info |= {"bytes": bench.num_bytes(way), "gb_per_s": rate}
    _CLOCK.play(times_ms, benchmark)


if __name__ == "__main__":
    from bench import gpu_run

    sys.exit(gpu_run.main(["op_times", *sys.argv[1:]]))

"""Time every fused op and compare it with the copy rate, eager PyTorch and torch.compile.

    python -m bench.ops --out DIR       the piece op_times of bench.gpu_run: a table and JSON

First, an op is compared with float32 and float64 arithmetic: in bf16 at the timed shape, and in bf16,
fp16 and fp32 at a small one. An op that is wrong is timed all the same; its row has the status WRONG,
and the exit status is 1. GB/s always count the bytes that a perfect kernel would move.
"""

from __future__ import annotations

import sys

from bench.harness.outcome import WRONG, Outcome, Row, Settings
from bench.harness.rates import copy_rate
from bench.harness.timing import spread
from bench.kernel_ops.op_bench import OURS, OpBench, time_contestant
from bench.kernel_ops.op_cases import OPS, SHAPES, TINY_SHAPES
from bench.kernel_ops.optimizer_ops import OptimizerBench, optimizer_benches

Bench = OpBench | OptimizerBench
_LEAST_SECONDS = 20  # time that an op with all its peers may need


def benches(settings: Settings) -> list[Bench]:
    """Return all benchmarks; those of the largest shape come last, as they are skipped first."""
    of_blocks = [
        OpBench(settings, op, shape)
        for shape in (TINY_SHAPES if settings.is_tiny else SHAPES)
        for op in OPS
    ]
    num_first = 2 * len(OPS)  # the ops of the first two shapes
    return [*of_blocks[:num_first], *optimizer_benches(settings), *of_blocks[num_first:]]


def measure_ops(settings: Settings) -> Outcome:
    """Measure a row for every op, shape and way; `vs X` is the time of X over that of cogfast."""
    # Measure the copy rate of this run, since clocks differ from machine to machine and from day to day.
    copy = copy_rate(settings)
    numbers = {f"copy_{key}": value for key, value in copy.items()}
    todo = benches(settings)
    peers = list(dict.fromkeys(name for bench in todo for name in bench.peers))
    shown = ("op", "model", "way", "status", "median_ms", "p10_ms", "p90_ms", "gb_per_s")
    shown += ("percent_of_copy", "goal_percent", *(f"vs {name}" for name in peers))
    rows: list[Row] = []
    problems: list[str] = []
    outcome = Outcome()
    for bench in todo:
        if settings.seconds_left < _LEAST_SECONDS:
            note = {"status": "left out: no time"}
            rows += [{**bench.describe(), "way": way, **note} for way in bench.ways]
        else:
            found, wrong = _measure(bench, copy["gb_per_s"])
            rows += found
            problems += wrong
        outcome = Outcome(numbers, list(rows), shown, list(problems))
        settings.keep(outcome)
    return outcome


def _measure(bench: Bench, copy_gb_per_s: float) -> tuple[list[Row], list[str]]:
    """Return the rows of one op at one shape, and the problems; an op that is wrong is timed as well."""
    problems = bench.check()
    status = WRONG if problems else "ok"
    rows = {way: {**bench.describe(), "way": way, "status": status} for way in bench.ways}
    for name in (OURS, *bench.peers):
        try:
            timed = time_contestant(bench, name, bench.ways)
        except Exception as error:  # what follows is measured after any failure
            text = f"{type(error).__name__}: {error}".splitlines()[0]
            problems.append(f"{bench}: {name}: {text}")
            if name == OURS:
                failed = {"status": WRONG, "error": text}
                return [{**row, **failed} for row in rows.values()], problems
            continue
        for way, times_ms in timed.items():
            times, row = spread(times_ms), rows[way]
            if name == OURS:
                rate = bench.num_bytes(way) / times["median_ms"] / 1e6
                row |= {**times, "bytes": bench.num_bytes(way), "gb_per_s": rate}
                row |= {"percent_of_copy": 100 * rate / copy_gb_per_s}
                row |= {"goal_percent": bench.goal(way)}
            else:
                row[f"vs {name}"] = times["median_ms"] / row["median_ms"]
    return list(rows.values()), problems


if __name__ == "__main__":
    from bench import gpu_run

    sys.exit(gpu_run.main(["op_times", *sys.argv[1:]]))

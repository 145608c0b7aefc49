"""The suite of kernel benchmarks: pytest bench --benchmark-only

Every fused op and every update of the weights, by cogfast and its peers: a group is one op at one shape, forward or
backward. What cogfast computes is compared first, and an op that is wrong has no time. docs/benchmarks.md has the options.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.harness.timing import wait_for
from bench.kernel_ops.op_bench import OURS, OpBench
from bench.kernel_ops.optimizer_ops import OptimizerBench

_WARM_UP = 2  # calls; the first compiles


def test_op(benchmark: Any, bench: OpBench | OptimizerBench, way: str, name: str) -> None:
    device = bench.settings.device
    if name == OURS and (problems := bench.check()):
        pytest.fail("; ".join(problems), pytrace=False)
    calls = itertools.cycle(bench.calls(name)[way])

    def call() -> None:
        next(calls)()
        wait_for(device)

    for _ in range(_WARM_UP):
        call()
    kind = str(bench.dtype).removeprefix("torch.")
    benchmark.group = f"{bench}, {kind}, {way}"
    benchmark.name = name
    benchmark.extra_info |= {**bench.describe(), "dtype": kind, "device": str(device), "way": way}
    benchmark.extra_info["bytes"] = bench.num_bytes(way)
    benchmark(call)

"""Time other launch configurations of the kernels at the shapes that count.

Every candidate is timed through the public op, next to the configuration that the op uses, after
its results have been compared with the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from types import ModuleType
from unittest.mock import patch

from bench.harness.outcome import Outcome, Row, Settings
from bench.harness.rates import copy_rate
from bench.kernel_ops.op_bench import OURS, Bench, OpBench, time_contestant
from bench.kernel_ops.op_cases import (
    GELU,
    LORA,
    NORM,
    QK,
    RESIDUAL,
    RESIDUAL_NORM,
    RESIDUAL_NORM_FROZEN,
    SHAPES,
    TINY_SHAPES,
    Op,
)
from bench.kernel_ops.optimizer_ops import sweep_bench
from cogfast.kernels.gpu import adaptive_layernorm as norm_kernels
from cogfast.kernels.gpu import add_low_rank, gelu, qk_norm_rope3d
from cogfast.kernels.gpu import fused_ema_adam as adam_kernels
from cogfast.kernels.gpu.adaptive_layernorm import BackwardLaunch
from cogfast.kernels.gpu.add_low_rank import AddLowRankLaunch
from cogfast.kernels.gpu.gelu import GeluLaunch
from cogfast.kernels.gpu.qk_norm_rope3d import QkLaunch

_LEAST_SECONDS = 15  # time that the candidates of one op at one shape may need
Swap = tuple[ModuleType, str, object]  # module, name in it, temporary value of that name

# Candidates of the adaptive LayerNorm by width M: warps of forward, launches of backward with sums
# and, with frozen modulation and norms, without.
NORM_WARPS = {1920: (2, 4, 8), 3072: (4, 8, 16)}
NORM_BACKWARD = {
    1920: (
        BackwardLaunch(8, 5, 2),
        BackwardLaunch(8, 4, 2),
        BackwardLaunch(8, 3, 2),
        BackwardLaunch(8, 5, 1),
        BackwardLaunch(4, 4, 2),
    ),
    3072: (
        BackwardLaunch(16, 5, 1),
        BackwardLaunch(16, 4, 1),
        BackwardLaunch(16, 3, 1),
        BackwardLaunch(8, 4, 1),
    ),
}
NORM_BACKWARD_FROZEN = {
    1920: (BackwardLaunch(4, 1, None), BackwardLaunch(8, 1, None), BackwardLaunch(8, 4, 4)),
    3072: (
        BackwardLaunch(4, 1, None),
        BackwardLaunch(8, 1, None),
        BackwardLaunch(16, 4, 1),
        BackwardLaunch(4, 3, 4),
    ),
}
GELU_FORWARD = (
    GeluLaunch(rows=4, columns=512, num_warps=2),
    GeluLaunch(rows=2, columns=512, num_warps=2),
    GeluLaunch(rows=8, columns=512, num_warps=2),
    GeluLaunch(rows=4, columns=256, num_warps=1),
    GeluLaunch(rows=4, columns=1024, num_warps=4),
)
GELU_BACKWARD = (
    GeluLaunch(rows=4, columns=512, num_warps=2, programs=10),
    GeluLaunch(rows=2, columns=512, num_warps=2, programs=14),
    GeluLaunch(rows=1, columns=512, num_warps=2, programs=20),
    GeluLaunch(rows=4, columns=256, num_warps=1, programs=24),
    GeluLaunch(rows=4, columns=1024, num_warps=4, programs=6),
)
LORA_FORWARD = (
    AddLowRankLaunch(rows=128, columns=128, num_warps=8),
    AddLowRankLaunch(rows=128, columns=128, num_warps=4),
    AddLowRankLaunch(rows=64, columns=128, num_warps=4),
    AddLowRankLaunch(rows=128, columns=256, num_warps=8),
    AddLowRankLaunch(rows=64, columns=256, num_warps=4),
    AddLowRankLaunch(rows=128, columns=128, num_warps=8, rank_bytes=256, num_stages=1),
)
QK_FORWARD = (
    QkLaunch(tokens=2, heads=16, num_warps=4, programs=5),
    QkLaunch(tokens=1, heads=16, num_warps=4, programs=7),
    QkLaunch(tokens=2, heads=16, num_warps=4, programs=1 << 20),  # one program per tile
    QkLaunch(tokens=2, heads=32, num_warps=8, programs=2),
)
QK_BACKWARD = (
    QkLaunch(tokens=2, heads=16, num_warps=4, programs=3),
    QkLaunch(tokens=1, heads=16, num_warps=4, programs=4),
    QkLaunch(tokens=1, heads=32, num_warps=8, programs=2),
    QkLaunch(tokens=1, heads=8, num_warps=2, programs=8),
)
# FusedEmaAdam: elements of a block, and warps.
ADAM = ((512, 4), (1024, 4), (1024, 8), (2048, 8))


@dataclass(frozen=True, slots=True)
class Choice:
    """Candidates for one direction of some ops.

    candidates: the candidates at a width M. swaps: replacements that make the ops use a candidate.
    """

    ops: Sequence[Op]
    way: str
    candidates: Callable[[int], Sequence[object]]
    swaps: Callable[[object], Sequence[Swap]]


def _passed_on(module: ModuleType, name: str) -> Callable[[object], Sequence[Swap]]:
    """Replace the module's launcher `name` by one with another `launch`."""
    launcher = vars(module)[name]
    return lambda candidate: ((module, name, partial(launcher, launch=candidate)),)


def _of_width(candidates: Mapping[int, Sequence[object]], width: int) -> Sequence[object]:
    return candidates.get(width, candidates[min(candidates)])


CHOICES = (
    Choice(
        (NORM, RESIDUAL_NORM, RESIDUAL),
        "forward",
        partial(_of_width, NORM_WARPS),
        lambda num_warps: ((norm_kernels, "choose_num_warps", lambda *_: num_warps),),
    ),
    Choice(
        (NORM, RESIDUAL_NORM, RESIDUAL),
        "backward",
        partial(_of_width, NORM_BACKWARD),
        lambda launch: ((norm_kernels, "choose_launch", lambda *_: launch),),
    ),
    Choice(
        (RESIDUAL_NORM_FROZEN,),
        "backward",
        partial(_of_width, NORM_BACKWARD_FROZEN),
        lambda launch: ((norm_kernels, "choose_launch", lambda *_: launch),),
    ),
    Choice((QK,), "forward", lambda _: QK_FORWARD, _passed_on(qk_norm_rope3d, "launch_forward")),
    Choice((QK,), "backward", lambda _: QK_BACKWARD, _passed_on(qk_norm_rope3d, "launch_backward")),
    Choice((GELU,), "forward", lambda _: GELU_FORWARD, _passed_on(gelu, "launch_forward")),
    Choice((GELU,), "backward", lambda _: GELU_BACKWARD, _passed_on(gelu, "launch_backward")),
    Choice((LORA,), "forward", lambda _: LORA_FORWARD, _passed_on(add_low_rank, "launch")),
)


def swaps_of_adam(candidate: tuple[int, int]) -> Sequence[Swap]:
    block, num_warps = candidate
    return ((adam_kernels, "BLOCK", block), (adam_kernels, "NUM_WARPS", num_warps))


@contextmanager
def taking(swaps: Sequence[Swap]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, stand_in in swaps:
            stack.enter_context(patch.object(module, name, stand_in))
        yield


def sweep_launches(settings: Settings) -> Outcome:
    """Return a row for every op, shape and direction: the best candidate and the one in use."""
    shapes = TINY_SHAPES if settings.is_tiny else SHAPES
    todo: list[tuple[Bench, str, Sequence[object], Callable]] = [
        (OpBench(settings, op, shape), choice.way, choice.candidates(shape.width), choice.swaps)
        for choice in CHOICES
        for op in choice.ops
        for shape in shapes
    ]
    todo.append((sweep_bench(settings), "step", ADAM, swaps_of_adam))
    copy = copy_rate(settings)["gb_per_s"]
    rows: list[Row] = []
    problems: list[str] = []
    shown = ("op", "model", "way", "status", "used_ms", "used_percent_of_copy", "best_ms")
    outcome = Outcome({"copy_gb_per_s": copy}, rows, (*shown, "best"), problems)
    for bench, way, candidates, swaps in todo:
        start = {**bench.describe(), "way": way}
        if settings.seconds_left < _LEAST_SECONDS:
            rows.append({**start, "status": "left out: no time"})
            continue
        wrong = bench.check(at_small_shapes=False)
        problems += wrong
        figures = {"status": "FAILED"} if wrong else _sweep(bench, way, candidates, swaps, copy)
        rows.append({**start, **figures})
        settings.keep(outcome)
    return outcome


def _sweep(
    bench: Bench,
    way: str,
    candidates: Sequence[object],
    swaps: Callable[[object], Sequence[Swap]],
    copy_gb_per_s: float,
) -> Row:
    used = median(time_contestant(bench, OURS, (way,))[way])
    timed: dict[str, float] = {}
    failed: dict[str, str] = {}
    for candidate in candidates:
        with taking(swaps(candidate)):
            wrong = bench.check(at_small_shapes=False)
            if wrong:  # no run uses this candidate: report it, do not fail
                failed[str(candidate)] = wrong[0]
            else:
                timed[str(candidate)] = median(time_contestant(bench, OURS, (way,))[way])
    percent = 100 * bench.num_bytes(way) / used / 1e6 / copy_gb_per_s
    row = {"status": "ok", "used_ms": used, "used_percent_of_copy": percent}
    if timed:
        best = min(timed, key=timed.__getitem__)
        row |= {"best": best, "best_ms": timed[best]}
    return {**row, "candidates_ms": timed, "candidates_that_fail": failed}

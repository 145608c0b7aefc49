"""Which launch configuration is the fastest: the candidates that stand beside each kernel, timed at
the shapes that count through the public op, next to what the op takes by itself.

A candidate is compared with the reference before it is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from cogfast.kernels import adaptive_layernorm, gelu, qk_norm_rope3d
from cogfast.kernels.gpu import adaptive_layernorm_backward, qk_norm_rope3d_launch
from cogfast.kernels.gpu import fused_ema_adam as ema_adam_kernel

_LEAST_SECONDS = 15  # what the candidates of one op at one shape may take
Swap = tuple[ModuleType, str, object]  # module, a name in it, and what it stands for meanwhile


@dataclass(frozen=True, slots=True)
class Choice:
    """What may be launched instead, for one way of some ops. candidates: of a width; swaps: make
    the ops take a candidate."""

    ops: Sequence[Op]
    way: str
    candidates: Callable[[int], Sequence[object]]
    swaps: Callable[[object], Sequence[Swap]]


def _passed_on(module: ModuleType, name: str) -> Callable[[object], Sequence[Swap]]:
    """The module's launcher `name` with another `launch`."""
    launcher = vars(module)[name]
    return lambda candidate: ((module, name, partial(launcher, launch=candidate)),)


def _of_width(candidates: dict[int, Sequence[object]], width: int) -> Sequence[object]:
    return candidates.get(width, candidates[min(candidates)])


CHOICES = (
    Choice(
        (NORM, RESIDUAL_NORM, RESIDUAL),
        "forward",
        lambda width: _of_width(adaptive_layernorm.NUM_WARPS_CANDIDATES, width),
        lambda warps: ((adaptive_layernorm, "choose_num_warps", lambda *_: warps),),
    ),
    Choice(
        (NORM, RESIDUAL_NORM, RESIDUAL),
        "backward",
        lambda width: _of_width(adaptive_layernorm_backward.LAUNCH_CANDIDATES, width),
        lambda launch: ((adaptive_layernorm_backward, "choose_launch", lambda *_: launch),),
    ),
    Choice(
        (RESIDUAL_NORM_FROZEN,),
        "backward",
        lambda width: _of_width(adaptive_layernorm_backward.FROZEN_CANDIDATES, width),
        lambda launch: ((adaptive_layernorm_backward, "choose_launch", lambda *_: launch),),
    ),
    Choice(
        (QK,),
        "forward",
        lambda width: qk_norm_rope3d_launch.FORWARD_CANDIDATES,
        _passed_on(qk_norm_rope3d, "launch_forward"),
    ),
    Choice(
        (QK,),
        "backward",
        lambda width: qk_norm_rope3d_launch.BACKWARD_CANDIDATES,
        _passed_on(qk_norm_rope3d, "launch_backward"),
    ),
    Choice(
        (GELU,), "forward", lambda width: gelu.FORWARD_CANDIDATES, _passed_on(gelu, "launch_gelu")
    ),
    Choice(
        (GELU,),
        "backward",
        lambda width: gelu.BACKWARD_CANDIDATES,
        _passed_on(gelu, "launch_gelu_backward"),
    ),
)
# Of FusedEmaAdam: elements of a block, and warps.
ADAM_CANDIDATES = ((512, 4), (1024, 4), (1024, 8), (2048, 8))


def swaps_of_adam(candidate: tuple[int, int]) -> Sequence[Swap]:
    block, num_warps = candidate
    return ((ema_adam_kernel, "BLOCK", block), (ema_adam_kernel, "_NUM_WARPS", num_warps))


@contextmanager
def taking(swaps: Sequence[Swap]) -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, stand_in in swaps:
            stack.enter_context(patch.object(module, name, stand_in))
        yield


def sweep_launches(settings: Settings) -> Outcome:
    """A row for every op, shape and way: the best candidate next to what is used."""
    shapes = TINY_SHAPES if settings.is_tiny else SHAPES
    todo: list[tuple[Bench, str, Sequence[object], Callable]] = [
        (OpBench(settings, op, shape), choice.way, choice.candidates(shape.width), choice.swaps)
        for choice in CHOICES
        for op in choice.ops
        for shape in shapes
    ]
    todo.append((sweep_bench(settings), "step", ADAM_CANDIDATES, swaps_of_adam))
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
            if wrong:  # nobody uses it, so it is no problem of the run's
                failed[str(candidate)] = wrong[0]
            else:
                timed[str(candidate)] = median(time_contestant(bench, OURS, (way,))[way])
    percent = 100 * bench.num_bytes(way) / used / 1e6 / copy_gb_per_s
    row = {"status": "ok", "used_ms": used, "used_percent_of_copy": percent}
    if timed:
        best = min(timed, key=timed.__getitem__)
        row |= {"best": best, "best_ms": timed[best]}
    return {**row, "candidates_ms": timed, "candidates_that_fail": failed}

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

from bench.op_bench import OURS, OpBench, time_contestant
from bench.op_cases import GELU, NORM, QK, RESIDUAL, RESIDUAL_NORM, SHAPES, TINY_SHAPES, Op
from bench.optimizer_ops import OptimizerBench, sweep_bench
from bench.outcome import Outcome, Row, Settings
from bench.rates import copy_rate
from cogfast.kernels import (
    adaptive_layernorm,
    adaptive_layernorm_backward,
    ema_adam_kernel,
    gelu,
    qk_norm_rope3d,
    qk_norm_rope3d_launch,
)

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
        lambda width: (2, 4, 8),
        lambda warps: ((adaptive_layernorm, "choose_num_warps", lambda *_: warps),),
    ),
    Choice(
        (NORM, RESIDUAL_NORM, RESIDUAL),
        "backward",
        lambda width: _of_width(adaptive_layernorm_backward.LAUNCH_CANDIDATES, width),
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
    copy = copy_rate(settings)["gb_per_s"]
    rows: list[Row] = []
    problems: list[str] = []

    def outcome() -> Outcome:
        shown = ("op", "model", "way", "used_ms", "used_percent_of_copy", "best_ms")
        return Outcome({"copy_gb_per_s": copy}, rows, (*shown, "best"), problems)

    for choice in CHOICES:
        for op in choice.ops:
            for shape in TINY_SHAPES if settings.is_tiny else SHAPES:
                bench = OpBench(settings, op, shape)
                candidates = choice.candidates(shape.width)
                rows.append(_sweep(bench, choice.way, candidates, choice.swaps, copy, problems))
                settings.keep(outcome())
    bench = sweep_bench(settings)
    rows.append(_sweep(bench, "step", ADAM_CANDIDATES, swaps_of_adam, copy, problems))
    return outcome()


def _sweep(
    bench: OpBench | OptimizerBench,
    way: str,
    candidates: Sequence[object],
    swaps: Callable[[object], Sequence[Swap]],
    copy_gb_per_s: float,
    problems: list[str],
) -> Row:
    used = median(time_contestant(bench, OURS, (way,))[way])
    timed: dict[str, object] = {}
    for candidate in candidates:
        with taking(swaps(candidate)):
            wrong = bench.check(at_small_shapes=False)
            if wrong:
                problems += [f"{candidate}: {text}" for text in wrong]
                timed[str(candidate)] = "FAILED"
            else:
                timed[str(candidate)] = median(time_contestant(bench, OURS, (way,))[way])
    best = min(
        (x for x in timed.items() if isinstance(x[1], float)), key=lambda x: x[1], default=None
    )
    percent = 100 * bench.num_bytes(way) / used / 1e6 / copy_gb_per_s
    row = {**bench.describe(), "way": way, "used_ms": used, "used_percent_of_copy": percent}
    if best is not None:
        row |= {"best": best[0], "best_ms": best[1]}
    return {**row, "candidates_ms": timed}

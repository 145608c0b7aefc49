"""A fixed ladder of changes that make a run smaller, from those that cost least time to those that cost most.

`climb` makes them one after the other until the plan fits, and then takes back what is not needed.
args.fit=auto makes the changes, `cogfast plan` and the error of a run that is out of memory name them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cogfast.config.sat_network import VAE_KEY
from cogfast.core.device_memory import free_memory
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.memory.quantized_base import base_linears
from cogfast.extensions.plan.memory import (
    FIT,
    GIB,
    MARGIN,
    MemoryPlan,
    Setup,
    choose_policies,
    plan_memory,
    setup_of,
    usable,
)
from cogfast.train.activation_checkpointing import LADDER, Policy, describe
from cogfast.train.run.opened import Run

if TYPE_CHECKING:
    from cogfast.train.run.parts import Launch

logger = logging.getLogger(__name__)

_MOST_GPUS = 64
# These keys round numbers of the run.
_ROUNDING = ("args.optimizer_moments=", "args.quantize_base=")
# The layout of the traced model depends on these keys, and no rung changes others of them.
_TRACED = tuple(map(MemoryKeys.key, ("offload_blocks", "quantize_base")))
_GPUS = "GPUs"
_ENCODE_CHUNKS = f"{VAE_KEY}.encode_chunks"


@dataclass(frozen=True, slots=True)
class Fitted:
    """A run after some changes, each {dotted key: value} or {"GPUs": number}."""

    steps: tuple[Mapping[str, Any], ...]
    plan: MemoryPlan

    @property
    def values(self) -> dict[str, Any]:
        return {k: v for step in self.steps for k, v in step.items() if k != _GPUS}

    @property
    def changes(self) -> tuple[str, ...]:
        """Each change as `key=value` words, or as a number of GPUs."""
        return tuple(map(_text, self.steps))

    def describe(self) -> str:
        peak = f"{self.plan.peak / GIB:.1f} GiB ({self.plan.largest.name})"
        return f"{' '.join(self.changes)}: {peak}"


Change = Callable[..., Setup]  # setup_of, of one run


def climb(plan: MemoryPlan, change: Change, has_gpus: bool = False) -> Fitted:
    """Return the first changes of the ladder with which the run fits, or those that help if none do.

    has_gpus: also the changes that are no keys of the same layout: ZeRO-3, more GPUs.
    """
    start = found = Fitted((), plan)
    for rung in _rungs(plan.setup, has_gpus):
        if found.plan.fits:
            break
        risen = _with(start, [*found.steps, rung], found, change)
        # Smaller micro-batches have sums of gradients, which may take more than they save.
        found = risen if _missing(risen.plan) < _missing(found.plan) else found
    if found.plan.fits:
        for step in found.steps[:-1]:
            less = _with(start, [each for each in found.steps if each != step], found, change)
            found = less if less.plan.fits else found
    return found


def _text(step: Mapping[str, Any]) -> str:
    if _GPUS in step:
        return f"{step[_GPUS]} {_GPUS}"
    return " ".join(f"{key}={'true' if value is True else value}" for key, value in step.items())


def _missing(plan: MemoryPlan) -> int:
    """Return the bytes that all phases take above those of the card."""
    most = usable(plan.card or 0)
    return sum(max(0, phase.total - most) for phase in plan.phases)


def _with(
    start: Fitted, steps: Sequence[Mapping[str, Any]], before: Fitted, change: Change
) -> Fitted:
    """Plan the run of `start` with these changes. A later change of a key replaces an earlier one."""
    made = Fitted(tuple({next(iter(step)): step for step in steps}.values()), start.plan)
    gpus = [step[_GPUS] for step in made.steps if _GPUS in step]
    traced = lambda fitted: {k: v for k, v in fitted.values.items() if k in _TRACED}
    alike = [each.plan.setup.traces for each in (before, start) if traced(each) == traced(made)]
    number = gpus[-1] if gpus else start.plan.setup.world_size
    setup = change(number, alike[0] if alike else None, made.values)
    return Fitted(made.steps, plan_memory(setup, start.plan.card))


def _rungs(setup: Setup, has_gpus: bool) -> Iterator[dict[str, Any]]:
    args, rules, encoders = setup.args, setup.rules, setup.encoders
    layers = len(setup.transformer.blocks)
    # Whether only adapters are trained in the blocks' linears
    is_frozen = not any(x.weight.requires_grad for _, x in base_linears(setup.transformer))
    key = args.key
    if args.activation_checkpointing != "auto":
        yield {key("activation_checkpointing"): "auto"}
    if (encoders.in_evaluation or any(encoders.in_step)) and not encoders.are_offloaded:
        yield {key("offload_encoders"): True}
    if encoders.is_known and encoders.encodes_clips and encoders.mode == "auto":
        yield {_ENCODE_CHUNKS: "tiles"}
    if rules.has_ema and not rules.is_offloaded and args.ema_device != "cpu" and not is_frozen:
        yield {key("ema_device"): "cpu"}
    if is_frozen:
        for number in (layers // 2, layers):
            if number > args.offload_blocks:
                yield {key("offload_blocks"): number}
    for divisor in (2, 4, 8):
        if args.batch_size % divisor == 0:
            times = args.gradient_accumulation_steps * divisor
            size = {key("batch_size"): args.batch_size // divisor}
            yield {**size, key("gradient_accumulation_steps"): times}
    if not args.offload_activations and not args.compile:
        yield {key("offload_activations"): True}
    if is_frozen and args.quantize_base == "none":
        yield {key("quantize_base"): "int8"}
    # The state of Prodigy and Muon cannot be of 8 bits.
    has_adams = rules.has_ema and rules.num_moments == 2 and not rules.is_muon
    if has_adams and not rules.is_offloaded and args.optimizer_moments != "8bit" and not is_frozen:
        yield {key("optimizer_moments"): "8bit"}
    if not has_gpus or is_frozen:
        return
    number = 2 * setup.world_size
    while number <= _MOST_GPUS and rules.stage >= 1:
        yield {_GPUS: number}
        number *= 2


def fit(launch: Launch) -> Run:
    """Return the run with the changes with which it fits on the device of the rank with the least memory.

    All ranks return the same. Raises ValueError if the whole ladder does not make it fit.
    """
    run, groups = launch.run, launch.groups
    free, total = free_memory(groups.device)
    # Memory that other programs hold counts like a smaller card.
    card = min(groups.gather(int(min(total, free / (1 - MARGIN)))))
    change = partial(setup_of, run)
    plan = plan_memory(change(groups.world_size), card)
    found = climb(plan, change)
    if not found.plan.fits:
        text = f"{FIT}: the run takes {plan.peak / GIB:.1f} GiB of {card / GIB:.1f}, and still {found.describe()}; "
        text += "use more GPUs, fewer frames (data.params.max_num_frames) or smaller ones (data.params.video_size)"
        raise ValueError(text)
    if groups.is_main:
        for line in fit_lines(found):
            logger.info("%s: %s", FIT, line)
    return run.with_values(found.values, FIT)


def policies_that_fit(setup: Setup, groups: ProcessGroups) -> tuple[Policy, ...]:
    """Return the policies of `auto` for the memory that is left, the same on all ranks.

    Call it when all that lasts is in memory.
    """
    device = groups.device
    free, total = free_memory(device)
    # The plan counts what lasts, which is in memory already. No allocator counts on a CPU.
    is_gpu = device.type == "cuda"
    held = torch.cuda.memory_allocated(device) if is_gpu else sum(setup.base_parts().values())
    budget = free - total + usable(total) + held - setup.gap_bytes
    chosen = choose_policies(setup, budget)
    # The rank with the least memory decides: its blocks have climbed LADDER least.
    return min(groups.gather(chosen), key=lambda each: sum(map(LADDER.index, each)))


def fit_lines(found: Fitted) -> list[str]:
    """Return one line for each change, and one for the result."""
    note = lambda change: " (results are rounded)" if change.startswith(_ROUNDING) else ""
    lines = [change + note(change) for change in found.changes]
    result = f"{found.plan.summary()}, activation checkpointing {describe(found.plan.policies)}"
    return [*lines, f"{'fits' if lines else 'fits without changes'}: {result}"]

"""A fixed ladder of changes that make a run smaller, from those that cost least time to those that cost most.

`climb` makes them one after the other until the plan fits, and then takes back what is not needed.
args.fit=auto makes the changes, `cogfast plan` and the error of a run that is out of memory name them.
`apply_checkpointing` gives the blocks of a run their policies, also those of `auto`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from cogfast.config import with_words
from cogfast.core.device_memory import free_memory
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.memory.offloaded_activations import OffloadedActivations
from cogfast.extensions.memory.quantized_base import base_linears
from cogfast.extensions.plan.memory import (
    GIB,
    MARGIN,
    MemoryPlan,
    Setup,
    choose_policies,
    plan_memory,
    setup_of,
    usable,
)
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import LADDER, Policy, apply_policies, describe
from cogfast.train.keys import TrainKeys
from cogfast.train.run.opened import Run

logger = logging.getLogger(__name__)

FIT = "args.fit=auto"
_MOST_GPUS = 64
# These keys round numbers of the run.
_ROUNDING = ("args.optimizer_moments=", "args.quantize_base=")
# The layout of the traced model depends on these keys, and no rung changes others of them.
_TRACED = ("args.offload_blocks=", "args.quantize_base=")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A configuration after the changes. changes: `key=value` words, or a number of GPUs."""

    changes: tuple[str, ...]
    run: Run
    args: TrainKeys
    plan: MemoryPlan

    def describe(self) -> str:
        """Return the changes with the peak that follows."""
        peak = f"{self.plan.peak / GIB:.1f} GiB ({self.plan.largest.name})"
        return f"{' '.join(self.changes)}: {peak}"


def climb(run: Run, args: TrainKeys, plan: MemoryPlan, has_gpus: bool = False) -> Fitted:
    """Return the first changes of the ladder with which the run fits, or those that help if none do.

    has_gpus: also the changes that are no keys of the same layout: ZeRO-3, more GPUs.
    """
    start = found = Fitted((), run, args, plan)
    for rung in _rungs(args, plan.setup, has_gpus):
        if found.plan.fits:
            break
        risen = _with(start, [*found.changes, rung], found)
        # Smaller micro-batches have sums of gradients, which may take more than they save.
        found = risen if _missing(risen.plan) < _missing(found.plan) else found
    if found.plan.fits:
        for change in found.changes[:-1]:
            less = _with(start, [each for each in found.changes if each != change], found)
            found = less if less.plan.fits else found
    return found


def _missing(plan: MemoryPlan) -> int:
    """Return the bytes that all phases take above those of the card."""
    most = usable(plan.card or 0)
    return sum(max(0, phase.total - most) for phase in plan.phases)


def _with(start: Fitted, changes: Sequence[str], before: Fitted) -> Fitted:
    """Plan the run of `start` with these changes. A later change of a key replaces an earlier one."""
    changes = tuple({change.partition("=")[0]: change for change in changes}.values())
    words = [word for change in changes if "GPUs" not in change for word in change.split()]
    run = Run(with_words(start.run.config, words, FIT))
    gpus = [int(change.split()[0]) for change in changes if "GPUs" in change]
    number = gpus[-1] if gpus else start.plan.setup.world_size
    traced = lambda changes: [w for c in changes for w in c.split() if w.startswith(_TRACED)]
    alike = [each for each in (before, start) if traced(each.changes) == traced(changes)]
    changed = setup_of(run, run.args, number, alike[0].plan.setup.traces if alike else None)
    return Fitted(changes, run, run.args, plan_memory(changed, start.plan.card))


def _rungs(args: TrainKeys, setup: Setup, has_gpus: bool) -> Iterator[str]:
    """Yield the changes that apply to a run, in their order."""
    rules, encoders = setup.rules, setup.encoders
    layers = len(setup.transformer.blocks)
    # Whether only adapters are trained in the blocks' linears
    is_frozen = not any(x.weight.requires_grad for _, x in base_linears(setup.transformer))
    if setup.choice != "auto":
        yield "args.activation_checkpointing=auto"
    if (encoders.in_evaluation or any(encoders.in_step)) and not encoders.are_offloaded:
        yield "args.offload_encoders=true"
    if encoders.is_known and encoders.encodes_clips and encoders.mode == "auto":
        yield "model.first_stage_config.params.encode_chunks=tiles"
    if rules.has_ema and not rules.is_offloaded and not rules.has_host_ema and not is_frozen:
        yield "args.ema_device=cpu"
    if is_frozen:
        for number in (layers // 2, layers):
            if number > args.offload_blocks:
                yield f"args.offload_blocks={number}"
    for divisor in (2, 4, 8):
        if args.batch_size % divisor == 0:
            size, times = args.batch_size // divisor, args.gradient_accumulation_steps * divisor
            yield f"args.batch_size={size} args.gradient_accumulation_steps={times}"
    if not setup.offloads and not args.compile:
        yield "args.offload_activations=true"
    if is_frozen and args.quantize_base == "none":
        yield "args.quantize_base=int8"
    # The state of Prodigy and Muon cannot be of 8 bits.
    has_adams = rules.has_ema and rules.num_moments == 2 and not rules.is_muon
    if has_adams and not rules.is_offloaded and not rules.has_8bit_moments and not is_frozen:
        yield "args.optimizer_moments=8bit"
    if not has_gpus or is_frozen:
        return
    number = 2 * setup.world_size
    while number <= _MOST_GPUS and rules.stage >= 1:
        yield f"{number} GPUs"
        number *= 2


def fit_to_device(run: Run, groups: ProcessGroups) -> Run:
    """Return the run that fits on the device of the rank with the least memory.

    All ranks return the same. Raises ValueError if the whole ladder does not make it fit.
    """
    free, total = free_memory(groups.device)
    # Memory that other programs hold counts like a smaller card.
    card = min(groups.gather(int(min(total, free / (1 - MARGIN)))))
    plan = plan_memory(setup_of(run, run.args, groups.world_size), card)
    found = climb(run, run.args, plan)
    if not found.plan.fits:
        text = f"{FIT}: the run takes {plan.peak / GIB:.1f} GiB of {card / GIB:.1f}, and still {found.describe()}; "
        text += "use more GPUs, fewer frames (data.params.max_num_frames) or smaller ones (data.params.video_size)"
        raise ValueError(text)
    if groups.is_main:
        for line in fit_lines(found):
            logger.info("%s: %s", FIT, line)
    return found.run


def apply_checkpointing(
    transformer: DiffusionTransformer, args: TrainKeys, groups: ProcessGroups, setup: Setup | None
) -> tuple[Policy, ...]:
    """Run each block under the policy of args.activation_checkpointing; return the policies.

    Call it when all that lasts is in memory: `auto` chooses for the rest, the same on all ranks.
    setup: of the run; None if it cannot be predicted, in which case `auto` is full.
    """
    number, choice = len(transformer.blocks), args.activation_checkpointing
    assert choice is not None, "from_config chooses one"
    policies: tuple[Policy, ...] = ("full" if choice == "auto" else choice,) * number
    if choice == "auto" and setup is not None:
        device = groups.device
        free, total = free_memory(device)
        # The plan counts what lasts, which is in memory already. No allocator counts on a CPU.
        is_gpu = device.type == "cuda"
        held = torch.cuda.memory_allocated(device) if is_gpu else sum(setup.base_parts().values())
        budget = free - total + usable(total) + held - setup.gap_bytes
        chosen = choose_policies(setup, budget)
        # The rank with the least memory decides: its blocks have climbed LADDER least.
        policies = min(groups.gather(chosen), key=lambda each: sum(map(LADDER.index, each)))
        logger.info("activation checkpointing: %s", describe(policies))
    elif choice == "auto":
        text = "activation checkpointing: %s, because the memory of the run cannot be predicted; "
        more = "args.activation_checkpointing=attention_kept, pointwise or none keeps more"
        logger.warning(text + more, describe(policies))
    offload = OffloadedActivations(number, groups.device) if args.offload_activations else None
    apply_policies(transformer, policies, args.compile, offload)
    return policies


def fit_lines(found: Fitted) -> list[str]:
    """Return one line for each change, and one for the result."""
    note = lambda change: " (results are rounded)" if change.startswith(_ROUNDING) else ""
    lines = [change + note(change) for change in found.changes]
    result = f"{found.plan.summary()}, activation checkpointing {describe(found.plan.policies)}"
    return [*lines, f"{'fits' if lines else 'fits without changes'}: {result}"]

"""args.fit=auto: changes a run's keys until its memory plan fits the device."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from cogfast.config import Config, with_words
from cogfast.schema.arguments import TrainArguments
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.plan.activations import MARGIN, describe, free_memory
from cogfast.train.plan.fixes import Fitted, find_fit
from cogfast.train.plan.memory import GIB, MemoryPlan, plan_memory, setup_of

logger = logging.getLogger(__name__)
_ORIGIN = "args.fit=auto"


@dataclass(frozen=True, slots=True)
class FittedConfig:
    """A configuration with the changes that make it fit.

    If nothing fits, config, args and plan are those of before, and fitted has the lowest peak.
    """

    config: Config
    args: TrainArguments
    plan: MemoryPlan
    fitted: Fitted


def fit_to_device(
    config: Config, args: TrainArguments, groups: ProcessGroups
) -> tuple[Config, TrainArguments]:
    """Return the configuration that fits on the device of the rank with the least memory.

    All ranks return the same. Raises ValueError if nothing that is tried makes it fit.
    """
    free, total = free_memory(groups.device)
    # Memory that other programs hold counts like a smaller card.
    card = min(groups.gather(int(min(total, free / (1 - MARGIN)))))
    found = fit_to_memory(config, args, groups.world_size, card)
    lowest = found.fitted.plan
    if not found.plan.fits:
        with_these = f" with {' '.join(found.fitted.words)}" if found.fitted.words else ""
        raise ValueError(
            f"{_ORIGIN}: the run takes {found.plan.peak / GIB:.1f} GiB of {card / GIB:.1f}, and still "
            f"{lowest.peak / GIB:.1f} ({lowest.largest.name}){with_these}; use more GPUs, fewer frames "
            "(data.params.max_num_frames) or smaller ones (data.params.video_size)"
        )
    if groups.is_main:
        for line in fit_lines(found.fitted):
            logger.info("%s: %s", _ORIGIN, line)
    return found.config, found.args


def fit_to_memory(config: Config, args: TrainArguments, world_size: int, card: int) -> FittedConfig:
    """Make the cheapest changes with which the run fits on a card of `card` bytes."""
    plan = plan_memory(setup_of(config, args, world_size), card)
    fitted = Fitted((), plan) if plan.fits else find_fit(config, args, plan)
    if not fitted.words or not fitted.plan.fits:
        return FittedConfig(config, args, plan, fitted)
    config = with_words(config, fitted.words, _ORIGIN)
    return FittedConfig(config, TrainArguments.from_config(config), fitted.plan, fitted)


def fit_lines(fitted: Fitted) -> list[str]:
    """Return one line for each change, with its estimated cost, and one for the result."""
    costs = []
    for change in fitted.changes:
        notes = [f"about {change.cost:.0%} of the step's time"] if change.cost >= 0.005 else []
        notes += ["results are rounded"] if change.rounds else []
        costs.append(f"{change.words} ({', '.join(notes)})" if notes else change.words)
    plan = fitted.plan
    result = f"{plan.summary()}, activation checkpointing {describe(plan.policies)}"
    return [*costs, f"{'fits' if costs else 'fits without changes'}: {result}"]

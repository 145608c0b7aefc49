"""The predicted memory of a run: what chooses for `auto`, is logged beside what it takes, and explains an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakKeyDictionary

import psutil
import torch

from cogfast.core.device_memory import free_memory
from cogfast.extensions.plan.gpus import gpu_of
from cogfast.extensions.plan.ladder import Change, climb, policies_that_fit
from cogfast.extensions.plan.memory import GIB, MemoryPlan, Setup, plan_memory, setup_of, usable
from cogfast.extensions.plan.seconds import predict_step
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import Policy
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:
    from cogfast.train.run.parts import Launch, Parts

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SMALLER = 0.95  # of the planned peak: what the changes that are named take at most
_MEASURED_STEP = 2  # the first one allocates what libraries keep
# Phase of a run (Progress) -> phase of a plan
_PHASES = {"encode": "encoding clips", "evaluation": "evaluation", "optimizer": "optimizer step"}
# {transformer of a run: its setup, which is made once; None: the run cannot be predicted}
_SETUPS: WeakKeyDictionary[DiffusionTransformer, Setup | None] = WeakKeyDictionary()


def _predicted(make: Callable[[], T]) -> T | None:
    """Return what `make` does. No run ends because it could not be predicted."""
    try:
        return make()
    except Exception as error:
        text = "the run's memory cannot be predicted (%s: %s)"
        logger.warning(text, type(error).__name__, error)
        return None


def _change(launch: Launch) -> Change:
    return partial(setup_of, replace(launch.run, args=launch.args))


def _setup(launch: Launch, transformer: DiffusionTransformer) -> Setup | None:
    if transformer not in _SETUPS:
        _SETUPS[transformer] = _predicted(lambda: _change(launch)(launch.groups.world_size))
    return _SETUPS[transformer]


def choose(launch: Launch, transformer: DiffusionTransformer) -> tuple[Policy, ...] | None:
    """Return the policies of `auto`, the same on all ranks; None if the run cannot be predicted."""
    setup = _setup(launch, transformer)
    return None if setup is None else policies_that_fit(setup, launch.groups)


def plan_of(parts: Parts) -> MemoryPlan | None:
    """Return the plan of a run for this device; None if the run cannot be predicted."""
    transformer = parts.engine.transformer
    setup = _setup(parts.launch, transformer)
    if setup is None:
        return None
    card = free_memory(parts.launch.groups.device)[1]
    plan = _predicted(lambda: plan_memory(setup, card, parts.policies))
    if plan is None:
        _SETUPS[transformer] = None
    return plan


class MemoryWatch(Watcher):
    """Logs the plan of a run on a GPU in one line, and compares it with what the second step takes."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.num_steps = parts, 0

    def at_start(self) -> None:
        plan = plan_of(self.parts)
        if plan is not None:
            logger.info("memory planned for each GPU: %s", plan.summary())
            warn_of_host_memory(plan.setup.host_parts(plan.policies))

    def after_step(self, step: int) -> None:
        """Log prediction and peak of the second step, whose memory the allocator counts."""
        self.num_steps += 1
        groups = self.parts.launch.groups
        device = groups.device
        if self.num_steps < _MEASURED_STEP:
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.is_done = True
        plan = plan_of(self.parts) if groups.is_main else None
        if plan is None:
            return
        text = "memory of a step: %.1f GiB were predicted and %.1f used (%.1f reserved)"
        used = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        logger.info(text, *(num_bytes / GIB for num_bytes in (plan.peak, *used)))
        gpu, attention = gpu_of(device), self.parts.model.attention_backend
        time = None if gpu is None else predict_step(plan, gpu, attention)
        if gpu is not None and time is not None:
            text = "a step is predicted to take %.0f ms: a prediction from the data sheet of %s, %s"
            logger.info(text, 1000 * time.seconds, gpu.name, time.attention_rates)


def explain(parts: Parts) -> list[str]:
    """Return what was planned for the phase that ran out of memory, and the changes that take less."""
    plan, launch = plan_of(parts), parts.launch
    if plan is None:
        return []
    planned = next(
        (p for p in plan.phases if p.name == _PHASES.get(parts.engine.clock.phase)), plan.phases[0]
    )
    sizes = ", ".join(f"{name} {n / GIB:.1f}" for name, n in planned.parts.items() if n)
    # The device has less for this run than the plan takes, whatever it says.
    smaller = replace(plan, card=min(plan.card or plan.peak, int(_SMALLER * plan.peak)))
    found = climb(smaller, _change(launch), has_gpus=launch.groups.device.type == "cuda")
    less = f"these changes take less: {found.describe()}"
    return [
        f"planned for {planned.name}: {planned.total / GIB:.1f} GiB ({sizes})",
        less if found.plan.fits else "use more GPUs, fewer frames or a smaller size",
    ]


def warn_of_host_memory(parts: Mapping[str, int]) -> None:
    """Warn if the ranks of this machine keep more in host memory than it has. parts: bytes of one rank."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, has = num_ranks * sum(parts.values()), psutil.virtual_memory().total
    if needed > usable(has):
        each = ", ".join(f"{name} {n / GIB:.1f}" for name, n in parts.items() if n)
        text = "%d ranks of this machine keep %.1f GiB in host memory (each %s), but it has %.1f GiB: offload "
        text += "less (docs/small_cards.md), or start fewer ranks"
        logger.warning(text, num_ranks, needed / GIB, each, has / GIB)

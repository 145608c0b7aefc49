"""The predicted memory of a run beside what it takes, and an error that names the fix if it runs out."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

import psutil
import torch

from cogfast.core.device_memory import free_memory
from cogfast.core.machine_limits import is_lack_of_memory
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import CLOCK
from cogfast.extensions.plan.gpus import gpu_of
from cogfast.extensions.plan.ladder import Change, climb
from cogfast.extensions.plan.memory import GIB, MemoryPlan, Setup, plan_memory, usable
from cogfast.extensions.plan.seconds import predict_step
from cogfast.train.activation_checkpointing import Policy, describe
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

T = TypeVar("T")
_SMALLER = 0.95  # of the planned peak: what the changes that are named take at most
_MEASURED_STEP = 2  # the first one allocates what libraries keep
# Phase of a run (Progress) -> phase of a plan
_PHASES = {"encode": "encoding clips", "evaluation": "evaluation", "optimizer": "optimizer step"}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory of the device or of the host is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or is_lack_of_memory(error)


class MemoryWatch(Watcher):
    """Compares plan and reality, and explains an out-of-memory error that ends the run."""

    def __init__(
        self, change: Change, groups: ProcessGroups, how_to_resume: Callable[[], str]
    ) -> None:
        """change: of the run. how_to_resume: describes the last checkpoint."""
        self.change, self.groups = change, groups
        self.how_to_resume = how_to_resume
        self.policies: tuple[Policy, ...] | None = None  # of the blocks, when they have some
        self.attention: str | None = None  # the backend, when one is chosen
        self.num_steps = 0
        self.is_done = groups.device.type != "cuda"  # only its errors count on a CPU

    @cached_property
    def setup(self) -> Setup | None:
        return self._predicted(lambda: self.change(self.groups.world_size, None, {}))

    def plan(self) -> MemoryPlan | None:
        """Return the plan for this device; None if the run cannot be predicted."""
        setup, device = self.setup, self.groups.device
        if setup is None:
            return None
        return self._predicted(lambda: plan_memory(setup, free_memory(device)[1], self.policies))

    def _predicted(self, make: Callable[[], T]) -> T | None:
        """Return what `make` does. No run ends because it could not be predicted."""
        try:
            return make()
        except Exception as error:
            text = "the run's memory cannot be predicted (%s: %s)"
            logger.warning(text, type(error).__name__, error)
            self.setup = None
            return None

    def start(self) -> None:
        """Log the plan of a run on a GPU in one line. Call it on every rank at the start of the run."""
        plan = self.plan() if self.groups.device.type == "cuda" else None
        if plan is not None:
            logger.info("memory planned for each GPU: %s", plan.summary())
            warn_of_host_memory(plan.setup.host_parts(plan.policies))

    def after_step(self, step: int) -> None:
        """Log prediction and peak of the second step on a GPU, whose allocator counts."""
        self.num_steps += 1
        device = self.groups.device
        if self.num_steps < _MEASURED_STEP:
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.is_done = True
        plan = self.plan() if self.groups.is_main else None
        if plan is None:
            return
        text = "memory of a step: %.1f GiB were predicted and %.1f used (%.1f reserved)"
        used = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
        logger.info(text, *(num_bytes / GIB for num_bytes in (plan.peak, *used)))
        gpu = gpu_of(device)
        time = None if gpu is None else predict_step(plan, gpu, self.attention)
        if time is not None:
            text = "a step is predicted to take %.0f ms: %s, %s"
            logger.info(text, 1000 * time.seconds, time.source, time.attention_rates)

    def close(self, error: BaseException | None) -> None:
        if error is not None and is_out_of_memory(error):
            raise RuntimeError(f"out of memory: {self.explain()}") from None

    def explain(self) -> str:
        """Return phase, the plan's parts, the changes that fit, and what is kept, in one line."""
        plan, phase = self.plan(), CLOCK.phase
        parts = [f"it happened in step {CLOCK.step + 1}, phase {phase}"]
        if self.policies is not None:
            parts.append(f"activation checkpointing: {describe(self.policies)}")
        if plan is not None:
            planned = next((p for p in plan.phases if p.name == _PHASES.get(phase)), plan.phases[0])
            sizes = ", ".join(f"{name} {n / GIB:.1f}" for name, n in planned.parts.items() if n)
            parts.append(f"planned for {planned.name}: {planned.total / GIB:.1f} GiB ({sizes})")
            # The device has less for this run than the plan takes, whatever it says.
            smaller = replace(plan, card=min(plan.card or plan.peak, int(_SMALLER * plan.peak)))
            has_gpus = self.groups.device.type == "cuda"
            found = climb(smaller, self.change, has_gpus)
            less = f"these changes take less: {found.describe()}"
            other = "use more GPUs, fewer frames or a smaller size"
            parts.append(less if found.plan.fits else other)
        return "; ".join([*parts, self.how_to_resume()])


def warn_of_host_memory(parts: Mapping[str, int]) -> None:
    """Warn if the ranks of this machine keep more in host memory than it has. parts: bytes of one rank."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, has = num_ranks * sum(parts.values()), psutil.virtual_memory().total
    if needed > usable(has):
        each = ", ".join(f"{name} {n / GIB:.1f}" for name, n in parts.items() if n)
        text = "%d ranks of this machine keep %.1f GiB in host memory (each %s), but it has %.1f GiB: offload "
        text += "less (docs/small_cards.md), or start fewer ranks"
        logger.warning(text, num_ranks, needed / GIB, each, has / GIB)

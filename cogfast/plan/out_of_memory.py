"""The predicted memory of a run beside what it takes, and an error that names the fix if it runs out.

Nothing runs between the steps: phase and block are read from the run's state and from the traceback
after an error.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from cogfast.config import Config
from cogfast.config.arguments import TrainArguments
from cogfast.core.device_memory import free_memory
from cogfast.core.machine_limits import is_lack_of_memory
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import CLOCK
from cogfast.kernels.cpu.memory import return_freed_memory
from cogfast.model.block import Block
from cogfast.model.transformer import DiffusionTransformer
from cogfast.plan.auto import ActivationCheckpointing
from cogfast.plan.gpus import gpu_of
from cogfast.plan.ladder import climb
from cogfast.plan.memory import GIB, MemoryPlan, Setup, host_parts, plan_memory, setup_of, usable
from cogfast.plan.seconds import predict_step
from cogfast.train.memory.activation_checkpointing import describe
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

# A CPU process that keeps freed memory took up to 1.8 times what its tensors took.
_MOST_WITH_GAPS = 2
_SMALLER = 0.95  # of the planned peak: what the changes that are named take at most
_MEASURED_STEP = 2  # the first one allocates what libraries keep
# Phase of a run (Progress) -> phase of a plan
_PHASES = {"encode": "encoding clips", "evaluation": "evaluation", "optimizer": "optimizer step"}


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory of the device or of the host is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or is_lack_of_memory(error)


class MemoryWatch(Watcher):
    """Compares plan and reality, and as a context manager explains an out-of-memory error.

    transformer: of the run. how_to_resume: describes the last checkpoint.
    """

    def __init__(
        self,
        config: Config,
        args: TrainArguments,
        groups: ProcessGroups,
        transformer: DiffusionTransformer,
        folder: Path,
        how_to_resume: Callable[[], str],
    ) -> None:
        self.config, self.args, self.groups = config, args, groups
        self.blocks = [block for block in transformer.blocks if isinstance(block, Block)]
        self.folder, self.how_to_resume = folder, how_to_resume
        self.checkpointing: ActivationCheckpointing | None = None
        self.setup: Setup | None = None
        self.num_steps = 0
        self.is_done = groups.device.type != "cuda"  # only its errors count on a CPU
        try:
            self.setup = setup_of(config, args, groups.world_size, groups.device.type)
        # No run ends because it could not be predicted.
        except Exception as error:
            _warn(error)

    def plan(self) -> MemoryPlan | None:
        """Return the plan for this device, with the policies that the run uses if it has chosen; None
        if the run cannot be predicted."""
        chosen = self.checkpointing
        policies = chosen.policies if chosen is not None and chosen.is_settled else None
        if self.setup is None:
            return None
        try:
            return plan_memory(self.setup, free_memory(self.groups.device)[1], policies)
        except Exception as error:  # as above
            self.setup = None
            _warn(error)
            return None

    def start(self) -> None:
        """Log the plan of a run on a GPU in one line; on a CPU, return freed memory where it is scarce.

        Call it on every rank at the start of the run.
        """
        plan, device = self.plan(), self.groups.device
        if plan is None:
            return
        if device.type == "cuda":
            logger.info("memory planned for each GPU: %s", plan.summary())
            warn_of_host_memory(host_parts(plan.setup, plan.policies))
            return
        held = psutil.Process().memory_info().rss
        if _MOST_WITH_GAPS * plan.peak > free_memory(device)[0] + held:
            return_freed_memory()
            logger.info(
                "freed memory goes back to the system at once, because it is scarce; steps take longer; "
                "memory planned for each process: %s",
                plan.summary(),
            )

    def after_step(self, step: int) -> None:
        """Log prediction and peak of one step on a GPU, whose allocator counts."""
        self.num_steps += 1
        device, measured = self.groups.device, _MEASURED_STEP
        if self.args.activation_checkpointing == "auto":
            measured += 1  # the policies change after the second step
        if self.num_steps < measured:
            torch.cuda.reset_peak_memory_stats(device)
            return
        self.is_done = True
        plan = self.plan() if self.groups.is_main else None
        if plan is None:
            return
        logger.info(
            "memory of a step: %.1f GiB were predicted and %.1f used (%.1f reserved)",
            plan.peak / GIB,
            torch.cuda.max_memory_allocated(device) / GIB,
            torch.cuda.max_memory_reserved(device) / GIB,
        )
        gpu = gpu_of(device)
        time = None if gpu is None else predict_step(plan, gpu)
        if time is not None:
            logger.info("a step is predicted to take %.0f ms: %s", 1000 * time.seconds, time.source)

    def close(self, error: BaseException | None) -> None:
        if error is not None and is_out_of_memory(error):
            raise RuntimeError(f"out of memory: {self.explain(error.__traceback__)}") from None

    def explain(self, traceback: TracebackType | None) -> str:
        """Return phase, the plan's parts, the changes that fit, and what is kept, in one line."""
        plan, phase = self.plan(), CLOCK.phase
        block = block_of(traceback, self.blocks)
        where = f"{phase}, block {block}" if block is not None else phase
        parts = [f"it happened in step {CLOCK.step + 1}, phase {where}"]
        if self.checkpointing is not None:
            parts.append(f"activation checkpointing: {describe(self.checkpointing.policies)}")
        if plan is not None:
            planned = next((p for p in plan.phases if p.name == _PHASES.get(phase)), plan.phases[0])
            sizes = ", ".join(f"{name} {n / GIB:.1f}" for name, n in planned.parts.items() if n)
            parts.append(f"planned for {planned.name}: {planned.total / GIB:.1f} GiB ({sizes})")
            # The device has less for this run than the plan takes, whatever it says.
            smaller = replace(plan, card=min(plan.card or plan.peak, int(_SMALLER * plan.peak)))
            found = climb(self.config, self.args, smaller, has_gpus=True)
            if found.plan.fits:
                parts.append(f"these changes take less: {found.describe()}")
            else:
                parts.append("use more GPUs, fewer frames or a smaller size")
        snapshot = write_snapshot(self.folder)
        if snapshot is not None:
            parts.append(f"the allocator's history is in {snapshot}")
        return "; ".join([*parts, self.how_to_resume()])


def warn_of_host_memory(parts: Mapping[str, int]) -> None:
    """Warn if the ranks of this machine keep more in host memory than it has. parts: bytes of one rank."""
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed, has = num_ranks * sum(parts.values()), psutil.virtual_memory().total
    if needed > usable(has):
        sizes = ", ".join(f"{name} {n / GIB:.1f}" for name, n in parts.items() if n)
        logger.warning(
            "%d ranks of this machine keep %.1f GiB in host memory (each %s), but it has %.1f GiB: "
            "offload less (docs/small_cards.md), or start fewer ranks",
            num_ranks,
            needed / GIB,
            sizes,
            has / GIB,
        )


def _warn(error: Exception) -> None:
    logger.warning(
        "the memory of the run cannot be predicted (%s: %s)", type(error).__name__, error
    )


def block_of(traceback: TracebackType | None, blocks: list[Block]) -> int | None:
    """Return the number of the block that ran when an error was raised, forward or recomputed."""
    found, places = None, {id(block): i for i, block in enumerate(blocks)}
    while traceback is not None:
        found = places.get(id(traceback.tb_frame.f_locals.get("self")), found)
        traceback = traceback.tb_next
    return found


def write_snapshot(folder: Path) -> Path | None:
    """Write the allocator's history, as PyTorch's memory viewer reads it, if it was recorded."""
    # Only PyTorch with CUDA has this function.
    is_recorded: Any = getattr(torch._C, "_cuda_isHistoryEnabled", lambda: False)
    if not (torch.cuda.is_initialized() and is_recorded()):
        return None
    path = folder / "memory_snapshot.pickle"
    torch.cuda.memory._dump_snapshot(str(path))
    return path

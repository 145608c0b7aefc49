"""args.activation_checkpointing of a run: applies a policy, or for `auto` measures a step and chooses.

`auto` starts with full and measures the second step (the first one allocates what libraries keep). Then
each block gets the policy that recomputes least and still fits by the plan, corrected by the measurement.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from cogfast.config.arguments import PolicyChoice
from cogfast.core.device_memory import free_memory
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.transformer import DiffusionTransformer
from cogfast.plan.memory import (
    GIB,
    Setup,
    base_parts,
    choose_policies,
    gap_bytes,
    training_phase,
    usable,
    with_shape,
)
from cogfast.train.memory.activation_checkpointing import (
    LADDER,
    Policy,
    apply_policies,
    describe,
)
from cogfast.train.memory.offloaded_activations import OffloadedActivations
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

_STEPS_BEFORE_AUTO = 2


class ActivationCheckpointing(Watcher):
    """Chooses and applies the policies of a run."""

    def __init__(
        self,
        transformer: DiffusionTransformer,
        choice: PolicyChoice,
        groups: ProcessGroups,
        setup: Setup | None,
        is_compiled: bool = False,
        has_buckets: bool = False,
        is_offloaded: bool = False,
    ) -> None:
        """Apply the policies of `choice`.

        setup: of the run; None if it cannot be predicted, in which case `auto` stays at full.
        is_compiled: args.compile. has_buckets: data.params.buckets is set, so that `auto` plans for the
        micro-batch of the setup, the largest one; otherwise for the largest one that has run.
        is_offloaded: args.offload_activations.
        """
        self.transformer, self.choice, self.groups = transformer, choice, groups
        self.setup, self.is_compiled = setup, is_compiled
        self.offload = (
            OffloadedActivations(len(transformer.blocks), groups.device) if is_offloaded else None
        )
        self.is_settled = choice != "auto"
        # (B, S) of the last micro-batch's blocks, and of the one to plan for.
        self.shape: tuple[int, int] | None = None
        self.largest = setup.planned_shape if has_buckets and setup is not None else (0, 0)
        self.num_steps = 0  # completed optimizer steps
        # Measured peak of a step minus the planned one, in bytes. Measured on a GPU.
        self.excess: int | None = None
        first: tuple[Policy] = ("full" if choice == "auto" else choice,)
        self._use(first * len(transformer.blocks))

    def _use(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        apply_policies(
            self.transformer, policies, self.is_compiled, self._before_blocks, self.offload
        )

    def _before_blocks(self, hidden: Tensor) -> None:
        """Record the shape of the blocks' input [B, S, M]."""
        self.shape = shape = (hidden.shape[0], hidden.shape[1])
        if shape[0] * shape[1] > self.largest[0] * self.largest[1]:
            self.largest = shape
        if not self.is_settled and self.groups.device.type == "cuda":
            # From here on the peak is that of this micro-batch alone.
            torch.cuda.reset_peak_memory_stats(self.groups.device)

    def after_backward(self, loss: Tensor) -> None:
        """Measure the step's peak memory. Call it after each micro-batch's backward pass."""
        device = self.groups.device
        if self.is_settled or device.type != "cuda" or self.setup is None or self.shape is None:
            return
        planned = training_phase(with_shape(self.setup, self.shape), self.policies).total
        excess = torch.cuda.max_memory_allocated(device) - planned
        self.excess = excess if self.excess is None else max(self.excess, excess)

    def after_step(self, step: int) -> None:
        """Let `auto` choose after the second step, the same on all ranks. Call it after each
        optimizer step."""
        self.num_steps += 1
        if self.is_settled or self.shape is None:
            return
        if self.num_steps < _STEPS_BEFORE_AUTO:
            # The first step also allocates what libraries keep: drop its measurement.
            self.excess = None
            return
        self.is_settled = True
        policies, setup = self.policies, None
        if self.setup is not None:
            setup = with_shape(self.setup, self.largest)
            policies = choose_policies(setup, self._budget(setup))
        # The rank with the least memory decides, so that every rank uses the same policies.
        self._use(min(self.groups.gather(policies), key=_rungs))
        if setup is None:
            logger.warning(
                "activation checkpointing: %s, because the memory of the run cannot be predicted; "
                "args.activation_checkpointing=attention_kept, pointwise or none keeps more",
                describe(self.policies),
            )
            return
        total = free_memory(self.groups.device)[1]
        left = self._budget(setup) - training_phase(setup, self.policies).total
        logger.info(
            "activation checkpointing: %s; predicted peak %.1f of %.1f GiB",
            describe(self.policies),
            (usable(total) - left) / GIB,
            total / GIB,
        )

    def _budget(self, setup: Setup) -> int:
        """Return the bytes that the plan of a step may have so that the step fits."""
        device = self.groups.device
        free, total = free_memory(device)
        # The bytes that are allocated, which the plan of a step has, too. No allocator counts on a CPU.
        is_gpu = device.type == "cuda"
        held = torch.cuda.memory_allocated(device) if is_gpu else sum(base_parts(setup).values())
        return free - total + usable(total) + held - gap_bytes(setup) - (self.excess or 0)


def _rungs(policies: Sequence[Policy]) -> int:
    """Return how far blocks have climbed LADDER in all; what choose_policies returns has an order."""
    return sum(map(LADDER.index, policies))

"""Selective activation checkpointing, with a policy for each block.

    none            keep everything
    pointwise       keep the results of matmuls and attention; recompute norms, rotation and gelu
    attention_kept  keep attention's output and lse; recompute the rest
    full            keep only the block's input

All policies give the same gradients, bit for bit where the kernels are deterministic. `auto` starts
with full and measures the second step (the first one allocates what libraries keep). Then each block
gets the policy that recomputes least and still fits by the plan (plan/memory.py), corrected by the
measurement. With args.compile, pointwise and attention_kept run inside the compiled graph and guide the
compiler's partitioner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cogfast.kernels.quantized.quantized_linear  # noqa: F401  registers _FROZEN
from cogfast.kernels.flash_attention import keeps_output
from cogfast.model.block import Block
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.schema.arguments import PolicyChoice
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.memory.offloaded_activations import (
    Keeps,
    OffloadedActivations,
    selective_contexts,
)
from cogfast.train.plan.activations import LADDER, Policy, describe, free_memory
from cogfast.train.plan.memory import (
    GIB,
    Setup,
    base_bytes,
    choose_policies,
    gap_bytes,
    training_phase,
    usable,
    with_rows,
)
from cogfast.train.run.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

_STEPS_BEFORE_AUTO = 2
# A matmul counts as low-rank if its inner dim is this many times smaller than both outer dims.
# Recomputing it is as cheap as reading its result.
_LOW_RANK = 4

_aten = torch.ops.aten
# Attention in plain PyTorch, which short sequences in half precision run on a CPU, has no op of its own.
_PLAIN_ATTENTION = {_aten.bmm.default, _aten.baddbmm.default}
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.linear.default}
_FROZEN = {torch.ops.cogfast.int8_linear.default, torch.ops.cogfast.fp8_linear.default}


def _is_attention(op: Any, *args: Any) -> bool:
    return op in _PLAIN_ATTENTION or keeps_output(op)


def _is_product(op: Any, *args: Any) -> bool:
    is_product = op in _MATMULS and not _is_low_rank(*args[-2:])
    return _is_attention(op) or op in _FROZEN or is_product


def _is_low_rank(a: Tensor, b: Tensor) -> bool:
    """Return whether k is far below n and m in the product of a [n, k] and b [k, m].

    LoRA's second product is low-rank. Keeping its result would cost as much memory as keeping the
    result of the linear that it is added to.
    """
    return a.ndim == 2 and _LOW_RANK * a.shape[1] < min(a.shape[0], b.shape[1])


# Policy -> whether it keeps the results of an op
_KEEPS: dict[Policy, Keeps] = {"attention_kept": _is_attention, "pointwise": _is_product}


def _contexts(keeps: Keeps) -> tuple[Any, Any]:
    def choose(ctx: object, op: object, *args: Any, **kwargs: object) -> CheckpointPolicy:
        is_kept = keeps(op, *args)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def _options(keep_rng: bool) -> dict[str, Any]:
    # Only the non-reentrant version accepts a context_fn.
    return {"use_reentrant": False, "preserve_rng_state": keep_rng}


@cache
def _runner(policy: Policy, keep_rng: bool, is_compiled: bool) -> Callable[..., Tensor]:
    """Return a function of a block and its inputs. Blocks with one policy share it and its graphs."""
    options = _options(keep_rng)
    if policy in _KEEPS:
        options["context_fn"] = partial(_contexts, _KEEPS[policy])
    if not is_compiled or policy == "full":
        # full needs no graph of its own: it calls the compiled block twice.
        return partial(checkpoint, **options)

    def run(block: Block, *inputs: object) -> Tensor:
        return checkpoint(block.forward, *inputs, **options)

    return torch.compile(run, fullgraph=True, dynamic=None)


def _offloading_call(
    block: nn.Module,
    number: int,
    policy: Policy,
    keep_rng: bool,
    offload: OffloadedActivations,
) -> BlockCall:
    """Return a call of a block under a policy that keeps activations in host memory."""

    def call(hidden: Tensor, *others: Any) -> Tensor:
        kept = offload.begin_block(number, hidden.shape[:2].numel())
        options = _options(keep_rng)
        if policy in _KEEPS:
            options["context_fn"] = partial(selective_contexts, kept, _KEEPS[policy])
        with kept.hooks():  # the checkpoint saves the block's inputs by them
            return checkpoint(block, hidden, *others, **options)

    return call


def apply_policies(
    transformer: DiffusionTransformer,
    policies: Sequence[Policy],
    is_compiled: bool = False,
    before: Callable[[Tensor], None] | None = None,
    offload: OffloadedActivations | None = None,
) -> None:
    """Run each block under its policy while the transformer is in training mode.

    before: called before the first block with its input, [B, S, M]. offload: moves what the policies
    keep to host memory; no policy may be `none`, and is_compiled allows `full` alone.
    """
    keep_rng = transformer.config.lora_dropout > 0  # no other op in a block uses random numbers
    calls: list[BlockCall] = []
    for number, (block, policy) in enumerate(zip(transformer.blocks, policies, strict=True)):
        if offload is not None:
            assert policy != "none" and not (is_compiled and policy in _KEEPS), policy
            calls.append(_offloading_call(block, number, policy, keep_rng, offload))
        else:
            runner = partial(_runner(policy, keep_rng, is_compiled), block)
            calls.append(block if policy == "none" else runner)
    transformer.use_calls(calls, before)


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
        # Rows (B S) of the last micro-batch, and of the one to plan for.
        self.num_rows = 0
        self.most_rows = setup.layer.num_rows if has_buckets and setup is not None else 0
        self.num_steps = 0  # completed optimizer steps
        # Measured peak of a step minus the planned one, in bytes. Measured on a GPU.
        self.excess: int | None = None
        first: Policy = "full" if choice == "auto" else choice
        policies: list[Policy] = [first] * len(transformer.blocks)
        self._use(policies)

    def _use(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        apply_policies(
            self.transformer, policies, self.is_compiled, self._before_blocks, self.offload
        )

    def _before_blocks(self, hidden: Tensor) -> None:
        """Record the rows of the blocks' input [B, S, M]."""
        self.num_rows = hidden.shape[:2].numel()
        self.most_rows = max(self.most_rows, self.num_rows)
        if not self.is_settled and self.groups.device.type == "cuda":
            # From here on the peak is that of this micro-batch alone.
            torch.cuda.reset_peak_memory_stats(self.groups.device)

    def after_backward(self, loss: Tensor) -> None:
        """Measure the step's peak memory. Call it after each micro-batch's backward pass."""
        device = self.groups.device
        if self.is_settled or device.type != "cuda" or self.setup is None or not self.num_rows:
            return
        planned = training_phase(with_rows(self.setup, self.num_rows), self.policies).total
        excess = torch.cuda.max_memory_allocated(device) - planned
        self.excess = excess if self.excess is None else max(self.excess, excess)

    def after_step(self, step: int) -> None:
        """Let `auto` choose after the second step, the same on all ranks. Call it after each
        optimizer step."""
        self.num_steps += 1
        if self.is_settled or not self.num_rows:
            return
        if self.num_steps < _STEPS_BEFORE_AUTO:
            # The first step also allocates what libraries keep: drop its measurement.
            self.excess = None
            return
        self.is_settled = True
        policies, setup = self.policies, None
        if self.setup is not None:
            setup = with_rows(self.setup, self.most_rows)
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
        free, total = free_memory(self.groups.device)
        held = self._held(setup)
        return free - total + usable(total) + held - gap_bytes(setup) - (self.excess or 0)

    def _held(self, setup: Setup) -> int:
        """Return the bytes that are allocated, which the plan of a step has, too."""
        device = self.groups.device
        # No allocator counts on a CPU.
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else base_bytes(setup)

    def advice(self) -> str:
        """Name the policy that would fit after an out-of-memory error, or say that none would."""
        smaller = (
            "a smaller deepspeed.train_micro_batch_size_per_gpu, fewer frames or a smaller size, or "
            "more GPUs to share the optimizer's state"
        )
        if not self.num_rows:
            return f"no block has run yet, so activation checkpointing cannot help; use {smaller}"
        used = f"args.activation_checkpointing={self.choice} ({describe(self.policies)})"
        if set(self.policies) == {"full"}:
            return f"{used} keeps the least of all policies; use {smaller}"
        if self.setup is None:
            return f"{used}; full keeps the least of all policies: set it, and use {smaller}"
        setup = with_rows(self.setup, self.most_rows)
        kept, budget = _kept(setup, self.policies), self._budget(setup)
        # From the policy that keeps most: recommend the fastest one that fits.
        policies: list[Policy]
        for policy in reversed(LADDER):
            policies = [policy] * len(self.policies)
            less = _kept(setup, policies)
            if less < kept and training_phase(setup, policies).total <= budget:
                return (
                    f"{used} keeps {kept / GIB:.1f} GiB of activations; {policy} keeps "
                    f"{less / GIB:.1f} GiB and would fit: set args.activation_checkpointing={policy}"
                )
        # The budget leaves memory for gaps, without which full may still fit.
        policies = ["full"] * len(self.policies)
        least = training_phase(setup, policies).total + (self.excess or 0)
        free, _ = free_memory(self.groups.device)
        has = free + self._held(setup)
        sizes = (
            f"a step takes {least / GIB:.1f} of the {has / GIB:.1f} GiB that this process can have"
        )
        if least <= has:
            return (
                f"{used} keeps {kept / GIB:.1f} GiB of activations; full keeps the least, and with it "
                f"{sizes}: set args.activation_checkpointing=full, or use {smaller}"
            )
        return (
            f"{used} keeps {kept / GIB:.1f} GiB of activations; not even full, which keeps the least, "
            f"would fit, since with it {sizes}; set it, and use {smaller}"
        )


def _rungs(policies: Sequence[Policy]) -> int:
    """Return how far blocks have climbed LADDER in all; what choose_policies returns has an order."""
    return sum(map(LADDER.index, policies))


def _kept(setup: Setup, policies: Sequence[Policy]) -> int:
    return sum(map(setup.layer.kept, policies))

"""Selective activation checkpointing, with a policy for each block.

    none            keep everything
    pointwise       keep the results of matmuls and attention; recompute norms, rotation and gelu
    attention_kept  keep attention's output and lse; recompute the rest
    full            keep only the block's input

All policies give the same gradients, bit for bit where the kernels are deterministic. `auto` starts
with full and measures the second step (the first one allocates gradients and optimizer state). Then
each block gets the policy that recomputes least and still fits (plan/activations.py). With args.compile,
pointwise and attention_kept run inside the compiled graph and guide the compiler's partitioner.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cogfast.kernels.attention.flash_attention  # noqa: F401  registers the op that _ATTENTION names
import cogfast.kernels.int8_linear  # noqa: F401  registers _FROZEN
from cogfast.model.block import Block
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.sequence_parallel import SequenceParallelBlock
from cogfast.train.distributed.tensor_parallel import ParallelLinear, ParallelLora
from cogfast.train.memory.offloaded_activations import (
    Keeps,
    OffloadedActivations,
    selective_contexts,
)
from cogfast.train.plan.activations import (
    LADDER,
    MARGIN,
    LayerShape,
    Policy,
    describe,
    free_memory,
    kept_by_all,
    plan_layers,
)

logger = logging.getLogger(__name__)

_STEPS_BEFORE_AUTO = 2
# A matmul counts as low-rank if its inner dim is this many times smaller than both outer dims.
# Recomputing it is as cheap as reading its result.
_LOW_RANK = 4

_aten = torch.ops.aten
# bmm and baddbmm: on a CPU, short sequences in half precision run attention in plain PyTorch, which
# has no op of its own.
_ATTENTION = {torch.ops.cogfast.flash_attention.default, _aten.bmm.default, _aten.baddbmm.default}
_MATMULS = {_aten.mm.default, _aten.addmm.default, _aten.linear.default}
_FROZEN = torch.ops.cogfast.int8_linear.default


def _is_attention(op: object, *args: Any) -> bool:
    return op in _ATTENTION


def _is_product(op: object, *args: Any) -> bool:
    is_product = op in _MATMULS and not _is_low_rank(*args[-2:])
    return op in _ATTENTION or op is _FROZEN or is_product


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


class ActivationCheckpointing:
    """Chooses and applies the policies of a run."""

    def __init__(
        self,
        transformer: DiffusionTransformer,
        choice: Policy | Literal["auto"],
        groups: ProcessGroups,
        is_compiled: bool = False,
        most_rows: int = 0,
        is_offloaded: bool = False,
    ) -> None:
        """Apply the policies of `choice`.

        is_compiled: args.compile. most_rows: B S of the run's largest micro-batch; 0 if unknown, in
        which case `auto` plans for the last micro-batch. is_offloaded: args.offload_activations.
        """
        self.transformer, self.choice, self.groups = transformer, choice, groups
        self.is_compiled, self.most_rows = is_compiled, most_rows
        self.offload = (
            OffloadedActivations(len(transformer.blocks), groups.device) if is_offloaded else None
        )
        self.is_settled = choice != "auto"
        self.layer: LayerShape | None = None  # shape of the last micro-batch
        self.num_steps = 0  # completed optimizer steps
        self.is_inside_step = False
        # Bytes allocated before the first block of a step runs.
        self.bytes_before = 0
        # Peak bytes that a step adds, without the activations that blocks keep. Measured on a GPU.
        self.bytes_on_top: int | None = None
        trained = (p for p in transformer.parameters() if p.requires_grad)
        self.gradient_bytes = sum(p.numel() * p.element_size() for p in trained)
        first: Policy = "full" if choice == "auto" else choice
        policies: list[Policy] = [first] * len(transformer.blocks)
        self._use(policies)

    def _use(self, policies: Sequence[Policy]) -> None:
        self.policies = tuple(policies)
        apply_policies(
            self.transformer, policies, self.is_compiled, self._before_blocks, self.offload
        )

    def _before_blocks(self, hidden: Tensor) -> None:
        """Record the blocks' input [B, S, M] and the memory in use before any activation is kept."""
        device = self.groups.device
        if self.layer is None or hidden.shape[:2].numel() != self.layer.num_rows:
            self.layer = layer_shape(
                self.transformer, hidden.shape[:2].numel(), hidden.element_size()
            )
        if device.type == "cuda":
            # The first micro-batch of a step: later ones would count its gradients.
            if not self.is_inside_step:
                self.bytes_before = torch.cuda.memory_allocated(device)
            if not self.is_settled:
                # From here on the peak is that of this micro-batch alone.
                torch.cuda.reset_peak_memory_stats(device)
        self.is_inside_step = True

    def after_backward(self) -> None:
        """Measure the step's peak memory. Call it after each micro-batch's backward pass."""
        device = self.groups.device
        if not self.is_settled and self.layer is not None and device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(device) - self.bytes_before
            on_top = peak - kept_by_all(self.layer, self.policies)
            self.bytes_on_top = max(self.bytes_on_top or 0, on_top)

    def after_step(self) -> None:
        """Let `auto` choose after the second step, the same on all ranks. Call it after each
        optimizer step."""
        self.is_inside_step = False
        self.num_steps += 1
        if self.is_settled or self.layer is None:
            return
        if self.num_steps < _STEPS_BEFORE_AUTO:
            # The first step also allocates gradients and optimizer state: drop its measurement.
            self.bytes_on_top = None
            return
        self.is_settled = True
        free, total = free_memory(self.groups.device)
        layer = self.layer = self._look_ahead(self.layer)
        here = free - int(MARGIN * total) - self._on_top(layer)
        # The rank with the least memory decides, so that every rank uses the same policies.
        ladder = LADDER if self.offload is None else LADDER[:2]
        self._use(plan_layers(layer, len(self.policies), min(self.groups.gather(here)), ladder))
        peak = total - free + self._need(layer, self.policies)
        logger.info(
            "activation checkpointing: %s; predicted peak %.1f of %.1f GiB",
            describe(self.policies),
            peak / 2**30,
            total / 2**30,
        )

    def _look_ahead(self, measured: LayerShape) -> LayerShape:
        """Scale the measurement to the run's largest micro-batch, and return its shape."""
        layer = replace(measured, num_rows=max(measured.num_rows, self.most_rows))
        if self.bytes_on_top is not None:
            # Temporary activations grow with the number of rows; gradients do not.
            of_rows = max(0, self.bytes_on_top - self.gradient_bytes)
            self.bytes_on_top += of_rows * layer.num_rows // measured.num_rows - of_rows
        return layer

    def _on_top(self, layer: LayerShape) -> int:
        if self.bytes_on_top is not None:
            return self.bytes_on_top
        return layer.live + self.gradient_bytes

    def _need(self, layer: LayerShape, policies: Sequence[Policy]) -> int:
        """Return the bytes that a step adds to those in use before it."""
        return self._on_top(layer) + kept_by_all(layer, policies)

    def advice(self) -> str:
        """Name the policy that would fit after an out-of-memory error, or say that none would."""
        smaller = (
            "a smaller deepspeed.train_micro_batch_size_per_gpu, fewer frames or a smaller size, or "
            "more GPUs to share the optimizer's state"
        )
        if self.layer is None:
            return f"no block has run yet, so activation checkpointing cannot help; use {smaller}"
        free, total = free_memory(self.groups.device)
        if self.groups.device.type == "cuda":
            # bytes_before, which is subtracted below, is part of what is allocated now.
            free += torch.cuda.memory_allocated(self.groups.device)
        free -= int(MARGIN * total) + self.bytes_before
        used = f"args.activation_checkpointing={self.choice} ({describe(self.policies)})"
        kept = kept_by_all(self.layer, self.policies)
        # From the policy that keeps most: recommend the fastest one that fits.
        for policy in reversed(LADDER):
            policies: list[Policy] = [policy] * len(self.policies)
            less = kept_by_all(self.layer, policies)
            if less < kept and self._need(self.layer, policies) <= free:
                return (
                    f"{used} keeps {kept / 2**30:.1f} GiB of activations; {policy} keeps "
                    f"{less / 2**30:.1f} GiB and would fit: set args.activation_checkpointing={policy}"
                )
        if set(self.policies) == {"full"}:
            return f"{used} keeps the least of all policies; use {smaller}"
        return (
            f"{used} keeps {kept / 2**30:.1f} GiB of activations; not even full, which keeps the "
            f"least, would fit; set it, and use {smaller}"
        )


def layer_shape(
    transformer: DiffusionTransformer, num_rows: int, bytes_per_number: int
) -> LayerShape:
    """Return the shape of a block for num_rows (B S) rows of activations. Weights may be on meta."""
    config, block = transformer.config, transformer.blocks[0]
    fc1 = block.get_submodule("fc1")
    named = transformer.blocks.named_parameters()
    return LayerShape(
        num_rows=num_rows,
        width=config.hidden_size,
        num_heads=config.num_attention_heads,
        bytes_per_number=bytes_per_number,
        num_parts=fc1.group.size if isinstance(fc1, ParallelLinear | ParallelLora) else 1,
        splits_rows=isinstance(block, SequenceParallelBlock),
        adapter_columns=len(config.lora_targets) * (config.lora_rank or 0),
        adapts_fc1="ff.net.0.proj" in config.lora_targets,
        adapts_fc2="ff.net.2" in config.lora_targets,
        is_frozen=not any(p.requires_grad and not is_lora_parameter(name) for name, p in named),
        dequantizes=any(b.dtype == torch.int8 for b in block.buffers()),
    )

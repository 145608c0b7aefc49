"""Bytes of weights, optimizer state and gradients under ZeRO, and how gradients grow in a backward pass.

Follows DeepSpeed's stages 1 to 3 and FusedStep (train/distributed/fused_step.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from cogfast.kernels.quantized.moment_codes import num_blocks
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.memory.host_blocks import NUM_SLOTS, num_offloaded
from cogfast.train.memory.host_ema import DEVICE_BYTES
from cogfast.train.memory.quantized_base import base_linears

_FLOAT32 = 4
_DEFAULT_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements
_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Numbers of elements on one rank, with tensor parallelism of its shard.

    blocks: trained elements of each block. others: trained elements outside of the blocks.
    buffer_bytes: of position tables. base, base_rows: elements and rows of a block's linears, if all of
    them are frozen, else 0. is_quantized: args.quantize_base. num_offloaded: args.offload_blocks.
    """

    num_weights: int
    blocks: tuple[int, ...]
    others: int
    largest: int  # trained parameter
    buffer_bytes: int = 0
    base: int = 0
    base_rows: int = 0
    is_quantized: bool = False
    num_offloaded: int = 0

    @classmethod
    def of(cls, transformer: DiffusionTransformer) -> ModelSize:
        trained = lambda module: sum(p.numel() for p in module.parameters() if p.requires_grad)
        blocks = tuple(trained(block) for block in transformer.blocks)
        sizes = [p.numel() for p in transformer.parameters() if p.requires_grad]
        linears = [linear for _, linear in base_linears(transformer)]
        held = [m.weight.numel() for m in linears if not isinstance(m.weight, nn.Parameter)]
        is_frozen = not any(linear.weight.requires_grad for linear in linears)
        own = linears[: len(linears) // len(blocks)] if is_frozen else []
        return cls(
            num_weights=sum(p.numel() for p in transformer.parameters()) + sum(held),
            blocks=blocks,
            others=sum(sizes) - sum(blocks),
            largest=max(sizes, default=0),
            buffer_bytes=sum(b.nbytes for b in transformer.buffers())
            - sum(b.nbytes for linear in linears for b in linear.buffers()),
            base=sum(linear.weight.numel() for linear in own),
            base_rows=sum(len(linear.weight) for linear in own),
            is_quantized=linears[0].weight.dtype == torch.int8,
            num_offloaded=num_offloaded(transformer),
        )

    @property
    def num_trained(self) -> int:
        return sum(self.blocks) + self.others

    @property
    def num_partitioned(self) -> int:
        """Return the weights that are parameters, which ZeRO-3 partitions."""
        num_held = len(self.blocks) if self.is_quantized else self.num_offloaded
        return self.num_weights - num_held * self.base

    def held_bytes(self, weight_bytes: int) -> int:
        """Return the bytes on the device of weights that are no parameters."""
        resident = len(self.blocks) - self.num_offloaded if self.is_quantized else 0
        slots = min(NUM_SLOTS, self.num_offloaded)
        return (resident + slots) * self._base_bytes(weight_bytes)

    def host_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of blocks in host memory."""
        return self.num_offloaded * self._base_bytes(weight_bytes)

    def _base_bytes(self, weight_bytes: int) -> int:
        """Return the bytes of a block's frozen linears."""
        if self.is_quantized:
            return self.base + _FLOAT32 * self.base_rows
        return weight_bytes * self.base


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroRules:
    """Rules by which ZeRO keeps state.

    data_size: data-parallel ranks. num_moments: of the optimizer, float32. is_fused: FusedStep replaces
    DeepSpeed's step. is_offloaded: the optimizer's state is in host memory. has_8bit_moments,
    has_host_ema: args.optimizer_moments and args.ema_device. sum_bytes: size of a number
    in which gradients are accumulated.
    """

    stage: int
    data_size: int
    weight_bytes: int
    sum_bytes: int
    num_moments: int = 2
    has_8bit_moments: bool = False
    has_ema: bool = True
    has_host_ema: bool = False
    is_fused: bool = True
    is_offloaded: bool = False
    overlaps: bool = False
    accumulation: int = 1
    bucket: int = _DEFAULT_BUCKET
    copies_gradients: bool = False  # the optimizer reads float32 gradients

    @property
    def is_alone(self) -> bool:
        """Whether gradients stay where autograd put them until a bucket of them is complete."""
        return self.is_fused and self.data_size == 1 and self.sum_bytes == self.weight_bytes

    def partition(self, numel: int) -> int:
        return -(-numel // self.data_size)


@dataclass(frozen=True, slots=True)
class State:
    """Bytes of one rank that last from step to step."""

    weights: int
    master: int
    moments: int
    ema: int

    @property
    def total(self) -> int:
        return self.weights + self.master + self.moments + self.ema


def lasting_state(model: ModelSize, rules: ZeroRules) -> State:
    """Return what a rank keeps from step to step, after the first one."""
    numel = rules.partition(model.num_trained) * (not rules.is_offloaded)
    part = numel * _FLOAT32
    # A byte per element and an int16 per block.
    moment = numel + 2 * num_blocks(numel) if rules.has_8bit_moments else part
    average = DEVICE_BYTES if rules.has_host_ema else part
    num_held, held = model.num_partitioned, model.held_bytes(rules.weight_bytes)
    if rules.stage == 3:
        num_held = rules.partition(num_held)
    return State(
        weights=num_held * rules.weight_bytes + held + model.buffer_bytes,
        master=part,
        moments=rules.num_moments * moment,
        ema=average if rules.has_ema else 0,
    )


def host_ema_bytes(model: ModelSize, rules: ZeroRules) -> int:
    """Return the bytes of the EMA in host memory."""
    return rules.partition(model.num_trained) * _FLOAT32 * rules.has_host_ema


@dataclass(frozen=True, slots=True)
class GradientPoint:
    """Bytes of gradients and of ZeRO's buffers at a moment of the backward pass.

    block: the block whose backward pass runs next; -1 after the last one. transient: what is needed
    for a moment while no block runs, on top of both.
    """

    block: int
    gradients: int
    buffers: int
    transient: int = 0


def backward_points(model: ModelSize, rules: ZeroRules) -> list[GradientPoint]:
    """Follow the gradients of the last micro-batch of a step, from the output to the input."""
    number = rules.weight_bytes
    part = rules.partition(model.num_trained)
    # Micro-batches before the last one left their sum.
    is_later = rules.accumulation > 1
    if rules.stage == 3:
        return _stage3_points(model, rules)
    if rules.is_alone and not (rules.stage == 1 and not rules.overlaps):
        return _alone_points(model, rules, part * number * is_later)
    if rules.stage == 1 and not rules.overlaps:
        # Every gradient stays until the end of the step.
        points, arrived = [], 0
        for block, numel in _arrivals(model):
            points.append(GradientPoint(block, arrived * number, 0))
            arrived += numel
        flat = part * rules.sum_bytes
        buffers = 0 if rules.is_alone else rules.bucket * number
        points.append(GradientPoint(-1, arrived * number, buffers, flat))
        return points
    # Gradients are copied into a bucket as they arrive, and a full bucket is reduced.
    buffers = rules.bucket * number * (2 if rules.overlaps else 1)
    flat = part * rules.sum_bytes
    before = flat if is_later else 0
    # Sums in another dtype are added to one partition; others get a partition for each micro-batch.
    is_summed_in_place = rules.sum_bytes != number
    points, filled, held = [], 0, 0
    for block, numel in _arrivals(model):
        # A reduction joins the slices of a bucket in new memory.
        transient = 0
        while filled + numel > rules.bucket and filled:
            transient = min(filled, rules.bucket) * number
            filled, held = 0, flat
        points.append(_point(block, before, held, is_summed_in_place, buffers, transient))
        filled += numel
    last = min(filled, rules.bucket) * number
    points.append(_point(-1, before, flat, is_summed_in_place, buffers, last))
    return points


def _point(
    block: int, before: int, held: int, is_in_place: bool, buffers: int, transient: int
) -> GradientPoint:
    total = max(before, held) if is_in_place else before + held
    return GradientPoint(block, total, buffers, transient)


def _arrivals(model: ModelSize) -> list[tuple[int, int]]:
    """Return (block, trained elements) in the order of the backward pass."""
    return list(enumerate(model.blocks))[::-1]


def _alone_points(model: ModelSize, rules: ZeroRules, before: int) -> list[GradientPoint]:
    """Follow gradients that one rank keeps until they fill a bucket and are copied to their places."""
    number, flat = rules.weight_bytes, model.num_trained * rules.weight_bytes
    points, kept, held = [], 0, 0
    for block, numel in _arrivals(model):
        # The bucket's gradients and the partition are in memory together while they are copied.
        transient = 0
        if kept > rules.bucket:
            transient, kept, held = kept * number, 0, flat
        points.append(GradientPoint(block, before + held + kept * number, 0, transient))
        kept += numel
    points.append(GradientPoint(-1, before + flat, 0, kept * number))
    return points


def _stage3_points(model: ModelSize, rules: ZeroRules) -> list[GradientPoint]:
    """Estimate ZeRO-3: gathered weights, the reduction's bucket and the partition of gradients."""
    number = rules.weight_bytes
    # DeepSpeed keeps weights that are used again soon, which are those of the last blocks here.
    gathered = min(model.num_partitioned, _LIVE_PARAMETERS)
    flat = rules.partition(model.num_trained) * max(number, rules.sum_bytes)
    buffers = (rules.bucket + gathered) * number
    return [GradientPoint(block, flat, buffers) for block, _ in _arrivals(model)]


def step_bytes(model: ModelSize, rules: ZeroRules) -> int:
    """Return the bytes of gradients in the optimizer's step."""
    part = rules.partition(model.num_trained)
    if rules.is_offloaded:
        return model.largest * rules.weight_bytes
    num_bytes = part * rules.sum_bytes
    if rules.copies_gradients:
        # DeepSpeed flattens the gradients, and converts them to float32.
        num_bytes += part * _FLOAT32 + (0 if rules.is_fused else part * rules.sum_bytes)
    return num_bytes

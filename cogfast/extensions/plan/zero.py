"""Bytes of weights, optimizer state and gradients under ZeRO, and how gradients grow in a backward pass.

Follows DeepSpeed's stages 1 to 3 and FusedStep (distributed/fused_step.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cogfast.distributed.fused_step import order_by_blocks
from cogfast.extensions.memory.host_blocks import HostBlocks
from cogfast.extensions.memory.host_ema import DEVICE_BYTES
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.kernels.fused_ema_adam import num_blocks
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.shard import whole_shape
from cogfast.train.optimizer import muon_matrices, parameter_groups

_FLOAT32 = 4
DEFAULT_BUCKET = 500_000_000  # DeepSpeed's reduce_bucket_size, in elements
_MUON_PRODUCTS = 8  # matrices in bf16 that an iteration has at most
_LIVE_PARAMETERS = 1_000_000_000  # DeepSpeed's stage3_max_live_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroRules:
    """Rules by which ZeRO keeps state.

    data_size: ranks with the same weights. num_moments: of the optimizer, float32. is_fused: FusedStep
    replaces DeepSpeed's step. is_offloaded: the optimizer's state is in host memory. sum_bytes: size of
    a number in which gradients are accumulated. copies_gradients: the optimizer reads float32 gradients.
    is_muon: matrices have one moment, and are put together in bf16. section: zero_optimization.
    """

    stage: int
    data_size: int
    weight_bytes: int
    sum_bytes: int
    args: MemoryKeys = MemoryKeys()
    num_moments: int = 2
    has_ema: bool = True
    is_fused: bool = True
    is_offloaded: bool = False
    overlaps: bool = False
    accumulation: int = 1
    bucket: int = DEFAULT_BUCKET
    copies_gradients: bool = False
    is_muon: bool = False
    section: Mapping[str, Any] = field(default_factory=lambda: {"stage": 2})

    @property
    def is_alone(self) -> bool:
        """Whether gradients stay where autograd put them until a bucket of them is complete."""
        return self.is_fused and self.data_size == 1 and self.sum_bytes == self.weight_bytes

    def partition(self, numel: int) -> int:
        return -(-numel // self.data_size)


def num_trained(transformer: DiffusionTransformer) -> int:
    return sum(p.numel() for p in transformer.parameters() if p.requires_grad)


def offloaded_blocks(transformer: DiffusionTransformer) -> tuple[int, int]:
    """Return the bytes of blocks in host memory, and of the slots on the device that they are copied to."""
    source = transformer.runtime.source
    return (source.host_bytes, source.slot_bytes) if isinstance(source, HostBlocks) else (0, 0)


def lasting_state(transformer: DiffusionTransformer, rules: ZeroRules) -> dict[str, int]:
    """Return the bytes that a rank keeps on the device from step to step, by part, after the first one."""
    numel = rules.partition(num_trained(transformer)) * (not rules.is_offloaded)
    # 8-bit moments: a byte per element and an int16 per block.
    has_codes = rules.args.optimizer_moments == "8bit"
    moments = rules.num_moments * (numel + 2 * num_blocks(numel) if has_codes else numel * _FLOAT32)
    if rules.is_muon:
        matrices = sum(p.numel() for p in muon_matrices(transformer))
        moments -= rules.partition(matrices) * _FLOAT32
    average = DEVICE_BYTES if rules.args.ema_device == "cpu" else numel * _FLOAT32
    parameters = sum(p.numel() for p in transformer.parameters())
    parameters = rules.partition(parameters) if rules.stage == 3 else parameters
    # Position tables, and weights of 8 bits
    buffers = sum(b.nbytes for b in transformer.buffers())
    return {
        "weights": parameters * rules.weight_bytes + buffers + offloaded_blocks(transformer)[1],
        "master weights": numel * _FLOAT32,
        "moments": moments,
        "EMA": average if rules.has_ema else 0,
    }


class Gradients:
    """Bytes of gradients and of ZeRO's buffers in the backward pass of a step's last micro-batch.

    held, buffers: now. Micro-batches before the last one left their sum.
    """

    def __init__(self, transformer: DiffusionTransformer, rules: ZeroRules) -> None:
        self.rules, self.held, self.buffers = rules, 0, 0
        self._waiting = self._reduced = 0  # elements that wait for a reduction, and that had one
        moments = rules.args.optimizer_moments
        groups = parameter_groups(transformer, moments=moments, is_for_muon=rules.is_muon)
        groups = order_by_blocks(groups, transformer, rules.section, rules.data_size)
        # Elements of the optimizer's parameter groups, in the order of the backward pass.
        self._groups = [sum(p.numel() for p in group["params"]) for group in reversed(groups)]
        part, self._number = rules.partition(sum(self._groups)), rules.weight_bytes
        self._flat = part * rules.sum_bytes
        # Whether every gradient stays until the end of the step.
        self._stays = rules.stage == 1 and not rules.overlaps
        if rules.stage == 3:
            # An estimate: DeepSpeed keeps weights that are used again soon, those of the last blocks here.
            numel = sum(p.numel() for p in transformer.parameters())
            gathered = min(numel, _LIVE_PARAMETERS)
            self.held = part * max(self._number, rules.sum_bytes)
            self.buffers = (rules.bucket + gathered) * self._number
        elif not self._stays:
            self.held = self._flat if rules.accumulation > 1 else 0
            if not rules.is_alone:
                self.buffers = rules.bucket * self._number * (2 if rules.overlaps else 1)
        self._before = self._summed = self.held

    def arrive(self, numel: int) -> int:
        """Take a complete gradient; return the bytes that are needed for a moment beside the others."""
        rules, transient = self.rules, 0
        if rules.stage == 3:
            return 0
        if self._stays:
            self.held += numel * self._number
            return 0
        if not rules.is_alone and self._waiting and self._waiting + numel > rules.bucket:
            transient = self._reduce()
        self._waiting += numel
        if rules.is_alone:
            if self._waiting > rules.bucket:
                transient = self._reduce()
            self.held = self._summed + self._waiting * self._number
        return transient

    def finish(self) -> int:
        """End the backward pass; return the bytes that are needed for a moment beside the others."""
        if self.rules.stage == 3:
            return 0
        if self._stays:
            self.buffers = 0 if self.rules.is_alone else self.rules.bucket * self._number
            return self._flat
        self._reduced = math.inf  # parameters without a gradient have a place, too
        return self._reduce()

    def _reduce(self) -> int:
        """Move the waiting gradients to their partitions; both are in memory for a moment."""
        rules = self.rules
        at_once = self._waiting if rules.is_alone else min(self._waiting, rules.bucket)
        # Sums in another dtype are added in place; others get a partition for each micro-batch.
        is_in_place = rules.sum_bytes != self._number
        self._reduced += self._waiting
        flat, before = 0, 0
        for numel in self._groups:
            flat += rules.partition(numel) * rules.sum_bytes * (before < self._reduced)
            before += numel
        self._summed = max(self._before, flat) if is_in_place else self._before + flat
        self._waiting, self.held = 0, self._summed
        return at_once * self._number


def step_bytes(transformer: DiffusionTransformer, rules: ZeroRules) -> int:
    """Return the bytes of gradients in the optimizer's step."""
    if rules.is_offloaded:
        sizes = (p.numel() for p in transformer.parameters() if p.requires_grad)
        return max(sizes, default=0) * rules.weight_bytes
    part = rules.partition(num_trained(transformer))
    num_bytes = part * rules.sum_bytes
    if rules.copies_gradients:
        # DeepSpeed flattens the gradients, and converts them to float32.
        num_bytes += part * _FLOAT32 + (0 if rules.is_fused else part * rules.sum_bytes)
    if rules.is_muon:
        # A matrix of each rank, and the products of the iterations with one of them.
        largest = max((math.prod(whole_shape(p)) for p in muon_matrices(transformer)), default=0)
        num_bytes += largest * (rules.data_size + _MUON_PRODUCTS) * 2
    return num_bytes

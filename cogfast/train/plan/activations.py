"""Memory of activation checkpointing: the bytes that policies keep, and the free ones.

In units U of one activation [B, S, M]; tensor-parallel ranks share what is in brackets:

    full            h 1
    attention_kept  h 1, [attention 1, lse]
    pointwise       h 1, [qkv 3, attention 1, lse, fc1 4], out 1, fc2 1
    none            pointwise's and n1 1, [q, k 2], h' 1, n2 1, [gelu 4], the statistics of two norms

If only adapters are trained, none keeps h, n1, qkv, q, k, attention, lse, h' and fc1 (13 U), and the
adapters' low-rank products; with adapters of fc1 also n2, of fc2 also gelu. With sequence parallelism,
ranks share everything except pointwise's out and fc2, which are not yet summed, and the adapters' n1
and n2.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import psutil
import torch

from cogfast.kernels.quantized.float8 import FP8
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.distributed.sequence_parallel import SequenceParallelBlock
from cogfast.train.distributed.tensor_parallel import ParallelLinear, ParallelLora
from cogfast.train.memory.quantized_base import base_linears

Policy = Literal["none", "attention_kept", "pointwise", "full"]

# From the policy that keeps least to the one that keeps most. Each unit of memory saves less
# recomputation from rung to rung: attention for 1 U, the matmuls for 9 U, then the rest.
LADDER: tuple[Policy, ...] = ("full", "attention_kept", "pointwise", "none")
MARGIN = 0.04  # fraction of the device's memory left free for the allocator's fragmentation
# U held by the block whose backward pass runs, (by rows, shared by tensor-parallel ranks): of full
# training, of adapters in attention, of adapters in the MLP. They are counted op by op, with the
# float32 sums of attention's backward pass.
_LIVE_UNITS = {"all": (6, 18), "attention": (7, 14), "mlp": (4, 22)}
_LIVE_AT_NORMS = (10.5, 4)  # the same for the norms' backward pass, where ranks share little


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerShape:
    """Size of one block for one micro-batch.

    num_rows: B S; num_heads: of the whole model; num_parts: tensor-parallel size; splits_rows: with
    sequence parallelism; adapter_columns: total width of LoRA's low-rank products; adapts_fc1,
    adapts_fc2: whether they have adapters; is_frozen: only adapters are trained; dequantizes, is_fp8: the
    frozen weights are int8 or fp8 (kernels/quantized/).
    """

    num_rows: int
    width: int
    num_heads: int
    bytes_per_number: int
    num_parts: int = 1
    splits_rows: bool = False
    adapter_columns: int = 0
    adapts_fc1: bool = False
    adapts_fc2: bool = False
    is_frozen: bool = False
    dequantizes: bool = False
    is_fp8: bool = False

    @classmethod
    def of(
        cls, transformer: DiffusionTransformer, num_rows: int, bytes_per_number: int
    ) -> LayerShape:
        """Return the shape of a block for num_rows (B S) rows. Weights may be on meta."""
        config, block = transformer.config, transformer.blocks[0]
        dtypes = {linear.weight.dtype for _, linear in base_linears(transformer)}
        fc1 = block.get_submodule("fc1")
        named = transformer.blocks.named_parameters()
        return cls(
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
            dequantizes=dtypes == {torch.int8},
            is_fp8=FP8 in dtypes,
        )

    @property
    def unit(self) -> int:
        """Return the bytes of one activation [B, S, M]."""
        return self.num_rows * self.width * self.bytes_per_number

    @property
    def live(self) -> int:
        """Return the bytes of the block whose backward pass runs, including what its policy keeps.

        What runs does not depend on the policy, since a block is recomputed as a whole.
        """
        part = self.unit / self.num_parts
        row = part if self.splits_rows else self.unit
        kind = "all"
        if self.is_frozen:
            kind = "mlp" if self.adapts_fc1 or self.adapts_fc2 else "attention"
        pairs = (_LIVE_UNITS[kind], _LIVE_AT_NORMS)
        held = max(rows * row + parts * part for rows, parts in pairs)
        adapters = self.num_rows * self.adapter_columns * self.bytes_per_number
        # At the peak the gradient of an MLP matrix is complete, or a frozen one is dequantized.
        matrix = 4 * self.width**2 * self.bytes_per_number // self.num_parts
        if not self.is_frozen:
            return int(held) + matrix
        # At the peak an fp8 product has nothing of its own: its rounded factors are gone.
        return int(held) + adapters + self.dequantizes * matrix

    def kept(self, policy: Policy) -> int:
        """Return the bytes that a block keeps from its forward to its backward pass."""
        u, part = self.unit, self.unit // self.num_parts
        row = part if self.splits_rows else u  # an activation between the linears
        # Attention's log-sum-exp: one float32 for each row and head.
        lse = 4 * self.num_rows * self.num_heads // self.num_parts
        statistics = 2 * 2 * 4 * self.num_rows  # float32 mean and rstd
        adapters = self.num_rows * self.adapter_columns * self.bytes_per_number
        if policy == "full":
            return row
        if policy == "attention_kept":
            return row + part + lse
        # qkv 3, attention 1 and fc1 4 are split between the tensor-parallel ranks.
        wide = 8 * part + lse + adapters
        if policy == "pointwise":
            return row + 2 * u + wide
        if self.is_frozen:
            inputs = self.adapts_fc1 * u + self.adapts_fc2 * 4 * part
            return 2 * row + u + 2 * part + inputs + wide + statistics
        return 6 * row + 6 * part + wide + statistics


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process may still allocate on a device, and the device's total.

    On a CPU the processes of a machine share the available memory equally.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory in the allocator's cache is not free to the driver, but to this process.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held, total
    memory = psutil.virtual_memory()
    return memory.available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), memory.total


def describe(policies: Sequence[Policy]) -> str:
    """Format policies as `attention_kept in layers 0-23, pointwise in layers 24-41`."""
    if len(set(policies)) == 1:
        return f"{policies[0]} in all {len(policies)} layers"
    parts, first = [], 0
    for policy, run in groupby(policies):
        last = first + len(list(run)) - 1
        parts.append(f"{policy} in layers {first}-{last}")
        first = last + 1
    return ", ".join(parts)

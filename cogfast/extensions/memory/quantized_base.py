"""The frozen base of LoRA in 8 bits: the linears of the blocks as int8 or fp8 (quantized_linear.py).

A block's qkv, attention output, fc1, fc2 and modulation hold 1 byte per weight in place of 2, and 4
bytes per row, as buffers: ZeRO neither partitions them nor keeps state for them. The modulation is
int8 in both: it has one row per sample, so that fp8 products would save no time. They are quantized
while they load, one tensor at a time, after tensor parallelism has cut them; a shard of columns has the
scales of the whole rows, so that the base does not depend on the number of ranks. Checkpoints and exports
have adapters alone, so that merges use the weights of args.load as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cogfast.distributed.tensor_parallel import ParallelGroup, ParallelLinear, largest_of_group
from cogfast.extensions.memory.quantized_linear import (
    DTYPES,
    Quantization,
    quantize_rows,
    quantized_linear,
    row_maxima,
)
from cogfast.model.attention import DeferredBiasLinear
from cogfast.model.block import BlockModulation
from cogfast.model.transformer import DiffusionTransformer


class QuantizedLinear(nn.Module):
    """A linear with a frozen weight [out, in] of 8 bits and the scales of its rows [out]."""

    weight: Tensor
    scale: Tensor

    def __init__(self, whole: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.adds_bias = not isinstance(whole, DeferredBiasLinear)
        self.bias = whole.bias
        _quantize(self, whole.weight, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """[.., in] -> [.., out], without a deferred bias."""
        return _product(self, x, self.bias if self.adds_bias else None)


Linear = nn.Linear | ParallelLinear | QuantizedLinear


def base_linears(transformer: DiffusionTransformer) -> Iterator[tuple[str, Linear]]:
    """Yield (path, module) of the linears of all blocks, without adapters."""
    for path, module in transformer.blocks.named_modules(prefix="blocks"):
        if isinstance(module, Linear):
            yield path, module


def quantize_base(transformer: DiffusionTransformer, kind: Quantization) -> None:
    """Replace the weights of the blocks' linears by buffers of 8 bits. They have no values yet.

    The transformer is on the meta device, with all weights of these linears frozen.
    """
    for path, linear in list(base_linears(transformer)):
        assert not linear.weight.requires_grad, f"{path} is trained"
        parent = transformer.get_submodule(path.rpartition(".")[0])
        dtype = torch.int8 if isinstance(parent, BlockModulation) else DTYPES[kind]
        if isinstance(linear, nn.Linear):
            transformer.set_submodule(path, QuantizedLinear(linear, dtype))
        elif isinstance(linear, ParallelLinear):
            _quantize(linear, linear.weight, dtype)
            linear.own_product = _product


def _product(linear: Any, x: Tensor, bias: Tensor | None) -> Tensor:
    return quantized_linear(x, linear.weight, linear.scale, bias)


def _quantize(module: nn.Module, weight: Tensor, dtype: torch.dtype) -> None:
    module._parameters.pop("weight", None)
    make = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=weight.device)
    module.register_buffer("weight", make(*weight.shape, dtype=dtype), persistent=False)
    # ZeRO casts parameters alone: a buffer stays float32.
    module.register_buffer("scale", make(len(weight), dtype=torch.float32), persistent=False)


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Takes the values of a weight and stores them in 8 bits. device: of the computation.

    row_group: the ranks that have the other columns of the weight, for which `copy_` is collective; None:
    it has whole rows.
    """

    q: Tensor
    scale: Tensor
    device: torch.device
    row_group: ParallelGroup | None = None

    @property
    def shape(self) -> torch.Size:
        return self.q.shape

    def any(self) -> Tensor:
        return self.q.any()

    def copy_(self, values: Tensor) -> None:
        values = values.to(self.device)
        maxima = row_maxima(values)
        if self.row_group is not None:
            maxima = largest_of_group(maxima, self.row_group)
        q, scale = quantize_rows(values, self.q.dtype, maxima)
        self.q.copy_(q)
        self.scale.copy_(scale)

"""Low-rank adapters on the linears of an attention layer, as SAT's lora2.LoraMixin has them.

    y = W x + b + (alpha / r) B A x

with one pair (A, B) per equal part of the output: q, k and v each have their own, `out` has one.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cogfast.model.attention import Attention


class LoraLinear(nn.Module):
    """A linear and its adapters; `original` is trained only if something says so."""

    def __init__(
        self, original: nn.Linear, num_parts: int, rank: int, alpha: float, dropout: float
    ):
        super().__init__()
        out_features, in_features = original.weight.shape
        make = lambda rows, columns: nn.Parameter(original.weight.new_zeros(rows, columns))
        self.original = original
        self.matrix_A = nn.ParameterList(make(rank, in_features) for _ in range(num_parts))
        self.matrix_B = nn.ParameterList(
            make(out_features // num_parts, rank) for _ in range(num_parts)
        )
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    @property
    def bias(self) -> Tensor | None:
        """The original's: where that is a DeferredBiasLinear, somebody else adds it."""
        return self.original.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in] -> [B, S, out]."""
        return self.original(x) + self.delta(x, torch.cat(list(self.matrix_A)), self.matrix_B)

    def delta(self, x: Tensor, a: Tensor, b: Iterable[Tensor]) -> Tensor:
        """What the adapters add, [B, S, out]; a: the A's side by side, so that one matmul reads x."""
        low = nn.functional.linear(self.dropout(x), a) * self.scaling  # here, where it is small
        parts = low.chunk(len(self.matrix_A), dim=-1)  # of [B, S, r]
        deltas = [nn.functional.linear(p, each) for p, each in zip(parts, b, strict=True)]
        return torch.cat(deltas, dim=-1)

    def merged_weight(self) -> Tensor:
        """W + (alpha / r) B A, [out, in], computed in float32, in the dtype of W."""
        delta = [b.float() @ a.float() for a, b in zip(self.matrix_A, self.matrix_B, strict=True)]
        weight = self.original.weight
        return (weight.float() + torch.cat(delta) * self.scaling).to(weight.dtype)


def add_lora(attention: Attention, rank: int, alpha: float = 1.0, dropout: float = 0.0) -> None:
    """Replace the linears of `attention` by ones with adapters: three pairs for QKV, one for out."""
    if rank < 1:
        raise ValueError(f"lora_config.params.r={rank} must be 1 or more")
    attention.qkv = LoraLinear(attention.qkv, 3, rank, alpha, dropout)
    attention.out = LoraLinear(attention.out, 1, rank, alpha, dropout)


def is_lora_parameter(name: str) -> bool:
    """Whether `name` (ours or SAT's) is an adapter matrix."""
    return ".matrix_A." in name or ".matrix_B." in name

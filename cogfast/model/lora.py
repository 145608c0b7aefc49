"""Low-rank adapters on the linears of an attention layer, as SAT's lora2.LoraMixin has them.

    y = W x + b + (alpha / r) B A x

with one pair (A, B) per equal part of the output: q, k and v each have their own, `out` has one.
Some of them may go without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from cogfast.model.attention import Attention

SAT_ALPHA = 1.0  # of a SAT config that names none, and of checkpoints that do not say
# What can have adapters, by diffusers' names: our linear in the attention layer, and which part.
TARGETS = {"to_q": ("qkv", 0), "to_k": ("qkv", 1), "to_v": ("qkv", 2), "to_out.0": ("out", 0)}
NUM_PARTS = {"qkv": 3, "out": 1}  # equal parts of its outputs


class LoraLinear(nn.Module):
    """A linear and its adapters; `original` is trained only if something says so. parts: those of
    the num_parts that have a pair, None: all; a pair's names end in the number of its part."""

    def __init__(
        self,
        original: nn.Linear,
        num_parts: int,
        rank: int,
        alpha: float,
        dropout: float,
        parts: Sequence[int] | None = None,
    ):
        super().__init__()
        out_features, in_features = original.weight.shape
        names = [str(i) for i in (range(num_parts) if parts is None else sorted(parts))]
        make = lambda rows, columns: nn.Parameter(original.weight.new_zeros(rows, columns))
        self.original, self.num_parts = original, num_parts
        self.matrix_A = nn.ParameterDict({name: make(rank, in_features) for name in names})
        self.matrix_B = nn.ParameterDict(
            {name: make(out_features // num_parts, rank) for name in names}
        )
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    @property
    def bias(self) -> Tensor | None:
        """The original's: where that is a DeferredBiasLinear, somebody else adds it."""
        return self.original.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in] -> [B, S, out]."""
        a = torch.cat(list(self.matrix_A.values()))
        return self.original(x) + self.delta(x, a, self.matrix_B.values())

    def delta(self, x: Tensor, a: Tensor, b: Iterable[Tensor]) -> Tensor:
        """What the adapters add, [B, S, out]; a: the A's side by side, so that one matmul reads x."""
        low = nn.functional.linear(self.dropout(x), a) * self.scaling  # here, where it is small
        names = list(self.matrix_A)
        pairs = zip(low.chunk(len(names), dim=-1), b, strict=True)  # of [B, S, r] and [out, r]
        deltas = dict(zip(names, [nn.functional.linear(*pair) for pair in pairs], strict=True))
        first = deltas[names[0]]
        nothing = first.new_zeros(()).expand_as(first)  # of a part without a pair; no memory
        parts = [deltas.get(str(i), nothing) for i in range(self.num_parts)]
        return torch.cat(parts, dim=-1)


def add_lora(
    attention: Attention,
    rank: int,
    alpha: float = SAT_ALPHA,
    dropout: float = 0.0,
    targets: Iterable[str] = tuple(TARGETS),
) -> None:
    """Replace the linears of `attention` that `targets`, of TARGETS, name by ones with adapters."""
    if rank < 1:
        raise ValueError(f"lora_config.params.r={rank} must be 1 or more")
    for name, num_parts in NUM_PARTS.items():
        parts = [part for linear, part in map(TARGETS.__getitem__, targets) if linear == name]
        if parts:
            original = getattr(attention, name)
            setattr(attention, name, LoraLinear(original, num_parts, rank, alpha, dropout, parts))


def is_lora_parameter(name: str) -> bool:
    """Whether `name` (ours or SAT's) is an adapter matrix."""
    return ".matrix_A." in name or ".matrix_B." in name

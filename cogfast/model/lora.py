"""Low-rank adapters on the linears of a block: attention's, as in SAT's lora2.LoraMixin, and the MLP's.

    y = W x + b + (alpha / r) B A x

There is one pair (A, B) per equal part of the output: q, k and v have one each, other linears have
one. Parts may have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from cogfast.kernels.add_low_rank import read_low_rank
from cogfast.kernels.block_kernels import BlockKernels

FILE_NAME = "pytorch_lora_weights.safetensors"  # the name that diffusers looks for in a folder
SAT_ALPHA = 1.0  # default for SAT configs and for checkpoints that store no alpha
# {diffusers' name: (linear of a block, part of its output)} of everything that can be adapted.
TARGETS = {
    "to_q": ("attention.qkv", 0),
    "to_k": ("attention.qkv", 1),
    "to_v": ("attention.qkv", 2),
    "to_out.0": ("attention.out", 0),
    "ff.net.0.proj": ("fc1", 0),
    "ff.net.2": ("fc2", 0),
}
# SAT adapts these, and so does the diffusers trainer by default.
DEFAULT_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
# Equal parts of a linear's output
NUM_PARTS = {"attention.qkv": 3, "attention.out": 1, "fc1": 1, "fc2": 1}


class LoraLinear(nn.Module):
    """A linear (`original`) with adapters. parts: the parts of the output, of num_parts, that have a
    pair. The names of a pair end in the index of its part. is_on: False runs the original
    alone (`without_adapters`)."""

    is_on = True

    def __init__(
        self,
        original: nn.Linear,
        num_parts: int,
        rank: int,
        alpha: float,
        dropout: float,
        parts: Sequence[int],
        *,
        kernels: BlockKernels,
    ):
        super().__init__()
        out_features, in_features = original.weight.shape
        names = [str(i) for i in sorted(parts)]
        make = lambda *shape: nn.Parameter(original.weight.new_zeros(shape))
        self.original, self.num_parts, self.kernels = original, num_parts, kernels
        rows = out_features // num_parts
        # The names are SAT's, so that its checkpoints map one to one.
        self.matrix_A = nn.ParameterDict({name: make(rank, in_features) for name in names})
        self.matrix_B = nn.ParameterDict({name: make(rows, rank) for name in names})
        self.scaling = alpha / rank
        self.dropout = nn.Dropout(dropout) if dropout > 0 else nn.Identity()

    @staticmethod
    def reset(name: str, matrix: Tensor, generator: torch.Generator) -> None:
        """Fill a whole matrix with its initial values: A uniform in +-1/sqrt(fan-in), B zero.

        name: of the matrix's parameter; see is_lora_parameter.
        """
        if ".matrix_B." in name:
            matrix.zero_()
        else:
            bound = 1 / math.sqrt(matrix.shape[1])
            matrix.uniform_(-bound, bound, generator=generator)

    @property
    def bias(self) -> Tensor | None:
        """The original's bias. If that is a DeferredBiasLinear, a later kernel adds it."""
        return self.original.bias

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, in] -> [B, S, out]."""
        return self.adapt(self.original, x, self.joined_a(), list(self.matrix_B.values()))

    def joined_a(self) -> Tensor:
        """Return the matrices A as one, [parts * r, in]: one matmul reads x for q, k and v."""
        matrices = list(self.matrix_A.values())
        return matrices[0] if len(matrices) == 1 else torch.cat(matrices)

    def adapt(
        self, base: Callable[[Tensor], Tensor], x: Tensor, a: Tensor, b: Sequence[Tensor]
    ) -> Tensor:
        """Return the base's product of x, [B, S, out], plus what the adapters make of x.

        a: of joined_a. b: the matrices B.
        """
        if not self.is_on:
            return base(x)
        if isinstance(self.dropout, nn.Identity):
            x, low = read_low_rank(x, a)
        else:
            low = nn.functional.linear(self.dropout(x), a)
        parts = [int(name) for name in self.matrix_A]
        return self.kernels.add_low_rank(base(x), low, b, parts, self.num_parts, self.scaling)


def add_lora(
    block: nn.Module,
    rank: int,
    alpha: float = SAT_ALPHA,
    dropout: float = 0.0,
    targets: Iterable[str] = DEFAULT_TARGETS,
    *,
    kernels: BlockKernels,
) -> None:
    """Replace the linears of a block that `targets` (keys of TARGETS) name by LoraLinears."""
    for name, num_parts in NUM_PARTS.items():
        if parts := [part for linear, part in map(TARGETS.__getitem__, targets) if linear == name]:
            original = block.get_submodule(name)
            assert isinstance(original, nn.Linear), f"{name} is {type(original).__name__}"
            # The original becomes a child: as in SAT, its parameters have `.original` in their names.
            lora = LoraLinear(original, num_parts, rank, alpha, dropout, parts, kernels=kernels)
            block.set_submodule(name, lora)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Run the base model within the block: linears without their adapters."""
    adapted = [each for each in module.modules() if isinstance(each, LoraLinear)]
    for each in adapted:
        each.is_on = False
    try:
        yield
    finally:
        for each in adapted:
            each.is_on = True


def is_lora_parameter(name: str) -> bool:
    """Return whether a parameter name (cogfast's or SAT's) is that of an adapter matrix."""
    return ".matrix_A." in name or ".matrix_B." in name

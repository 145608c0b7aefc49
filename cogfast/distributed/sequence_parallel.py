"""Sequence parallelism: tensor parallelism whose ranks split the rows between the linears.

Norms and residuals then run on S / size rows per rank, and keep that much less memory for backward.
A column-parallel linear all-gathers its input rows, a row-parallel one reduce-scatters its products:
together they send as many bytes as the all-reduce that they replace. Backward additionally gathers
each column-parallel linear's input again, for the gradient of its weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from cogfast.distributed.tensor_parallel import (
    ParallelGroup,
    communicate,
    gather,
    own_part,
    share_vectors,
)
from cogfast.kernels.block_kernels import BlockKernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.block import Block


def _own_rows(x: Tensor, group: ParallelGroup) -> Tensor:
    return own_part(x, group).contiguous()


class SequenceParallelBlock(Block):
    """A block whose ranks have S / size rows each between the linears.

    The first block splits its input by rows, and the last one joins its output.
    """

    def __init__(self, whole: Block, group: ParallelGroup, is_first: bool, is_last: bool) -> None:
        nn.Module.__init__(self)  # takes over the modules of `whole` instead of making new ones
        self.group, self.is_first, self.is_last = group, is_first, is_last
        self.modulation = whole.modulation
        self.attention_norm, self.attention = whole.attention_norm, whole.attention
        self.mlp_norm, self.fc1, self.fc2 = whole.mlp_norm, whole.fc1, whole.fc2
        self.kernels = whole.kernels

    @property
    def kernels(self) -> BlockKernels:
        """Kernels for this rank's rows. Attention has all rows of its heads, so its kernels stay."""
        return self._kernels

    @kernels.setter
    def kernels(self, kernels: BlockKernels) -> None:
        self._kernels = _of_own_rows(kernels, self.group)

    def forward(
        self, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
    ) -> Tensor:
        if self.is_first:
            if hidden.shape[1] % self.group.size:  # the size of a data set of one's own
                text = f"{hidden.shape[1]} text and video tokens between {self.group.size} ranks"
                raise ValueError(f"cannot split {text} evenly; use args.sequence_parallel=false")
            # Each rank has the gradient of its own rows only.
            hidden = communicate(hidden, _own_rows, gather, self.group)
        hidden = super().forward(hidden, conditioning, num_text, rotation)
        if not self.is_last:
            return hidden
        # The gradient of all rows is replicated: each rank takes its own.
        return communicate(hidden, gather, _own_rows, self.group)


def _of_own_rows(kernels: BlockKernels, group: ParallelGroup) -> BlockKernels:
    """Adapt the kernels of norms and residuals to this rank's rows of the sequence.

    They get the number of text rows among this rank's rows, and the gradients of their parameters are
    summed over the group. (GatheredLinear sums the gradients of the modulation.)
    """

    def own_text(hidden: Tensor, num_text: int) -> int:
        # Text rows come first: a rank may have only text rows, or none.
        num_rows = hidden.shape[1]
        return min(max(num_text - group.rank * num_rows, 0), num_rows)

    def shared(*vectors: Tensor | None) -> list[Tensor | None]:
        # All are None if no norm is affine.
        given = [v for v in vectors if v is not None]
        if not any(v.requires_grad for v in given):
            return list(vectors)
        copies = share_vectors(given, group)
        # The kernels expect the parameters' dtype; float32 is for the sum of the gradients.
        return [copy.to(v.dtype) for copy, v in zip(copies, given, strict=True)]

    def adapted(kernel: Callable, text: int, *parameters: slice) -> Callable:
        """Return a kernel of hidden and others. text: its argument num_text; parameters: its vectors."""

        def run(*given: Any) -> Any:
            inputs = [*given]
            for place in parameters:
                inputs[place] = shared(*inputs[place])
            inputs[text] = own_text(inputs[0], inputs[text])
            return kernel(*inputs)

        return run

    bias, norm, norm_of_residual = slice(2, 3), slice(1, 3), slice(4, 6)
    both = kernels.residual_adaptive_layernorm
    return replace(
        kernels,
        adaptive_layernorm=adapted(kernels.adaptive_layernorm, -2, norm),
        residual_adaptive_layernorm=adapted(both, -2, bias, norm_of_residual),
        gated_residual=adapted(kernels.gated_residual, -1, bias),
    )

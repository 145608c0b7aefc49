"""Sequence parallelism: tensor parallelism whose ranks split the rows between the linears.

Norms and residuals then run on S / size rows per rank, and keep that much less memory for backward.
A column-parallel linear all-gathers its input rows, a row-parallel one reduce-scatters its products:
together they send as many bytes as the all-reduce that they replace. Backward additionally gathers
each column-parallel linear's input again, for the gradient of its weight.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch declares backward(ctx, *grads); the functions here name the one gradient that they get.

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.distributed.tensor_parallel import (
    ColumnParallelLinear,
    ParallelGroup,
    RowParallelLinear,
    communicate,
    share_vectors,
    wait_for,
)
from cogfast.kernels.block_kernels import BlockKernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.block import Block

_ops = torch.ops._c10d_functional


def _start_gather(rows: Tensor, group: ParallelGroup) -> Tensor:
    """Start to gather rows [B, S / size, N] -> [size * B, S / size, N], not yet complete."""
    return _ops.all_gather_into_tensor(rows.contiguous(), group.size, group.name)


def _joined(gathered: Tensor, group: ParallelGroup) -> Tensor:
    """Wait for `_start_gather` and join its result -> [B, S, N]."""
    # Ranks are joined along dim 0, but their rows follow each other along dim 1.
    return wait_for(gathered).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def _start_scatter(x: Tensor, group: ParallelGroup) -> Tensor:
    """Start to reduce-scatter x [B, S, N] -> this rank's rows [B, S / size, N], not yet complete."""
    pieces = x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _ops.reduce_scatter_tensor(pieces, "sum", group.size, group.name)


def _gather_rows(x: Tensor, group: ParallelGroup) -> Tensor:
    return _joined(_start_gather(x, group), group)


def _scatter_rows(x: Tensor, group: ParallelGroup) -> Tensor:
    return wait_for(_start_scatter(x, group))


def _own_rows(x: Tensor, group: ParallelGroup) -> Tensor:
    return x.chunk(group.size, 1)[group.rank].contiguous()


class _GatheringLinear(torch.autograd.Function):
    """x W^T + b of all ranks' rows x.

    Keeps only this rank's rows: backward gathers x again while it computes dx, and reduce-scatters dx
    while it computes dW.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, group: ParallelGroup
    ) -> Tensor:
        # A frozen weight's gradient is not computed, so its input is not kept.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group = group
        return F.linear(_gather_rows(x, group), weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (x, weight), group = ctx.saved_tensors, ctx.group
        needs_dx, needs_dw, needs_db, _ = ctx.needs_input_grad
        dx = dw = db = None
        # The collectives run beside the matmuls and are waited for when their result is needed.
        gathered = _start_gather(x, group) if needs_dw else None
        if needs_dx:
            # Each rank has a part of the sum over the outputs: a reduce-scatter adds and splits it.
            dx = _start_scatter(grad @ weight, group)
        rows = grad.flatten(0, -2)
        if gathered is not None:
            dw = rows.T @ _joined(gathered, group).flatten(0, -2)
        if needs_db:
            db = rows.sum(0)
        return None if dx is None else wait_for(dx), dw, db, None


class RowGatheringLinear(ColumnParallelLinear):
    """Column-parallel linear: this rank's rows [B, S / size, in] -> all rows [B, S, out / size]."""

    def enter(self, x: Tensor) -> Tensor:
        # Backward sums the gradients, because each rank computes a share.
        return communicate(x, _gather_rows, _scatter_rows, self.group)

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is not None:
            return self.product(self.enter(x))
        bias = self.bias if self.adds_bias else None
        return _GatheringLinear.apply(x, self.weight, bias, self.group)


class RowScatteringLinear(RowParallelLinear):
    """Row-parallel linear: all rows [B, S, in / size] -> this rank's rows [B, S / size, out].

    Does not add the bias.
    """

    def leave(self, product: Tensor) -> Tensor:
        return communicate(product, _scatter_rows, _gather_rows, self.group)


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
            hidden = communicate(hidden, _own_rows, _gather_rows, self.group)
        hidden = super().forward(hidden, conditioning, num_text, rotation)
        if not self.is_last:
            return hidden
        # The gradient of all rows is replicated: each rank takes its own.
        return communicate(hidden, _gather_rows, _own_rows, self.group)


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

    # The arguments are those of the kernels; `rest` ends in num_text and eps.
    def adaptive_layernorm(
        hidden: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        *modulation, num_text, eps = rest
        count = own_text(hidden, num_text)
        return kernels.adaptive_layernorm(hidden, *shared(weight, bias), *modulation, count, eps)

    def residual_adaptive_layernorm(
        hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        weight, bias, *modulation, num_text, eps = rest
        residual = (branch, *shared(branch_bias), gate)
        norm, count = (*shared(weight, bias), *modulation), own_text(hidden, num_text)
        return kernels.residual_adaptive_layernorm(hidden, *residual, *norm, count, eps)

    def gated_residual(
        hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
    ) -> Tensor:
        residual = (branch, *shared(branch_bias), gate)
        return kernels.gated_residual(hidden, *residual, own_text(hidden, num_text))

    return replace(
        kernels,
        adaptive_layernorm=adaptive_layernorm,
        residual_adaptive_layernorm=residual_adaptive_layernorm,
        gated_residual=gated_residual,
    )

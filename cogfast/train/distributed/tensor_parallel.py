"""Linears of which each process of a group has a share, and the sums over the group between them.

Column-parallel: a share of the outputs, so that backward sums the input's gradient. Row-parallel: a
share of the inputs, so that forward sums the product. Between the two, activations are shares of
the heads or of the MLP's width; everywhere else every process of the group has all of them, bit for
bit the same. A parameter that all have, but that sees a share of the activations only, gets the sum
of the gradients: `copy_to_group`.

The collectives are PyTorch's functional ones: torch.compile and torch.utils.checkpoint see them as
ops like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.model.attention import DeferredBiasLinear, HeadNorm
from cogfast.model.lora import LoraLinear
from cogfast.model.weights.shard import Shard

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """`size` processes that hold one model together; this process is `rank` of them."""

    rank: int
    size: int
    process_group: dist.ProcessGroup

    @property
    def name(self) -> str:
        """By which the functional collectives know it."""
        return self.process_group.group_name

    def shard(self, shape: torch.Size, dim: int, num_parts: int = 1) -> Shard:
        """Our share of a parameter of `shape`."""
        return Shard(tuple(shape), dim, num_parts, self.rank, self.size)


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return _ops.wait_tensor(_ops.all_reduce(grad, "sum", ctx.name)), None


class _SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, name: str) -> Tensor:
        # Not in place: selective checkpointing may keep the product as it was.
        return _ops.wait_tensor(_ops.all_reduce(x, "sum", name))

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: TensorParallelGroup, sums_gradient: bool) -> Tensor:
        ctx.group, ctx.sums_gradient = group, sums_gradient
        pieces = _ops.wait_tensor(_ops.all_gather_into_tensor(x, group.size, group.name))
        return pieces.unflatten(0, (group.size, -1)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        group = ctx.group
        if not ctx.sums_gradient:
            return grad.chunk(group.size, -1)[group.rank], None, None
        pieces = grad.unflatten(-1, (group.size, -1)).movedim(-2, 0).flatten(0, 1).contiguous()
        scattered = _ops.reduce_scatter_tensor(pieces, "sum", group.size, group.name)
        return _ops.wait_tensor(scattered), None, None


class _ColumnLinear(torch.autograd.Function):
    """x W^T + b whose backward sums dx over the group while it computes dW."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, name: str) -> Tensor:
        # as autograd does: a frozen weight's input is not kept
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.name = name
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            # In place while nobody else has it; a compiler wants ops without side effects.
            start = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
            dx = start(grad @ weight, "sum", ctx.name)
        rows = grad.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            dw = rows.T @ x.flatten(0, -2)
        if ctx.needs_input_grad[2]:
            db = rows.sum(0)
        return None if dx is None else _ops.wait_tensor(dx), dw, db, None


def copy_to_group(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """x, which all have, for work that each does a share of; backward sums its gradient."""
    return _CopyToGroup.apply(x, group.name)


def sum_over_group(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """The sum of all shares' x, on all; its gradient is the same on all already."""
    return _SumOverGroup.apply(x, group.name)


def gather_columns(x: Tensor, group: TensorParallelGroup, sums_gradient: bool = False) -> Tensor:
    """[B, N / size] of each -> [B, N] on all, whose gradient is the same on all, or summed."""
    return _GatherColumns.apply(x, group, sums_gradient)


def share_vectors(vectors: Sequence[Tensor], group: TensorParallelGroup) -> Sequence[Tensor]:
    """Parameters [N], which all have, in float32, for work that each does a share of: one sum of
    all their gradients."""
    both = torch.stack(tuple(vectors))
    both = both.to(torch.promote_types(both.dtype, torch.float32))
    return copy_to_group(both, group).unbind()


def take_share(parameter: nn.Parameter, shard: Shard) -> nn.Parameter:
    """Our share in memory of its own; the whole can be freed."""
    share = shard.of(parameter.detach()).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(share, parameter.requires_grad)


class ParallelLinear(nn.Module):
    """A share of a linear: of its outputs, in each of num_parts equal parts (dim 0), or of its
    inputs (dim 1), where the bias, added after the sum, is whole. shards: by parameter's name."""

    def __init__(
        self, whole: nn.Linear, group: TensorParallelGroup, dim: int, num_parts: int = 1
    ) -> None:
        super().__init__()
        self.group = group
        self.adds_bias = not isinstance(whole, DeferredBiasLinear)
        self.shards = {"weight": group.shard(whole.weight.shape, dim, num_parts)}
        self.weight = take_share(whole.weight, self.shards["weight"])
        self.bias = whole.bias
        if dim == 0:
            self.shards["bias"] = group.shard(whole.bias.shape, 0, num_parts)
            self.bias = take_share(whole.bias, self.shards["bias"])

    def product(self, x: Tensor) -> Tensor:
        """Of our share, without a word to the group."""
        return F.linear(x, self.weight, self.bias if self.adds_bias else None)


class ColumnParallelLinear(ParallelLinear):
    """[.., in], the same on all -> our share of [.., out]."""

    def __init__(self, whole: nn.Linear, group: TensorParallelGroup, num_parts: int = 1) -> None:
        super().__init__(whole, group, 0, num_parts)

    def enter(self, x: Tensor) -> Tensor:
        """The input of `product`, also where that is not all that reads it."""
        return copy_to_group(x, self.group)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        return _ColumnLinear.apply(x, self.weight, bias, self.group.name)


class GatheredLinear(ColumnParallelLinear):
    """[B, in], the same on all -> all of [B, out]. sums_gradient: where each works with it on rows
    of its own."""

    def __init__(
        self, whole: nn.Linear, group: TensorParallelGroup, sums_gradient: bool = False
    ) -> None:
        super().__init__(whole, group)
        self.sums_gradient = sums_gradient

    def forward(self, x: Tensor) -> Tensor:
        return gather_columns(super().forward(x), self.group, self.sums_gradient)


class RowParallelLinear(ParallelLinear):
    """Our share of [.., in] -> [.., out], the same on all, without the bias."""

    def __init__(self, whole: DeferredBiasLinear, group: TensorParallelGroup) -> None:
        assert isinstance(whole, DeferredBiasLinear), "each share would add the bias"
        super().__init__(whole, group, 1)

    def leave(self, product: Tensor) -> Tensor:
        """What all get of everybody's product."""
        return sum_over_group(product, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.product(x))


class ParallelLora(LoraLinear):
    """A share of a linear with adapters: the B's are cut as its outputs, or the A's as its inputs;
    the others all have. shards: of the adapters, by name."""

    def __init__(self, whole: LoraLinear, original: ParallelLinear) -> None:
        nn.Module.__init__(self)
        self.group, self.original = original.group, original
        self.scaling, self.dropout, self.num_parts = whole.scaling, whole.dropout, whole.num_parts
        self.matrix_A, self.matrix_B = whole.matrix_A, whole.matrix_B
        self.shards: dict[str, Shard] = {}

    def _cut(self, name: str, matrices: nn.ParameterDict, dim: int) -> nn.ParameterDict:
        shards = {part: self.group.shard(matrix.shape, dim) for part, matrix in matrices.items()}
        self.shards |= {f"{name}.{part}": shard for part, shard in shards.items()}
        return nn.ParameterDict({part: take_share(matrices[part], shards[part]) for part in shards})


class ColumnParallelLora(ParallelLora):
    """One sum of the input's gradient for linear and adapters."""

    def __init__(self, whole: LoraLinear, original: ColumnParallelLinear) -> None:
        super().__init__(whole, original)
        self.matrix_B = self._cut("matrix_B", whole.matrix_B, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.original.enter(x)
        a = copy_to_group(torch.cat(list(self.matrix_A.values())), self.group)
        return self.original.product(x) + self.delta(x, a, self.matrix_B.values())


class RowParallelLora(ParallelLora):
    """One sum of the products of linear and adapters."""

    def __init__(self, whole: LoraLinear, original: RowParallelLinear) -> None:
        super().__init__(whole, original)
        self.matrix_A = self._cut("matrix_A", whole.matrix_A, 1)

    def forward(self, x: Tensor) -> Tensor:
        b = [copy_to_group(matrix, self.group) for matrix in self.matrix_B.values()]
        delta = self.delta(x, torch.cat(list(self.matrix_A.values())), b)
        return self.original.leave(self.original.product(x) + delta)


class SharedHeadNorm(HeadNorm):
    """All heads' weights, of which each process norms its share of the heads."""

    def __init__(self, whole: HeadNorm, group: TensorParallelGroup) -> None:
        nn.Module.__init__(self)
        self.group, self.eps = group, whole.eps
        self.normalized_shape, self.elementwise_affine = whole.normalized_shape, True
        self.weight, self.bias = whole.weight, whole.bias

    def affine(self) -> tuple[Tensor, Tensor]:
        weight, bias = share_vectors((self.weight, self.bias), self.group)
        return weight, bias

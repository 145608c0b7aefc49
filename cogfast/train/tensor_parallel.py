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

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.model.attention import HeadNorm
from cogfast.model.linear import DeferredBiasLinear
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
    def forward(ctx, x: Tensor, rank: int, size: int, name: str) -> Tensor:
        ctx.rank, ctx.size = rank, size
        pieces = _ops.wait_tensor(_ops.all_gather_into_tensor(x, size, name))
        return pieces.unflatten(0, (size, -1)).movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.chunk(ctx.size, -1)[ctx.rank], None, None, None


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


def gather_columns(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """[.., N / size] of each -> [.., N] on all, whose gradient must be the same on all."""
    return _GatherColumns.apply(x, group.rank, group.size, group.name)


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
    """[.., in], the same on all -> our share of [.., out], or all of it where `gathers`."""

    def __init__(
        self,
        whole: nn.Linear,
        group: TensorParallelGroup,
        num_parts: int = 1,
        gathers: bool = False,
    ) -> None:
        super().__init__(whole, group, 0, num_parts)
        self.gathers = gathers

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.adds_bias else None
        y = _ColumnLinear.apply(x, self.weight, bias, self.group.name)
        return gather_columns(y, self.group) if self.gathers else y


class RowParallelLinear(ParallelLinear):
    """Our share of [.., in] -> [.., out], the same on all, without the bias."""

    def __init__(self, whole: DeferredBiasLinear, group: TensorParallelGroup) -> None:
        assert isinstance(whole, DeferredBiasLinear), "each share would add the bias"
        super().__init__(whole, group, 1)

    def forward(self, x: Tensor) -> Tensor:
        return sum_over_group(self.product(x), self.group)


class ParallelLora(LoraLinear):
    """A share of a linear with adapters: the B's are cut as its outputs, or the A's as its inputs;
    the others all have. shards: of the adapters, by name."""

    def __init__(
        self, whole: LoraLinear, original: ParallelLinear, group: TensorParallelGroup
    ) -> None:
        nn.Module.__init__(self)
        self.group, self.original = group, original
        self.scaling, self.dropout = whole.scaling, whole.dropout
        self.matrix_A, self.matrix_B = whole.matrix_A, whole.matrix_B
        self.shards: dict[str, Shard] = {}

    def _cut(self, name: str, matrices: nn.ParameterList, dim: int) -> nn.ParameterList:
        shards = [self.group.shard(matrix.shape, dim) for matrix in matrices]
        self.shards |= {f"{name}.{i}": shard for i, shard in enumerate(shards)}
        return nn.ParameterList(map(take_share, matrices, shards))


class ColumnParallelLora(ParallelLora):
    """One sum of the input's gradient for linear and adapters."""

    def __init__(self, whole: LoraLinear, group: TensorParallelGroup, num_parts: int) -> None:
        super().__init__(whole, ColumnParallelLinear(whole.original, group, num_parts), group)
        self.matrix_B = self._cut("matrix_B", whole.matrix_B, 0)

    def forward(self, x: Tensor) -> Tensor:
        x = copy_to_group(x, self.group)
        a = copy_to_group(torch.cat(list(self.matrix_A)), self.group)
        return self.original.product(x) + self.delta(x, a, self.matrix_B)


class RowParallelLora(ParallelLora):
    """One sum of the products of linear and adapters."""

    def __init__(self, whole: LoraLinear, group: TensorParallelGroup) -> None:
        super().__init__(whole, RowParallelLinear(whole.original, group), group)
        self.matrix_A = self._cut("matrix_A", whole.matrix_A, 1)

    def forward(self, x: Tensor) -> Tensor:
        b = [copy_to_group(matrix, self.group) for matrix in self.matrix_B]
        delta = self.delta(x, torch.cat(list(self.matrix_A)), b)
        return sum_over_group(self.original.product(x) + delta, self.group)


class SharedHeadNorm(HeadNorm):
    """All heads' weights, of which each process norms its share of the heads."""

    def __init__(self, whole: HeadNorm, group: TensorParallelGroup) -> None:
        nn.Module.__init__(self)
        self.group, self.eps = group, whole.eps
        self.normalized_shape, self.elementwise_affine = whole.normalized_shape, True
        self.weight, self.bias = whole.weight, whole.bias

    def affine(self) -> tuple[Tensor, Tensor]:
        # one sum for both, in float32: the kernel's gradients come so, and they are few numbers
        both = torch.stack([self.weight, self.bias])
        both = both.to(torch.promote_types(both.dtype, torch.float32))
        weight, bias = copy_to_group(both, self.group).unbind()
        return weight, bias

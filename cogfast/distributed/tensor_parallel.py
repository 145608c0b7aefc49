"""Tensor-parallel linears and the collectives between them.

Column-parallel: each rank has a shard of the outputs, and backward all-reduces the input's gradient.
Row-parallel: each rank has a shard of the inputs, and forward all-reduces the product. Between the
two, activations are sharded by heads or by the MLP's width; elsewhere they are replicated, bit for
bit. The gradient of a replicated parameter that only sees sharded activations is all-reduced, by
`copy_to_group`.

The collectives are PyTorch's functional ones: ordinary ops to torch.compile and torch.utils.checkpoint.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch declares backward(ctx, *grads); the functions here name the one gradient that they get.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.model.attention import DeferredBiasLinear, HeadNorm
from cogfast.model.lora import LoraLinear
from cogfast.model.weights.shard import Shard

_ops = torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class ParallelGroup:
    """A group of `size` processes that share the work on a sample; `rank` is this process's rank in it."""

    rank: int
    size: int
    process_group: dist.ProcessGroup

    @property
    def name(self) -> str:
        """The group's name in the functional collectives."""
        return self.process_group.group_name

    def shard(self, shape: torch.Size, dim: int, num_parts: int = 1) -> Shard:
        return Shard(tuple(shape), dim, num_parts, self.rank, self.size)


def wait_for(started: Tensor) -> Tensor:
    return _ops.wait_tensor(started)  # watchers/hang.py knows the name of this function


class _Communication(torch.autograd.Function):
    """Return forward(x, *given), whose gradient is backward(gradient of the result, *given)."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: Callable, backward: Callable, *given: Any) -> Tensor:
        ctx.back, ctx.given = backward, given
        return forward(x, *given)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, *ctx.given), None, None, *[None] * len(ctx.given)


communicate = _Communication.apply


def unchanged(x: Tensor, group: ParallelGroup) -> Tensor:
    return x.view_as(x)  # since autograd needs a tensor of its own for this node


def _sum(x: Tensor, group: ParallelGroup) -> Tensor:
    # Not in place: selective checkpointing may keep the product from before the sum.
    return wait_for(_ops.all_reduce(x, "sum", group.name))


# A part is 1 / size of dim 1: rows [B, S / size, N] of [B, S, N], or columns [B, N / size] of [B, N].


def _start_gather(part: Tensor, group: ParallelGroup) -> Tensor:
    """Start to gather parts [B, n, ..] -> [size * B, n, ..], not yet complete."""
    return _ops.all_gather_into_tensor(part.contiguous(), group.size, group.name)


def _joined(gathered: Tensor, group: ParallelGroup) -> Tensor:
    """Wait for `_start_gather` and join its result -> [B, size * n, ..]."""
    # Ranks are joined along dim 0, but their parts follow each other along dim 1.
    return wait_for(gathered).unflatten(0, (group.size, -1)).transpose(0, 1).flatten(1, 2)


def _start_scatter(x: Tensor, group: ParallelGroup) -> Tensor:
    """Start to reduce-scatter x [B, size * n, ..] -> this rank's part [B, n, ..], not yet complete."""
    pieces = x.unflatten(1, (group.size, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return _ops.reduce_scatter_tensor(pieces, "sum", group.size, group.name)


def gather(part: Tensor, group: ParallelGroup) -> Tensor:
    return _joined(_start_gather(part, group), group)


def scatter(x: Tensor, group: ParallelGroup) -> Tensor:
    return wait_for(_start_scatter(x, group))


def own_part(x: Tensor, group: ParallelGroup) -> Tensor:
    return x.chunk(group.size, 1)[group.rank]


class _ColumnLinear(torch.autograd.Function):
    """x W^T + b whose backward sums dx over the group while it computes dW.

    splits_rows: x has this rank's rows, and the product all rows. Only this rank's are kept: backward
    gathers x again while it computes dx, of which each rank gets its rows.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, group, splits_rows):
        # A frozen weight's gradient is not computed, so its input is not kept, as in F.linear.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.group, ctx.splits_rows = group, splits_rows
        return F.linear(gather(x, group) if splits_rows else x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), group, splits_rows = ctx.saved_tensors, ctx.group, ctx.splits_rows
        needs_dx, needs_dw, needs_db, *_ = ctx.needs_input_grad
        dx = dw = db = None
        # The collectives run beside the matmuls and are waited for when their result is needed.
        if needs_dw and splits_rows:
            x = _start_gather(x, group)
        # Each rank has a part of the sum over the outputs.
        if needs_dx and splits_rows:
            dx = _start_scatter(grad @ weight, group)
        elif needs_dx:
            # In place, since nothing else uses the product; torch.compile needs the pure op.
            start = _ops.all_reduce if torch.compiler.is_compiling() else _ops.all_reduce_
            dx = start(grad @ weight, "sum", group.name)
        rows = grad.flatten(0, -2)
        if needs_dw:
            dw = rows.T @ (_joined(x, group) if splits_rows else x).flatten(0, -2)
        if needs_db:
            db = rows.sum(0)
        return None if dx is None else wait_for(dx), dw, db, None, None


def copy_to_group(x: Tensor, group: ParallelGroup) -> Tensor:
    """Identity forward, all-reduce backward, for a replicated x [..] that enters sharded work."""
    return communicate(x, unchanged, _sum, group)


def largest_of_group(x: Tensor, group: ParallelGroup) -> Tensor:
    """Return the largest of the ranks' numbers in each place, without a gradient."""
    return wait_for(_ops.all_reduce(x, "max", group.name))


def share_vectors(vectors: Sequence[Tensor], group: ParallelGroup) -> Sequence[Tensor]:
    """Return copies of replicated parameters [N], in float32, for sharded work.

    Backward sums all their gradients in one all-reduce.
    """
    both = torch.stack(tuple(vectors))
    # A sum over ranks in bf16 would round at every addition.
    both = both.to(torch.promote_types(both.dtype, torch.float32))
    return copy_to_group(both, group).unbind()


def take_share(parameter: Tensor, shard: Shard) -> nn.Parameter:
    """Copy this rank's shard of a parameter, so that the whole parameter can be freed."""
    if parameter.is_meta:
        # torch.cat on the meta device imports torch._dynamo, which takes seconds.
        share = parameter.new_empty(shard.share_shape)
        return nn.Parameter(share, parameter.requires_grad)
    # A clone, since a view would keep the whole parameter in memory.
    share = shard.of(parameter.detach()).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(share, parameter.requires_grad)


class ParallelLinear(nn.Module):
    """A shard of a linear, by outputs (dim 0) or by inputs (dim 1).

    By outputs, each of num_parts equal parts (such as q, k and v) is cut. By inputs, the bias is
    whole, since it is added after the sum. splits_rows: outside of the linear a rank has a part of the
    rows (sequence_parallel.py). shards: {parameter name: its shard}. own_product: multiplies x [.., in]
    with a weight that is no parameter (extensions/memory/quantized_base.py), and adds the bias.
    """

    dim: int
    own_product: Callable[[ParallelLinear, Tensor, Tensor | None], Tensor] | None = None

    def __init__(
        self, whole: nn.Linear, group: ParallelGroup, splits_rows: bool = False, num_parts: int = 1
    ) -> None:
        super().__init__()
        is_deferred = isinstance(whole, DeferredBiasLinear)
        assert is_deferred or self.dim == 0, "each rank would add the bias"
        self.group, self.splits_rows = group, splits_rows
        self.adds_bias = not is_deferred
        self.shards = {"weight": group.shard(whole.weight.shape, self.dim, num_parts)}
        self.weight: Tensor = take_share(whole.weight, self.shards["weight"])
        self.bias = whole.bias
        if self.dim == 0:
            self.shards["bias"] = group.shard(whole.bias.shape, 0, num_parts)
            self.bias = take_share(whole.bias, self.shards["bias"])

    def product(self, x: Tensor) -> Tensor:
        """Multiply with the local shard, without communication."""
        # A deferred bias, sharded or whole, goes to the kernel behind the linear.
        bias = self.bias if self.adds_bias else None
        if self.own_product is not None:
            return self.own_product(self, x, bias)
        return F.linear(x, self.weight, bias)


class ColumnParallelLinear(ParallelLinear):
    """Column-parallel linear: replicated [.., in] -> this rank's columns of [.., out].

    splits_rows: this rank's rows [B, S / size, in] -> all rows [B, S, out / size].
    """

    dim = 0

    def enter(self, x: Tensor) -> Tensor:
        """Enter the column-parallel region: identity forward, all-reduce backward."""
        if self.splits_rows:
            # Backward sums the gradients, because each rank computes a share.
            return communicate(x, gather, scatter, self.group)
        return copy_to_group(x, self.group)

    def forward(self, x: Tensor) -> Tensor:
        if self.own_product is not None:
            return self.product(self.enter(x))
        bias = self.bias if self.adds_bias else None
        return _ColumnLinear.apply(x, self.weight, bias, self.group, self.splits_rows)


class GatheredLinear(ColumnParallelLinear):
    """Column-parallel linear with a gathered output: replicated [B, in] -> [B, out].

    sums_gradient: the ranks use the output on different rows (sequence parallelism), so that its
    gradients must be summed.
    """

    def __init__(self, whole: nn.Linear, group: ParallelGroup, sums_gradient: bool = False) -> None:
        super().__init__(whole, group)
        self.sums_gradient = sums_gradient

    def forward(self, x: Tensor) -> Tensor:
        back = scatter if self.sums_gradient else own_part
        return communicate(super().forward(x), gather, back, self.group)


class RowParallelLinear(ParallelLinear):
    """Row-parallel linear: this rank's columns of [.., in] -> replicated [.., out], without the bias.

    splits_rows: all rows [B, S, in / size] -> this rank's rows [B, S / size, out].
    """

    dim = 1

    def leave(self, product: Tensor) -> Tensor:
        """Leave the row-parallel region: all-reduce the partial products."""
        if self.splits_rows:
            return communicate(product, scatter, gather, self.group)
        # The gradient is replicated already.
        return communicate(product, _sum, lambda grad, group: grad, self.group)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.product(x))


class ParallelLora(LoraLinear):
    """A shard of a linear with LoRA adapters.

    Matrices B are cut as the linear's outputs, or matrices A as its inputs; the other matrices are
    replicated. There is one all-reduce for linear and adapters: of the input's gradient, or of the
    products. shards: {name of a cut matrix: its shard}.
    """

    def __init__(self, whole: LoraLinear, original: ParallelLinear) -> None:
        nn.Module.__init__(self)
        self.group, self.original = original.group, original
        self.scaling, self.dropout, self.num_parts = whole.scaling, whole.dropout, whole.num_parts
        self.kernels = whole.kernels
        self.shards: dict[str, Shard] = {}
        a, b, is_column = whole.matrix_A, whole.matrix_B, original.dim == 0
        self.matrix_A = a if is_column else self._cut("matrix_A", a, 1)
        self.matrix_B = self._cut("matrix_B", b, 0) if is_column else b

    def _cut(self, name: str, matrices: nn.ParameterDict, dim: int) -> nn.ParameterDict:
        shards = {part: self.group.shard(matrix.shape, dim) for part, matrix in matrices.items()}
        # Checkpoints and loaders ask for these: a rank reads and writes its part of each matrix.
        self.shards |= {f"{name}.{part}": shard for part, shard in shards.items()}
        return nn.ParameterDict({part: take_share(matrices[part], shards[part]) for part in shards})

    def forward(self, x: Tensor) -> Tensor:
        original = self.original
        if isinstance(original, ColumnParallelLinear):
            x = original.enter(x)
            # A is replicated but sees only this rank's columns of the gradient: sum its gradients.
            a = copy_to_group(self.joined_a(), self.group)
            return self.adapt(original.product, x, a, list(self.matrix_B.values()))
        assert isinstance(original, RowParallelLinear), "__init__ sets it"
        # B is replicated but sees only this rank's part of A x: sum its gradients.
        b = [copy_to_group(matrix, self.group) for matrix in self.matrix_B.values()]
        return original.leave(self.adapt(original.product, x, self.joined_a(), b))


class SharedHeadNorm(HeadNorm):
    """HeadNorm with replicated weights, applied to this rank's heads."""

    def __init__(self, whole: HeadNorm, group: ParallelGroup) -> None:
        nn.Module.__init__(self)
        self.group, self.eps = group, whole.eps
        self.normalized_shape, self.elementwise_affine = whole.normalized_shape, True
        self.weight, self.bias = whole.weight, whole.bias

    def affine(self) -> tuple[Tensor, Tensor]:
        weight, bias = share_vectors((self.weight, self.bias), self.group)
        return weight, bias

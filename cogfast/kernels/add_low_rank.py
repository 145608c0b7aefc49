"""LoRA beside the linear that it adapts: its second product is added to the linear's output in one
pass, and its part of the input's gradient to the linear's by a product.

    y_p = x_p + c l_p B_p^T    for each part p of the columns that has a B_p;  y_p = x_p for the others

x [.., N] has equal parts (q, k and v, or one), and l [.., sum of r] has the columns l_p side by side.
c is LoRA's alpha / r.

    dx = dy,    dl_p = c dy_p B_p,    dB_p = c dy_p^T l_p

Bytes of q, k and v with U those of a bf16 [B, S, M], without those of l: 6 U (x, y). Products, a
concatenation and a sum of their own move 18 U. y is rounded once.

The input x of both has the gradient dx = dx_linear + dl A. `read_low_rank` computes it in the memory of
dx_linear and rounds the sum once: it moves 2 U, where a product and a sum of their own move 4 U.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.torch_library import from_gpu, register_gradient, register_op


def add_low_rank_reference(
    x: Tensor,
    low: Tensor,
    matrices: Sequence[Tensor],
    parts: Sequence[int],
    num_parts: int,
    scaling: float = 1.0,
) -> Tensor:
    """Return x [.., N] plus the products of low [.., P r] and matrices B [N / num_parts, r], scaled.

    parts: the part of each matrix, in ascending order.
    """
    lows = (low * scaling).chunk(len(matrices), dim=-1)  # scaled where the tensor is smallest
    columns = list(x.chunk(num_parts, dim=-1))
    for part, given, matrix in zip(parts, lows, matrices, strict=True):
        columns[part] = columns[part] + torch.nn.functional.linear(given, matrix)
    return columns[0] if num_parts == 1 else torch.cat(columns, dim=-1)


def _on_cpu(
    x: Tensor, low: Tensor, matrices: list[Tensor], parts: list[int], num_parts: int, scaling: float
) -> Tensor:
    y = x.clone(memory_format=torch.contiguous_format)  # so that `columns` are views
    columns = y.flatten(0, -2).chunk(num_parts, dim=-1)
    lows = low.flatten(0, -2).chunk(len(matrices), dim=-1)
    for part, given, matrix in zip(parts, lows, matrices, strict=True):
        columns[part].addmm_(given, matrix.t(), alpha=scaling)
    return y


_add_low_rank = register_op(
    "add_low_rank(Tensor x, Tensor low, Tensor[] matrices, int[] parts, int num_parts, float scaling)"
    " -> Tensor",
    gpu=from_gpu("add_low_rank", "launch"),
    cpu=_on_cpu,
    fake=lambda x, low, matrices, parts, num_parts, scaling: x.new_empty(x.shape),
    flops=lambda x, low, matrices, *others, **out: (
        2 * low.numel() // low[-1] * sum(matrix.numel() for matrix in matrices)
    ),
)


def _scaled_product(a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Return scaling a b in one product."""
    # With beta 0 the first argument is not read.
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scaling)


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, low, parts, num_parts, scaling, *matrices):
        inputs = (x, low, list(matrices), parts, num_parts, scaling)
        _AddLowRank.save(ctx, inputs, None)
        return _run(*inputs)

    @staticmethod
    def save(ctx, inputs, output) -> None:
        _, low, matrices, ctx.parts, ctx.num_parts, ctx.scaling = inputs
        ctx.save_for_backward(low, *matrices)

    @staticmethod
    def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = output_gradients
        low, *matrices = ctx.saved_tensors
        of_part = dy.flatten(0, -2).chunk(ctx.num_parts, dim=-1)
        gradients = [of_part[part] for part in ctx.parts]
        dlow = None
        if ctx.needs_input_grad[1]:
            pairs = zip(gradients, matrices, strict=True)
            products = [_scaled_product(*pair, ctx.scaling) for pair in pairs]
            dlow = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
            dlow = dlow.view(low.shape)
        lows = low.flatten(0, -2).chunk(len(matrices), dim=-1)
        pairs = zip(gradients, lows, strict=True)
        dmatrices = [_scaled_product(dy_p.t(), low_p, ctx.scaling) for dy_p, low_p in pairs]
        return dy, dlow, None, None, None, *dmatrices


def _backward_of_op(ctx, dy: Tensor) -> tuple:
    # The matrices are one argument of the op, and the last ones of the function.
    dx, dlow, *others = _AddLowRank.backward(ctx, dy)
    return dx, dlow, others[3:], None, None, None


_run = register_gradient(_add_low_rank, _AddLowRank.save, _backward_of_op)


def add_low_rank(
    x: Tensor,
    low: Tensor,
    matrices: Sequence[Tensor],
    parts: Sequence[int],
    num_parts: int,
    scaling: float = 1.0,
) -> Tensor:
    """Return x [.., N] plus `scaling` times the products of low [.., P r] and the P matrices B
    [N / num_parts, r].

    parts: the part of the columns that each matrix adds to, ascending. All tensors have x's dtype.
    """
    if not matrices or x.shape[-1] % num_parts or sorted(set(parts)) != list(parts):
        text = f"it must have {num_parts} equal parts of columns, of which {list(parts)} are"
        refuse("add_low_rank", "x", x, f"{text} adapted")
    rank = matrices[0].shape[-1]
    check_tensor("add_low_rank", "low", low, (*x.shape[:-1], len(matrices) * rank), like=x)
    for matrix in matrices:
        check_tensor("add_low_rank", "matrix", matrix, (x.shape[-1] // num_parts, rank), like=x)
    return _AddLowRank.apply(x, low, list(parts), num_parts, scaling, *matrices)


class _ReadLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, a)
        # A view, since autograd needs a tensor of its own for this node.
        return x.view_as(x), x @ a.t()

    @staticmethod
    def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        dx, dlow = output_gradients
        x, a = ctx.saved_tensors
        rows = dlow.flatten(0, -2)
        # In place, since only the linear has read the view; torch.compile needs the pure op.
        add = torch.addmm if torch.compiler.is_compiling() else Tensor.addmm_
        total = add(dx.flatten(0, -2), rows, a).view(dx.shape)
        return total, None if x is None else rows.t() @ x.flatten(0, -2)


def read_low_rank(x: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Return x [.., K] for the linear and the products of x with the matrices A, a [P r, K]: [.., P r].

    Only one linear may read the first result: its gradient's memory becomes that of x's gradient.
    """
    if x.requires_grad:
        return _ReadLowRank.apply(x, a)
    return x, torch.nn.functional.linear(x, a)

"""Autograd of a linear whose weight of 8 bits does not change: int8_linear.py and fp8_linear.py."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.torch_library import register_op

Product = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # x, q, scale, bias -> y
Gradient = Callable[[Tensor, Tensor, Tensor], Tensor]  # dy, q, scale -> dx


def register_linear(
    name: str, gpu: tuple[Product, Gradient], cpu: tuple[Product, Gradient]
) -> Product:
    """Register the ops `name` and `name`_backward, and return the linear as a function with gradients.

    They are ops, so that neither autograd nor torch.compile keeps the weight or what is rounded.
    """
    product = register_op(
        f"{name}(Tensor x, Tensor q, Tensor scale, Tensor? bias) -> Tensor",
        gpu=gpu[0],
        cpu=cpu[0],
        fake=lambda x, q, scale, bias: x.new_empty(*x.shape[:-1], q.shape[0]),
    )
    gradient = register_op(
        f"{name}_backward(Tensor dy, Tensor q, Tensor scale) -> Tensor",
        gpu=gpu[1],
        cpu=cpu[1],
        fake=lambda dy, q, scale: dy.new_empty(*dy.shape[:-1], q.shape[1]),
    )

    class FrozenLinear(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
            ctx.save_for_backward(q, scale)
            return product(x, q, scale, bias)

        @staticmethod
        def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
            (dy,) = output_gradients
            dx = gradient(dy, *ctx.saved_tensors) if ctx.needs_input_grad[0] else None
            db = dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[3] else None
            return dx, None, None, db

    return FrozenLinear.apply


def check_linear(
    op: str, x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> None:
    """Check x [.., K], q [N, K] of `dtype`, scale [N] float32 and bias [N] in the dtype of x."""
    check_tensor(op, "x", x, (*x.shape[:-1], q.shape[-1]))
    if q.dtype != dtype or q.ndim != 2:
        refuse(op, "q", q, f"it must be a matrix of {str(dtype).removeprefix('torch.')}")
    if scale.dtype != torch.float32 or scale.shape != q.shape[:1]:
        refuse(op, "scale", scale, f"it must be float32 of shape [{q.shape[0]}]")
    if bias is not None:
        check_tensor(op, "bias", bias, q.shape[:1], like=x)

"""GELU in its tanh form, of a linear's product x and the bias that the linear left out.

    u = x + bias,    z = 2 sqrt(2/pi) (u + 0.044715 u^3),    s = sigmoid(z)
    y = u s                                  = 0.5 u (1 + tanh(z / 2))
    dx = dy (s + u s (1 - s) dz/du),   dbias = sum of dx over all rows

Bytes, with U those of a bf16 [B, S, M] and x, y [B, S, 4 M]: forward moves 8 U (x, y), backward 12
U (x, dy, dx). The bias gradient needs no pass of its own: backward adds dx in float32 before
rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor
from cogfast.kernels.torch_library import from_gpu, has_kernel, register_gradient, register_op


def gelu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of x [B, S, N] + bias [N]."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


_gelu = register_op(
    "gelu(Tensor x, Tensor? bias) -> Tensor",
    gpu=from_gpu("gelu", "launch_forward"),
    fake=lambda x, bias: x.new_empty(x.shape),
)
_gelu_backward = register_op(
    "gelu_backward(Tensor dy, Tensor x, Tensor? bias, bool needs_dbias) -> (Tensor, Tensor)",
    gpu=from_gpu("gelu", "launch_backward"),
    fake=lambda dy, x, bias, needs_dbias: (
        x.new_empty(x.shape),
        x.new_empty(x.shape[-1] if needs_dbias else 0),
    ),
)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, bias)
        return _run(x, bias)

    @staticmethod
    def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor, Tensor | None]:
        (dy,) = output_gradients
        needs_dbias = ctx.needs_input_grad[1]
        dx, dbias = _gelu_backward(dy, *ctx.saved_tensors, needs_dbias)
        return dx, dbias if needs_dbias else None


_keep = lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
_run = register_gradient(_gelu, _keep, _Gelu.backward)


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return GELU of x + bias, [.., N].

    x: [.., N]. bias: [N] in the dtype of x, or None.
    """
    # Any shape will do: this checks dtype, device and the last dim.
    check_tensor("gelu", "x", x, x.shape)
    check_tensor("gelu", "bias", bias, x.shape[-1:], like=x)
    return _Gelu.apply(x, bias) if has_kernel(x) else gelu_reference(x, bias)

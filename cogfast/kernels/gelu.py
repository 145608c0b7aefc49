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
from cogfast.kernels.gpu.gelu import launch_backward, launch_forward


def gelu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """GELU of x [B, S, N] + bias [N]."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


def _forward_cpu(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y and u = x + bias, which backward reads; without a bias, u has shape [0]."""
    x = x.contiguous()
    if bias is None:
        return F.gelu(x, approximate="tanh"), x.new_empty(0)
    u = x + bias
    return F.gelu(u, approximate="tanh"), u


def _backward_cpu(
    dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    """Return dx and dbias [N], or [0] if it is not needed. With a saved u, x is u and bias None."""
    u = x.contiguous() if bias is None else x + bias
    # aten computes in float32 and rounds dx once.
    dx = torch.ops.aten.gelu_backward(dy.contiguous(), u, approximate="tanh")
    return dx, dx.flatten(0, -2).sum(0) if needs_dbias else x.new_empty(0)


@torch.library.custom_op("cogfast::gelu", mutates_args=(), device_types="cuda")
def _gelu(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return y, and u = x + bias on a CPU, where backward reads u faster than it adds again."""
    return launch_forward(x, bias), x.new_empty(0)


@_gelu.register_fake
def _(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    # The fake's device decides as the implementation does: only the CPU version returns u.
    has_sum = bias is not None and x.device.type == "cpu"
    return x.new_empty(x.shape), x.new_empty(x.shape if has_sum else 0)


@torch.library.custom_op("cogfast::gelu_backward", mutates_args=(), device_types="cuda")
def _gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    return launch_backward(dy, x, bias, needs_dbias)


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if needs_dbias else 0)


_gelu.register_kernel("cpu")(_forward_cpu)
_gelu_backward.register_kernel("cpu")(_backward_cpu)


def _keep(ctx, inputs: tuple, output: tuple) -> None:
    x, bias = inputs
    u = output[1]
    ctx.set_materialize_grads(False)  # u gets no gradient: do not fill one with zeros
    ctx.needs_dbias = bias is not None and ctx.needs_input_grad[1]
    # A CPU saves u in place of x and bias.
    saved = (u, None) if u.numel() else (x, bias)
    ctx.save_for_backward(*saved)


def _backward(ctx, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dx, dbias = _gelu_backward(dy, *ctx.saved_tensors, ctx.needs_dbias)
    return dx, dbias if ctx.needs_dbias else None


_gelu.register_autograd(_backward, setup_context=_keep)


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """Return GELU of x + bias, [.., N].

    x: [.., N]. bias: [N] in the dtype of x, or None.
    """
    # Any shape will do: this checks dtype, device and the last dim.
    check_tensor("gelu", "x", x, x.shape)
    if bias is not None:
        check_tensor("gelu", "bias", bias, x.shape[-1:], like=x)
    return _gelu(x, bias)[0]

"""Linear with a frozen weight of 8-bit floats q [N, K] (e4m3) and a float32 scale for each row, whose
products run on the fp8 tensor cores of a GPU.

    W = scale q,    y = x^ W^T + b,    dx = g^ q  with  g = scale dy,    db = sum of dy over all rows

x^ and g^ are x and g rounded to e4m3 with a scale for each row, its largest magnitude / 448. The row's
scale of W is on the summed dimension of dx, so that g takes it up before it is rounded. This is the
recipe `rowwise` of torchao.float8 (all e4m3, scales of the current values) for a weight that does not
change. Sums are in float32 (forward, an H100's fp8 products keep fewer bits of partial sums, as there).

Entries of an e4m3 row are off by up to 1/16 of themselves, those of an int8 row (int8_linear.py) by
up to 1/254 of the row's largest: fp8 is for speed. The products run at twice bf16's rate; for them x is
read and half as many bytes are written, and backward makes a transposed copy of q, which is freed again.
A CPU computes the same roundings with products in float32. No GPU has run it yet.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import refuse
from cogfast.kernels.quantized.float8 import FP8, LARGEST, LEAST
from cogfast.kernels.quantized.frozen_linear import check_linear, register_linear
from cogfast.kernels.quantized.int8_linear import row_maxima
from cogfast.kernels.torch_library import from_gpu

_MULTIPLE = 16  # of rows and columns of a matrix, for the tensor cores


def quantize_rows(weight: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return q [N, K] e4m3 and the scales [N] float32 of a matrix [N, K].

    maxima: [N] of `row_maxima`; None: of this matrix. A row that is not finite stays so.
    """
    values = weight.float()
    maxima = (row_maxima(values) if maxima is None else maxima).clamp_min(LEAST)
    return (values * (LARGEST / maxima)[:, None]).to(FP8), maxima / LARGEST


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the matrix [N, K] in `dtype`."""
    return (q.float() * scale[:, None]).to(dtype)


def fp8_linear_reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias in plain PyTorch, without rounding x."""
    return torch.nn.functional.linear(x, (q.to(scale.dtype) * scale[:, None]).to(x.dtype), bias)


_launch_quantize = from_gpu("fp8_linear", "launch")


def _on_gpu(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rounded, scales = _launch_quantize(x.reshape(-1, x.shape[-1]), None)
    out = torch._scaled_mm(
        rounded,
        q.t(),
        scale_a=scales[:, None],
        scale_b=scale[None],
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.view(*x.shape[:-1], -1)


def _backward_on_gpu(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rounded, scales = _launch_quantize(dy.reshape(-1, dy.shape[-1]), scale)
    # The second operand's columns must be contiguous. Not every copy kernel knows float8.
    transposed = q.view(torch.uint8).t().contiguous().view(FP8)
    out = torch._scaled_mm(
        rounded,
        transposed.t(),
        scale_a=scales[:, None],
        scale_b=torch.ones(1, q.shape[1], device=q.device),
        out_dtype=torch.bfloat16,
    )
    return out.view(*dy.shape[:-1], -1)


def _on_cpu(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    rounded, scales = quantize_rows(x.reshape(-1, x.shape[-1]))
    out = (rounded.float() @ q.float().t()) * scales[:, None] * scale
    out = out if bias is None else out + bias
    return out.to(x.dtype).view(*x.shape[:-1], -1)


def _backward_on_cpu(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rounded, scales = quantize_rows(dy.reshape(-1, dy.shape[-1]).float() * scale)
    out = (rounded.float() @ q.float()) * scales[:, None]
    return out.to(dy.dtype).view(*dy.shape[:-1], -1)


_run = register_linear(
    "fp8_linear", gpu=(_on_gpu, _backward_on_gpu), cpu=(_on_cpu, _backward_on_cpu)
)


def fp8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x^ W^T + bias, [.., N], with W = scale q and x^ the rows of x rounded to e4m3.

    x: [.., K], on a GPU bfloat16. q: [N, K] float8_e4m3fn, on a GPU with N and K multiples of 16;
    scale: [N] float32; both without gradients. bias: [N] in the dtype of x, or None.
    """
    check_linear("fp8_linear", x, q, scale, bias, FP8)
    if x.device.type == "cuda":
        if x.dtype != torch.bfloat16:
            refuse("fp8_linear", "x", x, "its dtype must be bfloat16 on a GPU")
        if q.shape[0] % _MULTIPLE or q.shape[1] % _MULTIPLE:
            refuse("fp8_linear", "q", q, f"its sides must be multiples of {_MULTIPLE} on a GPU")
    return _run(x, q, scale, bias)

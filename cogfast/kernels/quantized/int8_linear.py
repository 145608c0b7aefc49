"""Linear with a frozen weight of int8 rows q [N, K] and a float32 scale for each row.

    W = scale q,    y = x W^T + b,    dx = dy W,    db = sum of dy over all rows

q is symmetric: the largest magnitude of a row is 127, and the error of an entry is at most half a
scale. W is computed in the dtype of x right before a product and freed right after it, forward and
backward, so that autograd keeps q alone. In bf16 this moves 3 bytes per entry beside the 2 R FLOPs of
a product of R rows: 2% of its time at R = 17,776 and the rates that plan/gpus.py assumes for an
H100. No GPU has run it yet.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cogfast.kernels.quantized.frozen_linear import check_linear, register_linear

_MOST = 127  # -128 is not used: q is symmetric


def row_maxima(weight: Tensor) -> Tensor:
    """Return the largest magnitude of each row, [N] float32; infinite if the row is not finite."""
    return weight.float().abs().amax(dim=1).nan_to_num_(nan=math.inf, posinf=math.inf)


def quantize_rows(weight: Tensor, maxima: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return q [N, K] int8 and the scales [N] float32 of a weight [N, K].

    maxima: [N] of `row_maxima`; None: of this weight. A row that is not finite gets a scale that is not
    finite.
    """
    values = weight.float()
    scale = (row_maxima(values) if maxima is None else maxima) / _MOST
    # A row of zeros has scale 0.
    q = values / scale.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    return q.nan_to_num_(0.0).round_().clamp_(-_MOST, _MOST).to(torch.int8), scale


def dequantize_rows(q: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight [N, K] in `dtype`: products in float32, rounded once, in one pass."""
    return torch.mul(q, scale[:, None], out=torch.empty_like(q, dtype=dtype))


def int8_linear_reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias in plain PyTorch, which keeps W for backward."""
    return torch.nn.functional.linear(x, (q * scale[:, None]).to(x.dtype), bias)


def _product(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    weight = dequantize_rows(q, scale, x.dtype).t()
    rows = x.reshape(-1, x.shape[-1])
    out = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return out.view(*x.shape[:-1], -1)


def _input_gradient(dy: Tensor, q: Tensor, scale: Tensor) -> Tensor:
    rows = dy.reshape(-1, dy.shape[-1])
    return (rows @ dequantize_rows(q, scale, dy.dtype)).view(*dy.shape[:-1], -1)


_run = register_linear(
    "int8_linear", gpu=(_product, _input_gradient), cpu=(_product, _input_gradient)
)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W^T + bias, [.., N], with W = scale q.

    x: [.., K]. q: [N, K] int8; scale: [N] float32; both without gradients. bias: [N] in the dtype of x,
    or None.
    """
    check_linear("int8_linear", x, q, scale, bias, torch.int8)
    return _run(x, q, scale, bias)

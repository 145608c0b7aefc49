"""A linear with a frozen weight of 8 bits: int8 (int8_linear.py) or fp8 (fp8_linear.py)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from cogfast.kernels.quantized import fp8_linear, int8_linear
from cogfast.kernels.quantized.float8 import FP8

Quantization = Literal["int8", "fp8"]
DTYPES: dict[Quantization, torch.dtype] = {"int8": torch.int8, "fp8": FP8}


def quantized_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias, [.., N], for W of q [N, K] in int8 or fp8 and the scales [N] of its rows."""
    if q.dtype == torch.int8:
        return int8_linear.int8_linear(x, q, scale, bias)
    return fp8_linear.fp8_linear(x, q, scale, bias)


def quantize_rows(
    weight: Tensor, dtype: torch.dtype, maxima: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return q [N, K] of a dtype of DTYPES and the scales [N] float32 of a weight [N, K].

    maxima: [N], the largest magnitude of each row; None: of this weight.
    """
    kernels = int8_linear if dtype == torch.int8 else fp8_linear
    return kernels.quantize_rows(weight, maxima)

"""Triton kernel that rounds rows to 8-bit floats for extensions/memory/quantized_linear.py, and its launch.

It reads each number once: 3 bytes per bf16 entry.
"""

import torch
import triton.language as tl
from torch import Tensor

from cogfast.extensions.memory.quantized_linear import FP8, LARGEST, LEAST_FP8
from cogfast.kernels.gpu.launch import jit, next_power_of_2

_LARGEST = tl.constexpr(LARGEST[FP8])
_LEAST = tl.constexpr(LEAST_FP8)


@jit
def round_rows_kernel(
    x_ptr,  # [rows, N]
    columns_ptr,  # [N] float32 that x is multiplied by, or None
    q_ptr,  # [rows, N] e4m3
    scale_ptr,  # [rows] float32
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Round one row, which stays in registers."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < N
    x = tl.load(x_ptr + row * N + column, mask=inside, other=0.0).to(tl.float32)
    if columns_ptr is not None:
        x *= tl.load(columns_ptr + column, mask=inside, other=0.0)
    # A row with a NaN gets an infinite scale, as one with an infinite entry: products with it are NaN.
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 0)
    largest = tl.maximum(largest, _LEAST)
    tl.store(q_ptr + row * N + column, (x * (_LARGEST / largest)).to(tl.float8e4nv), mask=inside)
    tl.store(scale_ptr + row, largest / _LARGEST)


def num_warps_of(block: int) -> int:
    """Return the warps that leave a thread 16 entries of a row."""
    return max(1, min(16, block // 512))


def launch(x: Tensor, columns: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return q [R, N] e4m3 and the scales [R] float32 of x [R, N], times columns [N] float32."""
    x = x.contiguous()
    rows, n = x.shape
    q, scale = torch.empty_like(x, dtype=FP8), x.new_empty(rows, dtype=torch.float32)
    if rows:
        block = next_power_of_2(n)
        num_warps = num_warps_of(block)
        round_rows_kernel[(rows,)](x, columns, q, scale, N=n, BLOCK=block, num_warps=num_warps)
    return q, scale

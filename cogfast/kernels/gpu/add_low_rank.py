"""Triton kernel of add_low_rank, and its launch. kernels/add_low_rank.py has the formulas.

An entry of y takes 2 r FLOPs and 4 bytes of HBM in bf16: at r = 128 an H100's tensor cores need a
quarter of the time that its memory does. An H100 reaches 67% of its copy rate forward.
"""

import torch
import triton.language as tl
from torch import Tensor

from cogfast.kernels.gpu.launch import cdiv, jit, next_power_of_2

_MOST_PARTS = 3  # q, k and v


@jit
def add_low_rank_kernel(
    x_ptr,  # [rows, NUM_PARTS * N]
    low_ptr,  # [rows, NUM_MATRICES * RANK]
    first_ptr,  # [N, RANK]
    second_ptr,  # of the second matrix, if there is one
    third_ptr,
    y_ptr,  # [rows, NUM_PARTS * N]
    rows,
    scaling,  # float
    N: tl.constexpr,
    RANK: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    NUM_MATRICES: tl.constexpr,
    MATRIX_OF_FIRST: tl.constexpr,  # number of the matrix of each part; -1: none
    MATRIX_OF_SECOND: tl.constexpr,
    MATRIX_OF_THIRD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_RANK: tl.constexpr,
):
    """Compute one tile of one part; neighbouring programs take neighbouring columns.

    They share their rows of low, and all programs share the matrices: both stay in the L2 cache.
    """
    num_blocks: tl.constexpr = (N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    block = tl.program_id(0) % (NUM_PARTS * num_blocks)
    part = block // num_blocks
    row = tl.program_id(0) // (NUM_PARTS * num_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    row = row.to(tl.int64)
    column = block % num_blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    inside = (row < rows)[:, None]
    if N % BLOCK_COLUMNS != 0:
        inside = inside & (column < N)[None, :]
    offset = row[:, None] * (NUM_PARTS * N) + (part * N + column)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)

    matrix = MATRIX_OF_FIRST
    b_ptr = first_ptr
    if NUM_PARTS > 1:
        if part == 1:
            matrix = MATRIX_OF_SECOND
        elif part == 2:
            matrix = MATRIX_OF_THIRD
    if NUM_MATRICES > 1:
        if matrix == 1:
            b_ptr = second_ptr
        elif matrix == 2:
            b_ptr = third_ptr
    if matrix >= 0:
        for first in range(0, RANK, BLOCK_RANK):
            k = first + tl.arange(0, BLOCK_RANK)
            low_offset = row[:, None] * (NUM_MATRICES * RANK) + (matrix * RANK + k)[None, :]
            low_inside = (row < rows)[:, None]
            b_inside = (column < N)[None, :]
            if RANK % BLOCK_RANK != 0:
                low_inside = low_inside & (k < RANK)[None, :]
                b_inside = b_inside & (k < RANK)[:, None]
            low = tl.load(low_ptr + low_offset, mask=low_inside, other=0.0)
            b = tl.load(b_ptr + column[None, :] * RANK + k[:, None], mask=b_inside, other=0.0)
            # float32 stays float32, as in PyTorch's products.
            total = tl.dot(low, b, total, input_precision="ieee")
    # Loaded behind the product: its registers are free then, and the other program computes meanwhile.
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    total = x + scaling * total
    tl.store(y_ptr + offset, total.to(y_ptr.dtype.element_ty), mask=inside)


# 64 KB of shared memory and at most 128 registers a thread let a multiprocessor of an H100 hold two
# programs. A larger tile spills registers in float32, whose products take no tensor cores.
SIDE, SIDE_FP32 = 128, 64  # of a square tile
NUM_WARPS, NUM_STAGES = 8, 2
RANK_BYTES = 128  # of a row of low that is read at a time
_LEAST = 16  # tl.dot's smallest inner dimension


def launch(
    x: Tensor, low: Tensor, matrices: list[Tensor], parts: list[int], num_parts: int, scaling: float
) -> Tensor:
    """Return y [.., N] from x [.., N], low [.., P r] and the P matrices [N / num_parts, r]."""
    side = SIDE_FP32 if x.dtype == torch.float32 else SIDE
    x, low = x.contiguous(), low.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y
    n, rank = matrices[0].shape
    rows = x.numel() // x.shape[-1]
    contiguous = [matrix.contiguous() for matrix in matrices]
    number_of = {part: number for number, part in enumerate(parts)}
    first, second, third = (number_of.get(part, -1) for part in range(_MOST_PARTS))
    block_rank = min(next_power_of_2(rank), RANK_BYTES // x.element_size())
    grid = (cdiv(rows, side) * num_parts * cdiv(n, side),)
    add_low_rank_kernel[grid](
        x,
        low,
        contiguous[0],
        contiguous[min(1, len(matrices) - 1)],
        contiguous[-1],
        y,
        rows,
        float(scaling),
        N=n,
        RANK=rank,
        NUM_PARTS=num_parts,
        NUM_MATRICES=len(matrices),
        MATRIX_OF_FIRST=first,
        MATRIX_OF_SECOND=second,
        MATRIX_OF_THIRD=third,
        BLOCK_ROWS=side,
        BLOCK_COLUMNS=side,
        BLOCK_RANK=max(_LEAST, block_rank),
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
    return y

"""Triton kernels that choose the blocks of sparse attention. extensions/sparse/attention.py has the formulas.

Three launches per layer and pass: means of blocks, the choice of each block of queries, and the blocks of
queries of each block of keys, which the backward pass walks. Memory moves once, for the means.
"""

import torch
import triton.language as tl
from torch import Tensor

from cogfast.extensions.sparse.attention import BLOCK, Blocks, Choice, empty_choice
from cogfast.kernels.gpu.launch import jit, next_power_of_2


@jit
def block_means_kernel(
    means_ptr,  # out [2, B, H, D, N] float32: of queries, then of keys
    q_ptr,  # [B, S, H, D]
    k_ptr,
    num_rows,  # S
    q_stride_b,
    q_stride_s,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    H: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)  # B * H
    batch, of_sample = (head // H).to(tl.int64), (head % H).to(tl.int64)
    row = block * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, D_BLOCK)
    mask = (row < num_rows)[:, None] & (entry < D)[None, :]
    count = tl.minimum(num_rows - block * BLOCK, BLOCK)
    far = row.to(tl.int64)[:, None]
    q_ptr += batch * q_stride_b + of_sample * q_stride_h
    k_ptr += batch * k_stride_b + of_sample * k_stride_h
    q = tl.load(q_ptr + far * q_stride_s + entry[None, :], mask=mask, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + far * k_stride_s + entry[None, :], mask=mask, other=0.0).to(tl.float32)
    target = means_ptr + (head.to(tl.int64) * D + entry) * num_blocks + block
    tl.store(target, tl.sum(q, 0) / count, mask=entry < D)
    target += num_heads.to(tl.int64) * D * num_blocks
    tl.store(target, tl.sum(k, 0) / count, mask=entry < D)


@jit
def _list_chosen(indices_ptr, counts_ptr, chosen, is_block, column):
    """Write the chosen columns [N_BLOCK] in ascending order, then the others, and their count."""
    taken, others = chosen.to(tl.int32), (is_block & (chosen == 0)).to(tl.int32)
    count = tl.sum(taken, 0)
    place = tl.where(chosen, tl.cumsum(taken, 0), count + tl.cumsum(others, 0))
    tl.store(indices_ptr + place - 1, column, mask=is_block)
    tl.store(counts_ptr, count)


@jit
def choose_blocks_kernel(
    kv_counts_ptr,  # out [B, H, N] int32
    kv_indices_ptr,  # out [B, H, N, N] int32
    nothing_ptr,  # out [B, H, N] int32, zeros
    mass_ptr,  # out [B, H, N] float32
    chosen_ptr,  # out [B, H, N, N] int8
    means_ptr,  # [2, B, H, D, N] float32
    num_rows,
    num_text_blocks,
    num_free,
    num_kept,
    scale,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    head, num_heads = tl.program_id(1).to(tl.int64), tl.num_programs(1)
    column = tl.arange(0, N_BLOCK)
    is_block = column < num_blocks
    q_ptr = means_ptr + head * D * num_blocks + block
    k_ptr = means_ptr + (num_heads + head) * D * num_blocks + column
    scores = tl.zeros([N_BLOCK], tl.float32)
    for entry in range(D):
        q = tl.load(q_ptr + entry * num_blocks)
        scores += q * tl.load(k_ptr + entry * num_blocks, mask=is_block, other=0.0)
    scores = scores * scale + 0.0  # not -0.0, whose bits differ from those of 0.0

    is_free = (column >= num_text_blocks) & (column < num_text_blocks + num_free)
    # Integers in the order of the scores, 0 for blocks that are not free. The search below finds the
    # num_kept-th largest bit by bit.
    bits = scores.to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(bits < 0, -1 - bits, bits + 2147483648)
    keys = tl.where(is_free, keys, -1)
    least = tl.full([], 0, tl.int64)
    for i in range(32):
        candidate = least + (tl.full([], 2147483648, tl.int64) >> i)
        is_enough = tl.sum((keys >= candidate).to(tl.int32), 0) >= num_kept
        least = tl.where(is_enough, candidate, least)
    above = keys > least
    equal = keys == least
    missing = num_kept - tl.sum(above.to(tl.int32), 0)
    first_equal = equal & (tl.cumsum(equal.to(tl.int32), 0) <= missing)
    chosen = is_block & (above | first_equal | (is_free == 0) | (block < num_text_blocks))

    row = head * num_blocks + block
    _list_chosen(kv_indices_ptr + row * num_blocks, kv_counts_ptr + row, chosen, is_block, column)
    tl.store(chosen_ptr + row * num_blocks + column, chosen.to(tl.int8), mask=is_block)
    tl.store(nothing_ptr + row, 0)
    size = tl.minimum(num_rows - column * BLOCK, BLOCK).to(tl.float32)
    scores = tl.where(is_block, scores, float("-inf"))
    weights = tl.exp(scores - tl.max(scores, 0)) * size
    kept = tl.sum(tl.where(chosen, weights, 0.0), 0)
    tl.store(mass_ptr + row, kept / tl.sum(tl.where(is_block, weights, 0.0), 0))


@jit
def blocks_of_keys_kernel(
    q_counts_ptr,  # out [B, H, N] int32
    q_indices_ptr,  # out [B, H, N, N] int32
    chosen_ptr,  # [B, H, N, N] int8
    N_BLOCK: tl.constexpr,
):
    block, num_blocks = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    query = tl.arange(0, N_BLOCK)
    is_block = query < num_blocks
    source = chosen_ptr + (head * num_blocks + query) * num_blocks + block
    chosen = tl.load(source, mask=is_block, other=0) != 0
    row = head * num_blocks + block
    _list_chosen(q_indices_ptr + row * num_blocks, q_counts_ptr + row, chosen, is_block, query)


def num_warps(n_block: int) -> int:
    """Return the warps of a program that works on n_block blocks."""
    return max(1, min(8, n_block // 64))


def launch(q: Tensor, k: Tensor, num_text: int, num_kept: int) -> Choice:
    """Choose blocks for q, k [B, S, H, D] with a dense last dim."""
    b, num_rows, h, d = q.shape
    blocks = Blocks.of(num_rows, num_text)
    n = blocks.count
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    choice = empty_choice(q)
    means = q.new_empty(2, b, h, d, n, dtype=torch.float32)
    chosen = q.new_empty(b, h, n, n, dtype=torch.int8)
    grid = (n, b * h)
    block_means_kernel[grid](
        means,
        q,
        k,
        num_rows,
        *q.stride()[:3],
        *k.stride()[:3],
        H=h,
        D=d,
        D_BLOCK=next_power_of_2(d),
        BLOCK=BLOCK,
        num_warps=4,
    )
    n_block = next_power_of_2(n)
    warps = num_warps(n_block)
    choose_blocks_kernel[grid](
        choice.kv_counts,
        choice.kv_indices,
        choice.nothing,
        choice.kept_mass,
        chosen,
        means,
        num_rows,
        blocks.text,
        blocks.free,
        num_kept,
        d**-0.5,
        D=d,
        BLOCK=BLOCK,
        N_BLOCK=n_block,
        num_warps=warps,
    )
    of_keys = choice.q_counts, choice.q_indices
    blocks_of_keys_kernel[grid](*of_keys, chosen, N_BLOCK=n_block, num_warps=warps)
    return choice

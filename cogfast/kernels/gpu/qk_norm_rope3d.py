"""Triton kernels of qk_norm_rope3d, and their launches. kernels/qk_norm_rope3d.py has the formulas.

A program takes TOKENS tokens x HEADS heads at a time, q and k together. A thread has 8 neighbouring
entries of one head (16 bytes of bf16) of every token of the tile: a rotated pair never leaves its
thread, and the sum over a head of 64 is three shuffles. Instructions per 4 KB that a warp moves
(sm_90, bf16), for which HBM at 4.3 TB/s takes a multiprocessor's four schedulers 860 cycles:
forward 454, backward 405 with and 370 without the affine sums; without rotation 334 and 343. An H100
reaches 89% of its copy rate forward, and 71% (2B) and 82% (5B) backward.
"""

# pyright: reportPossiblyUnboundVariable=false
# A kernel's flags are compile-time constants, so a name is bound wherever it is read.

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from cogfast.kernels.gpu.launch import (
    cdiv,
    jit,
    next_power_of_2,
    num_backward_multiprocessors,
    num_multiprocessors,
)


@jit
def _tile(head, entry, stride_s, stride_h, TOKENS: tl.constexpr):
    """Compute the int64 offsets [TOKENS, HEADS, D_BLOCK] of a tile from its first token."""
    rows = tl.arange(0, TOKENS).to(tl.int64)[:, None, None] * stride_s
    return rows + head.to(tl.int64)[None, :, None] * stride_h + entry[None, None, :]


@jit
def _cos_sin(
    table_ptr,
    order_ptr,
    table_width,
    token,
    num_tokens,
    num_text,
    t,
    GRID_H: tl.constexpr,
    GRID_W: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """Load cos and sin of the tokens' angles, [TOKENS, 1, D_BLOCK / 2]; 1 and 0 for text."""
    # They come from three small per-axis tables, which stay in the L1 cache, once per token and
    # thread for q and k. The divisions that find a token's place are by constants.
    UNIT: tl.constexpr = D // 16
    TIME: tl.constexpr = 2 * UNIT  # pairs rotated by time
    SPACE: tl.constexpr = 3 * UNIT  # pairs rotated by the row, and as many by the column
    # Every summand of an index is a multiple of UNIT, hence of the largest power of two in UNIT.
    VECTOR: tl.constexpr = UNIT & -UNIT
    pair = tl.arange(0, D_BLOCK // 2)[None, :]
    video = token - num_text
    if order_ptr is not None:
        is_video = (video >= 0) & (token < num_tokens)
        video = tl.load(order_ptr + video, mask=is_video, other=-1)
    video = video[:, None]
    row_start = t * TIME + video // GRID_W % GRID_H * SPACE - TIME
    column_start = t * TIME + (GRID_H + video % GRID_W) * SPACE - (TIME + SPACE)
    start = tl.where(pair < TIME + SPACE, row_start, column_start)
    index = tl.where(pair < TIME, video // (GRID_H * GRID_W) * TIME, start) + pair
    index = tl.max_contiguous(tl.multiple_of(index, (1, VECTOR)), (1, VECTOR))
    sin_index = index + table_width
    sin_index = tl.max_contiguous(tl.multiple_of(sin_index, (1, VECTOR)), (1, VECTOR))
    is_rotated = (video >= 0) & (pair < D // 2)
    cos = tl.load(table_ptr + index, mask=is_rotated, other=1.0)
    sin = tl.load(table_ptr + sin_index, mask=is_rotated, other=0.0)
    return cos[:, None, :], sin[:, None, :]


@jit
def _rotate_pairs(x, cos, sin):
    """Rotate x [TOKENS, HEADS, D_BLOCK] pair by pair."""
    # Inside a kernel Triton makes a constexpr of any constant value, which no annotation says.
    PAIRS: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 2, 2)  # pyright: ignore[reportAssignmentType]
    a, b = tl.split(tl.reshape(x, PAIRS))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), x.shape)


@jit
def _normalise(x, entry, eps, D: tl.constexpr):
    """Return xhat and rstd [TOKENS, HEADS, 1] of x [TOKENS, HEADS, D_BLOCK], which is 0 past D."""
    x = x - tl.sum(x, 2, keep_dims=True) * (1.0 / D)
    if x.shape[2] > D:
        x = tl.where((entry < D)[None, None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 2, keep_dims=True) * (1.0 / D) + eps)
    return x * rstd, rstd


@jit
def _load_vector(ptr, entry, default: tl.constexpr, D: tl.constexpr):
    """Load an affine parameter [D] as [1, 1, D_BLOCK] float32, or return the default."""
    if ptr is None:
        return default
    else:
        return tl.load(ptr + entry, mask=entry < D, other=0.0).to(tl.float32)[None, None, :]


@jit
def qk_norm_rope3d_fwd_kernel(
    q_ptr,  # out [B, S, H, D]
    k_ptr,  # out [B, S, H, D]
    qkv_ptr,  # [B, S, 3, H, D]
    q_weight_ptr,  # [D] or None, as the next three
    q_bias_ptr,
    k_weight_ptr,
    k_bias_ptr,
    table_ptr,  # [2, table_width] or None: no rotation
    order_ptr,  # Rotation.order or None
    table_width,
    num_tokens,  # S
    num_text,
    t,
    qkv_stride_b,
    qkv_stride_s,
    qkv_stride_part,
    qkv_stride_h,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GRID_H: tl.constexpr,
    GRID_W: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    # Neighbouring programs take the heads of the same tokens, which lie side by side in memory.
    HEAD_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEAD_TILES * HEADS + tl.arange(0, HEADS)
    entry = tl.arange(0, D_BLOCK)
    is_head = (head < H)[None, :, None] & (entry < D)[None, None, :]

    qkv_ptr += batch * qkv_stride_b + _tile(head, entry, qkv_stride_s, qkv_stride_h, TOKENS)
    target = batch * num_tokens * (H * D) + _tile(head, entry, H * D, D, TOKENS)
    q_weight = _load_vector(q_weight_ptr, entry, 1.0, D)
    q_bias = _load_vector(q_bias_ptr, entry, 0.0, D)
    k_weight = _load_vector(k_weight_ptr, entry, 1.0, D)
    k_bias = _load_vector(k_bias_ptr, entry, 0.0, D)

    step = tl.num_programs(0) // HEAD_TILES * TOKENS
    for first in range(tl.program_id(0) // HEAD_TILES * TOKENS, num_tokens, step):
        token = first + tl.arange(0, TOKENS)
        mask = (token < num_tokens)[:, None, None] & is_head
        row = tl.cast(first, tl.int64)
        source = qkv_ptr + row * qkv_stride_s
        q = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        k = tl.load(source + qkv_stride_part, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            q, _ = _normalise(q, entry, eps, D)
            k, _ = _normalise(k, entry, eps, D)
            q = q * q_weight + q_bias
            k = k * k_weight + k_bias
        if table_ptr is not None:
            cos, sin = _cos_sin(
                table_ptr,
                order_ptr,
                table_width,
                token,
                num_tokens,
                num_text,
                t,
                GRID_H,
                GRID_W,
                D,
                D_BLOCK,
            )
            q = _rotate_pairs(q, cos, sin)
            k = _rotate_pairs(k, cos, sin)
        tl.store(q_ptr + row * (H * D) + target, q, mask=mask)
        tl.store(k_ptr + row * (H * D) + target, k, mask=mask)


@jit
def _head_norm_bwd(g, x, weight, entry, eps, D: tl.constexpr):
    """Return the gradient of x from g, the gradient of the norm's result, and these tokens' shares
    of the gradients of weight and bias, [HEADS, D_BLOCK] each."""
    xhat, rstd = _normalise(x, entry, eps, D)
    weight_part = tl.sum(g * xhat, 0)
    bias_part = tl.sum(g, 0)
    g *= weight
    mean = tl.sum(g, 2, keep_dims=True) * (1.0 / D)
    slope = tl.sum(g * xhat, 2, keep_dims=True) * (1.0 / D)
    # rstd * (g - mean - xhat * slope) as two fused multiply-adds per entry.
    return rstd * g - (rstd * slope * xhat + rstd * mean), weight_part, bias_part


@jit
def qk_norm_rope3d_bwd_kernel(
    dqkv_ptr,  # out [B, S, 3, H, D], dense
    partials_ptr,  # out [programs, 4, D] float32: query weight, bias, key weight, bias; or None
    dq_ptr,  # [B, S, H, D], as the next two
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    order_ptr,
    table_width,
    num_tokens,
    num_text,
    t,
    qkv_stride_b,
    qkv_stride_s,
    qkv_stride_part,
    qkv_stride_h,
    dq_stride_b,
    dq_stride_s,
    dq_stride_h,
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    dv_stride_b,
    dv_stride_s,
    dv_stride_h,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
    GRID_H: tl.constexpr,
    GRID_W: tl.constexpr,
    HAS_NORM: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (H + HEADS - 1) // HEADS
    # _rotate_pairs does the same: a constexpr of a plain value.
    NEEDS_SUMS: tl.constexpr = partials_ptr is not None  # pyright: ignore[reportAssignmentType]
    batch = tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % HEAD_TILES * HEADS + tl.arange(0, HEADS)
    entry = tl.arange(0, D_BLOCK)
    is_head = (head < H)[None, :, None] & (entry < D)[None, None, :]

    qkv_ptr += batch * qkv_stride_b + _tile(head, entry, qkv_stride_s, qkv_stride_h, TOKENS)
    dq_ptr += batch * dq_stride_b + _tile(head, entry, dq_stride_s, dq_stride_h, TOKENS)
    dk_ptr += batch * dk_stride_b + _tile(head, entry, dk_stride_s, dk_stride_h, TOKENS)
    dv_ptr += batch * dv_stride_b + _tile(head, entry, dv_stride_s, dv_stride_h, TOKENS)
    dqkv_ptr += batch * num_tokens * (3 * H * D) + _tile(head, entry, 3 * H * D, D, TOKENS)
    q_weight = _load_vector(q_weight_ptr, entry, 1.0, D)
    k_weight = _load_vector(k_weight_ptr, entry, 1.0, D)
    if NEEDS_SUMS:
        q_weight_sum = tl.zeros([HEADS, D_BLOCK], tl.float32)
        q_bias_sum = tl.zeros([HEADS, D_BLOCK], tl.float32)
        k_weight_sum = tl.zeros([HEADS, D_BLOCK], tl.float32)
        k_bias_sum = tl.zeros([HEADS, D_BLOCK], tl.float32)

    step = tl.num_programs(0) // HEAD_TILES * TOKENS
    for first in range(tl.program_id(0) // HEAD_TILES * TOKENS, num_tokens, step):
        token = first + tl.arange(0, TOKENS)
        mask = (token < num_tokens)[:, None, None] & is_head
        row = tl.cast(first, tl.int64)
        # All loads come before the first use, so that their latencies overlap.
        dq = tl.load(dq_ptr + row * dq_stride_s, mask=mask, other=0.0)
        dk = tl.load(dk_ptr + row * dk_stride_s, mask=mask, other=0.0)
        dv = tl.load(dv_ptr + row * dv_stride_s, mask=mask, other=0.0)
        if HAS_NORM:
            source = qkv_ptr + row * qkv_stride_s
            q = tl.load(source, mask=mask, other=0.0)
            k = tl.load(source + qkv_stride_part, mask=mask, other=0.0)
        target = dqkv_ptr + row * (3 * H * D)
        tl.store(target + 2 * H * D, dv, mask=mask)
        dq = dq.to(tl.float32)
        dk = dk.to(tl.float32)
        if table_ptr is not None:
            cos, sin = _cos_sin(
                table_ptr,
                order_ptr,
                table_width,
                token,
                num_tokens,
                num_text,
                t,
                GRID_H,
                GRID_W,
                D,
                D_BLOCK,
            )
            dq = _rotate_pairs(dq, cos, -sin)
            dk = _rotate_pairs(dk, cos, -sin)
        if HAS_NORM:
            dq, q_weight_part, q_bias_part = _head_norm_bwd(
                dq, q.to(tl.float32), q_weight, entry, eps, D
            )
            dk, k_weight_part, k_bias_part = _head_norm_bwd(
                dk, k.to(tl.float32), k_weight, entry, eps, D
            )
            if NEEDS_SUMS:
                q_weight_sum += q_weight_part
                q_bias_sum += q_bias_part
                k_weight_sum += k_weight_part
                k_bias_sum += k_bias_part
        tl.store(target, dq, mask=mask)
        tl.store(target + H * D, dk, mask=mask)

    if NEEDS_SUMS:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        partials_ptr += program * (4 * D) + entry
        tl.store(partials_ptr, tl.sum(q_weight_sum, 0), mask=entry < D)
        tl.store(partials_ptr + D, tl.sum(q_bias_sum, 0), mask=entry < D)
        tl.store(partials_ptr + 2 * D, tl.sum(k_weight_sum, 0), mask=entry < D)
        tl.store(partials_ptr + 3 * D, tl.sum(k_bias_sum, 0), mask=entry < D)


@dataclass(frozen=True, kw_only=True, slots=True)
class QkLaunch:
    """Tile at D = 64, and the programs that take tiles; tiles of other widths have as many entries.

    heads = 4 num_warps gives a thread 16 bytes of one bf16 head.
    """

    tokens: int
    heads: int
    num_warps: int
    programs: int  # per multiprocessor

    def fit(self, num_heads: int, width: int) -> tuple[dict[str, int], int, int]:
        """Return tile, warps and programs per multiprocessor for [.., num_heads, width]."""
        d_block = next_power_of_2(width)
        heads, num_warps = max(1, self.heads * 64 // d_block), self.num_warps
        padded = lambda tile: cdiv(num_heads, tile) * tile
        # Halve the tile while that leaves fewer lanes idle: 3 x 8 heads for 24, not 2 x 16.
        while num_warps > 1 and heads > 1 and padded(heads // 2) < padded(heads):
            heads, num_warps = heads // 2, num_warps // 2
        tile = {"D_BLOCK": d_block, "TOKENS": self.tokens, "HEADS": heads}
        return tile, num_warps, self.programs * self.num_warps // num_warps

    def grid(self, shape: torch.Size, multiprocessors: int) -> tuple[int, int]:
        """Return the grid for [B, S, .., H, D]: (head tiles x programs along the tokens, B)."""
        # The programs that are resident at once walk along the tokens, so that each loads the affine
        # parameters and computes addresses once; a program per tile takes a fifth more instructions.
        num_samples, num_tokens = shape[:2]
        tile, _, programs = self.fit(*shape[-2:])
        head_tiles = cdiv(shape[-2], tile["HEADS"])
        walks = multiprocessors * programs // (head_tiles * num_samples)
        walks = max(1, min(walks, cdiv(num_tokens, self.tokens)))
        return head_tiles * walks, num_samples


# Programs of four warps that the registers allow: forward takes 96 registers per thread, 72 with
# one token; backward 168 and 128. Loads in flight per multiprocessor are 40 and 28 KB (forward), 60
# and 40 KB (backward); the latency of HBM asks for about 25 KB.
FORWARD_LAUNCH = QkLaunch(tokens=2, heads=16, num_warps=4, programs=5)
FORWARD_ONE_TOKEN = QkLaunch(tokens=1, heads=16, num_warps=4, programs=7)
BACKWARD_LAUNCH = QkLaunch(tokens=2, heads=16, num_warps=4, programs=3)
BACKWARD_ONE_TOKEN = QkLaunch(tokens=1, heads=16, num_warps=4, programs=4)


def choose_launch(qkv: Tensor, has_norm: bool, usual: QkLaunch, one_token: QkLaunch) -> QkLaunch:
    """Choose between two tokens per tile and one for qkv [B, S, 3, H, D]."""
    # Two float32 tokens take too many registers, and rotation alone needs only one. Triton loads
    # cos and sin straight into the threads that use them only if they are fewer than the threads;
    # otherwise they go through shared memory.
    tile, num_warps, _ = usual.fit(*qkv.shape[-2:])
    is_direct = usual.tokens * tile["D_BLOCK"] // 2 < 32 * num_warps
    return usual if has_norm and is_direct and qkv.element_size() < 4 else one_token


def launch_forward(
    qkv: Tensor,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    table: Tensor | None,
    order: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return normed and rotated q, k [B, S, H, D].

    qkv: [B, S, 3, H, D] with any strides but a dense last dim. Affine parameters: [D] or None.
    table, order: those of Rotation or None, for t x h x w video tokens after num_text text tokens.
    """
    num_samples, num_tokens, _, num_heads, width = qkv.shape
    q = qkv.new_empty(num_samples, num_tokens, num_heads, width)
    k = torch.empty_like(q)
    launch = choose_launch(qkv, has_norm, FORWARD_LAUNCH, FORWARD_ONE_TOKEN)
    tile, num_warps, _ = launch.fit(num_heads, width)
    qk_norm_rope3d_fwd_kernel[launch.grid(qkv.shape, num_multiprocessors(qkv.device))](
        q,
        k,
        qkv,
        q_weight,
        q_bias,
        k_weight,
        k_bias,
        table,
        order,
        0 if table is None else table.shape[1],
        num_tokens,
        num_text,
        t,
        *qkv.stride()[:4],
        eps,
        H=num_heads,
        D=width,
        GRID_H=h,
        GRID_W=w,
        HAS_NORM=has_norm,
        **tile,
        num_warps=num_warps,
    )
    return q, k


def launch_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor | None,
    order: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
    needs_sums: bool,
) -> tuple[Tensor, Tensor]:
    """Return dqkv [B, S, 3, H, D], dense, and the affine gradients [4, D] float32.

    The affine gradients are those of query weight, query bias, key weight and key bias; [0, D] if
    needs_sums is false. dq, dk, dv: [B, S, H, D] with any strides.
    """
    num_samples, num_tokens, _, num_heads, width = qkv.shape
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq, dk, dv))
    launch = choose_launch(qkv, has_norm, BACKWARD_LAUNCH, BACKWARD_ONE_TOKEN)
    tile, num_warps, _ = launch.fit(num_heads, width)
    grid = launch.grid(qkv.shape, num_backward_multiprocessors(qkv.device))
    partials = None
    if needs_sums:
        shape = (grid[0] * grid[1], 4, width)
        partials = torch.empty(shape, dtype=torch.float32, device=qkv.device)
    qk_norm_rope3d_bwd_kernel[grid](
        dqkv,
        partials,
        dq,
        dk,
        dv,
        qkv,
        q_weight,
        k_weight,
        table,
        order,
        0 if table is None else table.shape[1],
        num_tokens,
        num_text,
        t,
        *qkv.stride()[:4],
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        eps,
        H=num_heads,
        D=width,
        GRID_H=h,
        GRID_W=w,
        HAS_NORM=has_norm,
        **tile,
        num_warps=num_warps,
    )
    if partials is None:
        return dqkv, qkv.new_empty(0, width, dtype=torch.float32)
    return dqkv, partials.sum(0)

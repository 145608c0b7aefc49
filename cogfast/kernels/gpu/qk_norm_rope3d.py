"""The Triton kernels of qk_norm_rope3d; the maths stand in qk_norm_rope3d.py.

A program takes TOKENS tokens x HEADS heads at a time, q and k together: a thread has 8 neighbouring
entries of one head (16 bytes of bf16) of every token of the tile. So a pair never leaves its thread,
a sum over a head of 64 is three shuffles, and nothing but the last sums of backward passes through
shared memory. cos and sin are loaded once per token and thread, for q and k, from the three small
per-axis tables, which stay in L1; their places follow from the token's number by divisions by
constants. Both kernels walk down the tokens with as many programs as are resident at once, which
load affine parameters and work out addresses once: a program per tile takes a fifth more
instructions.

Machine code (sm_90, bf16) of the loop, instructions per 4 KB that a warp moves, for which HBM at
4.3 TB/s takes a multiprocessor's four schedulers 860 cycles: forward 454, backward 405 with and 370
without the affine sums; without rotation 334 and 343.
"""

from cogfast.kernels.argument_checks import jit, tl


@jit
def _tile(head, entry, stride_s, stride_h, TOKENS: tl.constexpr):
    """Offsets [TOKENS, HEADS, D_BLOCK] of a tile from its first token, int64."""
    rows = tl.arange(0, TOKENS).to(tl.int64)[:, None, None] * stride_s
    return rows + head.to(tl.int64)[None, :, None] * stride_h + entry[None, None, :]


@jit
def _cos_sin(
    table_ptr,
    table_width,
    token,
    num_text,
    t,
    GRID_H: tl.constexpr,
    GRID_W: tl.constexpr,
    D: tl.constexpr,
    D_BLOCK: tl.constexpr,
):
    """cos and sin of tokens' angles, [TOKENS, 1, D_BLOCK / 2]; 1 and 0 for text."""
    UNIT: tl.constexpr = D // 16
    TIME: tl.constexpr = 2 * UNIT  # pairs that turn with time
    SPACE: tl.constexpr = 3 * UNIT  # with the row, and as many with the column
    # all that an index is made of is a multiple of UNIT, so of its largest power of two
    VECTOR: tl.constexpr = UNIT & -UNIT
    pair = tl.arange(0, D_BLOCK // 2)[None, :]
    video = (token - num_text)[:, None]
    row_start = t * TIME + video // GRID_W % GRID_H * SPACE - TIME
    column_start = t * TIME + (GRID_H + video % GRID_W) * SPACE - (TIME + SPACE)
    start = tl.where(pair < TIME + SPACE, row_start, column_start)
    index = tl.where(pair < TIME, video // (GRID_H * GRID_W) * TIME, start) + pair
    index = tl.max_contiguous(tl.multiple_of(index, (1, VECTOR)), (1, VECTOR))
    sin_index = index + table_width
    sin_index = tl.max_contiguous(tl.multiple_of(sin_index, (1, VECTOR)), (1, VECTOR))
    is_turned = (video >= 0) & (pair < D // 2)
    cos = tl.load(table_ptr + index, mask=is_turned, other=1.0)
    sin = tl.load(table_ptr + sin_index, mask=is_turned, other=0.0)
    return cos[:, None, :], sin[:, None, :]


@jit
def _rotate_pairs(x, cos, sin):
    """x [TOKENS, HEADS, D_BLOCK] turned pair by pair."""
    PAIRS: tl.constexpr = (x.shape[0], x.shape[1], x.shape[2] // 2, 2)
    a, b = tl.split(tl.reshape(x, PAIRS))
    return tl.reshape(tl.join(a * cos - b * sin, a * sin + b * cos), x.shape)


@jit
def _normalise(x, entry, eps, D: tl.constexpr):
    """Rows x [TOKENS, HEADS, D_BLOCK], 0 past D, as xhat and rstd [TOKENS, HEADS, 1]."""
    x = x - tl.sum(x, 2, keep_dims=True) * (1.0 / D)
    if x.shape[2] > D:
        x = tl.where((entry < D)[None, None, :], x, 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 2, keep_dims=True) * (1.0 / D) + eps)
    return x * rstd, rstd


@jit
def _load_vector(ptr, entry, default: tl.constexpr, D: tl.constexpr):
    """An affine parameter [D] as [1, 1, D_BLOCK] float32; default where there is none."""
    if ptr is None:
        return default
    else:
        return tl.load(ptr + entry, mask=entry < D, other=0.0).to(tl.float32)[None, None, :]


@jit
def qk_norm_rope3d_fwd_kernel(
    q_ptr,  # out [B, S, H, D]
    k_ptr,  # out [B, S, H, D]
    qkv_ptr,  # [B, S, 3, H, D]
    q_weight_ptr,  # this and the next three: [D] or None
    q_bias_ptr,
    k_weight_ptr,
    k_bias_ptr,
    table_ptr,  # [2, table_width] or None: no rotation
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
    # neighbouring programs take the heads of the same tokens, which lie side by side in memory
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
                table_ptr, table_width, token, num_text, t, GRID_H, GRID_W, D, D_BLOCK
            )
            q = _rotate_pairs(q, cos, sin)
            k = _rotate_pairs(k, cos, sin)
        tl.store(q_ptr + row * (H * D) + target, q, mask=mask)
        tl.store(k_ptr + row * (H * D) + target, k, mask=mask)


@jit
def _head_norm_bwd(g, x, weight, entry, eps, D: tl.constexpr):
    """Gradient of x from g, that of the norm's result; and what the sums of weight and bias take
    from these tokens: [HEADS, D_BLOCK] each."""
    xhat, rstd = _normalise(x, entry, eps, D)
    weight_part = tl.sum(g * xhat, 0)
    bias_part = tl.sum(g, 0)
    g *= weight
    mean = tl.sum(g, 2, keep_dims=True) * (1.0 / D)
    slope = tl.sum(g * xhat, 2, keep_dims=True) * (1.0 / D)
    # rstd * (g - mean - xhat * slope), as two fused multiply-adds per entry
    return rstd * g - (rstd * slope * xhat + rstd * mean), weight_part, bias_part


@jit
def qk_norm_rope3d_bwd_kernel(
    dqkv_ptr,  # out [B, S, 3, H, D], dense
    partials_ptr,  # out [programs, 4, D] float32: query weight, bias, key weight, bias; or None
    dq_ptr,  # this and the next two: [B, S, H, D]
    dk_ptr,
    dv_ptr,
    qkv_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
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
    NEEDS_SUMS: tl.constexpr = partials_ptr is not None
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
        # every load before the first use: their latencies overlap
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
                table_ptr, table_width, token, num_text, t, GRID_H, GRID_W, D, D_BLOCK
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

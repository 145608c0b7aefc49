"""Triton kernels of adaptive_layernorm, and their launches.

Forward takes one row per program. Backward is one persistent kernel: each program owns every n-th
row of one sample's text or video, and keeps its sums over rows in registers. A second kernel adds
the programs' sums in a fixed order, so gradients repeat bit for bit: there are no atomics.
The formulas are in kernels/adaptive_layernorm.py; docs/kernels.md says why the kernels look as they
do. Notes on registers come from compiling for sm_90.
"""

# pyright: reportPossiblyUnboundVariable=false
# A kernel's flags are compile-time constants, so a name is bound wherever it is read.

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from cogfast.kernels.adaptive_layernorm import Backward, empty_outputs
from cogfast.kernels.gpu.launch import (
    cdiv,
    jit,
    next_power_of_2,
    num_backward_multiprocessors,
    shared_bytes_per_multiprocessor,
)

# Backward runs 16 warps on a multiprocessor, which leaves 128 registers a thread: 8 columns of the
# sums and of one row. Rows in flight wait in this much shared memory.
_WARPS_PER_MULTIPROCESSOR, _SHARED_BYTES_PER_MULTIPROCESSOR = 16, 128 * 1024
_MOST_STAGES = 5
# Tile of the kernel that adds the programs' sums: programs x columns. Partial sums, at most about
# 13 MB, stay in the L2 cache and are read in two or three steps of four independent loads.
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 128, 16, 8


@jit
def adaptive_layernorm_fwd_kernel(
    hidden_ptr,
    branch_ptr,
    branch_bias_ptr,
    gate_ptr,
    weight_ptr,
    bias_ptr,
    shift_ptr,
    scale_ptr,
    out_ptr,
    normed_ptr,
    mean_ptr,
    rstd_ptr,
    num_rows,
    num_text,
    eps,
    stride_batch,
    stride_segment,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute one row; grid (S, B). Without branch_ptr no residual, without scale_ptr no norm."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < M
    # Modulation is [B, 2, M]: entry 0 for video rows, entry 1 for text rows. The choice is an
    # offset that is the same in the whole program, so rows need no slicing or joining.
    vector = batch * stride_batch + tl.where(row < num_text, stride_segment, 0)
    row = batch * num_rows + row
    start = row * M

    # Rows are read once: evict them first, and keep the vectors that all rows share in the cache.
    x = tl.load(
        hidden_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first"
    ).to(tl.float32)
    if branch_ptr is not None:
        branch = tl.load(
            branch_ptr + start + column, mask=mask, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)
        if branch_bias_ptr is not None:
            branch += tl.load(branch_bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + vector + column, mask=mask, other=0.0).to(tl.float32)
        out = (x + gate * branch).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + start + column, out, mask=mask)
        x = out.to(tl.float32)  # norm the rounded row, which is what backward reads

    if scale_ptr is not None:
        mean = tl.sum(x, axis=0) / M
        # From centred values: E[x^2] - E[x]^2 would cancel where the mean is large.
        x = tl.where(mask, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(x * x, axis=0) / M + eps)
        x *= rstd
        if weight_ptr is not None:
            x *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
            x += tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + vector + column, mask=mask, other=0.0).to(tl.float32)
        shift = tl.load(shift_ptr + vector + column, mask=mask, other=0.0).to(tl.float32)
        x = x * (1.0 + scale) + shift
        tl.store(normed_ptr + start + column, x.to(normed_ptr.dtype.element_ty), mask=mask)
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)


def choose_num_warps(width: int) -> int:
    """Choose the warps of a row: 8 columns a thread up to 4 warps, more columns up to 4096."""
    # 4 warps take 48 registers at 1920 columns and 60 at 3072, so that 10 and 8 rows share a
    # multiprocessor; the latency of its memory asks for two.
    block = next_power_of_2(width)
    return min(max(block // 256, 1), max(block // 1024, 4), 16)


def launch_forward(
    hidden: Tensor,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor | None,
    scale: Tensor | None,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return h', n [B, S, M] and mean, rstd [B, S], with `empty_outputs` for what is not computed.

    Without `branch` there is no residual, without `scale` no norm.
    """
    hidden = hidden.contiguous()
    branch = None if branch is None else branch.contiguous()
    out, normed, mean, rstd = empty_outputs(hidden, branch, scale)
    shift, scale, gate = share_strides(shift, scale, gate)
    stride_batch, stride_segment = _strides(scale, gate)
    num_batches, num_rows, width = hidden.shape
    adaptive_layernorm_fwd_kernel[(num_rows, num_batches)](
        hidden_ptr=hidden,
        branch_ptr=branch,
        branch_bias_ptr=branch_bias,
        gate_ptr=gate,
        weight_ptr=weight,
        bias_ptr=bias,
        shift_ptr=shift,
        scale_ptr=scale,
        out_ptr=out,
        normed_ptr=normed,
        mean_ptr=mean,
        rstd_ptr=rstd,
        num_rows=num_rows,
        num_text=num_text,
        eps=eps,
        stride_batch=stride_batch,
        stride_segment=stride_segment,
        M=width,
        BLOCK=next_power_of_2(width),
        num_warps=choose_num_warps(width),
    )
    return out, normed, mean, rstd


def _strides(scale: Tensor | None, gate: Tensor | None) -> tuple[int, int]:
    """Strides of B and of the video/text dim, which `scale` and `gate` [B, 2, M] share."""
    modulation = gate if scale is None else scale
    assert modulation is not None, "neither norm nor residual"
    return modulation.stride(0), modulation.stride(1)


@jit
def adaptive_layernorm_bwd_kernel(
    dn_ptr,
    dout_ptr,
    out_ptr,
    branch_ptr,
    mean_ptr,
    rstd_ptr,
    weight_ptr,
    scale_ptr,
    gate_ptr,
    dhidden_ptr,
    dbranch_ptr,
    partial_ptr,
    num_rows,
    num_text,
    num_text_programs,
    stride_batch,
    stride_segment,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_NORM_SUMS: tl.constexpr,
    HAS_BRANCH_SUM: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """Compute the gradients of some rows and their sums; grid (programs of a sample, B).

    out is h', dout its gradient; partial [4, B, programs, M] receives the sums A, B, G and C.
    """
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < M
    # The first programs take text rows, the others video rows; each takes every n-th row.
    is_text = program < num_text_programs
    first = tl.where(is_text, program, num_text + program - num_text_programs)
    last = tl.where(is_text, num_text, num_rows)
    step = tl.where(is_text, num_text_programs, num_programs - num_text_programs)
    vector = batch * stride_batch + tl.where(is_text, stride_segment, 0)
    first_row = batch * num_rows

    sum_a = tl.zeros([BLOCK], tl.float32)
    sum_b = tl.zeros([BLOCK], tl.float32)
    sum_g = tl.zeros([BLOCK], tl.float32)
    sum_c = tl.zeros([BLOCK], tl.float32)
    if gate_ptr is not None:
        gate = tl.load(gate_ptr + vector + column, mask=mask, other=0.0).to(tl.float32)
    if dn_ptr is not None:
        factor = 1.0 + tl.load(scale_ptr + vector + column, mask=mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            factor *= tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
        next_mean = tl.load(mean_ptr + first_row + first)
        next_rstd = tl.load(rstd_ptr + first_row + first)

    # num_stages - 1 rows are copied to shared memory (cp.async) while one is worked on. Two stages
    # overlap nothing: a row is requested when the one before is finished. Rows held in registers
    # instead fill all 128, and the assembler moves their loads behind the first barrier.
    for row in tl.range(first, last, step, num_stages=NUM_STAGES):
        start = (first_row + row) * M
        if dout_ptr is not None:
            dhidden = tl.load(dout_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        if dn_ptr is not None:
            dn = tl.load(dn_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(out_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            # cp.async does not copy scalars ahead, so request those of the next row now.
            mean, rstd = next_mean, next_rstd
            next_row = first_row + tl.minimum(row + step, last - 1)
            next_mean = tl.load(mean_ptr + next_row)
            next_rstd = tl.load(rstd_ptr + next_row)
            xhat = (x - mean) * rstd
            dx = dn * factor
            # One reduction for both means saves a barrier.
            mean1, mean2 = tl.split(tl.sum(tl.join(dx, dx * xhat), axis=0) / M)
            if HAS_NORM_SUMS:
                sum_a += dn * xhat
                sum_b += dn
            through_norm = rstd * (dx - mean1 - xhat * mean2)
            if dout_ptr is not None:
                dhidden += through_norm
            else:
                dhidden = through_norm
            dhidden_type: tl.constexpr = dhidden_ptr.dtype.element_ty
            tl.store(dhidden_ptr + start + column, dhidden.to(dhidden_type), mask=mask)
        if gate_ptr is not None:
            dbranch = (gate * dhidden).to(dbranch_ptr.dtype.element_ty)
            tl.store(dbranch_ptr + start + column, dbranch, mask=mask)
        if branch_ptr is not None:
            branch = tl.load(branch_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            sum_g += dhidden * branch
        if HAS_BRANCH_SUM:
            sum_c += dhidden

    slot = tl.num_programs(1).to(tl.int64) * num_programs * M
    own_ptr = partial_ptr + (batch * num_programs + program) * M + column
    if HAS_NORM_SUMS:
        tl.store(own_ptr, sum_a, mask=mask)
        tl.store(own_ptr + slot, sum_b, mask=mask)
    if branch_ptr is not None:
        tl.store(own_ptr + 2 * slot, sum_g, mask=mask)
    if HAS_BRANCH_SUM:
        tl.store(own_ptr + 3 * slot, sum_c, mask=mask)


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """Size of a launch of the backward kernel."""

    num_warps: int
    num_stages: int  # num_stages - 1 rows are in flight; 1: no copies through shared memory
    programs_per_multiprocessor: int | None  # None: one row per program, if there are no sums


def choose_launch(
    width: int, itemsize: int, has_sums: bool, shared_bytes: int = _SHARED_BYTES_PER_MULTIPROCESSOR
) -> BackwardLaunch:
    """Choose 8 columns a thread and as many rows in flight as shared memory holds.

    shared_bytes: shared memory of a multiprocessor; 128 KB of it are enough.
    """
    block = next_power_of_2(width)
    num_warps = min(max(block // 256, 1), _WARPS_PER_MULTIPROCESSOR)
    if not has_sums:
        # Nothing is kept from row to row: one row per program, 4 or 5 programs on a multiprocessor.
        return BackwardLaunch(min(num_warps, max(block // 1024, 4)), 1, None)
    num_programs = _WARPS_PER_MULTIPROCESSOR // num_warps
    row_bytes = 4 * block * itemsize  # dn, dh', h' and y
    shared_bytes = min(shared_bytes, _SHARED_BYTES_PER_MULTIPROCESSOR)
    rows_ahead = shared_bytes // (num_programs * row_bytes)
    return BackwardLaunch(num_warps, min(1 + rows_ahead, _MOST_STAGES), num_programs)


def split_programs(num_text: int, num_video: int, num_programs: int) -> tuple[int, int]:
    """Return how many programs take text rows and how many video rows.

    The busiest program has as few rows as possible. Text or video without rows gets no program,
    otherwise at least one.
    """
    num_programs = max(num_programs, (num_text > 0) + (num_video > 0))
    rows = -(-(num_text + num_video) // num_programs)
    while -(-num_text // rows) + -(-num_video // rows) > num_programs:
        rows += 1
    return -(-num_text // rows), -(-num_video // rows)


def share_strides(*modulation: Tensor | None) -> list[Tensor | None]:
    """Return tensors [B, 2, M] with equal strides: the given ones if theirs are, else copies.

    A kernel takes one pair of strides for shift, scale and gate, which a block gives as views of
    one tensor.
    """
    given = [x for x in modulation if x is not None]
    if all(x.stride() == given[0].stride() and x.stride(-1) == 1 for x in given):
        return list(modulation)
    return [None if x is None else x.contiguous() for x in modulation]


@jit
def adaptive_layernorm_sum_kernel(
    partial_ptr,
    weight_ptr,
    bias_ptr,
    scale_ptr,
    branch_bias_ptr,
    gate_ptr,
    dbranch_bias_ptr,
    dgate_ptr,
    dweight_ptr,
    dbias_ptr,
    dshift_ptr,
    dscale_ptr,
    num_batches,
    num_programs,
    num_text_programs,
    stride_batch,
    stride_segment,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_NORM_SUMS: tl.constexpr,
    HAS_GATE_SUM: tl.constexpr,
    HAS_BRANCH_SUM: tl.constexpr,
):
    """Add the programs' sums [4, B, programs, M] into the small gradients; grid (column blocks).

    The number of programs and the order of adding do not depend on the GPU's scheduling.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < M
    slot = tl.cast(num_batches, tl.int64) * num_programs * M
    dweight = tl.zeros([COLUMNS], tl.float32)
    dbias = tl.zeros([COLUMNS], tl.float32)
    dbranch_bias = tl.zeros([COLUMNS], tl.float32)
    for batch in range(num_batches):
        # 0 video, 1 text, as in the modulation. Triton unrolls the loop; at run time nothing
        # iterates.
        for segment in tl.static_range(2):  # pyright: ignore[reportGeneralTypeIssues]
            first = 0 if segment == 1 else num_text_programs
            last = num_text_programs if segment == 1 else num_programs
            sums_a = tl.zeros([ROWS, COLUMNS], tl.float32)
            sums_b = tl.zeros([ROWS, COLUMNS], tl.float32)
            sums_g = tl.zeros([ROWS, COLUMNS], tl.float32)
            sums_c = tl.zeros([ROWS, COLUMNS], tl.float32)
            for top in range(first, last, ROWS):
                program = top + tl.arange(0, ROWS)
                tile_ptr = partial_ptr + (tl.cast(batch, tl.int64) * num_programs + top) * M
                tile_ptr += tl.arange(0, ROWS)[:, None] * M + column[None, :]
                inside = (program < last)[:, None] & mask[None, :]
                if HAS_NORM_SUMS:
                    sums_a += tl.load(tile_ptr, mask=inside, other=0.0)
                    sums_b += tl.load(tile_ptr + slot, mask=inside, other=0.0)
                if HAS_GATE_SUM:
                    sums_g += tl.load(tile_ptr + 2 * slot, mask=inside, other=0.0)
                if HAS_BRANCH_SUM:
                    sums_c += tl.load(tile_ptr + 3 * slot, mask=inside, other=0.0)
            vector = tl.cast(batch, tl.int64) * stride_batch + segment * stride_segment + column
            written = (tl.cast(batch, tl.int64) * 2 + segment) * M + column
            if HAS_NORM_SUMS:
                a = tl.sum(sums_a, axis=0)
                b = tl.sum(sums_b, axis=0)
                dscale = a
                if weight_ptr is not None:
                    factor = 1.0 + tl.load(scale_ptr + vector, mask=mask, other=0.0).to(tl.float32)
                    dweight += factor * a
                    dbias += factor * b
                    dscale = a * tl.load(weight_ptr + column, mask=mask, other=0.0).to(tl.float32)
                    dscale += b * tl.load(bias_ptr + column, mask=mask, other=0.0).to(tl.float32)
                tl.store(dshift_ptr + written, b.to(dshift_ptr.dtype.element_ty), mask=mask)
                tl.store(dscale_ptr + written, dscale.to(dscale_ptr.dtype.element_ty), mask=mask)
            if HAS_BRANCH_SUM:
                c = tl.sum(sums_c, axis=0)
                gate = tl.load(gate_ptr + vector, mask=mask, other=0.0).to(tl.float32)
                dbranch_bias += gate * c
            if HAS_GATE_SUM:
                dgate = tl.sum(sums_g, axis=0)
                if HAS_BRANCH_SUM:
                    branch_bias = tl.load(branch_bias_ptr + column, mask=mask, other=0.0)
                    dgate += branch_bias.to(tl.float32) * c
                tl.store(dgate_ptr + written, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
    if HAS_NORM_SUMS and weight_ptr is not None:
        tl.store(dweight_ptr + column, dweight.to(dweight_ptr.dtype.element_ty), mask=mask)
        tl.store(dbias_ptr + column, dbias.to(dbias_ptr.dtype.element_ty), mask=mask)
    if HAS_BRANCH_SUM:
        dbranch_bias = dbranch_bias.to(dbranch_bias_ptr.dtype.element_ty)
        tl.store(dbranch_bias_ptr + column, dbranch_bias, mask=mask)


def launch_backward(backward: Backward) -> tuple[Tensor, ...]:
    """Compute the gradients of `Backward.empty_gradients`."""
    dn, dout, out, branch = (
        None if x is None else x.contiguous()
        for x in (backward.dn, backward.dout, backward.out, backward.branch)
    )
    scale, gate = share_strides(backward.scale, backward.gate)
    gradients = backward.empty_gradients()
    dhidden, dbranch, *small = gradients

    rows = backward.rows
    num_batches, num_rows, width = rows.shape
    has_sums = backward.has_norm_sums or backward.has_branch_sum or branch is not None
    launch = choose_launch(
        width, rows.element_size(), has_sums, shared_bytes_per_multiprocessor(rows.device)
    )
    num_programs = num_rows
    if launch.programs_per_multiprocessor is not None:
        total = num_backward_multiprocessors(rows.device) * launch.programs_per_multiprocessor
        # The number of programs that run at once; each takes an equal share of the rows.
        num_programs = total // num_batches
    text, video = split_programs(backward.num_text, num_rows - backward.num_text, num_programs)
    sums_shape = (4 if has_sums else 0, num_batches, text + video, width)
    partial = rows.new_empty(sums_shape, dtype=torch.float32)
    stride_batch, stride_segment = _strides(scale, gate)
    adaptive_layernorm_bwd_kernel[(text + video, num_batches)](
        dn_ptr=dn,
        dout_ptr=dout,
        out_ptr=out,
        branch_ptr=branch,
        mean_ptr=backward.mean,
        rstd_ptr=backward.rstd,
        weight_ptr=backward.weight,
        scale_ptr=scale,
        gate_ptr=gate,
        dhidden_ptr=dhidden,
        dbranch_ptr=dbranch,
        partial_ptr=partial,
        num_rows=num_rows,
        num_text=backward.num_text,
        num_text_programs=text,
        stride_batch=stride_batch,
        stride_segment=stride_segment,
        M=width,
        BLOCK=next_power_of_2(width),
        HAS_NORM_SUMS=backward.has_norm_sums,
        HAS_BRANCH_SUM=backward.has_branch_sum,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    if not has_sums:
        return gradients
    dbranch_bias, dgate, dweight, dbias, dshift, dscale = small
    adaptive_layernorm_sum_kernel[(cdiv(width, SUM_COLUMNS),)](
        partial_ptr=partial,
        weight_ptr=backward.weight,
        bias_ptr=backward.bias,
        scale_ptr=scale,
        branch_bias_ptr=backward.branch_bias,
        gate_ptr=gate,
        dbranch_bias_ptr=dbranch_bias,
        dgate_ptr=dgate,
        dweight_ptr=dweight,
        dbias_ptr=dbias,
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        num_batches=num_batches,
        num_programs=text + video,
        num_text_programs=text,
        stride_batch=stride_batch,
        stride_segment=stride_segment,
        M=width,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
        HAS_NORM_SUMS=backward.has_norm_sums,
        HAS_GATE_SUM=branch is not None,
        HAS_BRANCH_SUM=backward.has_branch_sum,
        num_warps=SUM_WARPS,
    )
    return gradients

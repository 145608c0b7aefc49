"""Backward of gated residual, LayerNorm and modulation (adaptive_layernorm.py has the forward).

With h' [B, S, M] the rows that were normed, xhat = (h' - mean) * rstd, dn and dh' the gradients that
arrive, y [B, S, M] and b [M] the branch and its bias:

    dx = dn * weight * (1 + scale)
    dh = dh' + rstd * (dx - mean(dx) - xhat * mean(dx * xhat))      the gradient of hidden
    dy = gate * dh                                                  the gradient of the branch

and, from four sums over the rows of each (batch, segment), segment 0 video and 1 text,

    A = sum dn * xhat      dscale = weight * A + bias * B      dweight = sum (1 + scale) * A
    B = sum dn             dshift = B                          dbias   = sum (1 + scale) * B
    G = sum dh * y         dgate  = G + b * C
    C = sum dh                                                 db      = sum gate * C

Without dn (no norm) dh is dh' itself, and only dy and the sums G and C remain.

Bytes, in units of one bf16 [B, S, M]: dn, dh', h', y in, dh, dy out = 6; frozen (no sums, so no y) 5;
without the branch 4; without the norm 3. The partial sums add about 3% and stay in the L2 cache.

One persistent kernel: a program owns every n-th row of one (batch, segment) and keeps its sums in
registers; a second, of fixed size, adds the programs' sums in a fixed order. No atomics, so the
gradients repeat bit for bit. What decided the shape (sm_90, offline compile): the four rows in
flight are copied into shared memory ahead of time (cp.async, 16 bytes each), by num_stages - 1 rows.
Rows held back in registers instead fill the register file (128 of 128 at 3072 columns), and the
assembler moves their loads down to the first barrier; num_stages = 2 overlaps nothing. Both means of
a row are one reduction, 3 barriers per row with the one that guards the copies. 16 warps on a
multiprocessor (one program at 3072 columns, two at 1920) leave 128 registers for 8 columns a thread.
On a GPU: not measured.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cogfast.kernels.adaptive_layernorm_cpu import backward_cpu
from cogfast.kernels.launch import jit, num_multiprocessors, tl, triton

_WARPS_PER_MULTIPROCESSOR = 16
_SUM_ROWS, _SUM_COLUMNS, _SUM_WARPS = 128, 16, 8


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """num_stages: rows of a program that are in flight or in use at once, at least 3."""

    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int


# By width: what is worth timing on a GPU beside choose_launch.
LAUNCH_CANDIDATES = {
    1920: [
        BackwardLaunch(8, 3, 2),
        BackwardLaunch(8, 5, 2),
        BackwardLaunch(4, 4, 2),
        BackwardLaunch(8, 4, 1),
    ],
    3072: [
        BackwardLaunch(16, 3, 1),
        BackwardLaunch(16, 5, 1),
        BackwardLaunch(8, 4, 1),
    ],
}


def choose_launch(width: int, itemsize: int) -> BackwardLaunch:
    """8 columns a thread; two rows ahead, one where an item has four bytes."""
    num_warps = min(max(triton.next_power_of_2(width) // 256, 1), _WARPS_PER_MULTIPROCESSOR)
    num_stages = 4 if itemsize == 2 else 3
    return BackwardLaunch(num_warps, num_stages, _WARPS_PER_MULTIPROCESSOR // num_warps)


def split_programs(num_text: int, num_video: int, num_programs: int) -> tuple[int, int]:
    """How many programs take text rows and how many video rows, so that the busiest has the fewest
    rows; a segment without rows gets none, every other at least one."""
    num_programs = max(num_programs, (num_text > 0) + (num_video > 0))
    rows = -(-(num_text + num_video) // num_programs)
    while -(-num_text // rows) + -(-num_video // rows) > num_programs:
        rows += 1
    return -(-num_text // rows), -(-num_video // rows)


def shared_strides(*modulation: Tensor | None) -> list[Tensor | None]:
    """shift, scale, gate [B, 2, M]: as they are where they have the same strides, else copies."""
    given = [x for x in modulation if x is not None]
    if all(x.stride() == given[0].stride() and x.stride(-1) == 1 for x in given):
        return list(modulation)
    return [None if x is None else x.contiguous() for x in modulation]


@jit
def _bwd_kernel(
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
    """Grid (programs of a batch, B). out is h', dout its gradient; partial [4, B, programs, M]."""
    program = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    num_programs = tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    mask = column < M
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

    for row in tl.range(first, last, step, num_stages=NUM_STAGES):
        start = (first_row + row) * M
        if dout_ptr is not None:
            dhidden = tl.load(dout_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
        if dn_ptr is not None:
            dn = tl.load(dn_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(out_ptr + start + column, mask=mask, other=0.0).to(tl.float32)
            # Scalars are not copied ahead: the next row's are asked for now.
            mean, rstd = next_mean, next_rstd
            next_row = first_row + tl.minimum(row + step, last - 1)
            next_mean = tl.load(mean_ptr + next_row)
            next_rstd = tl.load(rstd_ptr + next_row)
            xhat = (x - mean) * rstd
            dx = dn * factor
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


@jit
def _sum_kernel(
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
    """Grid (blocks of columns). The programs' sums [4, B, programs, M] -> the small gradients."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < M
    slot = tl.cast(num_batches, tl.int64) * num_programs * M
    dweight = tl.zeros([COLUMNS], tl.float32)
    dbias = tl.zeros([COLUMNS], tl.float32)
    dbranch_bias = tl.zeros([COLUMNS], tl.float32)
    for batch in range(num_batches):
        for segment in tl.static_range(2):
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


class Backward(NamedTuple):
    """What the backward reads. No dn: no norm, or nothing came back through it; no gate: no
    residual; a branch is given where its gate wants a gradient."""

    dn: Tensor | None  # [B, S, M]
    dout: Tensor | None  # [B, S, M], dh' of the formulas
    out: Tensor | None  # [B, S, M], h'
    mean: Tensor | None  # [B, S] float32
    rstd: Tensor | None
    weight: Tensor | None  # [M]
    bias: Tensor | None
    scale: Tensor | None  # [B, 2, M]
    branch: Tensor | None  # [B, S, M]
    branch_bias: Tensor | None  # [M]
    gate: Tensor | None  # [B, 2, M]
    num_text: int
    has_norm_sums: bool  # A and B are wanted
    has_branch_sum: bool  # C is wanted

    def room(self) -> tuple[Tensor, ...]:
        """For the gradients of hidden, branch, branch_bias, gate, weight, bias, shift, scale; what
        is not asked for is empty, as an op cannot return None."""
        rows = self.dout if self.dn is None else self.dn
        asked = (
            rows if self.dn is not None else None,
            rows if self.gate is not None else None,
            self.branch_bias if self.has_branch_sum else None,
            self.gate if self.branch is not None else None,
            *(
                [self.weight, self.bias, self.scale, self.scale]
                if self.has_norm_sums
                else [None] * 4
            ),
        )
        return tuple(rows.new_empty(0) if x is None else x.new_empty(x.shape) for x in asked)


def launch_backward(backward: Backward, launch: BackwardLaunch | None = None) -> tuple[Tensor, ...]:
    """The gradients of `Backward.room`."""
    dn, dout = (None if x is None else x.contiguous() for x in (backward.dn, backward.dout))
    scale, gate = shared_strides(backward.scale, backward.gate)
    gradients = backward.room()
    dhidden, dbranch, dbranch_bias, dgate, dweight, dbias, dshift, dscale = gradients

    rows = dout if dn is None else dn
    num_batches, num_rows, width = rows.shape
    launch = launch or choose_launch(width, rows.element_size())
    num_programs = num_multiprocessors(rows.device) * launch.programs_per_multiprocessor
    text, video = split_programs(
        backward.num_text, num_rows - backward.num_text, num_programs // num_batches
    )
    partial = rows.new_empty((4, num_batches, text + video, width), dtype=torch.float32)
    stride_batch, stride_segment, _ = (gate if scale is None else scale).stride()
    _bwd_kernel[(text + video, num_batches)](
        dn_ptr=dn,
        dout_ptr=dout,
        out_ptr=backward.out,
        branch_ptr=backward.branch,
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
        BLOCK=triton.next_power_of_2(width),
        HAS_NORM_SUMS=backward.has_norm_sums,
        HAS_BRANCH_SUM=backward.has_branch_sum,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    has_gate_sum = backward.branch is not None
    if not (backward.has_norm_sums or has_gate_sum or backward.has_branch_sum):
        return gradients
    _sum_kernel[(triton.cdiv(width, _SUM_COLUMNS),)](
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
        ROWS=_SUM_ROWS,
        COLUMNS=_SUM_COLUMNS,
        HAS_NORM_SUMS=backward.has_norm_sums,
        HAS_GATE_SUM=has_gate_sum,
        HAS_BRANCH_SUM=backward.has_branch_sum,
        num_warps=_SUM_WARPS,
    )
    return gradients


backward_op = torch.library.custom_op(
    "cogfast::adaptive_layernorm_backward",
    lambda *inputs: launch_backward(Backward(*inputs)),
    mutates_args=(),
    device_types="cuda",
    schema="""(
        Tensor? dn, Tensor? dout, Tensor? out, Tensor? mean, Tensor? rstd, Tensor? weight,
        Tensor? bias, Tensor? scale, Tensor? branch, Tensor? branch_bias, Tensor? gate,
        int num_text, bool has_norm_sums, bool has_branch_sum
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
)
backward_op.register_kernel("cpu")(backward_cpu)
backward_op.register_fake(lambda *inputs: Backward(*inputs).room())

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
registers; adaptive_layernorm_sums.py adds the programs' sums in a fixed order. No atomics, so the
gradients repeat bit for bit. What decided the shape (offline compile for sm_90): the next rows are
copied into shared memory (cp.async, 16 bytes a thread) while one is worked on, by default as many as
fit into 128 KB of a multiprocessor's, where the latency of its memory asks for about 16 KB of loads.
num_stages 2 overlaps nothing, as a row is asked for when the one before is done. Next rows held in
registers fill the register file (128 of 128 at 3072 columns), and the assembler moves their loads
down, before the first barrier. Both means of a row are one reduction, so that it has 3 barriers, the
one that guards the copies included. 16 warps on a multiprocessor (one program at 3072 columns, two
at 1920) leave 128 registers a thread for 8 columns: 120 and 103 are taken. Without sums nothing
asks for persistence: one row per program, 4 and 5 of them on a multiprocessor.
On a GPU: not measured.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cogfast.kernels.adaptive_layernorm_cpu import backward_cpu
from cogfast.kernels.argument_checks import (
    CompileCase,
    jit,
    num_multiprocessors,
    shared_bytes_per_multiprocessor,
    tl,
    triton,
)
from cogfast.kernels.gpu.adaptive_layernorm_sums import launch_sums

# 16 warps leave 128 registers a thread for the sums and a row; what rows wait in for their turn.
_WARPS_PER_MULTIPROCESSOR, _SHARED_BYTES_PER_MULTIPROCESSOR = 16, 128 * 1024
_MOST_STAGES = 5


@dataclass(frozen=True, slots=True)
class BackwardLaunch:
    """num_stages - 1 rows are on their way while one is worked on; 1: no copies through shared
    memory. programs_per_multiprocessor: None for one row per program, where there are no sums."""

    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int | None


# By width: what is worth timing on a GPU, with sums and (FROZEN) without.
LAUNCH_CANDIDATES = {
    1920: [
        BackwardLaunch(8, 5, 2),
        BackwardLaunch(8, 4, 2),
        BackwardLaunch(8, 3, 2),
        BackwardLaunch(8, 5, 1),
        BackwardLaunch(4, 4, 2),
    ],
    3072: [
        BackwardLaunch(16, 5, 1),
        BackwardLaunch(16, 4, 1),
        BackwardLaunch(16, 3, 1),
        BackwardLaunch(8, 4, 1),
    ],
}
FROZEN_CANDIDATES = {
    1920: [BackwardLaunch(4, 1, None), BackwardLaunch(8, 1, None), BackwardLaunch(8, 4, 4)],
    3072: [
        BackwardLaunch(4, 1, None),
        BackwardLaunch(8, 1, None),
        BackwardLaunch(16, 4, 1),
        BackwardLaunch(4, 3, 4),
    ],
}


def choose_launch(
    width: int,
    itemsize: int,
    has_sums: bool,
    shared_bytes: int = _SHARED_BYTES_PER_MULTIPROCESSOR,
) -> BackwardLaunch:
    """8 columns a thread, and as many rows ahead as shared memory holds; without sums 4 warps.
    shared_bytes: a multiprocessor's, of which no more is taken than serves."""
    block = triton.next_power_of_2(width)
    num_warps = min(max(block // 256, 1), _WARPS_PER_MULTIPROCESSOR)
    if not has_sums:
        return BackwardLaunch(min(num_warps, max(block // 1024, 4)), 1, None)
    num_programs = _WARPS_PER_MULTIPROCESSOR // num_warps
    row_bytes = 4 * block * itemsize  # dn, dh', h' and y
    shared_bytes = min(shared_bytes, _SHARED_BYTES_PER_MULTIPROCESSOR)
    rows_ahead = shared_bytes // (num_programs * row_bytes)
    return BackwardLaunch(num_warps, min(1 + rows_ahead, _MOST_STAGES), num_programs)


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
    dn, dout, out, branch = (
        None if x is None else x.contiguous()
        for x in (backward.dn, backward.dout, backward.out, backward.branch)
    )
    scale, gate = shared_strides(backward.scale, backward.gate)
    gradients = backward.room()
    dhidden, dbranch, *small = gradients

    rows = dout if dn is None else dn
    num_batches, num_rows, width = rows.shape
    has_sums = backward.has_norm_sums or backward.has_branch_sum or branch is not None
    launch = launch or choose_launch(
        width, rows.element_size(), has_sums, shared_bytes_per_multiprocessor(rows.device)
    )
    num_programs = num_rows
    if launch.programs_per_multiprocessor is not None:
        total = num_multiprocessors(rows.device) * launch.programs_per_multiprocessor
        num_programs = total // num_batches
    text, video = split_programs(backward.num_text, num_rows - backward.num_text, num_programs)
    sums_shape = (4 if has_sums else 0, num_batches, text + video, width)
    partial = rows.new_empty(sums_shape, dtype=torch.float32)
    stride_batch, stride_segment, _ = (gate if scale is None else scale).stride()
    _bwd_kernel[(text + video, num_batches)](
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
        BLOCK=triton.next_power_of_2(width),
        HAS_NORM_SUMS=backward.has_norm_sums,
        HAS_BRANCH_SUM=backward.has_branch_sum,
        NUM_STAGES=launch.num_stages,
        num_warps=launch.num_warps,
    )
    if not has_sums:
        return gradients
    launch_sums(
        partial=partial,
        weight=backward.weight,
        bias=backward.bias,
        scale=scale,
        branch_bias=backward.branch_bias,
        gate=gate,
        gradients=small,
        num_text_programs=text,
        has_norm_sums=backward.has_norm_sums,
        has_gate_sum=branch is not None,
        has_branch_sum=backward.has_branch_sum,
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


# Registers and bytes of shared memory of a program in bf16, by width; 16 warps leave 128 registers.
_LIMITS = {
    1920: {
        "whole": (114, 65_664),
        "frozen": (106, 32),
        "first": (114, 49_280),
        "last": (64, 32_768),
        "alone": (64, 32_832),
    },
    3072: {
        "whole": (128, 131_200),
        "frozen": (128, 32),
        "first": (114, 98_432),
        "last": (64, 65_536),
        "alone": (97, 65_664),
    },
}
_FP32_LIMITS = {1920: (128, 65_664), 3072: (128, 131_200)}


def compile_cases() -> list[CompileCase]:
    """Every variant in bf16, the whole one in fp32 too."""
    cases = []
    for width, limits in _LIMITS.items():
        cases += [_compile_case(width, variant, "bf16", *limits[variant]) for variant in limits]
        cases.append(_compile_case(width, "whole", "fp32", *_FP32_LIMITS[width]))
    return cases


def _compile_case(
    width: int, variant: str, dtype: str, max_registers: int, max_shared_bytes: int
) -> CompileCase:
    # alone: behind the blocks, where nothing but the norm's output is used
    has_residual, has_norm = variant not in ("first", "alone"), variant != "last"
    has_branch_sums = variant in ("whole", "last")
    pointers = ["dhidden_ptr", "dbranch_ptr"]
    pointers += ["dout_ptr"] if variant != "alone" else []
    pointers += ["dn_ptr", "out_ptr", "weight_ptr", "scale_ptr"] if has_norm else []
    pointers += ["branch_ptr"] if has_branch_sums else []
    pointers += ["gate_ptr"] if has_residual else []
    statistics = ["partial_ptr"] + (["mean_ptr", "rstd_ptr"] if has_norm else [])
    integers = ("num_rows", "num_text", "num_text_programs", "stride_batch", "stride_segment")
    arguments = dict.fromkeys(pointers, f"*{dtype}") | dict.fromkeys(statistics, "*fp32")
    may_lack = ("dout_ptr", "dn_ptr", "out_ptr", "branch_ptr", "mean_ptr", "rstd_ptr", "weight_ptr")
    lacking = [k for k in (*may_lack, "scale_ptr", "gate_ptr") if k not in arguments]
    launch = choose_launch(width, 4 if dtype == "fp32" else 2, variant != "frozen")
    return CompileCase(
        name=f"{variant} {width} {dtype}",
        kernel=_bwd_kernel,
        arguments=arguments | dict.fromkeys(integers, "i32"),
        constants={
            **dict.fromkeys(lacking),
            "M": width,
            "BLOCK": triton.next_power_of_2(width),
            "HAS_NORM_SUMS": variant in ("whole", "first", "alone"),
            "HAS_BRANCH_SUM": has_branch_sums,
            "NUM_STAGES": launch.num_stages,
        },
        num_warps=launch.num_warps,
        divisible=("stride_batch", "stride_segment"),
        max_registers=max_registers,
        max_shared_bytes=max_shared_bytes,
        narrow_loads=4 if has_norm else 0,  # mean and rstd, of the first row and of every next one
        narrow_stores=0,
    )

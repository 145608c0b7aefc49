"""The second stage of adaptive_layernorm's backward: what its programs summed, summed over them.

partial [4, B, P, M] float32 has the sums A, B, G, C of adaptive_layernorm_backward.py, of the P
programs of every batch, those of text rows first; out come the gradients of everything that is
smaller than a row of tokens. Always the same number of programs, each with 16 columns, and always
the same order of adding, so that the gradients repeat bit for bit. 128 programs' sums are one tile:
what a GPU's programs leave behind, about 13 MB at most in the L2 cache, is read in two or three
steps of four independent loads.
"""

from torch import Tensor

from cogfast.kernels.argument_checks import CompileCase, jit, tl, triton

_ROWS, _COLUMNS, _NUM_WARPS = 128, 16, 8


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


def launch_sums(
    partial: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    branch_bias: Tensor | None,
    gate: Tensor | None,
    gradients: list[Tensor],
    num_text_programs: int,
    has_norm_sums: bool,
    has_gate_sum: bool,
    has_branch_sum: bool,
) -> None:
    """Fill gradients: of branch_bias, gate, weight, bias, shift and scale, those that the flags ask
    for. scale and gate [B, 2, M] share their strides; the other vectors are [M]."""
    dbranch_bias, dgate, dweight, dbias, dshift, dscale = gradients
    _, num_batches, num_programs, width = partial.shape
    stride_batch, stride_segment, _ = (gate if scale is None else scale).stride()
    _sum_kernel[(triton.cdiv(width, _COLUMNS),)](
        partial_ptr=partial,
        weight_ptr=weight,
        bias_ptr=bias,
        scale_ptr=scale,
        branch_bias_ptr=branch_bias,
        gate_ptr=gate,
        dbranch_bias_ptr=dbranch_bias,
        dgate_ptr=dgate,
        dweight_ptr=dweight,
        dbias_ptr=dbias,
        dshift_ptr=dshift,
        dscale_ptr=dscale,
        num_batches=num_batches,
        num_programs=num_programs,
        num_text_programs=num_text_programs,
        stride_batch=stride_batch,
        stride_segment=stride_segment,
        M=width,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        HAS_NORM_SUMS=has_norm_sums,
        HAS_GATE_SUM=has_gate_sum,
        HAS_BRANCH_SUM=has_branch_sum,
        num_warps=_NUM_WARPS,
    )


def compile_cases() -> list[CompileCase]:
    """All sums, at both production widths."""
    rows = ("weight_ptr", "bias_ptr", "scale_ptr", "branch_bias_ptr", "gate_ptr")
    gradients = ("dbranch_bias", "dgate", "dweight", "dbias", "dshift", "dscale")
    integers = ("num_batches", "num_programs", "num_text_programs")
    strides = ("stride_batch", "stride_segment")
    return [
        CompileCase(
            name=f"all {width}",
            kernel=_sum_kernel,
            arguments={"partial_ptr": "*fp32"}
            | dict.fromkeys((*rows, *(f"{name}_ptr" for name in gradients)), "*bf16")
            | dict.fromkeys((*integers, *strides), "i32"),
            constants={
                "M": width,
                "ROWS": _ROWS,
                "COLUMNS": _COLUMNS,
                "HAS_NORM_SUMS": True,
                "HAS_GATE_SUM": True,
                "HAS_BRANCH_SUM": True,
            },
            num_warps=_NUM_WARPS,
            divisible=strides,
            max_registers=128,
            max_shared_bytes=4096,
        )
        for width in (1920, 3072)
    ]

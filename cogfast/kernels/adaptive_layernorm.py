"""Gated residual, LayerNorm and modulation: the glue between the linears of a block.

    h' = h + gate * (y + b)                         gated_residual
    n  = LayerNorm(h') * (1 + scale) + shift        adaptive_layernorm
    both at once                                    residual_adaptive_layernorm
    LayerNorm(h)                                    layernorm

with h, y, n [B, S, M], b [M] the bias that the linear before left out, and gate, shift, scale
[B, 2, M]: entry 0 of dim 1 belongs to the video rows, entry 1 to the `num_text` text rows that stand
in front (the order of SAT's modulation layer).

h' is rounded to the dtype of h before it is normed, so that the backward
(adaptive_layernorm_backward.py) sees what was normed; mean and rstd are kept in float32, 8 bytes a
row. Bytes, in units of one bf16 [B, S, M]: h, y in, h', n out = 4; without the residual 2, without
the norm 3. One row per program and 4 warps: 48 registers at 1920 columns, 60 at 3072, so that 10 and
8 rows are on a multiprocessor, whose memory's latency asks for two. A row's segment is an offset of
its program's vectors, not a slice or a join. Rows are marked evict-first: what should stay in the
cache are the vectors that all rows share. On a GPU: not measured.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.adaptive_layernorm_cpu import forward_cpu
from cogfast.kernels.argument_checks import CompileCase, check_tensor, jit, refuse, tl, triton
from cogfast.kernels.gpu.adaptive_layernorm_backward import backward_op, shared_strides

NUM_WARPS_CANDIDATES = {1920: (2, 4, 8), 3072: (4, 8, 16)}  # worth timing on a GPU


# Rows are split and joined, not sliced: the gradient of a split is one join, that of a slice is a
# tensor of zeros, a copy and a sum.
def _split_rows(x: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
    """[B, S, M] -> text rows [B, L, M], video rows [B, V, M]."""
    return x.split((num_text, x.shape[1] - num_text), dim=1)


def adaptive_layernorm_reference(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """hidden [B, S, M]; weight, bias [M] of the LayerNorm; shift, scale [B, 2, M] -> hidden as it
    is and normed [B, S, M]."""
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    text, video = _split_rows(normed, num_text)
    scale_video, scale_text = (1 + scale).split(1, dim=1)  # [B, 1, M]
    shift_video, shift_text = shift.split(1, dim=1)
    text = torch.addcmul(shift_text, text, scale_text)
    return hidden, torch.cat([text, torch.addcmul(shift_video, video, scale_video)], dim=1)


def layernorm_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """hidden [B, S, M]; weight, bias [M] -> [B, S, M]."""
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


def gated_residual_reference(
    hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
) -> Tensor:
    """hidden, branch [B, S, M]; branch_bias [M]; gate [B, 2, M] -> [B, S, M]."""
    if branch_bias is not None:
        branch = branch + branch_bias
    gate_video, gate_text = gate.split(1, dim=1)  # [B, 1, M]
    branch_text, branch_video = _split_rows(branch, num_text)
    hidden_text, hidden_video = _split_rows(hidden, num_text)
    text = torch.addcmul(hidden_text, branch_text, gate_text)
    return torch.cat([text, torch.addcmul(hidden_video, branch_video, gate_video)], dim=1)


def residual_adaptive_layernorm_reference(
    hidden: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The two above, one after the other -> h', n."""
    hidden = gated_residual_reference(hidden, branch, branch_bias, gate, num_text)
    return adaptive_layernorm_reference(hidden, weight, bias, shift, scale, num_text, eps)


@jit
def _fwd_kernel(
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
    """Grid (S, B). No branch_ptr: no residual; no scale_ptr: no norm."""
    row = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < M
    vector = batch * stride_batch + tl.where(row < num_text, stride_segment, 0)
    row = batch * num_rows + row
    start = row * M

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
        x = out.to(tl.float32)

    if scale_ptr is not None:
        mean = tl.sum(x, axis=0) / M
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
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-> h', n [B, S, M], mean, rstd [B, S]. Without branch no residual, without scale no norm."""
    hidden = hidden.contiguous()
    branch = None if branch is None else branch.contiguous()
    out, normed, mean, rstd = _room(hidden, branch, scale)
    shift, scale, gate = shared_strides(shift, scale, gate)
    stride_batch, stride_segment, _ = (gate if scale is None else scale).stride()
    num_batches, num_rows, width = hidden.shape
    _fwd_kernel[(num_rows, num_batches)](
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
        BLOCK=triton.next_power_of_2(width),
        num_warps=num_warps or choose_num_warps(width),
    )
    return out, normed, mean, rstd


def choose_num_warps(width: int) -> int:
    """8 columns a thread up to 4 warps, which serve up to 4096 columns."""
    block = triton.next_power_of_2(width)
    return min(max(block // 256, 1), max(block // 1024, 4), 16)


def _room(hidden: Tensor, branch: Tensor | None, scale: Tensor | None) -> tuple[Tensor, ...]:
    """For h', n, mean and rstd; what is not asked for is empty, as an op cannot return None."""
    rows, nothing = hidden.shape, (0,)
    statistics = nothing if scale is None else rows[:2]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty(nothing if branch is None else rows),
        hidden.new_empty(nothing if scale is None else rows),
        hidden.new_empty(statistics, dtype=wide),
        hidden.new_empty(statistics, dtype=wide),
    )


forward_op = torch.library.custom_op(
    "cogfast::adaptive_layernorm",
    launch_forward,
    mutates_args=(),
    device_types="cuda",
    schema="""(
        Tensor hidden, Tensor? branch, Tensor? branch_bias, Tensor? gate, Tensor? weight,
        Tensor? bias, Tensor? shift, Tensor? scale, int num_text, float eps
    ) -> (Tensor, Tensor, Tensor, Tensor)""",
)
forward_op.register_kernel("cpu")(forward_cpu)


@forward_op.register_fake
def _(hidden, branch, branch_bias, gate, weight, bias, shift, scale, num_text, eps):
    return _room(hidden, branch, scale)


def _keep(ctx, inputs, output) -> None:
    """What the backward reads. The branch is kept only where its gate wants a gradient."""
    hidden, branch, branch_bias, gate, weight, bias, _, scale, ctx.num_text, _ = inputs
    out, _, mean, rstd = output
    if branch is None:
        out = hidden
    if scale is None:
        out = mean = rstd = None
    _, _, needs_branch_bias, needs_gate, *needs_norm, _, _ = ctx.needs_input_grad
    ctx.has_norm_sums = any(needs_norm)
    ctx.has_branch_sum = branch_bias is not None and (needs_branch_bias or needs_gate)
    ctx.has_residual, ctx.has_norm = branch is not None, scale is not None
    branch = branch if needs_gate else None
    ctx.save_for_backward(out, mean, rstd, weight, bias, scale, branch, branch_bias, gate)
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of the op's ten arguments, from those of h' and n."""
    if dn is None and (dout is None or not ctx.has_residual):
        return dout, *[None] * 9
    has_norm_sums = ctx.has_norm_sums and dn is not None
    gradients = backward_op(
        dn, dout, *ctx.saved_tensors, ctx.num_text, has_norm_sums, ctx.has_branch_sum
    )
    dhidden, *others = (x if x.numel() else None for x in gradients)
    return dout if dn is None else dhidden, *others, None, None


def _backward(ctx, dout: Tensor | None, dn: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    # of outputs that are empty nothing comes back
    return _gradients(ctx, dout if ctx.has_residual else None, dn if ctx.has_norm else None)


forward_op.register_autograd(_backward, setup_context=_keep)


class _WithoutResidual(torch.autograd.Function):
    """The op's ten arguments -> hidden as it is and n: their gradients meet in one backward. An op
    of its own could not return what it was given."""

    @staticmethod
    def forward(ctx, *inputs):
        _, normed, mean, rstd = forward_op(*inputs)
        _keep(ctx, inputs, (None, None, mean, rstd))
        return inputs[0], normed

    @staticmethod
    def backward(ctx, dhidden, dn):
        return _gradients(ctx, dhidden, dn)


def _check_rows(op: str, hidden: Tensor, num_text: int) -> None:
    if hidden.dim() != 3:
        refuse(op, "hidden", hidden, "its shape must be [B, S, M]")
    check_tensor(op, "hidden", hidden, hidden.shape)
    if not 0 <= num_text <= hidden.shape[1]:
        refuse(op, "num_text", num_text, f"it must be 0 to {hidden.shape[1]}, the rows of hidden")


def _check_norm(
    op: str,
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
) -> None:
    num_batches, _, width = hidden.shape
    if (weight is None) != (bias is None):
        refuse(op, "bias", bias, "weight and bias are both tensors or both None")
    if weight is not None:
        check_tensor(op, "weight", weight, (width,), like=hidden, any_dtype=True)
        check_tensor(op, "bias", bias, (width,), like=weight)
    check_tensor(op, "scale", scale, (num_batches, 2, width), like=hidden, any_dtype=True)
    check_tensor(op, "shift", shift, (num_batches, 2, width), like=scale)


def _check_residual(
    op: str, hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor
) -> None:
    num_batches, _, width = hidden.shape
    check_tensor(op, "branch", branch, hidden.shape, like=hidden)
    if branch_bias is not None:
        check_tensor(op, "branch_bias", branch_bias, (width,), like=hidden, any_dtype=True)
    check_tensor(op, "gate", gate, (num_batches, 2, width), like=hidden, any_dtype=True)


def adaptive_layernorm(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """LayerNorm and modulation of hidden [B, S, M], see the top of the file; -> hidden, n.

    Go on with the hidden that is returned: its gradient then joins that of n inside the kernel.
    """
    _check_rows("adaptive_layernorm", hidden, num_text)
    _check_norm("adaptive_layernorm", hidden, weight, bias, shift, scale)
    nothing = (None, None, None)  # branch, its bias and its gate
    return _WithoutResidual.apply(hidden, *nothing, weight, bias, shift, scale, num_text, eps)


def layernorm(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of hidden [B, S, M] without a modulation, its sums over rows in float32 too (those
    of nn.LayerNorm are in bf16 for bf16 rows on a CPU)."""
    _check_rows("layernorm", hidden, 0)
    num_batches, _, width = hidden.shape
    shift, scale = hidden.new_zeros(2, num_batches, 2, width).unbind()  # they change no bit
    return adaptive_layernorm(hidden, weight, bias, shift, scale, 0, eps)[1]


def residual_adaptive_layernorm(
    hidden: Tensor,
    branch: Tensor,
    branch_bias: Tensor | None,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """h' = hidden + gate * (branch + branch_bias) and n of it, see the top of the file."""
    _check_rows("residual_adaptive_layernorm", hidden, num_text)
    _check_residual("residual_adaptive_layernorm", hidden, branch, branch_bias, gate)
    _check_norm("residual_adaptive_layernorm", hidden, weight, bias, shift, scale)
    out, normed, _, _ = forward_op(
        hidden, branch, branch_bias, gate, weight, bias, shift, scale, num_text, eps
    )
    return out, normed


def gated_residual(
    hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
) -> Tensor:
    """hidden + gate * (branch + branch_bias), see the top of the file; -> [B, S, M]."""
    _check_rows("gated_residual", hidden, num_text)
    _check_residual("gated_residual", hidden, branch, branch_bias, gate)
    no_norm = (None, None, None, None)  # weight, bias, shift, scale
    return forward_op(hidden, branch, branch_bias, gate, *no_norm, num_text, 0.0)[0]


# Registers, by width: at most 64 let 8 rows share a multiprocessor.
_MAX_REGISTERS = {
    1920: {"whole": 53, "first": 53, "last": 40},
    3072: {"whole": 64, "first": 64, "last": 53},
}
_MAX_REGISTERS_FP32 = {1920: 64, 3072: 96}


def compile_cases() -> list[CompileCase]:
    """Every variant in bf16, the whole one in fp32 too."""
    cases = []
    for width, limits in _MAX_REGISTERS.items():
        cases += [_compile_case(width, variant, "bf16", limits[variant]) for variant in limits]
        cases.append(_compile_case(width, "whole", "fp32", _MAX_REGISTERS_FP32[width]))
    return cases


def _compile_case(width: int, variant: str, dtype: str, max_registers: int) -> CompileCase:
    residual = ("branch_ptr", "branch_bias_ptr", "gate_ptr")
    norm = ("weight_ptr", "bias_ptr", "shift_ptr", "scale_ptr")
    lacking = {"whole": (), "first": residual, "last": norm}[variant]
    pointers = {"hidden_ptr", *residual, *norm, "out_ptr", "normed_ptr"} - {*lacking}
    integers = ("num_rows", "num_text", "stride_batch", "stride_segment")
    return CompileCase(
        name=f"{variant} {width} {dtype}",
        kernel=_fwd_kernel,
        arguments={
            **dict.fromkeys(pointers, f"*{dtype}"),
            **dict.fromkeys(("mean_ptr", "rstd_ptr"), "*fp32"),
            **dict.fromkeys(integers, "i32"),
            "eps": "fp32",
        },
        constants={
            **dict.fromkeys(lacking),
            "M": width,
            "BLOCK": triton.next_power_of_2(width),
        },
        num_warps=choose_num_warps(width),
        divisible=("stride_batch", "stride_segment"),
        max_registers=max_registers,
        max_shared_bytes=32,  # what the warps of a row tell each other
        narrow_loads=0,
        narrow_stores=0 if variant == "last" else 2,  # mean and rstd
    )

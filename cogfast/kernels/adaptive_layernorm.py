"""Gated residual, LayerNorm and modulation: the ops between the linears of a block.

    h' = h + gate * (y + b)                         gated_residual
    n  = LayerNorm(h') * (1 + scale) + shift        adaptive_layernorm
    both in one op                                  residual_adaptive_layernorm
    LayerNorm(h)                                    layernorm

h, y, n are [B, S, M]. b [M] is the bias that the linear before left out. gate, shift and scale are
[B, 2, M]: entry 0 of dim 1 is for video rows, entry 1 for the `num_text` text rows in front of
them, the order of SAT's modulation layer. h' is rounded to the dtype of h before it is normed, so
that backward sees what was normed. docs/kernels.md counts the bytes; no GPU has timed the ops yet.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.gpu.adaptive_layernorm import (
    Backward,
    empty_outputs,
    launch_backward,
    launch_forward,
)


def _split_rows(x: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
    """Split [B, S, M] into text rows [B, L, M] and video rows [B, V, M]."""
    # The gradient of a split is one concatenation; that of a slice is zeros, a copy and a sum.
    text, video = x.split((num_text, x.shape[1] - num_text), dim=1)
    return text, video


def adaptive_layernorm_reference(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """Return hidden unchanged, and n [B, S, M].

    hidden: [B, S, M]. weight, bias: [M], of the LayerNorm. shift, scale: [B, 2, M].
    """
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    text, video = _split_rows(normed, num_text)
    # Split, as above, so that the gradient of a modulation is one concatenation.
    scale_video, scale_text = (1 + scale).split(1, dim=1)  # [B, 1, M]
    shift_video, shift_text = shift.split(1, dim=1)
    text = torch.addcmul(shift_text, text, scale_text)
    return hidden, torch.cat([text, torch.addcmul(shift_video, video, scale_video)], dim=1)


def layernorm_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm of hidden [B, S, M] with weight, bias [M]."""
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


def gated_residual_reference(
    hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
) -> Tensor:
    """Return h' [B, S, M] from hidden, branch [B, S, M], branch_bias [M] and gate [B, 2, M]."""
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
    """Return h' and n [B, S, M]: gated_residual_reference, then adaptive_layernorm_reference."""
    hidden = gated_residual_reference(hidden, branch, branch_bias, gate, num_text)
    return adaptive_layernorm_reference(hidden, weight, bias, shift, scale, num_text, eps)


def _segments(num_text: int) -> tuple[tuple[int, slice], ...]:
    """Pair each entry of a modulation with its rows: (0, video), (1, text)."""
    return (0, slice(num_text, None)), (1, slice(num_text))


def forward_cpu(
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
    """Compute the outputs of `empty_outputs` with PyTorch's fused functions.

    Rows stay in their dtype: PyTorch computes in float32 inside and rounds what it writes, and a
    float32 copy of bfloat16 rows would cost more than it gains. Sums and statistics are float32.
    """
    dtype = hidden.dtype
    out, n, mean, rstd = (hidden.new_empty(0) for _ in range(4))
    if branch is not None:
        assert gate is not None, "a branch comes with its gate"
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        for segment, rows in _segments(num_text):
            factor = gate[:, segment, None].to(dtype)  # [B, 1, M]
            summand = branch[:, rows]
            if branch_bias is not None:
                summand = summand + branch_bias.to(dtype)
            torch.addcmul(hidden[:, rows], summand, factor, out=out[:, rows])
        hidden = out
    if scale is not None:
        assert shift is not None, "a scale comes with its shift"
        # float32 vectors give float32 statistics and sums for rows of any dtype.
        wide = torch.promote_types(dtype, torch.float32)
        weight = torch.ones(hidden.shape[-1]) if weight is None else weight
        bias = torch.zeros(hidden.shape[-1]) if bias is None else bias
        weight, bias = weight.to(wide), bias.to(wide)
        n, mean, rstd = torch.native_layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
        # Modulate in place: the norm's result is not read again.
        for segment, rows in _segments(num_text):
            factor = 1 + scale[:, segment, None].to(dtype)
            summand = shift[:, segment, None].to(dtype)
            torch.addcmul(summand, n[:, rows], factor, out=n[:, rows])
        mean, rstd = mean.squeeze(-1), rstd.squeeze(-1)
    return out, n, mean, rstd


def backward_cpu(
    dn: Tensor | None,
    dout: Tensor | None,
    out: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    branch: Tensor | None,
    branch_bias: Tensor | None,
    gate: Tensor | None,
    num_text: int,
    has_norm_sums: bool,
    has_branch_sum: bool,
) -> tuple[Tensor, ...]:
    """Compute the gradients of `Backward.empty_gradients`.

    With xhat = (h' - mean) * rstd and dn, dh' the gradients that arrive:

        dx = dn * weight * (1 + scale)
        dh = dh' + rstd * (dx - mean(dx) - xhat * mean(dx * xhat))      gradient of hidden
        dy = gate * dh                                                  gradient of the branch

    and, from four sums over the rows of each sample's text or video,

        A = sum dn * xhat      dscale = weight * A + bias * B      dweight = sum (1 + scale) * A
        B = sum dn             dshift = B                          dbias   = sum (1 + scale) * B
        G = sum dh * y         dgate  = G + b * C
        C = sum dh                                                 db      = sum gate * C

    Without dn (no norm) dh is dh' itself, and only dy and the sums G and C remain.
    """
    rows = dout if dn is None else dn
    assert rows is not None, "backward needs the gradient of h' or of n"
    wide = torch.promote_types(rows.dtype, torch.float32)
    dhidden = dbranch = dbranch_bias = dgate = dweight = dbias = dshift = dscale = None

    total = rows  # dh of the formulas
    if dn is not None:
        assert out is not None and mean is not None and rstd is not None and scale is not None
        wide_scale = scale.to(wide)
        wide_weight = None if weight is None else weight.to(wide)
        total, a, b = _norm_backward(
            dn, dout, out, mean, rstd, wide_weight, wide_scale, num_text, has_norm_sums
        )
        dhidden = total
        if a is not None and b is not None:
            dshift, dscale = b.to(scale.dtype), a
            if weight is not None and bias is not None:
                dscale = a * weight + b * bias
                factor = 1 + wide_scale
                dweight, dbias = ((factor * x).sum((0, 1)).to(weight.dtype) for x in (a, b))
            dscale = dscale.to(scale.dtype)
    if gate is not None:
        dbranch = torch.empty_like(total, memory_format=torch.contiguous_format)
        g, c = (torch.empty(gate.shape, dtype=wide) for _ in range(2))
        for segment, span in _segments(num_text):
            if branch is not None:  # dbranch is scratch memory until its gradient is written
                products = torch.mul(total[:, span], branch[:, span], out=dbranch[:, span])
                g[:, segment] = products.sum(1, dtype=wide)
            if has_branch_sum:
                c[:, segment] = total[:, span].sum(1, dtype=wide)
            factor = gate[:, segment, None].to(rows.dtype)
            torch.mul(total[:, span], factor, out=dbranch[:, span])
        if has_branch_sum:
            assert branch_bias is not None, "C is the sum behind the gradient of branch_bias"
            dbranch_bias = (gate * c).sum((0, 1)).to(branch_bias.dtype)
            g = g + branch_bias * c
        if branch is not None:
            dgate = g.to(gate.dtype)
    gradients = (dhidden, dbranch, dbranch_bias, dgate, dweight, dbias, dshift, dscale)
    return tuple(rows.new_empty(0) if x is None else x for x in gradients)


def _norm_backward(
    dn: Tensor,
    dout: Tensor | None,
    out: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    scale: Tensor,
    num_text: int,
    has_norm_sums: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return dh [B, S, M] and, if asked for, the sums A and B [B, 2, M] in float32."""
    factor = 1 + scale if weight is None else weight * (1 + scale)
    total = torch.empty_like(out, memory_format=torch.contiguous_format)
    for segment, rows in _segments(num_text):
        torch.mul(dn[:, rows], factor[:, segment, None].to(dn.dtype), out=total[:, rows])
    mean, rstd = mean.unsqueeze(-1), rstd.unsqueeze(-1)
    # The weight is part of `total` already; aten asks for one of the statistics' dtype.
    one = mean.new_ones(out.shape[-1])
    total, _, _ = torch.ops.aten.native_layer_norm_backward(
        total, out, out.shape[-1:], mean, rstd, one, one, [True, False, False]
    )
    if dout is not None:
        total += dout
    if not has_norm_sums:
        return total, None, None
    # One float32 tensor of the rows' size, [B, S, M], is allocated here.
    products = torch.sub(out, mean).mul_(rstd).mul_(dn)
    # Sums over rows lose too many digits in bfloat16.
    a, b = torch.empty_like(factor), torch.empty_like(factor)
    for segment, rows in _segments(num_text):
        torch.sum(products[:, rows], 1, out=a[:, segment])
        b[:, segment] = dn[:, rows].sum(1, dtype=b.dtype)
    return total, a, b


# Arguments are those of launch_forward; its outputs are those of empty_outputs.
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
    return empty_outputs(hidden, branch, scale)


# Arguments are the fields of Backward, in their order.
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
backward_op.register_fake(lambda *inputs: Backward(*inputs).empty_gradients())


def _keep(ctx, inputs, output) -> None:
    """Save what backward reads. The branch is saved only if its gate needs a gradient."""
    hidden, branch, branch_bias, gate, weight, bias, _, scale, ctx.num_text, _ = inputs
    out, _, mean, rstd = output
    # If there is no residual, h' is hidden itself, and the op returns no copy of it.
    if branch is None:
        out = hidden
    if scale is None:
        out = mean = rstd = None
    _, _, needs_branch_bias, needs_gate, *needs_norm, _, _ = ctx.needs_input_grad
    ctx.has_norm_sums = any(needs_norm)
    # The gate's gradient G + b C needs the sum C as well.
    ctx.has_branch_sum = branch_bias is not None and (needs_branch_bias or needs_gate)
    ctx.has_residual, ctx.has_norm = branch is not None, scale is not None
    branch = branch if needs_gate else None
    ctx.save_for_backward(out, mean, rstd, weight, bias, scale, branch, branch_bias, gate)
    # An output that was not used gets None, not a tensor of zeros.
    ctx.set_materialize_grads(False)


def _gradients(ctx, dout: Tensor | None, dn: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the op's ten arguments from those of h' and n."""
    # Nothing to compute: n was not used, and h' was not used or is hidden itself.
    if dn is None and (dout is None or not ctx.has_residual):
        return dout, *[None] * 9
    has_norm_sums = ctx.has_norm_sums and dn is not None
    gradients = backward_op(
        dn, dout, *ctx.saved_tensors, ctx.num_text, has_norm_sums, ctx.has_branch_sum
    )
    dhidden, *rest = (x if x.numel() else None for x in gradients)
    # If there is no norm, the gradient of hidden is that of h': return it without a copy.
    return dout if dn is None else dhidden, *rest, None, None


def _backward(ctx, dout: Tensor | None, dn: Tensor | None, *_) -> tuple[Tensor | None, ...]:
    # Autograd may pass a gradient for an output that was not computed: ignore it.
    return _gradients(ctx, dout if ctx.has_residual else None, dn if ctx.has_norm else None)


forward_op.register_autograd(_backward, setup_context=_keep)


class _WithoutResidual(torch.autograd.Function):
    """Return hidden unchanged and n, so that their gradients are added inside one backward.

    A custom op may not return its argument, hence this function around it.
    """

    @staticmethod
    def forward(ctx, *inputs):
        _, normed, mean, rstd = forward_op(*inputs)
        _keep(ctx, inputs, (None, None, mean, rstd))
        return inputs[0], normed

    @staticmethod
    def backward(ctx, *gradients):
        return _gradients(ctx, *gradients)


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
    if weight is not None and bias is not None:
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
    """Return hidden unchanged and n = LayerNorm(hidden) * (1 + scale) + shift, both [B, S, M].

    Use the returned hidden from here on: its gradient is then added to that of n inside the kernel.

    hidden: [B, S, M]. weight, bias: [M] or None. shift, scale: [B, 2, M].
    """
    _check_rows("adaptive_layernorm", hidden, num_text)
    _check_norm("adaptive_layernorm", hidden, weight, bias, shift, scale)
    no_residual = (None, None, None)  # branch, its bias and its gate
    return _WithoutResidual.apply(hidden, *no_residual, weight, bias, shift, scale, num_text, eps)


def layernorm(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of hidden [B, S, M] without modulation.

    Sums over rows are float32, also for bf16 rows on a CPU, where nn.LayerNorm adds in bf16.
    """
    _check_rows("layernorm", hidden, 0)
    num_batches, _, width = hidden.shape
    shift, scale = hidden.new_zeros(2, num_batches, 2, width).unbind()  # n * (1 + 0) + 0 is n
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
    """Return h' = hidden + gate * (branch + branch_bias) and its n, both [B, S, M].

    hidden, branch: [B, S, M]. branch_bias, weight, bias: [M] or None. gate, shift, scale:
    [B, 2, M].
    """
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
    """Return hidden + gate * (branch + branch_bias), [B, S, M].

    hidden, branch: [B, S, M]. branch_bias: [M] or None. gate: [B, 2, M].
    """
    _check_rows("gated_residual", hidden, num_text)
    _check_residual("gated_residual", hidden, branch, branch_bias, gate)
    no_norm = (None, None, None, None)  # weight, bias, shift, scale
    return forward_op(hidden, branch, branch_bias, gate, *no_norm, num_text, 0.0)[0]

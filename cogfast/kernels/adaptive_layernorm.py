"""Gated residual, LayerNorm and modulation: the ops between the linears of a block.

    h' = h + gate * (y + b)                         gated_residual
    n  = LayerNorm(h') * (1 + scale) + shift        adaptive_layernorm
    both in one op                                  residual_adaptive_layernorm
    LayerNorm(h)                                    layernorm

h, y, n are [B, S, M]. b [M] is the bias that the linear before left out. gate, shift and scale are
[B, 2, M]: entry 0 of dim 1 is for video rows, entry 1 for the `num_text` text rows in front of
them, the order of SAT's modulation layer. h' is rounded to the dtype of h before it is normed, so
that backward sees what was normed. docs/kernels.md counts the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.torch_library import (
    float32_on_cpu,
    from_gpu,
    has_kernel,
    register_gradient,
    register_op,
)


def _split_rows(x: Tensor, num_text: int) -> tuple[Tensor, Tensor]:
    """Split [B, S, M] into text rows [B, L, M] and video rows [B, V, M]."""
    # The gradient of a split is one concatenation; that of a slice is zeros, a copy and a sum.
    text, video = x.split((num_text, x.shape[1] - num_text), dim=1)
    return text, video


@float32_on_cpu
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
    text, video = _split_rows(F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps), num_text)
    # Split, as above, so that the gradient of a modulation is one concatenation.
    scale_video, scale_text = (1 + scale).split(1, dim=1)  # [B, 1, M]
    shift_video, shift_text = shift.split(1, dim=1)
    text = torch.addcmul(shift_text, text, scale_text)
    return hidden, torch.cat([text, torch.addcmul(shift_video, video, scale_video)], dim=1)


@float32_on_cpu
def layernorm_reference(
    hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """LayerNorm of hidden [B, S, M] with weight, bias [M]."""
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)


@float32_on_cpu
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


@float32_on_cpu
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


# With xhat = (h' - mean) * rstd and dn, dh' the gradients that arrive, backward computes
#
#     dx = dn * weight * (1 + scale)
#     dh = dh' + rstd * (dx - mean(dx) - xhat * mean(dx * xhat))      gradient of hidden
#     dy = gate * dh                                                  gradient of the branch
#
# and, from four sums over the rows of each sample's text or video,
#
#     A = sum dn * xhat      dscale = weight * A + bias * B      dweight = sum (1 + scale) * A
#     B = sum dn             dshift = B                          dbias   = sum (1 + scale) * B
#     G = sum dh * y         dgate  = G + b * C
#     C = sum dh                                                 db      = sum gate * C
#
# If there is no dn (no norm), dh is dh' itself, and only dy and the sums G and C remain.


def empty_outputs(
    hidden: Tensor, branch: Tensor | None, scale: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Allocate h', n [B, S, M] and mean, rstd [B, S] in float32 (float64 for float64 rows).

    An op cannot return None: an output that is not computed has shape [0].
    """
    rows, absent = hidden.shape, (0,)
    statistics = absent if scale is None else rows[:2]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return (
        hidden.new_empty(absent if branch is None else rows),
        hidden.new_empty(absent if scale is None else rows),
        hidden.new_empty(statistics, dtype=wide),
        hidden.new_empty(statistics, dtype=wide),
    )


class Backward(NamedTuple):
    """Arguments of the backward op. At least one of `dn` and `dout` is given.

    Without `dn` there is no norm, or its output was not used. Without `gate` there is no residual.
    `branch` is given only if the gate needs a gradient.
    """

    dn: Tensor | None  # [B, S, M], gradient of n
    dout: Tensor | None  # [B, S, M], gradient of h'
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
    has_norm_sums: bool  # compute A and B
    has_branch_sum: bool  # compute C

    @property
    def rows(self) -> Tensor:
        """A gradient that arrived, [B, S, M]."""
        rows = self.dout if self.dn is None else self.dn
        assert rows is not None, "backward needs the gradient of h' or of n"
        return rows

    def empty_gradients(self) -> tuple[Tensor, ...]:
        """Allocate the gradients of hidden, branch, branch_bias, gate, weight, bias, shift, scale.

        An op cannot return None: a gradient that is not computed has shape [0].
        """
        norm_vectors = (self.weight, self.bias, self.scale, self.scale)
        alike = [
            None if self.dn is None else self.rows,
            None if self.gate is None else self.rows,
            self.branch_bias if self.has_branch_sum else None,
            None if self.branch is None else self.gate,
        ]
        alike += norm_vectors if self.has_norm_sums else (None,) * 4
        return tuple(self.rows.new_empty(0) if x is None else x.new_empty(x.shape) for x in alike)


# Its arguments are those of launch_forward, its outputs those of empty_outputs.
_forward = register_op(
    """adaptive_layernorm(
        Tensor hidden, Tensor? branch, Tensor? branch_bias, Tensor? gate, Tensor? weight,
        Tensor? bias, Tensor? shift, Tensor? scale, int num_text, float eps
    ) -> (Tensor, Tensor, Tensor, Tensor)""",
    gpu=from_gpu("adaptive_layernorm", "launch_forward"),
    # Its last inputs are scale, num_text and eps.
    fake=lambda hidden, branch, *inputs: empty_outputs(hidden, branch, inputs[-3]),
)
_launch_backward = from_gpu("adaptive_layernorm", "launch_backward")
# Its arguments are the fields of Backward, in their order.
_backward = register_op(
    """adaptive_layernorm_backward(
        Tensor? dn, Tensor? dout, Tensor? out, Tensor? mean, Tensor? rstd, Tensor? weight,
        Tensor? bias, Tensor? scale, Tensor? branch, Tensor? branch_bias, Tensor? gate,
        int num_text, bool has_norm_sums, bool has_branch_sum
    ) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)""",
    gpu=lambda *inputs: _launch_backward(Backward(*inputs)),
    fake=lambda *inputs: Backward(*inputs).empty_gradients(),
)


class _AdaptiveLayerNorm(torch.autograd.Function):
    """Return h' and n; hidden itself in place of h' without a residual, None in place of n without
    a norm.

    The gradients of both outputs arrive together, so that backward adds them in its one pass.
    """

    @staticmethod
    def forward(ctx, *inputs):
        hidden, branch, *_, scale, _, _ = inputs
        outputs = _run_forward(*inputs)
        _AdaptiveLayerNorm.save(ctx, inputs, outputs)
        out, n, _, _ = outputs
        return hidden if branch is None else out, None if scale is None else n

    @staticmethod
    def save(ctx, inputs, output) -> None:
        hidden, branch, branch_bias, gate, weight, bias, _, scale, ctx.num_text, _ = inputs
        out, _, mean, rstd = output
        _, _, needs_branch_bias, needs_gate, *needs_norm, _, _ = ctx.needs_input_grad
        ctx.has_norm_sums = any(needs_norm)
        # The gate's gradient G + b C needs the sum C as well.
        ctx.has_branch_sum = branch_bias is not None and (needs_branch_bias or needs_gate)
        ctx.has_residual = branch is not None
        if branch is None:
            out = hidden
        norm = (None, None, None) if scale is None else (out, mean, rstd)
        # Only the gate's gradient reads the branch.
        branch = branch if needs_gate else None
        ctx.save_for_backward(*norm, weight, bias, scale, branch, branch_bias, gate)
        # An output that was not used gets None, not a tensor of zeros.
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx, *output_gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        dout, dn = output_gradients
        # Nothing to compute: n was not used, and h' was not used or is hidden itself.
        if dn is None and (dout is None or not ctx.has_residual):
            return dout, *[None] * 9
        has_norm_sums = ctx.has_norm_sums and dn is not None
        gradients = _backward(
            dn, dout, *ctx.saved_tensors, ctx.num_text, has_norm_sums, ctx.has_branch_sum
        )
        dhidden, *rest = (x if x.numel() else None for x in gradients)
        # If there is no norm, the gradient of hidden is that of h': return it without a copy.
        return dout if dn is None else dhidden, *rest, None, None


def _save_of_op(ctx, inputs, output) -> None:
    _AdaptiveLayerNorm.save(ctx, inputs, output)
    ctx.is_computed = [x.numel() > 0 for x in output[:2]]
    ctx.mark_non_differentiable(*output[2:])  # mean and rstd


def _backward_of_op(ctx, *gradients):
    # An h' or n of shape [0] has a gradient, too.
    dout, dn = (g if has else None for g, has in zip(gradients[:2], ctx.is_computed, strict=True))
    return _AdaptiveLayerNorm.backward(ctx, dout, dn)


_run_forward = register_gradient(_forward, _save_of_op, _backward_of_op)


def _check(op: str, num_text: int, hidden: Tensor, *others: Tensor | None) -> None:
    branch, branch_bias, gate, weight, bias, shift, scale = others
    if hidden.dim() != 3:
        refuse(op, "hidden", hidden, "its shape must be [B, S, M]")
    check_tensor(op, "hidden", hidden, hidden.shape)
    num_batches, num_rows, width = hidden.shape
    if not 0 <= num_text <= num_rows:
        refuse(op, "num_text", num_text, f"it must be 0 to {num_rows}, the rows of hidden")
    if (weight is None) != (bias is None):
        refuse(op, "bias", bias, "weight and bias are both tensors or both None")
    check_tensor(op, "branch", branch, hidden.shape, like=hidden)
    for name, vector in (("branch_bias", branch_bias), ("weight", weight)):
        check_tensor(op, name, vector, (width,), like=hidden, any_dtype=True)
    check_tensor(op, "bias", bias, (width,), like=weight)
    for name, modulation in (("gate", gate), ("scale", scale)):
        check_tensor(op, name, modulation, (num_batches, 2, width), like=hidden, any_dtype=True)
    check_tensor(op, "shift", shift, (num_batches, 2, width), like=scale)


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
    norm, no_residual = (weight, bias, shift, scale), (None, None, None)
    _check("adaptive_layernorm", num_text, hidden, *no_residual, *norm)
    if not has_kernel(hidden):
        return adaptive_layernorm_reference(hidden, *norm, num_text, eps)
    return _AdaptiveLayerNorm.apply(hidden, *no_residual, *norm, num_text, eps)


def layernorm(hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of hidden [B, S, M] without modulation.

    Sums over rows are float32, also for bf16 rows on a CPU, where nn.LayerNorm adds in bf16.
    """
    _check("layernorm", 0, hidden, *[None] * 7)
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

    hidden, branch: [B, S, M]. branch_bias, weight, bias: [M] or None. gate, shift, scale: [B, 2, M].
    """
    inputs = (hidden, branch, branch_bias, gate, weight, bias, shift, scale)
    _check("residual_adaptive_layernorm", num_text, *inputs)
    if not has_kernel(hidden):
        return residual_adaptive_layernorm_reference(*inputs, num_text, eps)
    return _AdaptiveLayerNorm.apply(*inputs, num_text, eps)


def gated_residual(
    hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
) -> Tensor:
    """Return hidden + gate * (branch + branch_bias), [B, S, M].

    hidden, branch: [B, S, M]. branch_bias: [M] or None. gate: [B, 2, M].
    """
    inputs = (hidden, branch, branch_bias, gate)
    no_norm = (None, None, None, None)  # weight, bias, shift, scale
    _check("gated_residual", num_text, *inputs, *no_norm)
    if not has_kernel(hidden):
        return gated_residual_reference(*inputs, num_text)
    return _AdaptiveLayerNorm.apply(*inputs, *no_norm, num_text, 0.0)[0]

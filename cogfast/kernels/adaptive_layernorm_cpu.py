"""Gated residual, LayerNorm and modulation for CPU tensors, forward and backward, in PyTorch's own
fused functions; the formulas are in adaptive_layernorm.py and adaptive_layernorm_backward.py.

Everything is computed in float32 (or float64) and rounded where the GPU's kernels round.
"""

import torch
from torch import Tensor


def _segments(num_text: int) -> tuple[tuple[int, slice], ...]:
    """(entry of a modulation, its rows), video and text."""
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
    """-> h', n [B, S, M], mean, rstd [B, S]; what is not asked for is empty."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    x, out, n, mean, rstd = hidden.to(wide), *(hidden.new_empty(0) for _ in range(4))
    if branch is not None:
        branch, total = branch.to(wide), torch.empty(x.shape, dtype=wide)
        for segment, rows in _segments(num_text):
            factor = gate[:, segment, None].to(wide)  # [B, 1, M]
            torch.addcmul(x[:, rows], branch[:, rows], factor, out=total[:, rows])
            if branch_bias is not None:
                total[:, rows] += factor * branch_bias
        out = total.to(hidden.dtype)
        x = out.to(wide)
    if scale is not None:
        weight, bias = (None if p is None else p.to(wide) for p in (weight, bias))
        n, mean, rstd = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        for segment, rows in _segments(num_text):
            factor, summand = 1 + scale[:, segment, None].to(wide), shift[:, segment, None].to(wide)
            torch.addcmul(summand, n[:, rows], factor, out=n[:, rows])
        n, mean, rstd = n.to(hidden.dtype), mean.squeeze(-1), rstd.squeeze(-1)
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
    """The gradients of hidden, branch, branch_bias, gate, weight, bias, shift, scale; what is not
    asked for is empty."""
    rows = dout if dn is None else dn
    wide = torch.promote_types(rows.dtype, torch.float32)
    to_wide = lambda x: None if x is None else x.to(wide)
    dhidden = dbranch = dbranch_bias = dgate = dweight = dbias = dshift = dscale = None

    total = to_wide(dout)  # dh of the formulas
    if dn is not None:
        total, a, b = _through_norm(
            *map(to_wide, (dn, total, out, mean, rstd, weight, scale)), num_text, has_norm_sums
        )
        dhidden = total.to(rows.dtype)
        if has_norm_sums:
            dshift, dscale = b.to(scale.dtype), a
            if weight is not None:
                dscale = a * weight + b * bias
                factor = 1 + scale.to(wide)
                dweight, dbias = ((factor * x).sum((0, 1)).to(weight.dtype) for x in (a, b))
            dscale = dscale.to(scale.dtype)
    if gate is not None:
        dbranch = torch.empty_like(total, memory_format=torch.contiguous_format)
        g, c = total.new_empty(gate.shape), total.new_empty(gate.shape)
        for segment, span in _segments(num_text):
            if branch is not None:  # dbranch is scratch until it is written
                products = torch.mul(total[:, span], to_wide(branch)[:, span], out=dbranch[:, span])
                torch.sum(products, 1, out=g[:, segment])
            if has_branch_sum:
                torch.sum(total[:, span], 1, out=c[:, segment])
            factor = gate[:, segment, None].to(wide)
            torch.mul(total[:, span], factor, out=dbranch[:, span])
        dbranch = dbranch.to(rows.dtype)
        if has_branch_sum:
            dbranch_bias = (gate * c).sum((0, 1)).to(branch_bias.dtype)
            g = g + branch_bias * c
        if branch is not None:
            dgate = g.to(gate.dtype)
    gradients = (dhidden, dbranch, dbranch_bias, dgate, dweight, dbias, dshift, dscale)
    return tuple(rows.new_empty(0) if x is None else x for x in gradients)


def _through_norm(
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
    """dh [B, S, M], and the sums A and B [B, 2, M].

    LayerNorm with weight * (1 + scale) for its weight is, for the rows of one (batch, segment), the
    whole op: its weight's gradient is A, its bias's is B.
    """
    factor = 1 + scale if weight is None else weight * (1 + scale)
    total = torch.empty_like(out, memory_format=torch.contiguous_format)
    sums = []
    for segment, rows in _segments(num_text):
        tensors = (dn, out, mean.unsqueeze(-1), rstd.unsqueeze(-1), total)
        for dn_rows, x, *statistics, total_rows, vector in zip(
            *(tensor[:, rows].unbind() for tensor in tensors),
            factor[:, segment].unbind(),
            strict=True,
        ):
            dx, *both = torch.ops.aten.native_layer_norm_backward(
                *(dn_rows, x, x.shape[-1:], *statistics, vector, vector),
                [True, has_norm_sums, has_norm_sums],
            )
            total_rows.copy_(dx)
            sums += both
    if dout is not None:
        total += dout
    if not has_norm_sums:
        return total, None, None
    # A, B, A, B, .. of every batch's video rows, then of its text rows; apart, as an op's results are
    by_segment = lambda parts: torch.stack(parts).view(2, -1, out.shape[-1])
    a, b = (by_segment(sums[i::2]).transpose(0, 1).contiguous() for i in (0, 1))
    return total, a, b

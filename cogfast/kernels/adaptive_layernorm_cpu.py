"""Gated residual, LayerNorm and modulation for CPU tensors, forward and backward, in PyTorch's own
fused functions; the formulas are in adaptive_layernorm.py and adaptive_layernorm_backward.py.

Everything is in the dtype of the rows: PyTorch's functions compute in float32 inside and round what
they write, and a copy of bfloat16 rows in float32 would cost more than it gains. Sums over rows are
float32, statistics too.
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
    dtype = hidden.dtype
    out, n, mean, rstd = (hidden.new_empty(0) for _ in range(4))
    if branch is not None:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        for segment, rows in _segments(num_text):
            factor = gate[:, segment, None].to(dtype)  # [B, 1, M]
            summand = branch[:, rows]
            if branch_bias is not None:
                summand = summand + branch_bias.to(dtype)
            torch.addcmul(hidden[:, rows], summand, factor, out=out[:, rows])
        hidden = out
    if scale is not None:
        # float32 vectors give float32 statistics and sums, whatever the rows are
        wide = torch.promote_types(dtype, torch.float32)
        weight = torch.ones(hidden.shape[-1]) if weight is None else weight
        bias = torch.zeros(hidden.shape[-1]) if bias is None else bias
        weight, bias = weight.to(wide), bias.to(wide)
        n, mean, rstd = torch.native_layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
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
    """The gradients of hidden, branch, branch_bias, gate, weight, bias, shift, scale; what is not
    asked for is empty."""
    rows = dout if dn is None else dn
    wide = torch.promote_types(rows.dtype, torch.float32)
    cast = lambda x: None if x is None else x.to(wide)
    dhidden = dbranch = dbranch_bias = dgate = dweight = dbias = dshift = dscale = None

    total = dout  # dh of the formulas
    if dn is not None:
        total, a, b = _through_norm(
            dn, dout, out, mean, rstd, cast(weight), cast(scale), num_text, has_norm_sums
        )
        dhidden = total
        if has_norm_sums:
            dshift, dscale = b.to(scale.dtype), a
            if weight is not None:
                dscale = a * weight + b * bias
                factor = 1 + cast(scale)
                dweight, dbias = ((factor * x).sum((0, 1)).to(weight.dtype) for x in (a, b))
            dscale = dscale.to(scale.dtype)
    if gate is not None:
        dbranch = torch.empty_like(total, memory_format=torch.contiguous_format)
        g, c = (torch.empty(gate.shape, dtype=wide) for _ in range(2))
        for segment, span in _segments(num_text):
            if branch is not None:  # dbranch is scratch until it is written
                products = torch.mul(total[:, span], branch[:, span], out=dbranch[:, span])
                g[:, segment] = products.sum(1, dtype=wide)
            if has_branch_sum:
                c[:, segment] = total[:, span].sum(1, dtype=wide)
            factor = gate[:, segment, None].to(rows.dtype)
            torch.mul(total[:, span], factor, out=dbranch[:, span])
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
    """dh [B, S, M], and the sums A and B [B, 2, M] in float32."""
    factor = 1 + scale if weight is None else weight * (1 + scale)
    total = torch.empty_like(out, memory_format=torch.contiguous_format)
    for segment, rows in _segments(num_text):
        torch.mul(dn[:, rows], factor[:, segment, None].to(dn.dtype), out=total[:, rows])
    mean, rstd = mean.unsqueeze(-1), rstd.unsqueeze(-1)
    one = mean.new_ones(out.shape[-1])
    total, _, _ = torch.ops.aten.native_layer_norm_backward(
        total, out, out.shape[-1:], mean, rstd, one, one, [True, False, False]
    )
    if dout is not None:
        total += dout
    if not has_norm_sums:
        return total, None, None
    products = torch.sub(out, mean).mul_(rstd).mul_(dn)  # float32
    a, b = torch.empty_like(factor), torch.empty_like(factor)
    for segment, rows in _segments(num_text):
        torch.sum(products[:, rows], 1, out=a[:, segment])
        b[:, segment] = dn[:, rows].sum(1, dtype=b.dtype)
    return total, a, b

"""Gated residual, LayerNorm and modulation: the glue between the linears of a block.

    h' = h + gate * y                               gated_residual
    n  = LayerNorm(h') * (1 + scale) + shift        adaptive_layernorm

with h, y, n [B, S, M] and gate, shift, scale [B, 2, M]: entry 0 of dim 1 belongs to the video rows,
entry 1 to the `num_text` text rows that stand in front (the order of SAT's modulation layer).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def _modulate(x: Tensor, scale: Tensor, shift: Tensor, num_text: int) -> Tensor:
    """x * scale + shift, the text rows and the video rows [B, S, M] with their own vectors."""
    video, text = slice(0, 1), slice(1, 2)
    return torch.cat(
        [
            torch.addcmul(shift[:, text], x[:, :num_text], scale[:, text]),
            torch.addcmul(shift[:, video], x[:, num_text:], scale[:, video]),
        ],
        dim=1,
    )


def adaptive_layernorm_reference(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> Tensor:
    """hidden [B, S, M]; weight, bias [M] of the LayerNorm; shift, scale [B, 2, M] -> [B, S, M]."""
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, eps)
    return _modulate(normed, 1 + scale, shift, num_text)


def gated_residual_reference(hidden: Tensor, branch: Tensor, gate: Tensor, num_text: int) -> Tensor:
    """hidden, branch [B, S, M]; gate [B, 2, M] -> [B, S, M]."""
    return torch.cat(
        [
            torch.addcmul(hidden[:, :num_text], branch[:, :num_text], gate[:, 1:]),
            torch.addcmul(hidden[:, num_text:], branch[:, num_text:], gate[:, :1]),
        ],
        dim=1,
    )


def adaptive_layernorm(
    hidden: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shift: Tensor,
    scale: Tensor,
    num_text: int,
    eps: float,
) -> Tensor:
    """LayerNorm and modulation of hidden [B, S, M], see the top of the file; -> [B, S, M]."""
    return adaptive_layernorm_reference(hidden, weight, bias, shift, scale, num_text, eps)


def gated_residual(hidden: Tensor, branch: Tensor, gate: Tensor, num_text: int) -> Tensor:
    """hidden + gate * branch, see the top of the file; -> [B, S, M]."""
    return gated_residual_reference(hidden, branch, gate, num_text)

"""Gated residual, LayerNorm and modulation: the glue between the linears of a block.

    h' = h + gate * (y + b)                         gated_residual
    n  = LayerNorm(h') * (1 + scale) + shift        adaptive_layernorm
    both at once                                    residual_adaptive_layernorm

with h, y, n [B, S, M], b [M] the bias that the linear before left out, and gate, shift, scale
[B, 2, M]: entry 0 of dim 1 belongs to the video rows, entry 1 to the `num_text` text rows that stand
in front (the order of SAT's modulation layer).
"""

import torch
import torch.nn.functional as F
from torch import Tensor


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
    return adaptive_layernorm_reference(hidden, weight, bias, shift, scale, num_text, eps)


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
    return residual_adaptive_layernorm_reference(
        hidden, branch, branch_bias, gate, weight, bias, shift, scale, num_text, eps
    )


def gated_residual(
    hidden: Tensor, branch: Tensor, branch_bias: Tensor | None, gate: Tensor, num_text: int
) -> Tensor:
    """hidden + gate * (branch + branch_bias), see the top of the file; -> [B, S, M]."""
    return gated_residual_reference(hidden, branch, branch_bias, gate, num_text)

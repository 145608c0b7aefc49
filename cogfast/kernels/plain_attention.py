"""Attention written out in plain PyTorch, a few heads at a time, with its gradients and lse.

The formulas stand at the top of flash_attention.py. The score matrices of as many heads as _MAX_SCORES
allows, one at least, are in memory at once; the backward pass computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MAX_SCORES = 2**28  # entries of the score matrices that are held at a time, 1 GiB in float32


def lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def plain_scores(q: Tensor, k: Tensor) -> Tensor:
    """q, k [N, S, D] -> q k^T / sqrt(D), [N, S, S]."""
    nothing = q.new_zeros(())  # added with factor 0, for the product's own factor alpha
    return torch.baddbmm(nothing, q, k.transpose(1, 2), beta=0, alpha=q.shape[-1] ** -0.5)


def _few_heads(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """[B, S, H, D] each -> the same heads of all, [n, S, D], as many as _MAX_SCORES allows."""
    b, s, h, d = tensors[0].shape
    at_a_time = max(1, _MAX_SCORES // s**2)
    flat = (x.transpose(1, 2).reshape(b * h, s, d).split(at_a_time) for x in tensors)
    return list(zip(*flat, strict=True))


def _heads_last(pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """[n, S, D] each -> [B, S, H, D]."""
    b, s, h, d = like.shape
    return torch.cat(list(pieces)).view(b, h, s, d).transpose(1, 2).contiguous()


def plain_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    out, lse = [], []
    for few_q, few_k, few_v in _few_heads(q, k, v):
        scores = plain_scores(few_q, few_k)
        lse.append(scores.to(lse_dtype(q)).logsumexp(-1))
        out.append(torch.bmm(scores.softmax(-1), few_v))
    return _heads_last(out, q), torch.cat(lse).view(b, h, s)


def plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    pieces, nothing, scale = [], q.new_zeros(()), q.shape[-1] ** -0.5
    for few_dout, few_q, few_k, few_v in _few_heads(dout, q, k, v):
        weights = plain_scores(few_q, few_k).softmax(-1)
        dweights = torch.bmm(few_dout, few_v.transpose(1, 2))
        dscores = torch.ops.aten._softmax_backward_data(dweights, weights, -1, q.dtype)
        dq = torch.baddbmm(nothing, dscores, few_k, beta=0, alpha=scale)
        dk = torch.baddbmm(nothing, dscores.transpose(1, 2), few_q, beta=0, alpha=scale)
        pieces.append((dq, dk, torch.bmm(weights.transpose(1, 2), few_dout)))
    dq, dk, dv = (_heads_last(x, q) for x in zip(*pieces, strict=True))
    return dq, dk, dv

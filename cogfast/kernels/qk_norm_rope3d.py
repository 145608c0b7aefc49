"""LayerNorm of every query and key head, then rotation of the video rows by their 3-D position.

    (a, b) -> (a cos - b sin, a sin + b cos)      for neighbouring entries a, b of a normed head

Text rows are normed and not rotated: their angle is 0 in the table that comes in.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the head norms, in every member of the family


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x [B, S, H, D] float32, rotation [S, D/2] complex (cos + i sin) -> [B, S, H, D]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [B, S, H, D/2]
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2)


def qk_norm_rope3d_reference(
    qkv: Tensor,
    query_norm: tuple[Tensor | None, Tensor | None] | None,
    key_norm: tuple[Tensor | None, Tensor | None] | None,
    rotation: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, 3, H, D]; each norm (weight [D], bias [D]) or None for no norm at all; rotation
    [S, D/2] complex64 or None -> normed and rotated q, k and, as it is, v: each [B, S, H, D] in the
    dtype of qkv. v comes out here too so that the gradient of qkv is written once."""
    q, k, v = qkv.unbind(2)
    turned = []
    for x, norm in ((q, query_norm), (k, key_norm)):
        if rotation is not None:
            x = x.float()
        if norm is not None:
            weight, bias = (None if p is None else p.to(x.dtype) for p in norm)
            x = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        if rotation is not None:
            x = _rotate(x, rotation).to(qkv.dtype)
        turned.append(x)
    return turned[0], turned[1], v


def qk_norm_rope3d(
    qkv: Tensor,
    query_norm: tuple[Tensor | None, Tensor | None] | None,
    key_norm: tuple[Tensor | None, Tensor | None] | None,
    rotation: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, D] of packed qkv [B, S, 3, H, D], see the reference above."""
    return qk_norm_rope3d_reference(qkv, query_norm, key_norm, rotation)

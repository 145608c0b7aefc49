"""LayerNorm of every query and key head, then rotation of the video rows by their 3-D position.

    (a, b) -> (a cos - b sin, a sin + b cos)      for neighbouring entries a, b of a normed head

The first D/8 pairs of a head turn with the token's time, 3D/16 with its row, 3D/16 with its column.
Text rows, which stand in front, are normed and not rotated.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # of the head norms, in every member of the family
Affine = tuple[Tensor | None, Tensor | None]  # weight and bias [D] of a head norm


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of every axis: table [2, N] float32, row 0 the cosines, row 1 the sines, of
    t x D/8 angles of time, then h x 3D/16 of rows, then w x 3D/16 of columns, for t x h x w tokens.
    """

    table: Tensor
    t: int
    h: int
    w: int

    def per_row(self, num_text: int) -> Tensor:
        """cos + i sin of every row's angles, [L + t*h*w, D/2] complex64; those of text are 1."""
        t, h, w = self.t, self.h, self.w
        # N = t D/8 + (h + w) 3D/16 = D/16 (2t + 3h + 3w)
        unit = self.table.shape[1] // (2 * t + 3 * h + 3 * w)
        values = torch.complex(self.table[0], self.table[1])
        time, row, column = values.split((2 * unit * t, 3 * unit * h, 3 * unit * w))
        axes = [
            time.view(t, 1, 1, 2 * unit).expand(t, h, w, -1),
            row.view(1, h, 1, 3 * unit).expand(t, h, w, -1),
            column.view(1, 1, w, 3 * unit).expand(t, h, w, -1),
        ]
        video = torch.cat(axes, dim=-1).flatten(0, 2)
        return torch.cat([video.new_ones(num_text, video.shape[1]), video])


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """x [B, S, H, D] float32, rotation [S, D/2] complex (cos + i sin) -> [B, S, H, D]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [B, S, H, D/2]
    return torch.view_as_real(pairs * rotation[:, None]).flatten(-2)


def qk_norm_rope3d_reference(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, 3, H, D]; norms: None for no norm at all, (None, None) for one without weights;
    -> normed and rotated q, k and, as it is, v: each [B, S, H, D] in the dtype of qkv. v comes out
    here too so that the gradient of qkv is written once."""
    q, k, v = qkv.unbind(2)
    angles = None if rotation is None else rotation.per_row(num_text)
    turned = []
    for x, norm in ((q, query_norm), (k, key_norm)):
        if angles is not None:
            x = x.float()
        if norm is not None:
            weight, bias = (None if p is None else p.to(x.dtype) for p in norm)
            x = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        if angles is not None:
            x = _rotate(x, angles).to(qkv.dtype)
        turned.append(x)
    return turned[0], turned[1], v


def qk_norm_rope3d(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, D] of packed qkv [B, S, 3, H, D], see the reference above."""
    return qk_norm_rope3d_reference(qkv, query_norm, key_norm, rotation, num_text)

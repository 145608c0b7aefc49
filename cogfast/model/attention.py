"""Self-attention over all rows, text and video together."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.kernels.block_kernels import BlockKernels
from cogfast.kernels.qk_norm_rope3d import EPS, Affine, Rotation


class DeferredBiasLinear(nn.Linear):
    """x W^T alone: the kernel that reads the product adds `bias` as it goes, and sums the bias's
    gradient while it writes the product's, which saves a pass over that gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight)


class HeadNorm(nn.LayerNorm):
    """Of every head of the queries, or of the keys: a kernel norms them with the weights here."""

    def affine(self) -> Affine:
        """Weight and bias [D], or twice None."""
        return self.weight, self.bias


class Attention(nn.Module):
    """QKV linear, norm and rotation of queries and keys, attention, output linear."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        has_qk_norm: bool,
        has_affine_norms: bool,
        *,
        kernels: BlockKernels,
    ):
        super().__init__()
        self.kernels = kernels
        self.head_width = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = DeferredBiasLinear(width, width)
        self.query_norm = self.key_norm = None
        if has_qk_norm:
            make = lambda: HeadNorm(self.head_width, EPS, elementwise_affine=has_affine_norms)
            self.query_norm, self.key_norm = make(), make()

    def forward(self, x: Tensor, num_text: int, rotation: Rotation | None) -> Tensor:
        """x [B, S, M] with num_text text rows in front -> [B, S, M] without the bias of `out`."""
        # the head count is taken from the data: a slice of the heads runs the same code
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_width))  # [B, S, 3, H, D]
        norms = (self.query_norm, self.key_norm)
        query_norm, key_norm = (None if n is None else n.affine() for n in norms)
        q, k, v = self.kernels.qk_norm_rope3d(
            qkv, query_norm, key_norm, rotation, num_text
        )  # [B, S, H, D]
        return self.out(self.kernels.flash_attention(q, k, v).flatten(2))

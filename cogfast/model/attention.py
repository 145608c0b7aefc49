"""Self-attention over all rows, text and video together."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.kernels.block_kernels import BlockKernels
from cogfast.kernels.qk_norm_rope3d import EPS, Affine, Rotation


class DeferredBiasLinear(nn.Linear):
    """Linear whose forward leaves out the bias: the kernel that reads the product adds it, and sums
    its gradient in the same pass in which it writes the product's gradient."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(input, self.weight)


class HeadNorm(nn.LayerNorm):
    """Per-head LayerNorm weights for queries or keys. The norm itself runs inside qk_norm_rope3d."""

    def affine(self) -> Affine:
        """Return weight and bias [D], or (None, None)."""
        return self.weight, self.bias


class Attention(nn.Module):
    """QKV linear, norm and rotation of queries and keys, attention and output linear."""

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
        self.sparse_share: float | None = None  # DiffusionTransformer.use_sparse_attention
        self.kept_mass: Tensor | None = None  # [B, H, N], of the last pass
        self.head_width = width // num_heads
        # One matmul for the three; rows of q, then of k, then of v, as in SAT.
        self.qkv = nn.Linear(width, 3 * width)
        self.out = DeferredBiasLinear(width, width)
        self.query_norm = self.key_norm = None
        if has_qk_norm:
            make = lambda: HeadNorm(self.head_width, EPS, elementwise_affine=has_affine_norms)
            self.query_norm, self.key_norm = make(), make()

    def forward(self, x: Tensor, num_text: int, rotation: Rotation | None) -> Tensor:
        """x [B, S, M] with num_text text rows in front -> [B, S, M] without the bias of `out`."""
        # The head count comes from the data, so that a tensor-parallel slice runs the same code.
        qkv = self.qkv(x).unflatten(-1, (3, -1, self.head_width))  # [B, S, 3, H, D]
        norms = (self.query_norm, self.key_norm)
        # The norms' weights go into the fused op: it norms and rotates in one pass over q and k.
        query_norm, key_norm = (None if n is None else n.affine() for n in norms)
        # q, k, v: [B, S, H, D]
        q, k, v = self.kernels.qk_norm_rope3d(qkv, query_norm, key_norm, rotation, num_text)
        if self.sparse_share is None:
            attended = self.kernels.flash_attention(q, k, v)
        else:
            attended, mass = self.kernels.sparse_attention(q, k, v, num_text, self.sparse_share)
            if not torch.compiler.is_compiling():  # a graph with a checkpoint has no side effects
                self.kept_mass = mass
        return self.out(attended.flatten(2))

"""A transformer block: attention and MLP, each with an adaptive LayerNorm and a gate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cogfast.kernels.block_kernels import BlockKernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.attention import Attention, DeferredBiasLinear

NORM_EPS = 1e-5  # input, post-attention and final LayerNorm (golden README); diffusers agrees
MLP_RATIO = 4


@dataclass(frozen=True, slots=True)
class Modulation:
    """Shift, scale and gate of one half of a block, each [B, 2, M]: entry 0 for video, 1 for text."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class BlockModulation(nn.Module):
    """Maps the conditioning vector to the modulation of both halves of a block."""

    def __init__(self, width: int, conditioning_width: int):
        super().__init__()
        self.linear = nn.Linear(conditioning_width, 12 * width)  # 2 streams x 2 halves x 3 vectors

    def forward(self, conditioning: Tensor) -> tuple[Modulation, Modulation]:
        """[B, conditioning_width] -> modulation of the attention half and of the MLP half."""
        # SAT's order of rows: video's six vectors, then text's.
        vectors = self.linear(conditioning).unflatten(-1, (2, 6, -1)).unbind(2)  # 6 of [B, 2, M]
        return Modulation(*vectors[:3]), Modulation(*vectors[3:])


class Block(nn.Module):
    """hidden [B, S, M] -> [B, S, M]; owns all its weights. device: of these, and not of those that a
    subclass adds (DiffusionTransformer.reset_added)."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        conditioning_width: int,
        has_qk_norm: bool = True,
        has_affine_norms: bool = True,
        *,
        kernels: BlockKernels,
        device: str | None = None,
    ):
        super().__init__()
        self.kernels = kernels
        norms = (has_qk_norm, has_affine_norms)
        with torch.device(device or torch.get_default_device()):
            self.modulation = BlockModulation(width, conditioning_width)
            self.attention_norm = nn.LayerNorm(width, NORM_EPS, elementwise_affine=has_affine_norms)
            self.attention = Attention(width, num_heads, *norms, kernels=kernels)
            self.mlp_norm = nn.LayerNorm(width, NORM_EPS, elementwise_affine=has_affine_norms)
            # Biases stay out of the matmuls, so that the kernels behind them add them for nothing.
            self.fc1 = DeferredBiasLinear(width, MLP_RATIO * width)
            self.fc2 = DeferredBiasLinear(MLP_RATIO * width, width)

    def forward(
        self, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
    ) -> Tensor:
        """hidden [B, S, M] with num_text text rows in front, conditioning [B, conditioning_width]
        after its SiLU -> [B, S, M]."""
        kernels, norm1, norm2 = self.kernels, self.attention_norm, self.mlp_norm
        # Text and video rows have vectors of their own; the kernels choose by the row.
        first, second = self.modulation(conditioning)

        hidden, x = kernels.adaptive_layernorm(
            hidden, norm1.weight, norm1.bias, first.shift, first.scale, num_text, NORM_EPS
        )
        x = self.attention(x, num_text, rotation)
        # Adds the output bias and the gated residual, then norms for the MLP, in one pass.
        hidden, x = kernels.residual_adaptive_layernorm(
            hidden,
            x,
            self.attention.out.bias,
            first.gate,
            norm2.weight,
            norm2.bias,
            second.shift,
            second.scale,
            num_text,
            NORM_EPS,
        )
        # fc1 and fc2 return products without bias: gelu and gated_residual add it.
        x = self.fc2(kernels.gelu(self.fc1(x), self.fc1.bias))
        return kernels.gated_residual(hidden, x, self.fc2.bias, second.gate, num_text)

"""One transformer block: attention and MLP, each behind an adaptive LayerNorm and a gate."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cogfast.kernels.adaptive_layernorm import adaptive_layernorm, gated_residual
from cogfast.kernels.gelu import gelu
from cogfast.model.attention import Attention

NORM_EPS = 1e-5  # input, post-attention and final LayerNorm (golden README); diffusers agrees
MLP_RATIO = 4


@dataclass(frozen=True, slots=True)
class Modulation:
    """What a timestep asks of one half of a block: shift, scale and gate, each [B, 2, M], entry 0
    for video rows and entry 1 for text rows."""

    shift: Tensor
    scale: Tensor
    gate: Tensor


class BlockModulation(nn.Module):
    """The conditioning vector as the modulation of both halves of a block."""

    def __init__(self, width: int, conditioning_width: int):
        super().__init__()
        self.linear = nn.Linear(conditioning_width, 12 * width)  # 2 streams x 2 halves x 3 vectors

    def forward(self, conditioning: Tensor) -> tuple[Modulation, Modulation]:
        """[B, conditioning_width] -> modulation of the attention half and of the MLP half."""
        vectors = self.linear(conditioning).unflatten(-1, (2, 6, -1)).unbind(2)  # 6 of [B, 2, M]
        return Modulation(*vectors[:3]), Modulation(*vectors[3:])


class Block(nn.Module):
    """hidden [B, S, M] -> [B, S, M]; owns all its weights."""

    def __init__(
        self,
        width: int,
        num_heads: int,
        conditioning_width: int,
        has_qk_norm: bool = True,
        has_affine_norms: bool = True,
    ):
        super().__init__()
        self.modulation = BlockModulation(width, conditioning_width)
        self.attention_norm = nn.LayerNorm(width, NORM_EPS, elementwise_affine=has_affine_norms)
        self.attention = Attention(width, num_heads, has_qk_norm, has_affine_norms)
        self.mlp_norm = nn.LayerNorm(width, NORM_EPS, elementwise_affine=has_affine_norms)
        self.fc1 = nn.Linear(width, MLP_RATIO * width)
        self.fc2 = nn.Linear(MLP_RATIO * width, width)

    def forward(
        self, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Tensor | None
    ) -> Tensor:
        """hidden [B, S, M] with num_text text rows in front, conditioning [B, conditioning_width]
        after its SiLU, rotation [S, D/2] complex or None -> [B, S, M]."""
        attention, mlp = self.modulation(conditioning)

        x = _modulated_norm(hidden, self.attention_norm, attention, num_text)
        x = self.attention(x, rotation)
        hidden = gated_residual(hidden, x, attention.gate, num_text)

        x = _modulated_norm(hidden, self.mlp_norm, mlp, num_text)
        x = self.fc2(gelu(self.fc1(x)))
        return gated_residual(hidden, x, mlp.gate, num_text)


def _modulated_norm(x: Tensor, norm: nn.LayerNorm, m: Modulation, num_text: int) -> Tensor:
    return adaptive_layernorm(x, norm.weight, norm.bias, m.shift, m.scale, num_text, norm.eps)

"""Latents to tokens and back, and the embedding of a timestep."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from cogfast.shapes import PatchSize, TokenGrid


def patchify(latents: Tensor, patch: PatchSize) -> Tensor:
    """[B, C, T, h, w] -> [B, V, C*patch], a row of V per patch, its entries ordered (c t h w)."""
    b, c, t, h, w = latents.shape
    x = latents.view(b, c, t // patch.t, patch.t, h // patch.h, patch.h, w // patch.w, patch.w)
    return x.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(b, -1, c * patch.t * patch.h * patch.w)


def unpatchify(rows: Tensor, grid: TokenGrid, patch: PatchSize) -> Tensor:
    """[B, V, C*patch] -> [B, C, T, h, w]; the inverse of patchify."""
    x = rows.view(rows.shape[0], grid.t, grid.h, grid.w, -1, patch.t, patch.h, patch.w)
    x = x.permute(0, 4, 1, 5, 2, 6, 3, 7)
    return x.flatten(6, 7).flatten(4, 5).flatten(2, 3)


def sinusoid(positions: Tensor, width: int) -> Tensor:
    """cos, then sin, of positions [B] at width/2 frequencies from 1 towards 1/10000: [B, width]
    float32."""
    half = width // 2
    # rounded as in both upstreams: at timestep 999 the last bit of a frequency is 3e-5 of the result
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(-math.log(10000.0) * exponents / half)
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SinusoidEmbedding(nn.Module):
    """A number per sample (the timestep, or 1.5-I2V's ofs) as a vector: sinusoid, then an MLP."""

    def __init__(self, input_width: int, width: int):
        super().__init__()
        self.input_width = input_width
        self.fc1 = nn.Linear(input_width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, numbers: Tensor) -> Tensor:
        """[B] -> [B, width]."""
        x = sinusoid(numbers, self.input_width).to(self.fc1.weight.dtype)
        return self.fc2(nn.functional.silu(self.fc1(x)))

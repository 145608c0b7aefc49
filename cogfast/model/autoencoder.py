"""The 3D VAE of CogVideoX: diffusers' AutoencoderKLCogVideoX, built from SAT's config or a folder."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """The Gaussian that a clip encodes to, not scaled: mean and std [B, C, T, h, w]."""

    mean: Tensor
    std: Tensor | None  # None: the first stage is deterministic

    def sample(self, noise: Tensor | None) -> Tensor:
        """Latents [B, C, T, h, w] from standard normal `noise` of that shape."""
        return self.mean if self.std is None or noise is None else self.mean + self.std * noise

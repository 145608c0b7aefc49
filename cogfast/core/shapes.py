"""Legend of tensor shapes: compression, patches and the grid of tokens.

B batch, C latent channels, T latent frames, h w latent rows and columns, L text tokens, V video
tokens, S = L + V, H heads, D head width, M = H*D model width, E text embedding width.
Pixels are [B, 3, 4(T-1)+1, 8h, 8w], latents [B, C, T, h, w], tokens [B, S, M] with the text first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TEMPORAL_COMPRESSION = 4  # the VAE keeps the first frame and joins every four that follow
SPATIAL_COMPRESSION = 8


def num_latent_frames(num_frames: int) -> int:
    """Return the latent frames T of a clip of 4(T-1)+1 frames."""
    return (num_frames - 1) // TEMPORAL_COMPRESSION + 1


def num_pixel_frames(latent_frames: int) -> int:
    """Return the number of frames that T latent frames decode to."""
    return (latent_frames - 1) * TEMPORAL_COMPRESSION + 1


@dataclass(frozen=True, slots=True)
class PatchSize:
    """Latent frames, rows and columns that one video token covers."""

    t: int
    h: int
    w: int

    @classmethod
    def from_config(cls, value: int | list[int] | tuple[int, ...]) -> PatchSize:
        """Parse SAT's `patch_size`: 2 (CogVideoX 1.0, one latent frame) or [2, 2, 2] (1.5)."""
        # SAT's number is for rows and columns alone.
        if isinstance(value, int):
            return cls(1, value, value)
        if len(value) != 3:
            raise ValueError(f"patch_size={list(value)} must be one number or three (t, h, w)")
        return cls(*(int(v) for v in value))

    @property
    def joins_frames(self) -> bool:
        """Whether a token covers several latent frames, as in CogVideoX 1.5 and not in 1.0."""
        return self.t > 1

    @property
    def version(self) -> str:
        """The version of CogVideoX with such patches, for messages."""
        return "1.5" if self.joins_frames else "1.0"


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """Video tokens along time, rows and columns: V = t*h*w, in that order."""

    t: int
    h: int
    w: int

    @classmethod
    def from_latents(cls, latents: Tensor, patch: PatchSize) -> TokenGrid:
        """Return the grid of latents [B, C, T, h, w]. ValueError if patches do not divide them."""
        _, _, t, h, w = latents.shape
        if t % patch.t or h % patch.h or w % patch.w:
            rule = f"do not divide into patches of {patch.t}x{patch.h}x{patch.w}; use a clip of a size that does"
            text = f"latents of {t}x{h}x{w} (frames x rows x columns) {rule}"
            raise ValueError(f"{text} (see cogfast.core.shapes)")
        return cls(t // patch.t, h // patch.h, w // patch.w)

    @property
    def num_tokens(self) -> int:
        return self.t * self.h * self.w


def pad_latent_frames(latents: Tensor, patch: PatchSize) -> Tensor:
    """Prepend copies of the first frame to latents [B, C, T, h, w] until patches divide T.

    CogVideoX 1.5 joins two latent frames in a token, but 8N+1 frames give an odd T. Upstream's
    diffusers trainer pads this way (finetune/models/cogvideox_i2v/lora_trainer.py).
    """
    # -T % t is the number of frames up to the next multiple of t.
    if not (missing := -latents.shape[2] % patch.t):
        return latents
    return torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], dim=2)

"""Legend of tensor shapes, and the size rules of the model families.

B batch, C latent channels, T latent frames, h w latent rows and columns, L text tokens, V video
tokens, S = L + V, H heads, D head width, M = H*D model width, E text embedding width.
Pixels are [B, 3, 4(T-1)+1, 8h, 8w], latents [B, C, T, h, w], tokens [B, S, M] with the text first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
            raise ValueError(
                f"latents of {t}x{h}x{w} (frames x rows x columns) do not divide into patches of "
                f"{patch.t}x{patch.h}x{patch.w}; use a clip of a size that does (see cogfast.core.shapes)"
            )
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
    missing = -latents.shape[2] % patch.t
    if missing == 0:
        return latents
    return torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], dim=2)


def check_num_frames(num_frames: int, patch: PatchSize, max_frames: int, key: str) -> None:
    """Raise ValueError for a frame count that the family cannot take; it names counts that fit.

    CogVideoX supports 8N+1 frames, up to the length of the position table: an odd number of latent
    frames, as all models were trained. For 1.5, pad_latent_frames makes it even.
    """
    step = 2 * TEMPORAL_COMPRESSION
    below = (num_frames - 1) // step * step + 1
    if num_frames == below and 1 <= num_frames <= max_frames:
        return
    most = (max_frames - 1) // step * step + 1
    fits = sorted({n for n in (below, below + step) if 1 <= n <= max_frames} or {most})
    raise ValueError(
        f"{key}={num_frames}: CogVideoX {patch.version} supports {step}N+1 frames, at most {most}; "
        f"use {' or '.join(map(str, fits))}"
    )


def check_video_size(
    height: int,
    width: int,
    patch: PatchSize,
    key: str,
    table: tuple[int, int] | None = None,
    one_size: Literal["computed", "learned"] | None = None,
) -> None:
    """Raise ValueError for a frame size that the family cannot take; it names one that fits.

    Rows and columns must divide into latent patches (multiples of 16). table: the largest rows and
    columns, in pixels, of the position table. one_size: the table holds for exactly this size, as
    the computed table of CogVideoX-2B and the learned one of 5B-I2V do. Rotary tables are relative,
    so smaller videos use a part of them.
    """
    rows, columns = SPATIAL_COMPRESSION * patch.h, SPATIAL_COMPRESSION * patch.w
    if height % rows == 0 and width % columns == 0 and height > 0 and width > 0:
        _check_table(height, width, key, table, one_size)
        return
    fits = [max(1, round(height / rows)) * rows, max(1, round(width / columns)) * columns]
    # Only sizes inside the table are suggested: the nearest multiple alone may be too large.
    if table is not None:
        fits = list(table) if one_size else list(map(min, fits, table))
    raise ValueError(
        f"{key}=[{height}, {width}]: rows must be a multiple of {rows} and columns of {columns}; "
        f"use {fits}"
    )


def _check_table(
    height: int, width: int, key: str, table: tuple[int, int] | None, one_size: str | None
) -> None:
    if table is None or (height, width) == tuple(table):
        return
    names = "latent_height and latent_width of model.network_config.params"
    if one_size:
        how = "train without its weights"
        if one_size == "computed":
            latent = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
            how = f"to {latent[0]} and {latent[1]}: the table is computed, so the weights load"
        raise ValueError(
            f"{key}=[{height}, {width}]: the model's position table is for {list(table)} only; use "
            f"that, or change {names} {'and ' if one_size == 'learned' else ''}{how}"
        )
    # A smaller video uses the first rows and columns of a rotary table.
    if height > table[0] or width > table[1]:
        raise ValueError(
            f"{key}=[{height}, {width}]: the model's position table ends at {list(table)}; use that "
            f"at most, or raise {names}"
        )

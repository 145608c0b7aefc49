"""Conversion between latents and tokens, timestep embedding and position tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from cogfast.core.shapes import PatchSize, TokenGrid
from cogfast.kernels.qk_norm_rope3d import Rotation


def patchify(latents: Tensor, patch: PatchSize) -> Tensor:
    """[B, C, T, h, w] -> [B, V, C*patch]: one row per patch, its entries ordered (c t h w)."""
    # (c t h w) is the order of the inputs in the published patch embeddings.
    pattern = "b c (t dt) (h dh) (w dw) -> b (t h w) (c dt dh dw)"
    return rearrange(latents, pattern, dt=patch.t, dh=patch.h, dw=patch.w)


def unpatchify(rows: Tensor, grid: TokenGrid, patch: PatchSize) -> Tensor:
    """[B, V, C*patch] -> [B, C, T, h, w]; the inverse of patchify."""
    sizes = {"t": grid.t, "h": grid.h, "dt": patch.t, "dh": patch.h, "dw": patch.w}
    return rearrange(rows, "b (t h w) (c dt dh dw) -> b c (t dt) (h dh) (w dw)", **sizes)


def sinusoid(positions: Tensor, width: int) -> Tensor:
    """Return cos, then sin, of positions [B] at frequencies from 1 towards 1/10000: [B, width] float32."""
    half = width // 2
    # Round as both upstreams do: at timestep 999 a frequency's last bit changes the result by 3e-5.
    exponents = torch.arange(half, dtype=torch.float32, device=positions.device)
    frequencies = torch.exp(-math.log(10000.0) * exponents / half)
    angles = positions.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class SinusoidEmbedding(nn.Module):
    """Embeds one number per sample (the timestep, or 1.5-I2V's ofs): sinusoid, then MLP."""

    def __init__(self, input_width: int, width: int):
        super().__init__()
        self.input_width = input_width
        self.fc1 = nn.Linear(input_width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, numbers: Tensor) -> Tensor:
        """[B] -> [B, width]."""
        x = sinusoid(numbers, self.input_width).to(self.fc1.weight.dtype)
        return self.fc2(nn.functional.silu(self.fc1(x)))


def _check_grid(grid: TokenGrid, held: TokenGrid, is_exact: bool) -> None:
    """Raise ValueError for a grid that a table for `held` does not cover. is_exact: the table is flattened, so
    with other rows and columns its entries belong to different positions."""
    is_equal = (grid.h, grid.w) == (held.h, held.w)
    if grid.t > held.t or not (is_equal if is_exact else grid.h <= held.h and grid.w <= held.w):
        rule = "exactly" if is_exact else "at most"
        text = f"video of {grid.t}x{grid.h}x{grid.w} tokens (frames x rows x columns): the position table holds up "
        text += f"to {held.t} frames of {rule} {held.h}x{held.w}; set num_frames, latent_height "
        raise ValueError(f"{text}and latent_width of model.network_config.params to the clip's")


def sincos_table(
    grid: TokenGrid, width: int, interpolation: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> Tensor:
    """Return 2B's fixed table, [V, width] float32: 1/4 for time, 3/8 for columns, 3/8 for rows.

    interpolation (t, h, w) divides the positions, which stretches the table over a larger grid.
    """
    shape, axes = (grid.t, grid.h, grid.w), []
    # Columns precede rows, as in both upstreams, whose meshgrid has w first.
    for axis, part in ((0, width // 4), (2, width // 8 * 3), (1, width // 8 * 3)):
        positions = np.arange(shape[axis], dtype=np.float32) / interpolation[axis]
        frequencies = 10000.0 ** (-np.arange(part // 2, dtype=np.float64) / (part / 2))
        angles = np.outer(positions, frequencies)
        # Round to float32 before joining the axes: a float64 table would take twice the memory.
        values = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
        others = tuple({0, 1, 2} - {axis})
        axes.append(np.broadcast_to(np.expand_dims(values, others), (*shape, part)))
    # from_numpy ignores a surrounding `torch.device("meta")`, so the values are kept.
    return torch.from_numpy(np.concatenate(axes, axis=-1).reshape(grid.num_tokens, width))


class PositionTable(nn.Module):
    """Adds a vector per token, text rows included. interpolation (t, h, w): use 2B's fixed sincos
    table, zero for text; None: a learned table (5B-I2V), initially zero."""

    def __init__(
        self,
        grid: TokenGrid,
        text_length: int,
        width: int,
        interpolation: tuple[float, float, float] | None,
    ):
        super().__init__()
        self.grid, self.text_length, self.interpolation = grid, text_length, interpolation
        shape = (1, text_length + grid.num_tokens, width)  # [1, L + V, M]
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=interpolation is None)
        self.reset()

    @torch.no_grad()
    def reset(self) -> None:
        self.weight.zero_()
        if self.interpolation is not None and not self.weight.is_meta:
            rows = sincos_table(self.grid, self.weight.shape[-1], self.interpolation)
            self.weight[:, self.text_length :] = rows.to(self.weight.device)

    def forward(self, hidden: Tensor, num_text: int, grid: TokenGrid) -> Tensor:
        """hidden [B, S, M] with num_text text rows in front -> [B, S, M]."""
        _check_grid(grid, self.grid, is_exact=True)
        if num_text != self.text_length:
            text = f"{num_text} text tokens: the position table is made for text_length={self.text_length}"
            raise ValueError(f"{text}; set max_length of the text encoder to it")
        # Tokens are ordered by frame, so a shorter clip uses the first rows of the table.
        return hidden + self.weight[:, : hidden.shape[1]]


class RotaryPositions(nn.Module):
    """Rotary angles of a head of width D: D/4 entries for time, 3D/8 for rows, 3D/8 for columns.

    Rows and columns have positions 0, 1, 2, ... With is_rescaled they have those of diffusers'
    pipelines for CogVideoX 1.0, which stretch any video over the rows and columns of `grid`.
    """

    frequencies_t: Tensor  # the buffers that _build registers
    frequencies_h: Tensor
    frequencies_w: Tensor

    def __init__(
        self, grid: TokenGrid, head_width: int, theta: float, is_rescaled: bool = False
    ) -> None:
        super().__init__()
        self.grid, self.theta, self.is_rescaled = grid, theta, is_rescaled
        self.axis_widths = (head_width // 4, head_width // 8 * 3, head_width // 8 * 3)
        self._build(torch.get_default_device())

    def _build(self, device: torch.device) -> None:
        """Register radians per step of each axis, float32: [D/8], [3D/16], [3D/16]."""
        for name, width in zip("thw", self.axis_widths, strict=True):
            exponents = torch.arange(0, width, 2, device="cpu").float() / width
            frequencies = (1.0 / self.theta**exponents).to(device)
            self.register_buffer(f"frequencies_{name}", frequencies, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        # Recompute: `.to(bfloat16)` would round the frequencies and `to_empty` leaves garbage.
        super()._apply(fn, recurse)
        self._build(self.frequencies_t.device)
        return self

    def positions(self, grid: TokenGrid) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of the frames, rows and columns of `grid`, float32."""
        given: Any = {"dtype": torch.float32, "device": self.frequencies_t.device}
        count = partial(torch.arange, **given)
        if not self.is_rescaled:
            _check_grid(grid, self.grid, is_exact=False)
            return count(grid.t), count(grid.h), count(grid.w)
        # Rows and columns are scaled into the grid, so only frames can be too many.
        _check_grid(TokenGrid(grid.t, 1, 1), self.grid, is_exact=False)
        axes = pipeline_ranges(grid, self.grid)
        rows, columns = (
            # Written as in diffusers, so that the results agree bit for bit.
            torch.linspace(start, stop * (n - 1) / n, n, **given)
            for (start, stop), n in zip(axes, (grid.h, grid.w), strict=True)
        )
        return count(grid.t), rows, columns

    def forward(self, grid: TokenGrid) -> Rotation:
        """Return cos and sin of the angles of a grid of tokens."""
        frequencies = (self.frequencies_t, self.frequencies_h, self.frequencies_w)
        axes = zip(self.positions(grid), frequencies, strict=True)
        angles = torch.cat([(p[:, None] * f).flatten() for p, f in axes])  # [N]
        return Rotation(torch.stack([angles.cos(), angles.sin()]), grid.t, grid.h, grid.w)


def pipeline_ranges(grid: TokenGrid, base: TokenGrid) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (start, stop) of the rows and of the columns of the largest centred box in `base` with
    the aspect ratio of `grid` (get_resize_crop_region_for_grid in diffusers'
    pipeline_cogvideox.py)."""
    if grid.h / grid.w > base.h / base.w:
        height, width = base.h, round(base.h / grid.h * grid.w)
    else:
        height, width = round(base.w / grid.w * grid.h), base.w
    top, left = round((base.h - height) / 2.0), round((base.w - width) / 2.0)
    return (top, top + height), (left, left + width)

"""Where a token stands: the table that is added to the tokens (2B, 5B-I2V) and the angles that
queries and keys are rotated by (all but 2B)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.shapes import TokenGrid


def _check_grid(grid: TokenGrid, held: TokenGrid, is_exact: bool) -> None:
    """Refuse a grid that a table for `held` does not hold; is_exact: rows and columns must agree,
    since the table is flattened and a slice of another width would hold other positions."""
    fits = grid.t <= held.t and grid.h <= held.h and grid.w <= held.w
    if fits and (not is_exact or (grid.h, grid.w) == (held.h, held.w)):
        return
    rule = f"up to {held.t} frames of exactly" if is_exact else f"up to {held.t} frames of at most"
    raise ValueError(
        f"video of {grid.t}x{grid.h}x{grid.w} tokens (frames x rows x columns): the position table "
        f"holds {rule} {held.h}x{held.w}; set num_frames, latent_height and latent_width of "
        "model.network_config.params to the clip's"
    )


def sincos_axis(width: int, positions: np.ndarray) -> np.ndarray:
    """sin, then cos, of positions [N] at width/2 frequencies from 1 down to 1/10000: [N, width]."""
    frequencies = 10000.0 ** (-np.arange(width // 2, dtype=np.float64) / (width / 2))
    angles = np.outer(positions, frequencies)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def sincos_table(
    grid: TokenGrid, width: int, interpolation: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> Tensor:
    """The fixed table of 2B, [V, width] float32: a quarter for time, 3/8 for columns, 3/8 for rows.

    interpolation (t, h, w) divides the positions, which stretches the table over a larger grid.
    """
    t, h, w = (
        np.arange(n, dtype=np.float32) / scale
        for n, scale in zip((grid.t, grid.h, grid.w), interpolation, strict=True)
    )
    shape = (grid.t, grid.h, grid.w)
    time = sincos_axis(width // 4, t)[:, None, None]
    column = sincos_axis(width // 8 * 3, w)[None, None]
    row = sincos_axis(width // 8 * 3, h)[None, :, None]
    # float32 before the axes are joined: the table in float64 would take twice its memory
    axes = [x.astype(np.float32) for x in (time, column, row)]
    axes = [np.broadcast_to(x, (*shape, x.shape[-1])) for x in axes]
    table = np.concatenate(axes, axis=-1).reshape(grid.num_tokens, width)
    # from numpy, so that the table is real under `torch.device("meta")` until it is copied
    return torch.from_numpy(table)


class PositionTable(nn.Module):
    """Adds a vector per token, text rows included. interpolation (t, h, w): the fixed sincos table
    of 2B, zero for text; None: a learned one (5B-I2V), which starts at zero."""

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
        """Set the values of a fresh model."""
        self.weight.zero_()
        if self.interpolation is not None and not self.weight.is_meta:
            rows = sincos_table(self.grid, self.weight.shape[-1], self.interpolation)
            self.weight[:, self.text_length :] = rows.to(self.weight.device)

    def forward(self, hidden: Tensor, num_text: int, grid: TokenGrid) -> Tensor:
        """hidden [B, S, M] with num_text text rows in front -> [B, S, M]."""
        _check_grid(grid, self.grid, is_exact=True)
        if num_text != self.text_length:
            raise ValueError(
                f"{num_text} text tokens: the position table is made for text_length="
                f"{self.text_length}; set max_length of the text encoder to it"
            )
        return hidden + self.weight[:, : hidden.shape[1]]


class NoPositionTable(nn.Module):
    """The members of the family whose tokens carry no position of their own."""

    def forward(self, hidden: Tensor, num_text: int, grid: TokenGrid) -> Tensor:
        return hidden


class RotaryPositions(nn.Module):
    """Angles of a head of width D: D/4 entries turn with time, 3D/8 with rows, 3D/8 with columns."""

    def __init__(self, grid: TokenGrid, head_width: int, theta: float):
        super().__init__()
        self.grid, self.theta = grid, theta
        self.axis_widths = (head_width // 4, head_width // 8 * 3, head_width // 8 * 3)
        self._build(torch.get_default_device())

    def _build(self, device: torch.device) -> None:
        """Per-axis angles, float32: [T, D/8], [h, 3D/16], [w, 3D/16]."""
        sizes = (self.grid.t, self.grid.h, self.grid.w)
        for name, size, width in zip("thw", sizes, self.axis_widths, strict=True):
            exponents = torch.arange(0, width, 2, device="cpu").float() / width
            positions = torch.arange(size, dtype=torch.float32, device="cpu")
            angles = positions[:, None] * (1.0 / self.theta**exponents)
            self.register_buffer(f"angles_{name}", angles.to(device), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> RotaryPositions:
        # rebuilt, since `.to(bfloat16)` would round the angles and `to_empty` leaves garbage
        super()._apply(fn, recurse)
        self._build(self.angles_t.device)
        return self

    def angles(self, grid: TokenGrid) -> Tensor:
        """Angles of each axis one after the other, as Rotation.table has them: [N] float32."""
        _check_grid(grid, self.grid, is_exact=False)
        axes = (self.angles_t[: grid.t], self.angles_h[: grid.h], self.angles_w[: grid.w])
        return torch.cat([axis.flatten() for axis in axes])

    def forward(self, grid: TokenGrid) -> Rotation:
        """cos and sin of the angles of a grid of tokens."""
        angles = self.angles(grid)
        return Rotation(torch.stack([angles.cos(), angles.sin()]), grid.t, grid.h, grid.w)


class NoRotation(nn.Module):
    """2B: queries and keys are not rotated."""

    def forward(self, grid: TokenGrid) -> None:
        return None

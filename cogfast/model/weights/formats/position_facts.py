"""What a flattened table of positions says of the video that it was made for."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

_LEAST_WIDTH = 16  # of a table: below it an axis has no column


def grid_facts(
    sin: Tensor | None, cos: Tensor | None, table: Tensor | None, is_rotary: bool, where: str
) -> dict[str, Any]:
    """Fields of TransformerConfig that SAT's tables hold, for patches of 2x2 and a VAE that makes
    one latent frame of four.

    sin, cos: the rotary tables [V, D]; table: 2B's sincos table or a learned one [1, L + V, M].
    where: for errors. ValueError for tensors that are no such tables.
    """
    facts: dict[str, Any] = {}
    eps = None if table is None else torch.finfo(table.dtype).eps
    sin, cos, table = (None if t is None else t.float() for t in (sin, cos, table))
    if table is not None and (table.dim() != 3 or len(table) != 1 or table.shape[2] < _LEAST_WIDTH):
        raise ValueError(
            f"{where}: its table of positions has shape {list(table.shape)}, not [1, rows, width]; "
            "copy it again"
        )
    if sin is not None and cos is not None:
        if sin.dim() != 2 or sin.shape != cos.shape or sin.shape[1] < _LEAST_WIDTH:
            raise ValueError(
                f"{where}: its rotary tables have shapes {list(sin.shape)} and {list(cos.shape)}, "
                "not [positions, width of a head] both; copy it again"
            )
        both = torch.stack([sin, cos], -1)
        width = sin.shape[1]
        rows, columns = width // 4, width // 4 + width // 8 * 3
        facts = {"position": "rotary"}
        facts |= _video_of(_grid(both[:, :rows], both[:, rows:columns], both[:, columns:]))
        if table is not None:
            facts["text_length"] = table.shape[1] - sin.shape[0]
    elif table is not None and not is_rotary:
        width = table.shape[2]
        columns, rows = width // 4, width // 4 + width // 8 * 3
        has_position = table[0].any(dim=1)
        text_length = int(has_position.int().argmax())
        video = table[0, text_length:]
        grid = _grid(video[:, :columns], video[:, rows:], video[:, columns:rows])
        facts = {"text_length": text_length, **_video_of(grid)}
        # the first frequency is 1: sin of position 1 is sin(1 / interpolation)
        steps = {"time": (grid[1] * grid[2], 0), "height": (grid[2], rows), "width": (1, columns)}
        for axis, (row, column) in steps.items():
            if row < len(video) and 0 < video[row, column] < 1:
                scale = 1 / math.asin(float(video[row, column]))
                error = scale * eps
                facts[f"{axis}_interpolation"] = _simplest_near(scale, error)
    return facts


def _grid(time: Tensor, row: Tensor, column: Tensor) -> tuple[int, int, int]:
    """(t, h, w) of V tokens ordered so, from what each axis adds to them, [V, ...]."""
    num_tokens = len(time)
    width = _period(column, 1)
    height = _period(row, width) // width
    return num_tokens // (height * width), height, width


def _period(values: Tensor, step: int) -> int:
    """The first multiple of `step` at which the values begin anew; their number when they do not."""
    starts = values[::step].flatten(1)
    again = (starts[1:] == starts[0]).all(dim=1).nonzero()
    return (int(again[0]) + 1) * step if len(again) else len(values)


def _video_of(grid: tuple[int, int, int]) -> dict[str, int]:
    t, h, w = grid
    return {"num_frames": (t - 1) * 4 + 1, "latent_height": 2 * h, "latent_width": 2 * w}


def _simplest_near(number: float, error: float) -> float:
    """The fraction with the least denominator within `error`: a rounded table hides 1.875."""
    for denominator in range(1, 64):
        found = round(number * denominator) / denominator
        if abs(found - number) <= error:
            return found
    return number

"""How many bytes the decoder of the 3D VAE takes, and the tiles with which it stays in a budget.

The bytes are counted, not looked up: the decoder runs once on tensors without data (meta), and the
largest sum of bytes that are alive at one time, per pixel of the frame, is what it needs: every
tensor in it is as large as the tile is. At full size in bf16 that is 44.7 KiB per pixel, 44.5 GiB
for CogVideoX 1.5's 768x1360. What convolutions need inside comes on top: on a CPU nothing to as much
again, by the profiler, and processes grew by 1.23 and 1.35 times the count; on a GPU: not measured.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# diffusers' tiles overlap by these shares of their rows and columns.
TILE_OVERLAP = (1 / 6, 1 / 5)
TILE_STEP = (48, 40)  # tile sizes whose stride falls on whole latent pixels
_LEAST_TILE = (96, 80)  # below, the seams are most of the picture
_INSIDE_CONVOLUTIONS = 1.4  # see above
# Beside the decoder: decoded tiles (1.5 videos, as they overlap), then the rows that are made of
# them and the whole (one each); the whole in float32 later takes less.
_VIDEOS_OF_TILES = 3.5


class _LiveBytes(TorchDispatchMode):
    """Adds up the storages that ops make, for as long as they are alive; `peak`: the most so far."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self,
        func: Callable,
        types: Sequence[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._add(leaf.untyped_storage())
        self.peak = max(self.peak, self.live)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.live -= self._sizes.pop(key)


def bytes_per_pixel(vae: nn.Module, num_latents: int) -> float:
    """Bytes that diffusers' decoder has alive per pixel of a frame, for `num_latents` latent frames
    and the chunks that `vae` is set to, in its dtype; what convolutions need inside is counted in."""
    with torch.device("meta"):
        copy = type(vae).from_config(vae.config).eval()
        chunk = copy.num_latent_frames_batch_size = vae.num_latent_frames_batch_size
        # the second of the serial calls needs most: it has the caches of the first
        frames = min(num_latents, 2 * chunk + 1)
        latents = torch.empty(1, vae.config.latent_channels, frames, 2, 2)
    counter = _LiveBytes()
    with torch.no_grad(), counter:
        video = copy.decode(latents).sample
    per_number = next(vae.parameters()).element_size() / latents.element_size()
    return _INSIDE_CONVOLUTIONS * counter.peak * per_number / (video.shape[3] * video.shape[4])


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """tile: rows and columns in pixels, None for whole frames; num_bytes: what it takes."""

    tile: tuple[int, int] | None
    num_bytes: int


def plan_decode(
    height: int, width: int, per_pixel: float, video_bytes: int, budget: int
) -> DecodePlan:
    """Whole frames where they fit into `budget` bytes, else the fewest tiles that do, of those the
    ones that decode the fewest pixels; where nothing fits, the least.

    per_pixel: of bytes_per_pixel; video_bytes: of the decoded video in the decoder's dtype.
    """
    whole = DecodePlan(None, int(height * width * per_pixel) + 2 * video_bytes)
    if whole.num_bytes <= budget:
        return whole
    plans = [
        tiled(height, width, (rows, columns), per_pixel, video_bytes)
        for rows in _sizes(height, 0)
        for columns in _sizes(width, 1)
    ]
    fitting = [plan for plan in plans if plan.num_bytes <= budget]
    if not fitting:
        return min(plans[0], whole, key=lambda plan: plan.num_bytes)
    return min(fitting, key=lambda plan: _cost(height, width, plan.tile))


def tiled(
    height: int, width: int, tile: tuple[int, int], per_pixel: float, video_bytes: int
) -> DecodePlan:
    """What decoding in tiles of this size takes."""
    area = min(tile[0], height) * min(tile[1], width)
    return DecodePlan(tile, int(area * per_pixel + _VIDEOS_OF_TILES * video_bytes))


def _cost(height: int, width: int, tile: tuple[int, int]) -> tuple[int, int]:
    """How many tiles, and how many pixels are decoded in all."""
    down, across = _extents(height, tile[0], 0), _extents(width, tile[1], 1)
    return len(down) * len(across), sum(down) * sum(across)


def _sizes(side: int, axis: int) -> range:
    """Tile sizes along an axis, up to the first whose stride covers the side."""
    step, least = TILE_STEP[axis], _LEAST_TILE[axis]
    most = max(least, int(side / (1 - TILE_OVERLAP[axis])) + step)
    return range(least, most + 1, step)


def _extents(side: int, tile: int, axis: int) -> list[int]:
    """Sizes of the tiles along an axis: diffusers begins one every stride, to the very end."""
    stride = round(tile * (1 - TILE_OVERLAP[axis]))
    return [min(tile, side - start) for start in range(0, side, stride)]

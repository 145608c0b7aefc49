"""The 3D VAE of CogVideoX: diffusers' AutoencoderKLCogVideoX, built from SAT's config or a folder.

Its group norms take their statistics over all frames of a call, so the numbers depend on how a clip
is cut into calls. We cut as SAT does: a clip is encoded whole, latents are decoded 3, 2, 2, ... at
a time with the convolutions' caches kept in between (SAT v1.0's sampling).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cogfast.model.weights.formats.safetensors_files import SafetensorsFiles
from cogfast.model.weights.source import check_tensors, first_of
from cogfast.model.weights.vae.names import read_sat_vae, read_vae_config, to_diffusers
from cogfast.schema.sat_network import autoencoder_sizes
from cogfast.shapes import (
    SPATIAL_COMPRESSION,
    TEMPORAL_COMPRESSION,
    num_latent_frames,
    num_pixel_frames,
)

logger = logging.getLogger(__name__)

_DIFFUSERS_FRAMES = 8  # pixel frames per call of diffusers' own encode
_SERIAL_LATENTS = 2  # latent frames per call; the first call takes one more

EncodeChunks = Literal["whole", "diffusers"]
DecodeChunks = Literal["serial", "whole"]


@dataclass(frozen=True, slots=True)
class Moments:
    """The Gaussian that a clip encodes to, not scaled, [B, C, T, h, w] in the first stage's dtype."""

    mean: Tensor
    logvar: Tensor | None  # None: the first stage is deterministic

    @property
    def std(self) -> Tensor | None:
        """float32: in bf16 the logarithm's exponential would lose bits."""
        return None if self.logvar is None else (0.5 * self.logvar.float()).exp()

    def sample(self, noise: Tensor | None) -> Tensor:
        """Latents [B, C, T, h, w] from standard normal `noise` of that shape; None: the mean."""
        mean = self.mean.float()
        return mean if self.logvar is None or noise is None else mean + self.std * noise


class VideoAutoencoder(nn.Module):
    """Clips to latents and back, frozen, with no scale factor applied.

    path: a diffusers VAE folder (or one with vae/ inside); `inner` instead: a built
    AutoencoderKLCogVideoX. encode_chunks: "whole" as SAT, "diffusers" 8 frames at a time.
    decode_chunks: "serial" or "whole". use_slicing: one clip of the batch at a time (same numbers).
    use_tiling: tiles of tile_size = [rows, columns] pixels (default 240x360) for frames larger than
    that; other numbers, since each tile has its own group norm statistics.
    """

    temporal_compression = TEMPORAL_COMPRESSION
    spatial_compression = SPATIAL_COMPRESSION

    def __init__(
        self,
        path: str | Path | None = None,
        inner: nn.Module | None = None,
        encode_chunks: EncodeChunks = "whole",
        decode_chunks: DecodeChunks = "serial",
        use_slicing: bool = False,
        use_tiling: bool = False,
        tile_size: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        _check_choice("encode_chunks", encode_chunks, ("whole", "diffusers"))
        _check_choice("decode_chunks", decode_chunks, ("serial", "whole"))
        if (path is None) == (inner is None):
            raise ValueError(
                f"first_stage_config.params.path={path}: give the vae folder of a diffusers "
                "CogVideoX model (SAT's 3d-vae.pt goes with encoder_config and decoder_config)"
            )
        self.inner = _read_folder(Path(path), dtype) if inner is None else inner
        self.encode_chunks = encode_chunks
        self.decode_chunks = decode_chunks
        self.latent_channels: int = self.inner.config.latent_channels
        self.inner.use_slicing = use_slicing
        self.use_tiling = self.has_decode_tiles = use_tiling
        if use_tiling:
            rows, columns = _check_tile_size(tile_size)
            self.inner.enable_tiling(rows, columns, *TILE_OVERLAP)
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.inner.parameters()).dtype

    @torch.no_grad()
    def encode(self, video: Tensor) -> Moments:
        """Video [B, 3, F, 8h, 8w] in [-1, 1] -> moments [B, C, T, h, w], F = 4(T-1)+1.

        An even F gives F/4 latent frames, as SAT v1.0 and diffusers do.
        """
        num_frames, height, width = video.shape[2:]
        if height % SPATIAL_COMPRESSION or width % SPATIAL_COMPRESSION:
            raise ValueError(
                f"frames of {height}x{width} do not divide into latent pixels; "
                f"use rows and columns that are multiples of {SPATIAL_COMPRESSION}"
            )
        self.inner.use_tiling = self.use_tiling
        is_whole = self.encode_chunks == "whole"
        self.inner.num_sample_frames_batch_size = num_frames if is_whole else _DIFFUSERS_FRAMES
        posterior = self.inner.encode(video.to(self.dtype).contiguous()).latent_dist
        return Moments(posterior.mean, posterior.logvar)  # clamped to [-30, 20] there

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Latents [B, C, T, h, w] -> video [B, 3, 4T-3, 8h, 8w], not clamped.

        diffusers and SAT v1.0 treat the first frame apart only in an odd count and make 4T frames
        of an even one. A copy of the first latent in front makes the count odd; its frames go.
        """
        num_frames = num_pixel_frames(latents.shape[2])
        if latents.shape[2] % 2 == 0:
            latents = torch.cat([latents[:, :, :1], latents], dim=2)
        self._set_decode_chunks(latents.shape[2])
        self.inner.use_tiling = self.has_decode_tiles
        video = self.inner.decode(latents.to(self.dtype)).sample
        return video[:, :, -num_frames:]

    def limit_decode_memory(
        self, num_bytes: int, num_frames: int, height: int, width: int
    ) -> DecodePlan:
        """Decode videos of up to `num_frames` of height x width pixels, one at a time, in tiles if
        they need more than `num_bytes` otherwise. Tiles that the config asks for stay.

        A tile has group norm statistics of its own, so its numbers are others; encoding is whole.
        """
        num_latents = num_latent_frames(num_frames)
        num_latents += 1 - num_latents % 2  # decode's copy of the first
        self._set_decode_chunks(num_latents)
        per_pixel = bytes_per_pixel(self.inner, num_latents)
        video = 3 * num_pixel_frames(num_latents) * height * width * self.dtype.itemsize
        if self.use_tiling:
            tile = (self.inner.tile_sample_min_height, self.inner.tile_sample_min_width)
            return tiled(height, width, tile, per_pixel, video)
        plan = plan_decode(height, width, per_pixel, video, num_bytes)
        self.has_decode_tiles = plan.tile is not None
        if plan.tile is not None:
            self.inner.enable_tiling(*plan.tile, *TILE_OVERLAP)
        return plan

    def _set_decode_chunks(self, num_latents: int) -> None:
        is_whole = self.decode_chunks == "whole"
        self.inner.num_latent_frames_batch_size = num_latents if is_whole else _SERIAL_LATENTS


def video_autoencoder_from_sat(
    encoder_config: Mapping[str, Any],
    decoder_config: Mapping[str, Any],
    ckpt_path: str | Path | None = None,
    ignore_keys: Sequence[str] = (),
    encode_chunks: EncodeChunks = "whole",
    decode_chunks: DecodeChunks = "serial",
    use_slicing: bool = False,
    use_tiling: bool = False,
    tile_size: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> VideoAutoencoder:
    """The autoencoder of SAT's VideoAutoencoderInferenceWrapper; weights from its 3d-vae.pt.

    Both configs are either SAT's {target, params} or the params alone. Keys that change nothing in
    a frozen autoencoder on one rank (resolution, dropout, gather_norm, ...) may stand in them.
    """
    from diffusers import AutoencoderKLCogVideoX

    sizes = autoencoder_sizes(encoder_config, decoder_config)
    num_levels = len(sizes["block_out_channels"])
    blocks = {
        "down_block_types": ("CogVideoXDownBlock3D",) * num_levels,
        "up_block_types": ("CogVideoXUpBlock3D",) * num_levels,
    }
    if ckpt_path is None:
        logger.warning("first_stage_config has no ckpt_path: the autoencoder has random weights")
        inner = AutoencoderKLCogVideoX(**sizes, **blocks)
    else:
        with torch.device("meta"):
            inner = AutoencoderKLCogVideoX(**sizes, **blocks)
        names = to_diffusers(
            read_sat_vae(ckpt_path, ignore_keys), num_levels, sizes["layers_per_block"]
        )
        fix = "give a matching 3d-vae.pt, or list what to leave out in ignore_keys"
        _load(inner, names, f"ckpt_path={ckpt_path}", fix, dtype)
    return VideoAutoencoder(
        inner=inner,
        encode_chunks=encode_chunks,
        decode_chunks=decode_chunks,
        use_slicing=use_slicing,
        use_tiling=use_tiling,
        tile_size=tile_size,
    ).to(dtype)


def _load(
    inner: nn.Module, state: dict[str, Tensor], where: str, fix: str, dtype: torch.dtype
) -> None:
    """Put every tensor in its place, a copy in `dtype`; what is missing or too much is an error."""
    wanted = inner.state_dict()
    missing = [name for name in wanted if name not in state]
    unexpected = [name for name in state if name not in wanted]
    if missing or unexpected:
        raise ValueError(
            f"{where} does not fit the autoencoder: {_count(missing)} missing, "
            f"{_count(unexpected)} unexpected; {fix}"
        )
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_tensors(where, shapes, {name: tensor.dtype for name, tensor in state.items()})
    for name, tensor in state.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{where}: {name} has shape {list(tensor.shape)}, the config asks for "
                f"{list(wanted[name].shape)}; make ch, ch_mult and num_res_blocks the checkpoint's"
            )
    # Copies, since a file's tensors may share memory and a memory-mapped file may be moved away.
    inner.load_state_dict({k: v.to(dtype, copy=True) for k, v in state.items()}, assign=True)


def _count(names: Sequence[str]) -> str:
    """`3 tensors (a.weight, b.weight, ...)`."""
    return f"{len(names)} tensors ({first_of(names)})" if names else "0 tensors"


def _read_folder(path: Path, dtype: torch.dtype) -> nn.Module:
    """The autoencoder in a diffusers folder, or in its vae/."""
    from diffusers import AutoencoderKLCogVideoX

    folder = path / "vae" if (path / "vae" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        raise ValueError(
            f"first_stage_config.params.path={path} has no config.json; "
            "give the vae folder of a diffusers CogVideoX model"
        )
    config, files = read_vae_config(folder), SafetensorsFiles(folder)
    with torch.device("meta"):
        inner = AutoencoderKLCogVideoX(**config.arguments())
    state = {name: files.read(name) for name in files.names()}
    _load(inner, state, f"first_stage_config.params.path={path}", "copy the folder again", dtype)
    return inner


def _check_choice(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}={value!r} must be one of {', '.join(map(repr, allowed))}")


def _check_tile_size(size: Sequence[int] | None) -> tuple[int | None, int | None]:
    """Rows and columns of a tile; None: diffusers' own 240x360."""
    if size is None:
        return None, None
    if len(size) != 2 or any(n <= 0 or n % step for n, step in zip(size, TILE_STEP, strict=True)):
        raise ValueError(
            f"tile_size={list(size)} must be [rows, columns] in pixels, rows a multiple of "
            f"{TILE_STEP[0]} and columns of {TILE_STEP[1]}; use [240, 360]"
        )
    return size[0], size[1]


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

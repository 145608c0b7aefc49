"""The 3D VAE of CogVideoX: diffusers' AutoencoderKLCogVideoX, built from SAT's config or a folder.

Its group norms compute statistics over all frames of a call, so outputs depend on how a clip is
split into calls. cogfast splits as SAT does: clips are encoded whole, and latents are decoded
3, 2, 2, ... at a time with the convolutions' caches kept between calls (SAT v1.0's sampling). Clips
that do not fit into the memory are encoded as in diffusers: 8 frames at a time, or in tiles.

`FirstStage` is what any VAE must have. config/components.py lists those that a configuration may name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from cogfast.config.sat_network import autoencoder_sizes
from cogfast.core.live_bytes import LiveBytes
from cogfast.core.shapes import SPATIAL_COMPRESSION, num_latent_frames, num_pixel_frames
from cogfast.extensions.formats.vae import read_sat_vae, read_vae_config, renamed
from cogfast.model.weights.source import load_state
from cogfast.model.weights.tensor_files import SafetensorsFiles

if TYPE_CHECKING:
    from diffusers import AutoencoderKLCogVideoX

logger = logging.getLogger(__name__)

_DIFFUSERS_FRAMES = 8  # pixel frames per call of diffusers' own encode
_SERIAL_LATENTS = 2  # latent frames per call; the first call takes one more

EncodeMode = Literal["whole", "frames", "tiles"]
EncodeWay = tuple[EncodeMode, bool]  # mode, is_sliced
EncodeChunks = Literal["auto", "whole", "frames", "tiles"]


@dataclass(frozen=True, slots=True)
class Moments:
    """The unscaled Gaussian that a clip encodes to, [B, C, T, h, w] in the first stage's dtype."""

    mean: Tensor
    logvar: Tensor | None  # None: the first stage is deterministic

    @property
    def std(self) -> Tensor | None:
        """Standard deviation, float32; None if the first stage is deterministic."""
        # In bf16 the exponential of the logarithm would lose bits.
        return None if self.logvar is None else (0.5 * self.logvar.float()).exp()

    def sample(self, noise: Tensor | None) -> Tensor:
        """Return latents [B, C, T, h, w] from standard normal `noise` of that shape; None: the mean."""
        mean = self.mean.float()
        if noise is None or (std := self.std) is None:
            return mean
        return mean + std * noise


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How to decode. tile: rows and columns in pixels, None for whole frames; num_bytes: peak memory."""

    tile: tuple[int, int] | None
    num_bytes: int


@dataclass(frozen=True, slots=True)
class EncodePlan:
    """How to encode: the mode, and whether the clips of a batch are encoded one by one.

    num_bytes: peak memory. passed_over: {mode: bytes} of the preferred modes, which do not fit.
    """

    mode: EncodeMode
    is_sliced: bool
    num_bytes: int
    passed_over: Mapping[str, int]


def check_pixels(height: int, width: int) -> None:
    """Raise ValueError for frames that do not divide into latent pixels."""
    if height % SPATIAL_COMPRESSION or width % SPATIAL_COMPRESSION:
        text = f"frames of {height}x{width} do not divide into latent pixels; use rows and columns that are "
        raise ValueError(f"{text}multiples of {SPATIAL_COMPRESSION}")


_Plan = TypeVar("_Plan", DecodePlan, EncodePlan)


class FirstStage(Protocol):
    """A frozen video autoencoder: what an nn.Module must have to be model.first_stage_config's.

    Pixels are [B, 3, F, H, W] in [-1, 1] and latents [B, C, T, h, w] with F = 4(T-1)+1, H = 8h and
    W = 8w (cogfast/core/shapes.py). Latents are unscaled: callers apply model.scale_factor. Inputs come on
    the module's device and in the dtype of its first parameter, or in float32 if it has none. The
    same input must give the same moments, because a latent cache stores them. The cache's key has the
    dotted path of the class and a checksum of its file: a cache is unusable after either has changed.

    A constructor that takes `dtype` gets args.precision's and keeps what must stay in float32;
    another module is converted with `.to(dtype)`.
    """

    def encode(self, video: Tensor) -> Moments:
        """Encode video [B, 3, F, H, W] to moments [B, C, T, h, w], without drawing from them."""
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, T, h, w] to video [B, 3, F, H, W], not clamped to [-1, 1]."""
        ...

    def limit_decode_memory(
        self, num_bytes: int, num_frames: int, height: int, width: int
    ) -> DecodePlan:
        """Choose how `decode` works on one video of `num_frames` frames of height x width pixels, so
        that it needs at most `num_bytes` if that is possible, and return the choice."""
        ...

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Return the weights; nn.Module has this method."""
        ...


class VideoAutoencoder(nn.Module):
    """Frozen encoder and decoder of video clips; applies no scale factor.

    inner: a built AutoencoderKLCogVideoX, instead of path. With encode_chunks="auto",
    limit_encode_memory decides, and without it clips are encoded whole. "tiles" takes 8 frames at a
    time, too; single frames are encoded whole in any case.
    """

    def __init__(
        self,
        # folder of a diffusers VAE, or one with vae/ inside
        path: str | Path | None = None,
        inner: nn.Module | None = None,
        # whole: encode a clip in one call, as SAT does; frames: eight frames at a time, as
        # diffusers does; tiles: likewise, in tiles; auto: the first of these that fits into the memory
        encode_chunks: EncodeChunks = "auto",
        # one clip of the batch at a time, with the same outputs
        use_slicing: bool = False,
        # work in tiles; changes outputs, since each tile has its own group norm statistics
        use_tiling: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        if (path is None) == (inner is None):
            text = f"first_stage_config.params.path={path}: give the vae folder of a diffusers CogVideoX model "
            raise ValueError(f"{text}(SAT's 3d-vae.pt goes with encoder_config and decoder_config)")
        if path is not None:
            inner = _read_folder(Path(path), dtype)
        # diffusers is imported late, so `inner` is annotated as a module and only named here.
        self.inner = cast("AutoencoderKLCogVideoX", inner)
        self.encode_chunks: EncodeChunks = encode_chunks
        self.encode_mode: EncodeMode = "whole" if encode_chunks == "auto" else encode_chunks
        self.inner.num_latent_frames_batch_size = _SERIAL_LATENTS
        self.latent_channels: int = self.inner.config["latent_channels"]
        self.use_slicing = self.has_encode_slices = use_slicing
        self.use_tiling = use_tiling
        # Tiles of encoding, and those of decoding: None for whole frames.
        self.tile = (self.inner.tile_sample_min_height, self.inner.tile_sample_min_width)
        self.decode_tile = self.tile if use_tiling else None
        self.eval().requires_grad_(False)

    @property
    def dtype(self) -> torch.dtype:
        return next(self.inner.parameters()).dtype

    @torch.no_grad()
    def encode(self, video: Tensor) -> Moments:
        """Encode video [B, 3, F, 8h, 8w] in [-1, 1] to moments [B, C, T, h, w], F = 4(T-1)+1.

        An even F gives F/4 latent frames, as in SAT v1.0 and diffusers.
        """
        num_frames = video.shape[2]
        check_pixels(*video.shape[3:])
        # A single frame needs little memory, and `cogfast sample` encodes it whole, too.
        mode = self.encode_mode if num_frames > 1 else "whole"
        self.inner.use_slicing = self.has_encode_slices
        self._set_tile(self.tile if self.use_tiling or mode == "tiles" else None)
        frames = num_frames if mode == "whole" else _DIFFUSERS_FRAMES
        self.inner.num_sample_frames_batch_size = frames
        posterior = self.inner.encode(video.to(self.dtype).contiguous(), return_dict=False)[0]
        return Moments(posterior.mean, posterior.logvar)  # clamped to [-30, 20] there

    def decode(self, latents: Tensor) -> Tensor:
        """Decode latents [B, C, T, h, w] to video [B, 3, 4T-3, 8h, 8w], not clamped."""
        num_frames = num_pixel_frames(latents.shape[2])
        # diffusers and SAT v1.0 decode an even count to 4T frames: they treat the first frame apart
        # only in an odd count. A copy of the first latent makes it odd; its frames are dropped.
        if latents.shape[2] % 2 == 0:
            latents = torch.cat([latents[:, :, :1], latents], dim=2)
        self.inner.use_slicing = self.use_slicing
        self._set_tile(self.decode_tile)
        video = self.inner.decode(latents.to(self.dtype), return_dict=False)[0]
        return video[:, :, -num_frames:]

    def limit_decode_memory(
        self, num_bytes: int, num_frames: int, height: int, width: int
    ) -> DecodePlan:
        """Switch on tiled decoding if one video of `num_frames` frames of height x width pixels needs
        more than `num_bytes`; return the plan. Tiles that the config asks for are kept.

        Tiling changes outputs, as each tile has its own group norm statistics, but not encoding.
        """
        num_latents = num_latent_frames(num_frames)
        num_latents += 1 - num_latents % 2  # decode's copy of the first latent
        per_pixel = bytes_per_pixel(self.inner, num_latents)
        video = 3 * num_pixel_frames(num_latents) * height * width * self.dtype.itemsize
        if self.use_tiling:
            # The user's choice of tiles is kept, whatever the limit.
            return tiled(height, width, self.tile, per_pixel, video)
        plan = plan_decode(height, width, per_pixel, video, num_bytes)
        self.decode_tile = plan.tile
        return plan

    def limit_encode_memory(
        self,
        num_bytes: int,
        shape: tuple[int, int, int, int],
        ways: Sequence[EncodeWay] | None = None,
    ) -> EncodePlan:
        """Choose how to encode clips of `shape` = (B, F, H, W) in at most `num_bytes`; return the plan.

        ways: those to choose from, the best first; None: with "auto" whole clips, all at once or one
        by one, then 8 frames at a time, then tiles, else what encode_chunks names. If nothing fits, the
        plan is the one of least memory.
        """
        if ways is None:
            mode = self.encode_mode
            ways = _WAYS if self.encode_chunks == "auto" else ((mode, False), (mode, True))
        # Slicing changes nothing for one clip: the first of two ways that are alike counts.
        distinct: dict[tuple[EncodeMode, int], bool] = {}
        for mode, is_sliced in ways:
            batch = 1 if is_sliced or self.use_slicing else shape[0]
            distinct.setdefault((mode, batch), is_sliced)
        plans: list[EncodePlan] = []
        passed_over: dict[str, int] = {}
        for (mode, batch), is_sliced in distinct.items():
            tile = self.tile if self.use_tiling or mode == "tiles" else None
            tensors = encode_bytes(self.inner, mode, tile, (batch, *shape[1:]))
            estimate = int(_INSIDE_CONVOLUTIONS * tensors)
            others = {name: n for name, n in passed_over.items() if name != mode}
            plans.append(EncodePlan(mode, is_sliced, estimate, others))
            if estimate <= num_bytes:
                break
            passed_over[mode] = estimate
        plan = _first_fitting(plans, num_bytes)
        self.use(plan)
        return plan

    def use(self, plan: EncodePlan) -> None:
        """Encode as in `plan` from now on."""
        self.encode_mode, self.has_encode_slices = plan.mode, self.use_slicing or plan.is_sliced

    def _set_tile(self, tile: tuple[int, int] | None) -> None:
        self.inner.use_tiling = tile is not None
        if tile is not None:
            self.inner.enable_tiling(*tile, *TILE_OVERLAP)


def video_autoencoder_from_sat(
    encoder_config: Mapping[str, Any],
    decoder_config: Mapping[str, Any],
    ckpt_path: str | Path | None = None,
    ignore_keys: Sequence[str] = (),
    encode_chunks: EncodeChunks = "auto",
    use_slicing: bool = False,
    use_tiling: bool = False,
    dtype: torch.dtype = torch.float32,
) -> VideoAutoencoder:
    """Build the autoencoder of SAT's VideoAutoencoderInferenceWrapper, with weights of 3d-vae.pt.

    Each config is SAT's {target, params} or the params alone. Keys without effect on a frozen
    autoencoder on one rank (resolution, dropout, gather_norm, ...) are accepted.
    """
    from diffusers import AutoencoderKLCogVideoX

    sizes = autoencoder_sizes(encoder_config, decoder_config)
    num_levels = len(sizes["block_out_channels"])
    blocks: dict[str, Any] = {
        "down_block_types": ("CogVideoXDownBlock3D",) * num_levels,
        "up_block_types": ("CogVideoXUpBlock3D",) * num_levels,
    }
    if ckpt_path is None:
        logger.warning("first_stage_config has no ckpt_path: the autoencoder has random weights")
        inner = AutoencoderKLCogVideoX(**sizes, **blocks)
    else:
        # No initial values are drawn for weights that are replaced.
        with torch.device("meta"):
            inner = AutoencoderKLCogVideoX(**sizes, **blocks)
        stored = read_sat_vae(ckpt_path, ignore_keys)
        names = renamed(stored, num_levels, sizes["layers_per_block"], "diffusers")
        fix = "give a 3d-vae.pt that matches ch, ch_mult and num_res_blocks, or list the tensors to leave "
        fix += "out in ignore_keys"
        load_state(inner, names, f"ckpt_path={ckpt_path}", fix, dtype)
    return VideoAutoencoder(
        inner=inner, encode_chunks=encode_chunks, use_slicing=use_slicing, use_tiling=use_tiling
    ).to(dtype)


def _read_folder(path: Path, dtype: torch.dtype) -> nn.Module:
    """Load the autoencoder from a diffusers folder or its vae/."""
    from diffusers import AutoencoderKLCogVideoX

    folder = path / "vae" if (path / "vae" / "config.json").is_file() else path
    if not (folder / "config.json").is_file():
        text = f"first_stage_config.params.path={path} has no config.json"
        raise ValueError(f"{text}; give the vae folder of a diffusers CogVideoX model")
    config, files = read_vae_config(folder), SafetensorsFiles(folder)
    with torch.device("meta"):
        inner = AutoencoderKLCogVideoX(**config.arguments())
    state = {name: files.read(name) for name in files.names()}
    where = f"first_stage_config.params.path={path}"
    load_state(inner, state, where, "copy the folder again", dtype)
    return inner


# From the outputs that SAT trained with to those that need least memory.
ENCODE_MODES: tuple[EncodeMode, ...] = get_args(EncodeMode)
# "auto" takes the first of these that fits. Only whole clips are also encoded in batches: the last
# bits of a batch differ from those of single clips, and latents should not depend on the memory.
_WAYS: tuple[EncodeWay, ...] = (("whole", False), *((mode, True) for mode in ENCODE_MODES))
# Fractions of rows and columns by which diffusers' tiles overlap.
TILE_OVERLAP = (1 / 6, 1 / 5)
# Tiles for decoding. The second are diffusers' own; below the last, seams cover most of the picture.
DECODE_TILES = ((480, 720), (240, 360), (96, 80))
_INSIDE_CONVOLUTIONS = 1.4  # allowance for the workspace of convolutions
# Besides the decoder: decoded tiles (1.5 videos, as they overlap), then the joined rows and the
# joined video (one each). The later float32 copy of the video takes less.
_VIDEOS_OF_TILES = 3.5


def bytes_per_pixel(vae: AutoencoderKLCogVideoX, num_latents: int) -> float:
    """Return the peak bytes of diffusers' decoder per pixel of a frame, in the dtype of `vae` and
    with its chunk size, for `num_latents` latent frames. Workspace of convolutions is included."""
    # A dry run on the meta device follows diffusers' code, whatever the version.
    with torch.device("meta"):
        copy = cast("AutoencoderKLCogVideoX", type(vae).from_config(vae.config)).eval()
        chunk = copy.num_latent_frames_batch_size = vae.num_latent_frames_batch_size
        # The second of the serial calls needs most memory: it has the caches of the first.
        frames = min(num_latents, 2 * chunk + 1)
        latents = torch.empty(1, vae.config["latent_channels"], frames, 2, 2)
    with torch.no_grad(), LiveBytes() as counter:
        video = copy.decode(latents, return_dict=False)[0]
    # The dry run counted numbers of its own dtype; scale them to the decoder's.
    per_number = next(vae.parameters()).element_size() / latents.element_size()
    return _INSIDE_CONVOLUTIONS * counter.peak * per_number / (video.shape[3] * video.shape[4])


def encode_bytes(
    vae: AutoencoderKLCogVideoX,
    mode: EncodeMode,
    tile: tuple[int, int] | None,
    shape: tuple[int, int, int, int],
) -> int:
    """Return the peak bytes of diffusers' encoder for clips of `shape` = (B, F, H, W) in the dtype of
    `vae`, with the pixels and latents. The workspace of convolutions is not included."""
    batch, num_frames, height, width = shape
    dtype = next(vae.parameters()).dtype
    rows, columns = (height, width) if tile is None else (min(tile[0], height), min(tile[1], width))
    with torch.device("meta"):
        copy = cast("AutoencoderKLCogVideoX", type(vae).from_config(vae.config)).eval()
        # nn.Module's method: diffusers' own logs a warning.
        nn.Module.to(copy, dtype)
        copy.num_sample_frames_batch_size = num_frames if mode == "whole" else _DIFFUSERS_FRAMES
        # The second call needs most memory: it has the caches of the first. Later ones are like it.
        least = 2 * _DIFFUSERS_FRAMES
        is_long = mode != "whole" and num_frames > least
        counted = least + num_frames % _DIFFUSERS_FRAMES if is_long else num_frames
        clip = torch.empty(batch, 3, counted, rows, columns, dtype=dtype)
    with torch.no_grad(), LiveBytes() as counter:
        copy.encode(clip, return_dict=False)
    # A clip on the device: uint8, float32, and in the encoder's dtype before and after its transpose.
    pixels = 3 * batch * num_frames * height * width * (1 + 4 + 2 * dtype.itemsize)
    latents = batch * num_latent_frames(num_frames) * height * width // SPATIAL_COMPRESSION**2
    # Mean and log-variance of every chunk or tile, and joined.
    return counter.peak + pixels + 4 * 2 * vae.config["latent_channels"] * latents * dtype.itemsize


def plan_decode(
    height: int, width: int, per_pixel: float, video_bytes: int, budget: int
) -> DecodePlan:
    """Plan whole frames if they fit into `budget` bytes, else the largest of DECODE_TILES that fit. If
    nothing fits, plan for the least memory.

    per_pixel: see bytes_per_pixel; video_bytes: size of the decoded video in the decoder's dtype.
    """
    # Two videos: the chunks that the decoder returns, and the video that they are joined to.
    whole = DecodePlan(None, int(height * width * per_pixel) + 2 * video_bytes)
    smaller = [tile for tile in DECODE_TILES if tile[0] < height or tile[1] < width]
    plans = [whole, *(tiled(height, width, tile, per_pixel, video_bytes) for tile in smaller)]
    return _first_fitting(plans, budget)


def _first_fitting(plans: Sequence[_Plan], budget: int) -> _Plan:
    """Return the first plan that takes at most `budget` bytes, else the one that takes least."""
    fitting = (plan for plan in plans if plan.num_bytes <= budget)
    return next(fitting, min(plans, key=lambda plan: plan.num_bytes))


def tiled(
    height: int, width: int, tile: tuple[int, int], per_pixel: float, video_bytes: int
) -> DecodePlan:
    # Tiles are decoded one after the other: one of them is in memory at a time.
    area = min(tile[0], height) * min(tile[1], width)
    return DecodePlan(tile, int(area * per_pixel + _VIDEOS_OF_TILES * video_bytes))

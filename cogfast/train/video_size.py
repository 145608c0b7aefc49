"""The size of videos: what the configuration asks for, and what the model supports."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cogfast.core.shapes import (
    SPATIAL_COMPRESSION,
    TEMPORAL_COMPRESSION,
    PatchSize,
    TokenGrid,
    num_latent_frames,
    num_pixel_frames,
)
from cogfast.core.values import KeyProblem
from cogfast.data.video.clip import checked_batches, checked_buckets, checked_size
from cogfast.model.config import COGVIDEOX_5B, TransformerConfig, inpainting_channels
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

DEFAULT_FPS = COGVIDEOX_5B.fps  # for all models, as upstream


@dataclass(frozen=True, slots=True)
class LatentSize:
    """The shape of latents [C, T, h, w], with the frame count and frame rate of the video."""

    channels: int
    frames: int  # T, padding included
    height: int
    width: int
    num_frames: int  # of the decoded video
    fps: float

    @classmethod
    def of_video(
        cls, channels: int, num_frames: int, height: int, width: int, patch_t: int, fps: float
    ) -> LatentSize:
        """Build from the number of video frames and latent rows and columns.

        T is padded to whole patches.
        """
        # The first pixel frame has a latent frame of its own, then four share one.
        frames = num_latent_frames(num_frames)
        # CogVideoX 1.5 joins two latent frames in a token: an odd number gets a padding frame.
        frames += -frames % patch_t
        return cls(channels, frames, height, width, num_frames, fps)

    @classmethod
    def of_model(cls, model: TransformerConfig) -> LatentSize:
        """Return the largest size that the model's position tables hold."""
        size = (model.num_frames, model.latent_height, model.latent_width)
        return cls.of_video(model.out_channels, *size, model.patch_size.t, DEFAULT_FPS)

    @property
    def pixels(self) -> tuple[int, int]:
        """Rows and columns of the video."""
        return self.height * SPATIAL_COMPRESSION, self.width * SPATIAL_COMPRESSION

    def num_tokens(self, model: TransformerConfig) -> int:
        """Return the number of tokens of one sample, including text."""
        patch = model.patch_size
        rows, columns = self.height // patch.h, self.width // patch.w
        return self.frames // patch.t * rows * columns + model.text_length


def bucket_sizes(data: Mapping[str, Any], model: TransformerConfig) -> list[LatentSize]:
    """Return the sizes of data.params.buckets; [] without buckets. data: the data set's arguments."""
    return [_size_of(data, model, *bucket) for bucket in checked_buckets(data.get("buckets")) or ()]


def sampled_size(
    data: Mapping[str, Any], model: TransformerConfig, fps: int | None = None
) -> LatentSize:
    """Return the size set in data.params, else the largest that the model supports.

    fps: args.sampling_fps, in place of the frame rate of the data.
    """
    if "max_num_frames" in data and "video_size" in data:
        size = _size_of(data, model, data["max_num_frames"], *checked_size(data["video_size"]))
    else:
        size = LatentSize.of_model(model)
    return dataclasses.replace(size, fps=float(fps or size.fps))


def largest_size(data: Mapping[str, Any], model: TransformerConfig) -> LatentSize:
    """Return the training size with the most tokens, a picture's only if there is no other."""
    sizes = bucket_sizes(data, model) or [sampled_size(data, model)]
    clips = [size for size in sizes if size.num_frames > 1]
    return max(clips or sizes, key=lambda size: size.num_tokens(model))


def batch_sizes(data: Mapping[str, Any], model: TransformerConfig) -> list[tuple[int, LatentSize]]:
    """Return each training size, and by what args.batch_size is multiplied for it."""
    sizes = bucket_sizes(data, model)
    batches = checked_batches(data.get("bucket_batch"), sizes)
    return list(zip(batches, sizes, strict=True)) or [(1, sampled_size(data, model))]


def warn_of_pipeline_positions(data: Mapping[str, Any], model: TransformerConfig) -> None:
    """Warn if diffusers' pipelines will use different positions for the training sizes."""
    sizes = bucket_sizes(data, model) or [sampled_size(data, model)]
    if model.learnable_position:
        held = model.grid.t
        few = sorted({s.num_frames for s in sizes if s.num_frames > 1 and s.frames < held})
        if few:
            logger.warning(
                "videos of %s frames use a part of the learned position table, which has %d latent "
                "frames. A diffusers pipeline replaces the table by a sine table unless the video has "
                "%d frames: train on %d frames, or sample with cogfast",
                " or ".join(map(str, few)),
                held,
                model.num_frames,
                model.num_frames,
            )
    elif not has_pipeline_positions(model, sizes):
        shown = ", ".join(f"{size.pixels[0]}x{size.pixels[1]}" for size in sizes[:4])
        logger.warning(
            "videos of %s are trained with integer positions, but a diffusers pipeline rescales the "
            "positions of all sizes except its own (an export of a run with one size has that size). "
            "To train with rescaled positions, set pos_embed_config.params.positions: pipeline",
            shown + ", ..." * (len(sizes) > 4),
        )


def has_pipeline_positions(model: TransformerConfig, sizes: Sequence[LatentSize]) -> bool:
    """Whether videos of these sizes have the positions that diffusers' pipelines would give them.

    Pipelines rescale every size except the model's own.
    """
    is_rescaled = model.position == "rotary" and not model.patch_size.joins_frames
    # A size of the model's own is not rescaled, so both kinds of positions agree there.
    own = (model.latent_height, model.latent_width)
    is_own = all((size.height, size.width) == own for size in sizes)
    return is_own or not is_rescaled or model.has_rescaled_positions


def _size_of(
    data: Mapping[str, Any], model: TransformerConfig, num_frames: int, height: int, width: int
) -> LatentSize:
    rows, columns = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
    fps = float(data.get("fps", DEFAULT_FPS))
    patch_t = model.patch_size.t
    return LatentSize.of_video(model.out_channels, num_frames, rows, columns, patch_t, fps)


# --- what the model supports; `network` has the fields of TransformerConfig ---


def check_frames(network: dict[str, Any], num_frames: int, key: str) -> None:
    """Raise ValueError if the model does not support this number of pixel frames."""
    if problem := frames_problem(network, num_frames, key):
        raise KeyProblem(key, problem)


def frames_problem(network: dict[str, Any], num_frames: int, key: str) -> str | None:
    """Describe why the model does not support this number of pixel frames; None if it does.

    CogVideoX supports 8N+1 frames, up to the length of the position table: an odd number of latent
    frames, as all models were trained. For 1.5, pad_latent_frames makes it even. CogVideoX-Fun-V1.5-InP
    was trained without padding, on an even number: 8N+5.
    """
    step, longest = 2 * TEMPORAL_COMPRESSION, num_pixel_frames(_table_frames(network))
    rest = _frames_rest(network)
    below = (num_frames - rest) // step * step + rest
    if num_frames == below and 1 <= num_frames <= longest:
        return None
    most = (longest - rest) // step * step + rest
    fits = sorted({n for n in (below, below + step) if 1 <= n <= longest} or {most})
    version = network["patch_size"].version
    return (
        f"{key}={num_frames}: CogVideoX {version} supports {step}N+{rest} frames, at most {most}; "
        f"use {' or '.join(map(str, fits))}"
    )


def _frames_rest(network: dict[str, Any]) -> int:
    """Return what is left of a supported number of frames after whole 8 frames."""
    is_inpainting = network["in_channels"] == inpainting_channels(network["out_channels"])
    is_padded = not (is_inpainting and network["patch_size"].joins_frames)
    return 1 if is_padded else 1 + TEMPORAL_COMPRESSION


def check_latent_frames(network: dict[str, Any], latent_frames: int) -> None:
    """Check args.sampling_num_frames.

    As in SAT, it counts latent frames, including the padding frames of CogVideoX 1.5.
    """
    key, most = TrainKeys.key("sampling_num_frames"), _table_frames(network)
    if not 1 <= latent_frames <= most:
        text = f"{key}={latent_frames} must be from 1 to {most} latent frames, the size of the"
        every = f"one latent frame for every {TEMPORAL_COMPRESSION} video frames"
        raise KeyProblem(key, f"{text} model's position table ({every})")
    patch: PatchSize = network["patch_size"]
    # CogVideoX was trained on an odd number of latent frames, before the padding of 1.5.
    step, rest = 2 * TEMPORAL_COMPRESSION, _frames_rest(network)
    frames = num_pixel_frames(latent_frames - (latent_frames - 1) % patch.t * (rest == 1))
    if (frames - rest) % step:
        fits = " or ".join(str(n) for n in (latent_frames - 1, latent_frames + 1) if n <= most)
        text = f"{key}={latent_frames} latent frames decode to {frames} video frames, but CogVideoX"
        rule = f"{patch.version} supports {step}N+{rest} video frames (2N+{num_latent_frames(rest)} latent frames)"
        raise KeyProblem(key, f"{text} {rule}; use {fits}")


def _table_frames(network: dict[str, Any]) -> int:
    """Return the latent frames that the position table holds, one entry per temporal patch."""
    rows = (network["num_frames"] - 1) // network["time_compressed_rate"] + 1
    return rows * network["patch_size"].t


def check_size(network: dict[str, Any], height: int, width: int, key: str) -> None:
    """Raise ValueError if the model does not support this size in pixels."""
    if problem := size_problem(network, height, width, key):
        raise KeyProblem(key, problem)


def size_problem(network: dict[str, Any], height: int, width: int, key: str) -> str | None:
    """Describe why the model does not support this size in pixels; None if it does.

    Rows and columns must divide into latent patches (multiples of 16) and be inside the position
    table. The computed table of CogVideoX-2B and the learned one of 5B-I2V are flattened row by row
    and fit one size only. Rotary tables are relative: smaller videos use a part of them, and
    `positions: pipeline` rescales any size.
    """
    patch: PatchSize = network["patch_size"]
    table = [network[n] * SPATIAL_COMPRESSION for n in ("latent_height", "latent_width")]
    is_computed = network["position"] == "sincos"
    is_one_size = is_computed or network["learnable_position"]
    is_rescaled = network.get("rotary_positions") == "pipeline" and not patch.joins_frames
    has_end = is_one_size or not is_rescaled
    rows, columns = SPATIAL_COMPRESSION * patch.h, SPATIAL_COMPRESSION * patch.w
    start = f"{key}=[{height}, {width}]:"
    if height % rows or width % columns or height <= 0 or width <= 0:
        fits = [max(1, round(height / rows)) * rows, max(1, round(width / columns)) * columns]
        # Only sizes inside the table are suggested: the nearest multiple alone may be too large.
        fits = table if is_one_size else [*map(min, fits, table)] if has_end else fits
        rule = f"rows must be a multiple of {rows} and columns of {columns}"
        return f"{start} {rule}; use {fits}"
    names = "latent_height and latent_width of model.network_config.params"
    if is_one_size and [height, width] != table:
        latent = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
        how = f"{names} to {latent[0]} and {latent[1]}, with model.learned_positions=resize"
        if is_computed:
            how = f"{names} to {latent[0]} and {latent[1]}: the table is computed, so the weights load"
        only = f"the model's position table is for {table} only"
        return f"{start} {only}; use that, or change {how}"
    if has_end and (height > table[0] or width > table[1]):
        return f"{start} the model's position table ends at {table}; use that at most, or raise {names}"
    return None


class SampleSize:
    """The size of the samples of a run: of those that it trains on, and of those that evaluations sample.

    The model's largest size until the first batch sets it; compute_loss of a subclass may not. With
    buckets, evaluations sample the configured size: the last batch's would depend on the step at which
    the run resumed.
    """

    def __init__(self, data: Mapping[str, Any], model: TransformerConfig, fps: int | None) -> None:
        sizes = bucket_sizes(data, model)
        self.is_picture = False  # whether the last batch had pictures
        # Whether the run has pictures and clips
        self.has_both = len({size.num_frames > 1 for size in sizes}) > 1
        self.latents = sampled_size(data, model, fps)
        self.num_tokens = self.latents.num_tokens(model)  # of the last batch's samples
        self.is_known = bool(sizes)
        self._sizes, self._patch, self._fps = sizes, model.patch_size, fps

    def note(self, batch: dict, latents: Tensor, num_text: int, num_frames: int) -> None:
        """Note the size of a batch. latents: [B, C, T, h, w]."""
        self.num_tokens = TokenGrid.from_latents(latents, self._patch).num_tokens + num_text
        self.is_picture = num_frames == 1
        if not self.is_known:
            fps = float(batch["fps"][0]) if "fps" in batch else DEFAULT_FPS  # sync: once
            self.latents = LatentSize(
                *latents.shape[1:], num_frames=num_frames, fps=float(self._fps or fps)
            )
            self.is_known = True

    def trained(self) -> list[list[int]]:
        """Return the training sizes: [pixel frames, latent rows, latent columns]."""
        return [[s.num_frames, s.height, s.width] for s in self._sizes or [self.latents]]

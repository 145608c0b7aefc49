"""Determines the size of videos: what the configuration asks for and what the model supports."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cogfast.config import Config, data_arguments
from cogfast.core.shapes import (
    SPATIAL_COMPRESSION,
    num_latent_frames,
)
from cogfast.data.video.settings import checked_buckets, checked_size
from cogfast.model.config import COGVIDEOX_5B, TransformerConfig
from cogfast.schema.sat_network import POSITION_KEY, transformer_arguments

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

    def num_tokens(self, model: TransformerConfig) -> int:
        """Return the number of tokens of one sample, including text."""
        patch = model.patch_size
        rows, columns = self.height // patch.h, self.width // patch.w
        return self.frames // patch.t * rows * columns + model.text_length


def bucket_sizes(config: Config, model: TransformerConfig) -> list[LatentSize]:
    """Return the sizes of data.params.buckets; [] without buckets."""
    data = data_arguments(config)
    buckets = checked_buckets(data.get("buckets")) or ()
    return [_size_of(data, model, *bucket) for bucket in buckets]


def sampled_size(config: Config, model: TransformerConfig) -> LatentSize:
    """Return the size set in data.params, else the largest that the model supports.

    args.sampling_fps replaces the frame rate of the data.
    """
    data = data_arguments(config)
    if "max_num_frames" in data and "video_size" in data:
        size = _size_of(data, model, data["max_num_frames"], *checked_size(data["video_size"]))
    else:
        size = LatentSize.of_model(model)
    return dataclasses.replace(size, fps=float(config.args.get("sampling_fps") or size.fps))


def largest_size(config: Config, model: TransformerConfig) -> LatentSize:
    """Return the training size with the most tokens."""
    sizes = bucket_sizes(config, model) or [sampled_size(config, model)]
    return max(sizes, key=lambda size: size.num_tokens(model))


def warn_of_pipeline_positions(config: Config) -> None:
    """Warn if diffusers' pipelines will use different positions for the training sizes."""
    model = TransformerConfig(**transformer_arguments(config.model.network_config.params))
    sizes = bucket_sizes(config, model) or [sampled_size(config, model)]
    if model.learnable_position:
        held = model.grid.t
        few = sorted({size.num_frames for size in sizes if size.frames < held})
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
        shown = ", ".join(
            f"{s.height * SPATIAL_COMPRESSION}x{s.width * SPATIAL_COMPRESSION}" for s in sizes[:4]
        )
        logger.warning(
            "videos of %s are trained with integer positions, but a diffusers pipeline rescales the "
            "positions of all sizes except its own (an export of a run with one size has that size). "
            "To train with rescaled positions, set pos_embed_config.params.positions: pipeline",
            shown + ", ..." * (len(sizes) > 4),
        )


def warn_of_other_positions(
    model: TransformerConfig, sizes: Sequence[LatentSize], manifest: dict[str, Any]
) -> None:
    """Warn if videos of these sizes have different positions than in the run of `manifest`."""
    trained: Any = manifest.get("config")
    # The manifest has the run's YAML as plain mappings; a run before the key existed lacks it.
    for part in (*POSITION_KEY.split("."), "positions"):
        trained = trained.get(part) if isinstance(trained, dict) else None
    trained = "pipeline" if trained == "pipeline" else "integer"
    as_trained = dataclasses.replace(model, rotary_positions=trained)
    both = (model, as_trained)
    if len({has_pipeline_positions(one, sizes) for one in both}) > 1:
        logger.warning(
            "%s.positions=%s, but the run was trained with %s: the model was not trained with these "
            "positions at this size; set the key as in the run",
            POSITION_KEY,
            model.rotary_positions,
            trained,
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
    data: dict, model: TransformerConfig, num_frames: int, height: int, width: int
) -> LatentSize:
    rows, columns = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
    fps = float(data.get("fps", DEFAULT_FPS))
    patch_t = model.patch_size.t
    return LatentSize.of_video(model.out_channels, num_frames, rows, columns, patch_t, fps)

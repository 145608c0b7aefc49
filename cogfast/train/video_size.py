"""How large and how long videos are: what is asked for, and what the members of the family take."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config import Config, data_arguments
from cogfast.data.video.clip import read_pixels
from cogfast.data.video.settings import checked_buckets, checked_size
from cogfast.model.config import TransformerConfig
from cogfast.schema.arguments import TrainArguments
from cogfast.schema.config import refuse
from cogfast.schema.sat_classes import transformer_arguments
from cogfast.shapes import (
    SPATIAL_COMPRESSION,
    PatchSize,
    check_num_frames,
    check_video_size,
    num_pixel_frames,
)
from cogfast.train.sampling.generate import DEFAULT_FPS, LatentSize

logger = logging.getLogger(__name__)

_POSITION = "model.network_config.params.modules.pos_embed_config.params"
_SIZE_15 = (768, 1360)  # rows and columns of CogVideoX 1.5's videos


def sampled_sizes(
    config: Config, args: TrainArguments, images: Sequence[Path | None]
) -> list[LatentSize]:
    """The size of each prompt's video: args.sampling_image_size, else for 1.5-I2V the picture's
    shape at the short side of the data, else the data's or the model's own. ValueError for what the model cannot make."""
    network = transformer_arguments(config.model.network_config.params)
    data = data_arguments(config)
    patch: PatchSize = network["patch_size"]
    channels = args.latent_channels or network["out_channels"]
    fps = args.sampling_fps or data.get("fps", DEFAULT_FPS)
    if args.sampling_num_frames is not None:  # in latent frames, those of padding included
        surplus = (args.sampling_num_frames - 1) % patch.t
        num_frames = num_pixel_frames(args.sampling_num_frames - surplus)
    elif "max_num_frames" in data:
        num_frames = data["max_num_frames"]
        check_frames(config, network, num_frames, "data.params.max_num_frames")
    else:
        num_frames = network["num_frames"]
    sizes = []
    for image in images:
        height, width = _pixels(config, args, network, data, image)
        rows, columns = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
        sizes.append(LatentSize.of_video(channels, num_frames, rows, columns, patch.t, fps))
    return sizes


def bucket_sizes(config: Config, model: TransformerConfig) -> list[LatentSize]:
    """The sizes of data.params.buckets; [] where all clips have one."""
    data = data_arguments(config)
    buckets = checked_buckets(data.get("buckets")) or ()
    return [_size_of(data, model, *bucket) for bucket in buckets]


def sampled_size(config: Config, model: TransformerConfig) -> LatentSize:
    """The size of data.params where it has one, else the largest that the model takes."""
    data = data_arguments(config)
    if "max_num_frames" not in data or "video_size" not in data:
        return LatentSize.of_model(model)
    return _size_of(data, model, data["max_num_frames"], *checked_size(data["video_size"]))


def largest_size(config: Config, model: TransformerConfig) -> LatentSize:
    """Of what is trained on, the size of the most tokens."""
    sizes = bucket_sizes(config, model) or [sampled_size(config, model)]
    return max(sizes, key=lambda size: size.num_tokens(model))


def warn_of_pipeline_positions(config: Config) -> None:
    """Say what diffusers' pipelines will do otherwise with the sizes that are trained on."""
    model = TransformerConfig(**transformer_arguments(config.model.network_config.params))
    sizes = bucket_sizes(config, model) or [sampled_size(config, model)]
    if model.learnable_position:
        held = model.grid.t
        few = sorted({size.num_frames for size in sizes if size.frames < held})
        if few:
            logger.warning(
                "%s frames take the first of %d latent frames of the learned position table, but a "
                "diffusers pipeline replaces the table by a sine table unless it makes %d frames: "
                "train on %d, or sample with cogfast",
                *(" or ".join(map(str, few)), held, model.num_frames, model.num_frames),
            )
    elif not has_pipeline_positions(model, sizes):
        shown = ", ".join(
            f"{s.height * SPATIAL_COMPRESSION}x{s.width * SPATIAL_COMPRESSION}" for s in sizes[:4]
        )
        logger.warning(
            "videos of %s are trained at integer positions; a diffusers pipeline rescales those of "
            "any size but its own (one size: exports make it theirs). "
            "pos_embed_config.params.positions: pipeline trains the pipeline's",
            shown + ", ..." * (len(sizes) > 4),
        )


def warn_of_other_positions(
    model: TransformerConfig, sizes: Sequence[LatentSize], manifest: dict[str, Any]
) -> None:
    """Say so where videos of these sizes have other positions than the run of `manifest` had."""
    run = OmegaConf.create(manifest.get("config") or {})
    trained = OmegaConf.select(run, f"{_POSITION}.positions") or "integer"
    as_trained = dataclasses.replace(model, rotary_positions=trained)
    both = (model, as_trained)
    if len({has_pipeline_positions(one, sizes) for one in both}) > 1:
        logger.warning(
            "%s.positions=%s, but the run was trained with %s: at this size the model has not seen "
            "these positions; leave the key as in the run",
            *(_POSITION, model.rotary_positions, trained),
        )


def has_pipeline_positions(model: TransformerConfig, sizes: Sequence[LatentSize]) -> bool:
    """Whether the model sees videos of these sizes where diffusers' pipelines put them, whose own
    size is the model's."""
    is_rescaled = model.position == "rotary" and model.patch_size.t == 1
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


def _pixels(
    config: Config, args: TrainArguments, network: dict[str, Any], data: Any, image: Path | None
) -> tuple[int, int]:
    given = data.get("video_size")
    key, size = "args.sampling_image_size", args.sampling_image_size
    if size is None and image is not None and network["patch_size"].t > 1:
        short_side = min(given) if given is not None else min(_SIZE_15)
        height, width = _like_picture(image, network["patch_size"], short_side)
        problem = _size_problem(network, height, width, f"--image {image}: its shape")
        if problem is not None:
            raise ValueError(f"{problem}, or give {key}")
        return height, width
    if size is None and given is not None:
        key, size = "data.params.video_size", given
    if size is None:
        held = [network[n] * SPATIAL_COMPRESSION for n in ("latent_height", "latent_width")]
        is_15 = network["patch_size"].t > 1  # whose table is larger than its videos
        return tuple(map(min, held, _SIZE_15)) if is_15 else tuple(held)
    height, width = map(int, size)
    check_size(config, network, height, width, key)
    return height, width


def _like_picture(path: Path, patch: PatchSize, short_side: int) -> tuple[int, int]:
    """The picture's shape at a short side of so many pixels, rounded to whole patches."""
    height, width, _ = open_image(path).shape
    rows, columns = (SPATIAL_COMPRESSION * side for side in (patch.h, patch.w))
    scale = short_side / min(height, width)
    return round(height * scale / rows) * rows, round(width * scale / columns) * columns


def open_image(path: Path) -> Tensor:
    """The pixels of --image, uint8 [H, W, 3]."""
    try:
        if not path.is_file():
            raise ValueError("no such file")
        return read_pixels(str(path))
    except ValueError as error:
        raise ValueError(f"--image {path}: {error}") from None


def check_frames(config: Config, network: dict[str, Any], num_frames: int, key: str) -> None:
    """ValueError for a number of pixel frames that the model cannot take."""
    most = num_pixel_frames(_table_frames(network))
    try:
        check_num_frames(num_frames, network["patch_size"], most, key)
    except ValueError as error:
        refuse(config, key, str(error))


def check_latent_frames(config: Config, network: dict[str, Any], latent_frames: int) -> None:
    """SAT counts sampling_num_frames in latent frames, the padding of CogVideoX 1.5 included."""
    key, most = "args.sampling_num_frames", _table_frames(network)
    if not 1 <= latent_frames <= most:
        refuse(
            config,
            key,
            f"{key}={latent_frames} counts latent frames, a quarter of the video's; the position "
            f"table holds {most}: use {most} at most",
        )
    patch_t = network["patch_size"].t
    step = 2 * patch_t  # latent frames of 8 or 16 pixel frames
    surplus = (latent_frames - 1) % patch_t
    frames = num_pixel_frames(latent_frames - surplus)
    if (frames - 1) % (8 * patch_t) == 0:
        return
    below = (latent_frames - 1) // step * step + patch_t
    fits = " or ".join(str(n) for n in (below, below + step) if n <= most)
    padding = f", {surplus} of padding," if surplus else ""
    refuse(
        config,
        key,
        f"{key}={latent_frames} latent frames{padding} make {frames} frames; CogVideoX "
        f"{'1.0' if patch_t == 1 else '1.5'} takes {8 * patch_t}N+1 frames, which are "
        f"{step}N+{patch_t} of latents: use {fits}",
    )


def _table_frames(network: dict[str, Any]) -> int:
    """Latent frames that the position table holds: it has an entry per token of time."""
    rows = (network["num_frames"] - 1) // network["time_compressed_rate"] + 1
    return rows * network["patch_size"].t


def check_size(config: Config, network: dict[str, Any], height: int, width: int, key: str) -> None:
    """ValueError for rows and columns of pixels that the model cannot take."""
    problem = _size_problem(network, height, width, key)
    if problem is not None:
        refuse(config, key, problem)


def _size_problem(network: dict[str, Any], height: int, width: int, key: str) -> str | None:
    patch: PatchSize = network["patch_size"]
    held = tuple(network[n] * SPATIAL_COMPRESSION for n in ("latent_height", "latent_width"))
    one_size = "computed" if network["position"] == "sincos" else None
    if network["position"] != "sincos" and network["learnable_position"]:
        one_size = "learned"
    if network.get("rotary_positions") == "pipeline" and patch.t == 1 and one_size is None:
        held = None  # any size is rescaled to the table's
    try:
        check_video_size(height, width, patch, key, held, one_size)
    except ValueError as error:
        return str(error)
    return None

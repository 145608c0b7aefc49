"""Determines each sampled video's size from arguments, data section, image or model, and reads images."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cogfast.config.sat_unused import POSITION_KEY
from cogfast.core.shapes import SPATIAL_COMPRESSION, PatchSize, num_pixel_frames
from cogfast.core.values import select
from cogfast.data.keys import data_param
from cogfast.data.video.clip import checked_size, resize_picture
from cogfast.data.video.picture import read_pixels
from cogfast.data.video.transform import Resize
from cogfast.model.config import Family, TransformerConfig
from cogfast.train.keys import TrainKeys
from cogfast.train.video_size import (
    DEFAULT_FPS,
    LatentSize,
    check_frames,
    check_size,
    has_pipeline_positions,
    size_problem,
)

logger = logging.getLogger(__name__)


def sampled_sizes(
    args: TrainKeys,
    network: dict[str, Any],
    data: Mapping[str, Any],
    images: Sequence[Path | None],
) -> list[LatentSize]:
    """Return the size of each prompt's video.

    In this order: args.sampling_image_size; for 1.5-I2V the aspect ratio of the image, with the short
    side of the data section; the data section's size; the model's. ValueError for a size that the
    model does not support.
    """
    patch: PatchSize = network["patch_size"]
    channels = network["out_channels"]
    fps = args.sampling_fps or data.get("fps", DEFAULT_FPS)
    if args.sampling_num_frames is not None:  # in latent frames, including padding
        # 1.5 pads to whole patches in front; these latent frames are not in the video.
        surplus = (args.sampling_num_frames - 1) % patch.t
        num_frames = num_pixel_frames(args.sampling_num_frames - surplus)
    elif "max_num_frames" in data:
        num_frames = data["max_num_frames"]
        check_frames(network, num_frames, data_param("max_num_frames"))
    else:
        num_frames = network["num_frames"]
    sizes = []
    for image in images:
        height, width = _pixels(args, network, data, image)
        rows, columns = height // SPATIAL_COMPRESSION, width // SPATIAL_COMPRESSION
        sizes.append(LatentSize.of_video(channels, num_frames, rows, columns, patch.t, fps))
    return sizes


def _pixels(
    args: TrainKeys, network: dict[str, Any], data: Any, image: Path | None
) -> tuple[int, int]:
    given = data.get("video_size")
    key, size = args.key("sampling_image_size"), args.sampling_image_size
    if size is None and image is not None and network["patch_size"].joins_frames:
        # The video has the image's aspect ratio, as in upstream's 1.5-I2V.
        short_side = min(given if given is not None else _published_size(network))
        height, width, _ = open_image(image).shape
        scale, patch = short_side / min(height, width), network["patch_size"]
        # Pixels of one token: sides must be multiples of these.
        rows, columns = (SPATIAL_COMPRESSION * side for side in (patch.h, patch.w))
        height = round(height * scale / rows) * rows
        width = round(width * scale / columns) * columns
        problem = size_problem(network, height, width, f"--image {image}: video size")
        if problem is not None:
            raise ValueError(f"{problem}, or set {key}")
        return height, width
    if size is None and given is not None:
        key, size = data_param("video_size"), checked_size(given)
    if size is None:
        held = [network[n] * SPATIAL_COMPRESSION for n in ("latent_height", "latent_width")]
        if network["patch_size"].joins_frames:  # 1.5's position table is larger than its videos
            held = map(min, held, _published_size(network))
        return tuple(held)
    height, width = map(int, size)
    check_size(network, height, width, key)
    return height, width


def _published_size(network: dict[str, Any]) -> tuple[int, int]:
    return Family.of_config(TransformerConfig(**network)).member.video_size


def open_image(path: Path, name: str = "--image") -> Tensor:
    """Read the pixels of an image, uint8 [H, W, 3]. name: of the option or key, for errors."""
    try:
        if not path.is_file():
            raise ValueError("no such file")
        return read_pixels(str(path))
    except ValueError as error:
        raise ValueError(f"{name} {path}: {error}") from None


def read_image(
    path: Path, size: tuple[int, int], resize: Resize = "crop", name: str = "--image"
) -> Tensor:
    """Read an image as [3, H, W] in [-1, 1], resized as the training clips are."""
    return resize_picture(open_image(path, name), size, resize).float() / 127.5 - 1


def warn_of_other_positions(
    model: TransformerConfig, sizes: Sequence[LatentSize], manifest: dict[str, Any]
) -> None:
    """Warn if videos of these sizes have different positions than in the run of `manifest`."""
    # The manifest has the run's YAML as plain mappings; a run before the key existed lacks it.
    found = select(manifest.get("config"), f"{POSITION_KEY}.positions")
    trained: Any = "pipeline" if found == "pipeline" else "integer"
    as_trained = dataclasses.replace(model, rotary_positions=trained)
    if len({has_pipeline_positions(one, sizes) for one in (model, as_trained)}) > 1:
        logger.warning(
            "%s.positions=%s, but the run was trained with %s: the model was not trained with these "
            "positions at this size; set the key as in the run",
            POSITION_KEY,
            model.rotary_positions,
            trained,
        )

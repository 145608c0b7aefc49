"""Checks that the model supports the configured frame counts and video sizes."""

from __future__ import annotations

from typing import Any

from cogfast.config import Config
from cogfast.core.shapes import (
    SPATIAL_COMPRESSION,
    TEMPORAL_COMPRESSION,
    PatchSize,
    check_num_frames,
    check_video_size,
    num_pixel_frames,
)
from cogfast.schema.merged_config import refuse


def check_frames(config: Config, network: dict[str, Any], num_frames: int, key: str) -> None:
    """Raise ValueError if the model does not support this number of pixel frames."""
    most = num_pixel_frames(_table_frames(network))
    try:
        check_num_frames(num_frames, network["patch_size"], most, key)
    except ValueError as error:
        refuse(config, key, str(error))


def check_latent_frames(config: Config, network: dict[str, Any], latent_frames: int) -> None:
    """Check args.sampling_num_frames.

    As in SAT, it counts latent frames, including the padding frames of CogVideoX 1.5.
    """
    key, most = "args.sampling_num_frames", _table_frames(network)
    if not 1 <= latent_frames <= most:
        refuse(
            config,
            key,
            f"{key}={latent_frames} must be from 1 to {most} latent frames, the size of the model's "
            f"position table (one latent frame for every {TEMPORAL_COMPRESSION} video frames)",
        )
    patch: PatchSize = network["patch_size"]
    patch_t = patch.t
    surplus = (latent_frames - 1) % patch_t
    frames = num_pixel_frames(latent_frames - surplus)
    # CogVideoX was trained on an odd number of latent frames, before the padding of 1.5.
    step = 2 * TEMPORAL_COMPRESSION
    if (frames - 1) % step == 0:
        return
    fits = " or ".join(str(n) for n in (latent_frames - 1, latent_frames + 1) if n <= most)
    refuse(
        config,
        key,
        f"{key}={latent_frames} latent frames decode to {frames} video frames, but CogVideoX "
        f"{patch.version} supports {step}N+1 video frames (2N+1 latent frames); use {fits}",
    )


def _table_frames(network: dict[str, Any]) -> int:
    """Return the latent frames that the position table holds, one entry per temporal patch."""
    rows = (network["num_frames"] - 1) // network["time_compressed_rate"] + 1
    return rows * network["patch_size"].t


def check_size(config: Config, network: dict[str, Any], height: int, width: int, key: str) -> None:
    """Raise ValueError if the model does not support this size in pixels."""
    problem = size_problem(network, height, width, key)
    if problem is not None:
        refuse(config, key, problem)


def size_problem(network: dict[str, Any], height: int, width: int, key: str) -> str | None:
    """Describe why the model does not support this size in pixels; None if it does."""
    patch: PatchSize = network["patch_size"]
    held = tuple(network[n] * SPATIAL_COMPRESSION for n in ("latent_height", "latent_width"))
    # A table is flattened row by row and fits one width only; rotary tables fit all smaller sizes.
    one_size = "computed" if network["position"] == "sincos" else None
    if network["position"] != "sincos" and network["learnable_position"]:
        one_size = "learned"
    if (
        network.get("rotary_positions") == "pipeline"
        and not patch.joins_frames
        and one_size is None
    ):
        held = None  # positions of any size are rescaled to the table's
    try:
        check_video_size(height, width, patch, key, held, one_size)
    except ValueError as error:
        return str(error)
    return None

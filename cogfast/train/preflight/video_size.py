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
    step = 2 * patch_t  # latent frames of 8 or 16 pixel frames
    surplus = (latent_frames - 1) % patch_t
    frames = num_pixel_frames(latent_frames - surplus)
    # Upstream's rule: CogVideoX was trained on 8N+1 frames, 1.5 on 16N+1.
    if (frames - 1) % (8 * patch_t) == 0:
        return
    below = (latent_frames - 1) // step * step + patch_t
    fits = " or ".join(str(n) for n in (below, below + step) if n <= most)
    padding = f" ({surplus} of them padding)" if surplus else ""
    refuse(
        config,
        key,
        f"{key}={latent_frames} latent frames{padding} decode to {frames} video frames, but CogVideoX "
        f"{patch.version} supports {8 * patch_t}N+1 video frames ({step}N+{patch_t} latent frames); "
        f"use {fits}",
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

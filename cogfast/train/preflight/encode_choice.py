"""Choose how the first stage encodes clips: whole, eight frames at a time, or in tiles.

The choice is the one that first_stage_config.params.encode_chunks names, else the checkpoint's or
the cache's, else the first one that fits into the memory of all ranks. Latents depend on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from cogfast.core.device_memory import free_memory
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.data.datasets import CaptionedVideos
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.autoencoder import (
    ENCODE_MODES,
    EncodePlan,
    EncodeWay,
    FirstStage,
    VideoAutoencoder,
)
from cogfast.model.config import TransformerConfig
from cogfast.train.keys import TrainKeys
from cogfast.train.video_size import batch_sizes, largest_size

logger = logging.getLogger(__name__)

_GIB = 2**30
_NAMES = {
    "whole": "whole",
    "frames": "8 frames at a time",
    "tiles": "8 frames at a time, in tiles of {}x{} pixels",
}


class EncodeChoice:
    """Makes the choice of a run when its first sample is encoded. Collective.

    shape: (B, F, H, W) of `largest_clips`. stored: [mode, is_sliced] of the checkpoint that the run resumes from.
    dataset: that is trained on; if it is a latent cache, its way is stored in the checkpoints.
    way: the one that was chosen, before that the stored one; None without either.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        args: TrainKeys,
        groups: ProcessGroups,
        stored: Sequence[Any] | None = None,
        dataset: object = None,
    ) -> None:
        self.args, self.groups, self.shape = args, groups, shape
        if isinstance(dataset, CaptionedVideos) and dataset.encode_chunks is not None:
            stored = dataset.encode_chunks, True
        self.way: EncodeWay | None = None
        # A mode of another version of cogfast is left out.
        if stored and stored[0] in ENCODE_MODES:
            self.way = ENCODE_MODES[ENCODE_MODES.index(stored[0])], bool(stored[1])
        self._is_made = False

    def __call__(self, stage: FirstStage, clips: Tensor) -> None:
        """Choose for `clips` [B, 3, F, H, W] and the largest clips of the configuration. All ranks
        call this for their first samples, which they encode in the same step."""
        if self._is_made or not isinstance(stage, VideoAutoencoder):
            return
        self._is_made = True
        # A user's own data set may return larger clips than the configuration says, and pictures on some ranks.
        own = memory_for_clips(self.args, self.groups), (self.shape[0], *clips.shape[2:])
        budgets, shapes = zip(*self.groups.gather(own), strict=True)
        if not (found := [shape for shape in (*shapes, self.shape) if shape[1] > 1]):
            return
        # A way that fits into the least free memory fits on all ranks.
        budget, shape = min(budgets), max(found, key=math.prod)
        # A configured way wins over the checkpoint's, which is kept whatever memory it takes.
        ways = [self.way] if self.way and stage.encode_chunks == "auto" else None
        plan = stage.limit_encode_memory(budget, shape, ways)
        log_plan(stage, shape, plan, budget)
        self.way = (plan.mode, plan.is_sliced)


def memory_for_clips(args: TrainKeys, groups: ProcessGroups) -> int:
    """Return the bytes that encoding may take on this rank."""
    if args.vae_memory_gib is not None:
        return int(args.vae_memory_gib * _GIB)
    return free_memory(groups.device)[0]


def largest_clips(
    args: TrainKeys, data: Mapping[str, Any], model: TransformerConfig, at_once: int | None
) -> tuple[int, int, int, int]:
    """Return (B, F, H, W) of the largest batch that a run encodes at once. data: the data set's arguments.
    at_once: model.en_and_decode_n_samples_a_time."""
    size = largest_size(data, model)
    # The batch with most pixels decides. Pictures are encoded one by one.
    volume = lambda each: each.num_frames * math.prod(each.pixels)
    sizes = batch_sizes(data, model)
    clips = [times * volume(each) for times, each in sizes if each.num_frames > 1]
    most = math.ceil(max(clips, default=0) / volume(size))
    batch = max(args.batch_size, args.eval_batch_size or 1) * max(1, most)
    rows, columns = (side * SPATIAL_COMPRESSION for side in (size.height, size.width))
    return min(batch, at_once or batch), size.num_frames, rows, columns


def log_plan(
    stage: VideoAutoencoder, shape: tuple[int, int, int, int], plan: EncodePlan, budget: int
) -> None:
    """Log how clips of `shape` = (B, F, H, W) are encoded, and the memory that this needs."""
    batch, *sides = shape
    names = {mode: name.format(*stage.tile) for mode, name in _NAMES.items()}
    way, needed, most = names[plan.mode], plan.num_bytes / _GIB, budget / _GIB
    others = "".join(f"; {names[mode]}: {n / _GIB:.1f}" for mode, n in plan.passed_over.items())
    one_by_one = ", one by one" if plan.is_sliced and batch > 1 else ""
    text = "clips of %dx%dx%d are encoded %s%s: about %.1f GiB of %.1f%s"
    logger.info(text, *sides, way, one_by_one, needed, most, others)
    if plan.num_bytes > budget:
        fix = "set model.first_stage_config.params.encode_chunks to frames or tiles, which need less memory and change "
        fix += "the latents"
        if plan.mode == "tiles":
            fix = "reduce data.params.video_size or max_num_frames"
        text = "%.1f GiB may be used (args.vae_memory_gib, or the free memory), but encoding %s needs about %.1f; %s"
        logger.warning(text, most, way, needed, fix)

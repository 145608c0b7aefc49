"""Checks that the number of ranks fits the model, the videos and the batch size."""

from __future__ import annotations

import os

from cogfast.config import Config, data_arguments
from cogfast.config.arguments import TrainArguments
from cogfast.config.merged_config import refuse
from cogfast.distributed.parallelize import check_parallel_sizes
from cogfast.model.config import TransformerConfig
from cogfast.train.video_size import bucket_sizes, sampled_size


def check_mesh(
    config: Config, args: TrainArguments, model: TransformerConfig, world_size: int | None = None
) -> None:
    """Check that args.model_parallel_size and context_parallel_size divide heads, tokens and ranks.

    world_size: None uses that of this launch.
    """
    world, heads = _world(world_size), model.num_attention_heads
    tensor, context, rows = (
        args.model_parallel_size,
        args.context_parallel_size,
        args.sequence_parallel,
    )
    sizes = bucket_sizes(config, model)
    if not sizes and "video_size" in data_arguments(config):
        sizes = [sampled_size(config, model)]
    tokens = [video.num_tokens(model) for video in sizes]
    try:
        check_parallel_sizes(model, tensor, context, rows, tokens)
    except ValueError as error:
        refuse(config, str(error).partition("=")[0], str(error))
    key = "args.model_parallel_size"
    _check_divides(config, key, tensor, world, heads, f"the number of ranks, {world}")
    key = "args.context_parallel_size"
    left, of = world // tensor, f"the number of ranks, {world}"
    if tensor > 1:
        of += f" / args.model_parallel_size={tensor} = {left}"
    _check_divides(config, key, context, left, heads // tensor, of)


def _check_divides(config: Config, key: str, size: int, ranks: int, heads: int, of: str) -> None:
    """Refuse a size that does not divide `ranks`, and name those that divide the heads as well."""
    if ranks % size:
        fitting = [str(n) for n in range(1, ranks + 1) if ranks % n == 0 and heads % n == 0]
        text = (
            f"{key}={size} must divide {of}; use {', '.join(fitting)}, or start another number of"
        )
        refuse(config, key, f"{text} ranks (--nproc_per_node)")


def check_global_batch(config: Config, args: TrainArguments, world_size: int | None = None) -> None:
    """Check that the batch sizes multiply to deepspeed.train_batch_size if it is set."""
    total = config.deepspeed.get("train_batch_size")
    # check_mesh has made sure that this divides.
    copies = _world(world_size) // (args.model_parallel_size * args.context_parallel_size)
    here = args.batch_size * args.gradient_accumulation_steps * copies
    if total is not None and total != here:
        key = "deepspeed.train_batch_size"
        refuse(
            config,
            key,
            f"{key}={total} does not fit {copies} data-parallel ranks: "
            f"train_micro_batch_size_per_gpu={args.batch_size} x gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps} x {copies} ranks = {here}; remove {key} or change "
            "one of them",
        )


def _world(world_size: int | None) -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size

"""Checks that the number of ranks fits the model, the videos and the batch size."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cogfast.config.sat_unused import NETWORKS
from cogfast.core.values import KeyProblem, show
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.model.config import TransformerConfig
from cogfast.train.keys import TrainKeys
from cogfast.train.video_size import bucket_sizes, sampled_size

_TENSOR, _CONTEXT = map(TrainKeys.key, ("model_parallel_size", "context_parallel_size"))


def check_mesh(
    args: TrainKeys,
    model: TransformerConfig,
    data: Mapping[str, Any],
    network: str,
    world_size: int | None = None,
) -> None:
    """Check that args.model_parallel_size and context_parallel_size fit heads, tokens and ranks.

    data: the data set's arguments. network: the name of the network's class. world_size: None uses that of
    this launch. KeyProblem if one does not divide the heads or the ranks,
    if LoRA dropout is on, or if args.sequence_parallel splits rows that the ranks do not divide.
    """
    world, heads = _world(world_size), model.num_attention_heads
    tensor, context = args.model_parallel_size, args.context_parallel_size
    for key, size in ((_TENSOR, tensor), (_CONTEXT, context)):
        if size > 1 and network not in NETWORKS:
            text = f"{key}={size} splits the work of cogfast's own modules, not of those that {network} adds"
            raise KeyProblem(key, f"{text}; use 1, and a higher ZeRO stage for memory")
        if size > 1 and model.lora_dropout > 0:
            text = f"{key}={size} does not support lora_dropout={model.lora_dropout}: its ranks would drop"
            raise KeyProblem(key, f"{text} other entries than one rank; use lora_dropout: 0")
    of_heads, of_ranks = f"num_attention_heads={heads}", f"the number of ranks, {world}"
    for key, size in ((_TENSOR, tensor), (_CONTEXT, context)):
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        if size not in divisors:
            fitting = ", ".join(map(str, divisors))
            raise KeyProblem(key, f"{key}={size} must divide {of_heads}; use {fitting}")
        if world % size:
            fitting = ", ".join(str(n) for n in divisors if world % n == 0)
            text = f"{key}={size} must divide {of_ranks}; use {fitting}, or start another number of ranks"
            raise KeyProblem(key, f"{text} (--nproc_per_node)")
        heads, world = heads // size, world // size
        if size > 1:
            of_heads += f" / {key}={size} = {heads}"
            of_ranks += f" / {key}={size} = {world}"
    if not args.sequence_parallel:
        return
    if tensor == 1:
        text = f" splits rows between tensor-parallel ranks, but {_TENSOR}=1; set that to 2 or more, or"
        raise args.refusal("sequence_parallel", f"{text} sequence_parallel to false")
    sizes = bucket_sizes(data, model)
    if not sizes and "video_size" in data:
        sizes = [sampled_size(data, model)]
    for tokens in (size.num_tokens(model) for size in sizes):
        if tokens % (tensor * context):
            text = f" splits {tokens} text and video tokens between {tensor * context} ranks ({_TENSOR}={tensor}, "
            text += f"{_CONTEXT}={context}), which does not divide them; use sizes that do, another video size, or "
            raise args.refusal("sequence_parallel", f"{text}args.sequence_parallel=false")


def check_global_batch(
    args: TrainKeys, section: Mapping[str, Any], world_size: int | None = None
) -> None:
    """Check that the batch sizes multiply to train_batch_size of DeepSpeed's section if it is set, and how
    gradients are divided by the number of ranks."""
    total = section.get("train_batch_size")
    # check_mesh has made sure that this divides.
    copies = _world(world_size) // (args.model_parallel_size * args.context_parallel_size)
    here = args.batch_size * args.gradient_accumulation_steps * copies
    if total is not None and total != here:
        key = DeepSpeedKeys.key("train_batch_size")
        text = f"{key}={total} does not fit {copies} data-parallel ranks: "
        text += f"train_micro_batch_size_per_gpu={args.batch_size} x gradient_accumulation_steps="
        text += f"{args.gradient_accumulation_steps} x {copies} ranks = {here}; remove {key} or"
        raise KeyProblem(key, f"{text} change one of them")
    # DeepSpeed does not support a division before the sum in a reduce-scatter.
    zero = section.get("zero_optimization") or {}
    for name, default in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
        key, value = f"deepspeed.{name}", section.get(name, default)
        if value != default and zero.get("reduce_scatter", True):
            text = f"{key}={show(value)} does not work with DeepSpeed's reduce_scatter; set "
            raise KeyProblem(key, f"{text}deepspeed.zero_optimization.reduce_scatter=false")


def _world(world_size: int | None) -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size


def divide(global_batch: int, batch_size: int, most_copies: int) -> tuple[int, int, int]:
    """Return the most data-parallel ranks that divide a global batch, the largest batch size up to
    `batch_size`, and the accumulation."""
    copies = next((n for n in range(most_copies, 0, -1) if global_batch % n == 0), 0)
    if not copies:
        return 0, 0, 0
    each = global_batch // copies
    size = next(n for n in range(min(batch_size, each), 0, -1) if each % n == 0)
    return copies, size, each // size

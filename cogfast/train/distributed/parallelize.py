"""Tensor parallelism applied to a finished transformer: each process keeps its share of the blocks.

Of the modulation layers each process has a share too, and gathers their few rows: whole, they are
12 M x 512 weights per block, 793 of 5B's 5570 million, and two processes would hold 396 million
each for nothing (7.9 GB with gradients, master weights, moments and EMA at 20 bytes). A gather
moves 12 M numbers per sample and block: 74 kB of 5B in bf16, where a block's activations that are
summed have 109 MB each.
"""

from __future__ import annotations

import logging
import math

import torch

from cogfast.model.attention import Attention, HeadNorm
from cogfast.model.config import TransformerConfig
from cogfast.model.initialization import initialize
from cogfast.model.lora import LoraLinear
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.shard import Shard
from cogfast.train.distributed.sequence_parallel import (
    RowGatheringLinear,
    RowScatteringLinear,
    SequenceParallelBlock,
)
from cogfast.train.distributed.tensor_parallel import (
    ColumnParallelLinear,
    ColumnParallelLora,
    GatheredLinear,
    ParallelLinear,
    ParallelLora,
    RowParallelLinear,
    RowParallelLora,
    SharedHeadNorm,
    TensorParallelGroup,
)

logger = logging.getLogger(__name__)

# Graphs of one block that a run may come to: training, held-out loss and sampling differ in
# gradients, in one sample or several, in a size of one here and there. PyTorch's limit is 8, and
# with fullgraph the ninth would end the run.
_MOST_GRAPHS = 64


def check_model_parallel_size(
    size: int, config: TransformerConfig, splits_rows: bool = False, num_tokens: int | None = None
) -> None:
    """ValueError for a size that the heads cannot be dealt out to, or that dropout forbids, or
    splits_rows where the num_tokens of a sample, known or None, do not allow it."""
    heads = config.num_attention_heads
    if size < 1 or heads % size:
        sizes = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise ValueError(
            f"args.model_parallel_size={size} must divide num_attention_heads={heads}; use {sizes}"
        )
    if size > 1 and config.lora_dropout > 0:
        raise ValueError(
            f"args.model_parallel_size={size} does not go with lora_dropout={config.lora_dropout}: "
            "the shares of a layer would drop other entries than the whole; use lora_dropout: 0"
        )
    if splits_rows and size == 1:
        raise ValueError(
            "args.sequence_parallel=true splits the rows of a model that ranks share, but "
            "args.model_parallel_size=1; set that to 2 or more, or sequence_parallel to false"
        )
    if splits_rows and num_tokens is not None and num_tokens % size:
        raise ValueError(
            f"args.sequence_parallel=true deals out {num_tokens} tokens of text and video to "
            f"args.model_parallel_size={size} processes, which does not divide them; use a size "
            "that does, another video size, or args.sequence_parallel=false"
        )


def parallelize(
    transformer: DiffusionTransformer, group: TensorParallelGroup, splits_rows: bool = False
) -> None:
    """Replace the linears of every block by our shares of them, in place; names of parameters stay.

    A transformer on the meta device stays there: nothing whole is ever in memory. splits_rows: each
    process has rows of its own between the linears (sequence_parallel.py).
    """
    check_model_parallel_size(group.size, transformer.config)
    if group.size == 1:
        return
    column, row = ColumnParallelLinear, RowParallelLinear
    if splits_rows:
        column, row = RowGatheringLinear, RowScatteringLinear
    last = len(transformer.blocks) - 1
    for i, block in enumerate(transformer.blocks):
        _parallelize_attention(block.attention, group, column, row)
        block.fc1 = column(block.fc1, group)
        block.fc2 = row(block.fc2, group)
        modulation = block.modulation
        modulation.linear = GatheredLinear(modulation.linear, group, sums_gradient=splits_rows)
        if splits_rows:
            transformer.blocks[i] = SequenceParallelBlock(block, group, i == 0, i == last)
    _mark(transformer)


def _parallelize_attention(
    attention: Attention,
    group: TensorParallelGroup,
    column: type[ColumnParallelLinear],
    row: type[RowParallelLinear],
) -> None:
    qkv, out = attention.qkv, attention.out
    if isinstance(qkv, LoraLinear):
        attention.qkv = ColumnParallelLora(qkv, column(qkv.original, group, num_parts=3))
    else:
        attention.qkv = column(qkv, group, num_parts=3)
    if isinstance(out, LoraLinear):
        attention.out = RowParallelLora(out, row(out.original, group))
    else:
        attention.out = row(out, group)
    attention.query_norm = _shared(attention.query_norm, group)
    attention.key_norm = _shared(attention.key_norm, group)


def _shared(norm: HeadNorm | None, group: TensorParallelGroup) -> HeadNorm | None:
    has_weights = norm is not None and norm.elementwise_affine
    return SharedHeadNorm(norm, group) if has_weights else norm


def find_shards(transformer: DiffusionTransformer) -> dict[str, Shard]:
    """{parameter's name: which part of it we hold}, for those that we do not hold whole."""
    return {
        f"{path}.{name}": shard
        for path, module in transformer.named_modules()
        if isinstance(module, ParallelLinear | ParallelLora)
        for name, shard in module.shards.items()
    }


def count_trained(transformer: DiffusionTransformer) -> int:
    """Trained numbers of the whole model."""
    shards = find_shards(transformer)
    trained = {n: p.shape for n, p in transformer.named_parameters() if p.requires_grad}
    return sum(math.prod(shards[n].shape if n in shards else s) for n, s in trained.items())


def _mark(transformer: DiffusionTransformer) -> None:
    """As DeepSpeed and checkpoints look for it: norms count the other parameters once per group."""
    for name, shard in find_shards(transformer).items():
        parameter = transformer.get_parameter(name)
        parameter.tensor_model_parallel, parameter.shard = True, shard


def allocate(transformer: DiffusionTransformer, device: torch.device) -> None:
    """Memory for a transformer that was built, and perhaps parallelized, on the meta device."""
    transformer.to_empty(device=device)
    _mark(transformer)  # memory came with new parameter objects


def materialize(transformer: DiffusionTransformer, device: torch.device, seed: int) -> None:
    """`allocate`, and the weights of a run from scratch: our part of what the whole would get."""
    allocate(transformer, device)
    initialize(transformer, seed, find_shards(transformer))


def compile_blocks(transformer: DiffusionTransformer) -> None:
    """Compile every block in place; names of parameters stay.

    All blocks share their graphs. The first shape, the training batch's, gets one of its own; one
    with sizes left open serves the later ones. fullgraph: what torch.compile cannot see through is
    an error, not a slow block. A block that recomputes a part of itself is compiled once more, with
    the checkpoint inside (activation_checkpointing.py).
    """
    limit = torch._dynamo.config.recompile_limit
    torch._dynamo.config.recompile_limit = max(limit, _MOST_GRAPHS)
    for block in transformer.blocks:
        block.compile(fullgraph=True, dynamic=None)
    logger.info("args.compile: blocks are compiled as they first run")

"""Compute the bytes that a GPU sends in a training step with ZeRO, tensor and context parallelism.

Counts are those of a ring, in which a GPU sends as much as it receives. For N bytes in all and n GPUs,
an all-reduce sends 2 (n-1)/n N; a reduce-scatter or an all-gather sends (n-1)/n N.

    per optimizer step    ZeRO-1               ZeRO-2                    ZeRO-3
    trained gradients     all-reduce           all-reduce each time      reduce-scatter each time
    weights               gather of trained    gather of trained         two gathers of all each time

"Each time" means for every micro-batch. Not counted: batches, replica checks, checkpoints, evaluations.
docs/scaling.md has the figures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import nn

from cogfast.model.block import Block
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import LoraLinear
from cogfast.model.transformer import DiffusionTransformer, assemble_transformer, freeze
from cogfast.train.distributed.parallelize import parallelize
from cogfast.train.distributed.tensor_parallel import ParallelGroup
from cogfast.train.memory.quantized_base import base_linears

PERSISTENT_NUMEL = 100_000  # ZeRO-3 keeps smaller parameters whole: DeepSpeed's default
_FLOAT32 = 4
_SCALARS = 2 * 8  # the gradient norm, and whether any rank got a stop signal


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """data_size copies of the model, each on model_size x context_size GPUs.

    model_size: tensor parallelism, whose GPUs share the weights. context_size: context parallelism,
    whose GPUs have the same weights and share the rows of a sample.
    batch_size: samples of a micro-batch.
    bytes_per_number: size of the training dtype.
    is_recomputed: activation checkpointing; every policy repeats the sums over the group.
    splits_rows: sequence parallelism.
    persistent_numel: stage3_param_persistence_threshold.
    num_held: last blocks whose linears' weights are no parameters, since they are int8 or in host memory.
    ZeRO-3 neither partitions nor gathers them.
    """

    data_size: int
    model_size: int = 1
    context_size: int = 1
    zero_stage: Literal[1, 2, 3] = 2
    batch_size: int = 1
    accumulation: int = 1
    bytes_per_number: int = 2
    is_recomputed: bool = False
    splits_rows: bool = False
    persistent_numel: int = PERSISTENT_NUMEL
    num_held: int = 0

    @property
    def num_replicas(self) -> int:
        """Number of GPUs with the same weights, over which ZeRO shards their state."""
        return self.data_size * self.context_size

    @property
    def world_size(self) -> int:
        return self.num_replicas * self.model_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes that one GPU sends per optimizer step.

    gradients, weights: between the GPUs that have the same weights.
    activations: between the GPUs that share the weights, including gradients of replicated parameters.
    rows: between the GPUs that share the rows of a sample.
    overlapped: the part of activations that is sent while the weights' gradients are computed.
    scalars: between all GPUs.
    """

    gradients: float
    weights: float
    activations: float
    rows: float
    overlapped: float
    scalars: float

    @property
    def among_copies(self) -> float:
        return self.gradients + self.weights

    @property
    def total(self) -> float:
        return self.among_copies + self.activations + self.rows + self.scalars


def all_reduce(num_bytes: float, size: int) -> float:
    """Return the bytes that each of `size` GPUs sends to sum num_bytes."""
    return 2 * scatter_or_gather(num_bytes, size)


def scatter_or_gather(num_bytes: float, size: int) -> float:
    """Return the bytes that each of `size` GPUs sends in a reduce-scatter or all-gather of num_bytes."""
    return (size - 1) / size * num_bytes


def count_traffic(config: TransformerConfig, layout: Layout, num_tokens: int) -> Traffic:
    """Count the traffic of a training step with num_tokens per sample (S).

    With LoRA only the adapters are trained. ValueError for LoRA with ZeRO-3, which gathers frozen
    weights in backward only where gradients pass.
    """
    if layout.zero_stage == 3 and config.lora_rank is not None:
        raise ValueError("zero_stage=3 with lora_rank is not counted; use 1 or 2")
    transformer = held_model(config, layout.model_size)
    gradients, weights = _among_copies(transformer, layout)
    reaches = gradient_reaches(transformer)
    activations = sum(
        _in_block(block, config, layout, num_tokens, *reach)
        for block, reach in zip(transformer.blocks, reaches, strict=True)
    )
    # Sums of the gradients of QKV's and fc1's inputs; with split rows a scatter is half as much.
    sums = sum(map(sum, reaches)) * _unit(config, layout, num_tokens)
    overlapped = all_reduce(sums, layout.model_size) / (2 if layout.splits_rows else 1)
    rows = _exchanged(config, layout, num_tokens, reaches)
    if layout.splits_rows:  # gathered after the last block, and in backward before the first one
        times = 1 + reaches[0][0]
        activations += times * scatter_or_gather(
            _unit(config, layout, num_tokens), layout.model_size
        )
    return Traffic(
        gradients=gradients,
        weights=weights,
        activations=activations * layout.accumulation,
        rows=rows * layout.accumulation,
        overlapped=overlapped * layout.accumulation,
        scalars=all_reduce(_SCALARS, layout.world_size),
    )


@cache
def held_model(config: TransformerConfig, model_size: int) -> DiffusionTransformer:
    """Build the shard of one of model_size GPUs on the meta device; requires_grad marks what is trained."""
    with torch.device("meta"):
        transformer = assemble_transformer(config)
    freeze(transformer, () if config.lora_rank is None else ["all"], is_lora_only=False)
    for name in transformer.unused_parameter_names():
        transformer.get_parameter(name).requires_grad_(False)
    no_group: Any = None  # a group is only used for the size of the shards
    parallelize(transformer, ParallelGroup(0, model_size, no_group))
    return transformer


def _among_copies(transformer: DiffusionTransformer, layout: Layout) -> tuple[float, float]:
    """Return the bytes for gradients and for weights between the copies."""
    number, size, times = layout.bytes_per_number, layout.num_replicas, layout.accumulation
    trained = sum(p.numel() for p in transformer.parameters() if p.requires_grad)
    if layout.zero_stage < 3:
        # DeepSpeed's ZeRO-2 all-reduces, as a bucket has gradients that several ranks own.
        sums = times if layout.zero_stage == 2 else 1
        gradients = sums * all_reduce(trained * number, size)
        return gradients, scatter_or_gather(trained * number, size)
    # ZeRO-3 keeps small parameters whole and gathers the rest in forward and in backward. This assumes
    # stage3_max_reuse_distance 0, and does not count gathers for recomputation.
    first = len(transformer.blocks) - layout.num_held
    linears = base_linears(transformer)
    held = {f"{path}.weight" for path, _ in linears if int(path.split(".")[1]) >= first}
    numels = [p.numel() for name, p in transformer.named_parameters() if name not in held]
    small = sum(numel for numel in numels if numel <= layout.persistent_numel)
    large = sum(numels) - small
    gradients = times * scatter_or_gather(trained * number, size)
    weights = scatter_or_gather((2 * times * large + small) * number, size)
    return gradients, weights


def _exchanged(
    config: TransformerConfig,
    layout: Layout,
    num_tokens: int,
    reaches: list[tuple[bool, bool]],
) -> float:
    """Return the bytes that context parallelism sends for one micro-batch."""
    size = layout.context_size
    # Q, K, V and the attention's result of this GPU's rows and heads.
    exchange = 4 * _unit(config, layout, num_tokens) / layout.model_size
    total = 0.0
    for _, is_reached in reaches:
        passes = 1 + is_reached * (2 if layout.is_recomputed else 1)
        total += passes * scatter_or_gather(exchange, size)
    # The output of the last block, and the gradients of the first one's inputs.
    whole = size * _unit(config, layout, num_tokens)
    total += (1 + reaches[0][0]) * scatter_or_gather(whole, size)
    conditioning = layout.batch_size * config.time_embed_dim * _FLOAT32
    return total + all_reduce(conditioning, size) * reaches[0][0]


def gradient_reaches(transformer: DiffusionTransformer) -> list[tuple[bool, bool]]:
    """Return for each block if its input has a gradient, and if anything inside it has."""
    with_input = transformer.patch_embedding.weight.requires_grad
    reaches = []
    for block in transformer.blocks:
        inside = with_input or any(p.requires_grad for p in block.parameters())
        reaches.append((with_input, inside))
        with_input = inside
    return reaches


def _in_block(
    block: nn.Module,
    config: TransformerConfig,
    layout: Layout,
    num_tokens: int,
    has_input_gradient: bool,
    has_gradient: bool,
) -> float:
    """Return the bytes of forward and backward of a block for one micro-batch."""
    assert isinstance(block, Block), f"{type(block).__name__} among the blocks"
    number, width, samples = layout.bytes_per_number, config.hidden_size, layout.batch_size
    unit, attention = _unit(config, layout, num_tokens), block.attention
    forwards = 2 if layout.is_recomputed and has_gradient else 1
    modulation = 12 * width * samples * number
    # sums: bytes of all-reduces. halves: bytes of reduce-scatters and all-gathers, half as much traffic.
    sums, halves = 0, forwards * modulation
    norm = attention.query_norm
    if norm is not None and norm.elementwise_affine and norm.weight.requires_grad:
        sums += 2 * 2 * config.head_width * _FLOAT32  # query norm and key norm, weight and bias
    is_modulation_trained = block.modulation.linear.weight.requires_grad
    if is_modulation_trained:
        sums += samples * config.time_embed_dim * number
    is_lora = isinstance(attention.qkv, LoraLinear)
    if isinstance(attention.qkv, LoraLinear):
        sums += sum(matrix.numel() for matrix in attention.qkv.matrix_A.values()) * number
    if isinstance(attention.out, LoraLinear):
        sums += sum(matrix.numel() for matrix in attention.out.matrix_B.values()) * number
    if not layout.splits_rows:
        sums += forwards * 2 * unit  # outputs of `out` and fc2
        sums += (has_input_gradient + has_gradient) * unit  # input gradients of QKV and fc1
        return all_reduce(sums, layout.model_size) + scatter_or_gather(halves, layout.model_size)
    halves += forwards * 4 * unit  # inputs of QKV and fc1, outputs of `out` and fc2
    halves += (has_input_gradient + 3 * has_gradient) * unit  # their gradients
    # An adapted fc1 is frozen itself.
    if not isinstance(block.fc1, LoraLinear) and block.fc1.weight.requires_grad:
        halves += unit if is_lora else 2 * unit  # inputs for weight gradients; adapters keep theirs
    if is_modulation_trained:
        halves += modulation
    biases = [attention.out.bias, block.fc2.bias]
    norms = [*block.attention_norm.parameters(), *block.mlp_norm.parameters()]
    sums += sum(p.numel() for p in (*biases, *norms) if p.requires_grad) * _FLOAT32
    return all_reduce(sums, layout.model_size) + scatter_or_gather(halves, layout.model_size)


def _unit(config: TransformerConfig, layout: Layout, num_tokens: int) -> int:
    """Return the bytes of one tensor [B, S, M] inside the blocks, where a GPU has 1 / context_size of
    the rows."""
    whole = layout.batch_size * num_tokens * config.hidden_size * layout.bytes_per_number
    return whole // layout.context_size

"""Initial weights, each a function of (seed, parameter name), so that they do not depend on the
layout of processes or the order of construction."""

from __future__ import annotations

from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from cogfast.core.slot_random import random_bits
from cogfast.model.embeddings import PositionTable
from cogfast.model.lora import LoraLinear, is_lora_parameter
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import Target

STD = 0.02  # linears of SAT's transformer layers (sat/model/transformer.py)


@torch.no_grad()
def initialize(
    transformer: nn.Module,
    seed: int,
    shards: Mapping[str, Shard] | None = None,
    names: Container[str] | None = None,
    held: Mapping[str, Target] | None = None,
) -> None:
    """Initialize the parameters of a DiffusionTransformer for training from scratch.

    Linears: normal with std 0.02, biases zero. Patch embedding: Xavier, as upstream. Modulation
    layers and the output layer: zero, so that every block starts as the identity and the first
    prediction is zero (upstream zeroes them when a checkpoint lacks them). LayerNorms: one and
    zero. LoRA matrices and position tables have their own `reset`.

    shards: the shard that the transformer holds of a parameter, by name; it gets that shard of the
    whole parameter's values. names: the parameters to set; None: all. held: weights that are no
    parameters, by name. Values are drawn on the CPU in float32, one parameter at a time.
    """
    targets: dict[str, Target] = {**dict(transformer.named_parameters()), **(held or {})}
    for name, parameter in targets.items():
        if names is not None and name not in names:
            continue
        owner = transformer.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, PositionTable):
            owner.reset()
            continue
        # Draw the whole parameter even for a shard: its values must not depend on the layout.
        shard = (shards or {}).get(name)
        shape = parameter.shape if shard is None else shard.shape
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        # Keyed by the name, so that adding a parameter changes no other's values.
        generator = torch.Generator().manual_seed(random_bits(seed, "weights", name))
        if is_lora_parameter(name):
            LoraLinear.reset(name, whole, generator)
        else:
            _draw(name, whole, generator)
        parameter.copy_(whole if shard is None else shard.of(whole))


def _draw(name: str, parameter: Tensor, generator: torch.Generator) -> None:
    *_, owner, kind = ("", *name.split("."))
    if kind == "bias" or ".modulation." in name or owner in ("output_modulation", "output"):
        parameter.zero_()
    elif owner.endswith("norm"):
        parameter.fill_(1.0)
    # Xavier over the flattened kernel, as SAT initializes its convolution.
    elif owner == "patch_embedding":
        nn.init.xavier_uniform_(parameter, generator=generator)
    else:
        parameter.normal_(std=STD, generator=generator)

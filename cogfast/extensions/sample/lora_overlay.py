"""Merges LoRA adapters of any supported format into a loaded model, once before sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cogfast.distributed.parallelize import find_shards
from cogfast.extensions.formats.adapters import (
    adapters_of,
    check_member,
    merge_lora,
    open_adapter,
    split_scale,
)
from cogfast.model.config import Family
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.source import WeightSource, check_finite

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoraOverlay:
    """Adapters to merge. path: a LoRA file, a SAT folder or a run. scale: 1 is the trained strength."""

    path: str
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> LoraOverlay:
        return cls(*split_scale(text, "--lora"))


def open_loras(loras: Sequence[LoraOverlay], ema: bool | None) -> list[tuple[WeightSource, float]]:
    """Open the adapters, with their scales, without reading weights.

    ema: use the averaged adapters of runs; None: of those that have any.
    """
    return [(open_adapter(lora.path, ema), lora.scale) for lora in loras]


@torch.no_grad()
def add_loras(
    transformer: DiffusionTransformer, loras: Sequence[tuple[WeightSource, float]]
) -> None:
    """Add scale * (alpha / r) * B A to the adapted weights, tensor by tensor.

    Sampling then costs nothing extra. ValueError if an adapter does not fit the model.
    """
    shards = find_shards(transformer)
    parameters = {
        # Adapter files name the plain linear, even if the model has adapters of its own on it.
        name.replace(".original.", "."): (name, parameter)
        for name, parameter in transformer.named_parameters()
        if not is_lora_parameter(name)
    }
    shapes = {
        plain: shards[name].shape if name in shards else tuple(parameter.shape)
        for plain, (name, parameter) in parameters.items()
    }
    # merge_lora adds adapters to a source of weights; zeros give the difference alone.
    zeros = WeightSource(
        description="the model",
        shapes=shapes,
        read=lambda name, _: torch.zeros(shapes[name]),
        dtypes=dict.fromkeys(shapes, torch.float32),
    )
    # {weight: the differences of all files that adapt it}.
    deltas: dict[str, list[WeightSource]] = {}
    for adapter, scale in loras:
        check_member(adapter, Family.of_config(transformer.config), "the model")
        delta = merge_lora(zeros, adapter, scale)
        for plain in {f"{name.split('.matrix_')[0]}.weight" for name in adapter.shapes}:
            deltas.setdefault(plain, []).append(delta)
    for plain in sorted(deltas):
        name, parameter = parameters[plain]
        merged = parameter.float()
        for delta in deltas[plain]:
            added = delta.read(plain, shards.get(name)).to(parameter.device)
            merged = merged + added.reshape(parameter.shape)
        # The sum of all files is in float32 and rounded once.
        parameter.copy_(check_finite("--lora", name, merged.to(parameter.dtype)))
    for adapter, scale in loras:
        logger.info("%s, %s, scale %g", adapter.description, adapters_of(adapter), scale)

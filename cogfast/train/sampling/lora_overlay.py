"""Adapters on top of a loaded model, of whatever format, added to its weights once."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.formats.run_manifest import find_run_checkpoint
from cogfast.model.weights.lora.adapters import (
    MergeRounding,
    adapters_of,
    merge_lora,
    open_adapter,
)
from cogfast.model.weights.source import WeightSource
from cogfast.train.distributed.parallelize import find_shards

logger = logging.getLogger(__name__)

_KEEPS_FLOAT32 = "deepspeed.bf16.enabled=false deepspeed.fp16.enabled=false"


@dataclass(frozen=True, slots=True)
class LoraOverlay:
    """path: a LoRA file, a SAT folder or a run of ours; scale: 1 is the strength as trained."""

    path: str
    scale: float = 1.0

    @classmethod
    def parse(cls, word: str) -> LoraOverlay:
        """`PATH` or `PATH:SCALE`."""
        path, colon, scale = word.rpartition(":")
        if not colon or os.path.exists(word):
            return cls(word)
        try:
            return cls(path, float(scale))
        except ValueError:
            raise ValueError(
                f"--lora {word}: no such file or folder, nor PATH:SCALE with a number; "
                "use lora.safetensors:0.8"
            ) from None


@dataclass(frozen=True, slots=True)
class OpenLora:
    """Adapters on the disk, and their scale."""

    adapter: WeightSource
    scale: float


def open_loras(loras: Sequence[LoraOverlay], ema: bool) -> list[OpenLora]:
    """Look into the files, and read no weights yet. ema: the averaged adapters, of runs."""
    opened = []
    for lora in loras:
        is_run = find_run_checkpoint(Path(lora.path)) is not None
        opened.append(OpenLora(open_adapter(lora.path, ema and is_run), lora.scale))
    return opened


@torch.no_grad()
def add_loras(transformer: DiffusionTransformer, loras: Sequence[OpenLora]) -> None:
    """Add scale (alpha / r) B A to the weights that adapters are for, tensor by tensor: nothing is
    computed later. ValueError where one does not fit."""
    shards = find_shards(transformer)
    parameters = {
        name.replace(".original.", "."): (name, parameter)
        for name, parameter in transformer.named_parameters()
        if not is_lora_parameter(name)
    }
    shapes = {
        plain: shards[name].shape if name in shards else tuple(parameter.shape)
        for plain, (name, parameter) in parameters.items()
    }
    nothing = WeightSource(
        description="the model",
        shapes=shapes,
        read=lambda name, _: torch.zeros(shapes[name]),
        dtypes=dict.fromkeys(shapes, torch.float32),
    )
    for lora in loras:
        adapter = lora.adapter
        delta = merge_lora(nothing, adapter, lora.scale)
        rounding = MergeRounding(transformer.dtype)
        for plain in sorted({f"{name.split('.matrix_')[0]}.weight" for name in adapter.shapes}):
            name, parameter = parameters[plain]
            added = delta.read(plain, shards.get(name)).to(parameter.device)
            merged = parameter.float() + added.reshape(parameter.shape)
            rounding.add(name, parameter, merged)
            parameter.copy_(merged)
        logger.info("%s, %s, scale %g", adapter.description, adapters_of(adapter), lora.scale)
        report = rounding.report(_KEEPS_FLOAT32)
        if report is not None:
            logger.info("%s: %s", adapter.description, report)

"""Adapters of CogVideoX 1.0 image-to-video models."""

from __future__ import annotations

from cogfast.finetune.registry import register
from cogfast.finetune.trainer import Trainer


class CogVideoXI2VLoraTrainer(Trainer):
    """Trains adapters of CogVideoX 1.0 image-to-video models."""


register("cogvideox-i2v", "lora", CogVideoXI2VLoraTrainer)

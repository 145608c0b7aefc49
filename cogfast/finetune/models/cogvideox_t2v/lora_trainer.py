"""Adapters of CogVideoX 1.0 text-to-video models."""

from __future__ import annotations

from cogfast.finetune.registry import register
from cogfast.finetune.trainer import Trainer


class CogVideoXT2VLoraTrainer(Trainer):
    """Trains adapters of CogVideoX 1.0 text-to-video models."""


register("cogvideox-t2v", "lora", CogVideoXT2VLoraTrainer)

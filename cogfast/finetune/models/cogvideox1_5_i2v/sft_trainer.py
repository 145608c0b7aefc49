"""All weights of CogVideoX1.5 image-to-video models."""

from __future__ import annotations

from cogfast.finetune.registry import register
from cogfast.finetune.trainer import Trainer


class CogVideoX1_5I2VSftTrainer(Trainer):
    """Trains all weights of CogVideoX1.5 image-to-video models."""


register("cogvideox1.5-i2v", "sft", CogVideoX1_5I2VSftTrainer)

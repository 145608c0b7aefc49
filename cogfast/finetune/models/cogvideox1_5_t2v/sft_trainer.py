"""All weights of CogVideoX1.5 text-to-video models."""

from __future__ import annotations

from cogfast.finetune.registry import register
from cogfast.finetune.trainer import Trainer


class CogVideoX1_5T2VSftTrainer(Trainer):
    """Trains all weights of CogVideoX1.5 text-to-video models."""


register("cogvideox1.5-t2v", "sft", CogVideoX1_5T2VSftTrainer)

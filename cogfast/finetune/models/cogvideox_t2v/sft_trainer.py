"""All weights of CogVideoX 1.0 text-to-video models."""

from __future__ import annotations

from cogfast.finetune.registry import register
from cogfast.finetune.trainer import Trainer


class CogVideoXT2VSftTrainer(Trainer):
    """Trains all weights of CogVideoX 1.0 text-to-video models."""


register("cogvideox-t2v", "sft", CogVideoXT2VSftTrainer)

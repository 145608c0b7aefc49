"""Keys of exports."""

from __future__ import annotations

from typing import Annotated, Literal

from cogfast.core.keys import After, Count, Keys


class ExportKeys(Keys):
    """Checkpoints that also hold files for diffusers."""

    export: Annotated[Literal["none", "last", "all"], After("save_interval")] = "none"
    """checkpoints that also hold files which diffusers loads: pytorch_lora_weights.safetensors of
    LoRA runs; transformer/ and, with EMA, transformer_ema/ of others, in the run's precision. last:
    only the checkpoint of the last step"""
    export_interval: Count | None = None
    """with export=last: steps between earlier checkpoints that also hold such files; must be a
    multiple of save_interval"""

"""The precision of a run whose configuration leaves it to the weights that it starts from."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from cogfast.config import Config
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)


def precision_values(source: WeightSource) -> dict[str, bool]:
    """The checkpoint's dtype; fp16 needs a GPU, and float32 holds the same numbers."""
    dtype = source.main_dtype
    return {
        "deepspeed.fp16.enabled": dtype == torch.float16 and torch.cuda.is_available(),
        "deepspeed.bf16.enabled": dtype == torch.bfloat16,
    }


def infer_precision(config: Config) -> None:
    """Set bf16 or fp16 as the weights of args.load are, in place, where no file and no word of the
    command line says either."""
    load = config.args.get("load")
    is_said = {"bf16", "fp16"} & set(config.deepspeed) or any(
        config.origins.get(f"args.{name}", "default") != "default" for name in ("bf16", "fp16")
    )
    if is_said or not load or not Path(load).exists():
        return
    for key, is_on in precision_values(open_source(Path(load))).items():
        if is_on:
            name = key.split(".")[1]
            config.deepspeed[name] = {"enabled": True}
            config.origins[key] = "args.load"
            logger.info("%s, as the weights of args.load=%s are", name, load)

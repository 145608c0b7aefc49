"""Infers the precision of a run from its weights if the configuration does not set it."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from cogfast.config import Config
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)


def precision_values(source: WeightSource) -> dict[str, bool]:
    """Return the precision keys for the dtype of a checkpoint.

    fp16 needs a GPU. Without one, fp16 weights run in float32, which represents them exactly.
    """
    dtype = source.main_dtype
    return {
        "deepspeed.fp16.enabled": dtype == torch.float16 and torch.cuda.is_available(),
        "deepspeed.bf16.enabled": dtype == torch.bfloat16,
    }


def infer_precision(config: Config) -> None:
    """If the config sets neither bf16 nor fp16, use the dtype of args.load's weights.

    Modifies `config`.
    """
    load = config.args.get("load")
    # A value in any file counts, false too: a user who writes bf16: false means float32.
    is_configured = {"bf16", "fp16"} & set(config.deepspeed) or any(
        config.origins.get(f"args.{name}", "default") != "default" for name in ("bf16", "fp16")
    )
    if is_configured or not load or not Path(load).exists():
        return
    for key, is_on in precision_values(open_source(Path(load))).items():
        # A false value is left out: an absent section and a disabled one mean the same.
        if is_on:
            name = key.split(".")[1]
            config.deepspeed[name] = {"enabled": True}
            config.origins[key] = "args.load"
            logger.info("precision: %s, the dtype of the weights of args.load=%s", name, load)

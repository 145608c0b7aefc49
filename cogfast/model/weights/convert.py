"""Weights of one format into another, tensor by tensor."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path

import torch

from cogfast.model.weights.cogfast_folder import write_cogfast
from cogfast.model.weights.diffusers import write_diffusers
from cogfast.model.weights.family import Family
from cogfast.model.weights.identify import check_complete, identify
from cogfast.model.weights.open import open_source
from cogfast.model.weights.sat_files import write_sat
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)


def convert(
    src: str,
    dst: str,
    to: str,
    ema: bool = False,
    model_parallel_size: int = 1,
    dtype: str | None = None,
    verify: bool = False,
    allow_unexpected: bool = False,
    scaling_factor: float | None = None,
) -> None:
    """What `cogfast convert` does. ValueError for what the user can mend."""
    source_path, target_path = Path(src), Path(dst)
    if not source_path.exists():
        raise ValueError(f"{src}: no such file or folder")
    if to != "sat" and model_parallel_size != 1:
        raise ValueError(f"--model-parallel-size {model_parallel_size} goes with --to sat only")
    source = open_source(source_path, ema)
    kind = None if dtype is None else getattr(torch, dtype)
    _refuse_unexpected(source, allow_unexpected)
    config = identify(source)
    check_complete(source, config)
    logger.info("%s: %s, %s", source.description, Family.of_config(config), _summary(source))
    if to == "sat":
        write_sat(source, config, target_path, model_parallel_size, kind)
    elif to == "diffusers":
        write_diffusers(source, config, target_path, kind)
    elif to == "cogfast":
        write_cogfast(source, config, target_path, kind)
    logger.info("%s: written for %s", dst, to)


def _refuse_unexpected(source: WeightSource, is_allowed: bool) -> None:
    if source.unexpected and not is_allowed:
        names = source.unexpected
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(
            f"{source.description}: {len(names)} tensors have names that nobody knows: {shown}; "
            "leave them out with --allow-unexpected"
        )


def _summary(source: WeightSource) -> str:
    numel = sum(math.prod(shape) for shape in source.shapes.values())
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in source.dtypes.values())
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    return f"{len(source.shapes)} tensors ({kinds}), {numel:,} parameters"

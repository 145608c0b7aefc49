"""Weights of one format into another, tensor by tensor."""

from __future__ import annotations

import logging
import math
from collections import Counter
from pathlib import Path

import torch

from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.convert_adapters import extracted, with_lora_options, write_adapters
from cogfast.model.weights.family import Family
from cogfast.model.weights.formats.cogfast_folder import write_cogfast
from cogfast.model.weights.formats.diffusers import write_diffusers
from cogfast.model.weights.formats.sat_files import write_sat
from cogfast.model.weights.identify import check_complete, identify
from cogfast.model.weights.lora.adapters import MergeRounding
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource, first_of
from cogfast.model.weights.vae.files import convert_vae, open_vae, verify_vae
from cogfast.model.weights.verify import check_memory
from cogfast.model.weights.verify import verify as verify_target

logger = logging.getLogger(__name__)


def convert(
    src: str | Path,
    dst: str | Path,
    to: str,
    ema: bool = False,
    merge_lora: str | None = None,
    add_lora: str | None = None,
    extract_lora: str | None = None,
    rank: int | None = None,
    lora_alpha: float | None = None,
    model_parallel_size: int = 1,
    dtype: str | None = None,
    verify: bool = False,
    allow_unexpected: bool = False,
    scaling_factor: float | None = None,
) -> None:
    """What `cogfast convert` does. merge_lora: adapters to merge into the model, "" for its own;
    add_lora: to write beside it; lora_alpha: of adapters, whatever their files say.
    ValueError for what the user can mend."""
    source_path, target_path = Path(src), Path(dst)
    if not source_path.exists():
        raise ValueError(f"{src}: no such file or folder")
    if to != "sat" and model_parallel_size != 1:
        raise ValueError(f"--model-parallel-size {model_parallel_size} goes with --to sat only")
    kind = None if dtype is None else getattr(torch, dtype)
    vae = open_vae(source_path)
    if vae is not None:
        convert_vae(vae, target_path, to, kind, scaling_factor)
        if verify:
            logger.info("%s: %s", dst, verify_vae(vae, target_path, kind))
        return
    if scaling_factor is not None:
        raise ValueError(f"--scaling-factor={scaling_factor} is a VAE's; {src} is a transformer")
    source = open_source(source_path, ema)
    _refuse_unexpected(source, allow_unexpected)
    rounding = MergeRounding(kind)
    source = with_lora_options(source, merge_lora, add_lora, lora_alpha, rounding)
    extraction = None
    if extract_lora is not None:
        extraction = extracted(source, extract_lora, rank)
        source = extraction.source
    if to == "peft" or all(is_lora_parameter(name) for name in source.shapes):
        write_adapters(source, target_path, to, kind, model_parallel_size, verify)
        if extraction is not None:
            logger.info("%s", extraction.report())
        return
    config = identify(source)
    check_complete(source, config)
    logger.info("%s: %s, %s", source.description, Family.of_config(config), _summary(source))
    if verify:
        check_memory(source)
    if to == "sat":
        write_sat(source, config, target_path, model_parallel_size, kind)
    elif to == "diffusers":
        write_diffusers(source, config, target_path, kind)
    else:
        write_cogfast(source, config, target_path, kind)
    logger.info("%s: written for %s", dst, to)
    if rounding.report() is not None:
        logger.info("%s: %s", dst, rounding.report())
    if verify:
        found = verify_target(source.as_written(kind), config, target_path, to)
        logger.info("%s: %s", dst, found)


def _refuse_unexpected(source: WeightSource, is_allowed: bool) -> None:
    if source.unexpected and not is_allowed:
        raise ValueError(
            f"{source.description}: {len(source.unexpected)} tensors have unknown names: "
            f"{first_of(source.unexpected)}; leave them out with --allow-unexpected"
        )


def _summary(source: WeightSource) -> str:
    numel = sum(math.prod(shape) for shape in source.shapes.values())
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in source.dtypes.values())
    kinds = ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    return f"{len(source.shapes)} tensors ({kinds}), {numel:,} parameters"

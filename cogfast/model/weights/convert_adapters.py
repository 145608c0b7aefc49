"""What `cogfast convert` does with LoRA adapters: merged, added, extracted, or written alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch

from cogfast.model.lora import SAT_ALPHA, is_lora_parameter
from cogfast.model.weights.formats.peft import write_peft
from cogfast.model.weights.formats.sat_files import write_sat
from cogfast.model.weights.lora.adapters import (
    MergeRounding,
    adapters_of,
    merge_lora,
    only_adapters,
    open_adapter,
    with_adapters,
    without_adapters,
)
from cogfast.model.weights.lora.extract import Extraction, extract_lora
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource
from cogfast.model.weights.verify_peft import verify_peft

logger = logging.getLogger(__name__)

_OF_TRAINING = ("rotary_positions", "trained_size")  # facts that adapters bring to their base


def with_lora_options(
    source: WeightSource,
    merge: str | None,
    add: str | None,
    alpha: float | None,
    rounding: MergeRounding,
) -> WeightSource:
    """`source` as --merge-lora, --add-lora and --lora-alpha ask; merge: "" for its own adapters.
    rounding: where a merge notes what it loses.

    ValueError where they do not go together or with the source.
    """
    if merge is not None and add is not None:
        raise ValueError("--merge-lora and --add-lora: leave one of them out")
    lora = merge or add
    if lora is not None and _has_adapters(source):
        option = "--add-lora" if merge is None else "--merge-lora"
        raise ValueError(
            f"{source.description}: it has adapters of its own, and {option} {lora} is for a plain "
            "model; merge its own first, with --merge-lora and no name"
        )
    if lora is None:
        source = _with_alpha(source, alpha)
    if merge == "":
        base = without_adapters(source)
        if not _has_adapters(source):
            raise ValueError(
                f"{source.description}: no LoRA tensors to merge; write --merge-lora LORA"
            )
        if not base.shapes:
            raise ValueError(
                f"{source.description}: adapters alone; give the base as SRC and them as "
                "--merge-lora LORA"
            )
        return merge_lora(base, only_adapters(source), rounding=rounding)
    if lora is None:
        return source
    adapter = _with_alpha(open_adapter(lora), alpha)
    if merge is None:
        whole = with_adapters(source, adapter)
    else:
        whole = merge_lora(source, adapter, rounding=rounding)
    trained = {k: adapter.facts[k] for k in _OF_TRAINING if k in adapter.facts}
    return replace(whole, facts={**whole.facts, **trained})


def extracted(source: WeightSource, base: str, rank: int | None) -> Extraction:
    """The adapters of --extract-lora BASE --rank R."""
    if rank is None:
        raise ValueError(f"--extract-lora {base} needs --rank R, such as --rank 64")
    if not Path(base).exists():
        raise ValueError(f"--extract-lora {base}: no such file or folder")
    models = [source, open_source(Path(base))]
    for model in models:
        if _has_adapters(model):
            raise ValueError(
                f"{model.description}: it has LoRA tensors, and --extract-lora compares plain models; "
                "merge them first, with cogfast convert --merge-lora"
            )
    return extract_lora(*models, rank)


def write_adapters(
    source: WeightSource,
    path: Path,
    to: str,
    dtype: torch.dtype | None,
    model_parallel_size: int,
    is_verified: bool,
) -> None:
    """The adapters of `source` without a model, for PEFT or as a SAT folder."""
    source = only_adapters(source)
    about = f"{source.description}: {adapters_of(source)}"
    if to == "peft":
        written = write_peft(source, path, dtype)
        logger.info("%s: the adapters of %s", written, about)
        if is_verified:
            logger.info("%s: %s", written, verify_peft(source.as_written(dtype), written))
        return
    if to != "sat":
        raise ValueError(
            f"{source.description}: adapters alone; --to peft and --to sat write them, and a model "
            f"with them merged comes from cogfast convert BASE {path} --to {to} --merge-lora LORA"
        )
    if model_parallel_size != 1 or is_verified:
        option = "--verify" if is_verified else "--model-parallel-size"
        raise ValueError(
            f"{option} is for whole models, and {source.description} gives adapters alone; "
            f"cogfast convert BASE {path} --to sat --add-lora LORA writes them with their base"
        )
    write_sat(source, None, path, dtype=dtype)
    alpha = SAT_ALPHA if source.lora_alpha is None else source.lora_alpha
    logger.info(
        "%s: the adapters alone of %s; their config has lora_config.params.lora_alpha: %g",
        *(path, about, alpha),
    )


def _has_adapters(source: WeightSource) -> bool:
    return any(is_lora_parameter(name) for name in source.shapes)


def _with_alpha(source: WeightSource, alpha: float | None) -> WeightSource:
    """alpha: what the user says; None: what the file does."""
    return source if alpha is None else replace(source, lora_alpha=alpha)

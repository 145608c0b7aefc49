"""Completes the weights of a run that trained and saved a part of a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cogfast.core.values import counted
from cogfast.extensions.formats.adapters import (
    check_member,
    joined,
    merge_lora,
    open_adapter,
    selected,
    without_adapters,
)
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.keys import LearnedPositions
from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.identify import identify, lacking_of
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)
_SIZES = ("num_frames", "latent_height", "latent_width")  # of a position table


def completed(source: WeightSource) -> WeightSource:
    """Return the weights of a run that trained and saved a part of a model, without adapters, with the rest
    from the model that it started from; other weights as they are.

    Raises:
        ValueError: that model is not there.
    """
    if source.base is None or any(map(is_lora_parameter, source.shapes)):
        return source
    lacking, _ = lacking_of(source, identify(source))
    if not lacking:
        return source
    base = Path(source.base)
    if not base.exists():  # nor is an address of a run's file followed
        text = f"{source.description}: has a part of the model, and {source.base}, which has the rest, is no folder here"
        raise ValueError(f"{text}; write cogfast convert BASE DST --to diffusers --merge-lora RUN")
    number = counted(len(lacking), "tensor")
    logger.info("%s: %s are read from %s", source.description, number, base)
    rest = as_in_run(without_adapters(completed(open_source(base))), source)
    shared = {name: shape for name, shape in source.shapes.items() if name in rest.shapes}
    whole = merge_lora(rest, replace(source, shapes=shared))
    # Modules of a user's own network are in the run alone.
    own = selected(source, {name: name for name in source.shapes if name not in shared})
    facts = whole.facts | source.facts
    return replace(joined(whole, own), description=source.description, facts=facts)


def fitted(
    source: WeightSource,
    config: TransformerConfig,
    new_channels: bool,
    positions: LearnedPositions | None,
) -> WeightSource:
    """Return weights with what model.new_channels and model.learned_positions make of them for `config`:
    zeros for input channels that they lack, and another position table."""
    name, patch = "patch_embedding.weight", config.patch_size
    if new_channels and name in source.shapes:
        source = source.with_channels(name, config.in_channels * patch.t * patch.h * patch.w)
    name = "position_table.weight"
    if positions is None or config.position == "sincos" or name not in source.shapes:
        return source
    if positions == "drop":
        return source.without(name)
    old = identify(source, config.out_channels)
    sizes = {key: getattr(config, key) for key in _SIZES}
    source = source.with_table(name, old.text_length, old.grid, config.grid)
    return replace(source, facts=source.facts | sizes)


def as_in_run(base: WeightSource, run: WeightSource) -> WeightSource:
    """Return the model that a run started from with the input channels and the position table that the run gave
    it; another source's as it is."""
    if not run.facts:
        return base
    is_wider = "patch_embedding.weight" in run.shapes  # trained, as new channels are
    return fitted(base, TransformerConfig(**run.facts), is_wider, run.positions)


def adapters_for(config: TransformerConfig, path: str) -> WeightSource:
    """Open the adapters that a model of this config starts from (args.load_lora).

    Raises:
        ValueError: there are none, or they were trained on another model.
    """
    adapter = open_adapter(path)
    check_member(adapter, Family.of_config(config), "the model")
    return adapter

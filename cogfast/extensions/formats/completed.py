"""Completes the weights of a run that trained and saved a part of a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.core.values import counted
from cogfast.extensions.formats.adapters import (
    joined,
    merge_lora,
    selected,
    without_adapters,
)
from cogfast.model.config import TransformerConfig
from cogfast.model.keys import LearnedPositions
from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.identify import identify, lacking_of
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)
_SIZES = ("num_frames", "latent_height", "latent_width")  # of a position table


def completed(source: WeightSource) -> WeightSource:
    """Return the weights of a run that trained and saved a part of a model, without adapters, with the rest
    from the model that it started from; other weights as they are. ValueError if that model is not there."""
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
    num_inputs = config.in_channels * patch.t * patch.h * patch.w
    if new_channels and name in source.shapes and source.shapes[name][1] < num_inputs:
        rows, inputs = source.shapes[name]
        pad = lambda values: F.pad(values, (0, num_inputs - inputs))
        facts = {key: value for key, value in source.facts.items() if key != "in_channels"}
        source = replace(source.changed(name, (rows, num_inputs), pad), facts=facts)
    name = "position_table.weight"
    if positions is None or config.position == "sincos" or name not in source.shapes:
        return source
    if positions == "drop":
        shapes = {other: shape for other, shape in source.shapes.items() if other != name}
        facts = {key: value for key, value in source.facts.items() if key != "learnable_position"}
        return replace(source, shapes=shapes, facts=facts)
    found = identify(source, config.out_channels)
    num_text, old, new = found.text_length, found.grid, config.grid
    _, rows, width = source.shapes[name]
    if rows != num_text + old.num_tokens:
        text = f"{source.description}: {name} has {rows} rows, but {num_text} of text and {old.t}x{old.h}x{old.w} "
        text += "of video (frames x rows x columns) were expected; model.learned_positions=resize "
        raise ValueError(f"{text}needs the config.json that belongs to these tensors")

    def interpolated(values: Tensor) -> Tensor:
        # In float32, trilinear, by the tokens' centres
        text, video = values.float().split([num_text, old.num_tokens], dim=1)
        video = video.transpose(1, 2).unflatten(2, (old.t, old.h, old.w))  # [1, M, t, h, w]
        video = F.interpolate(video, size=(new.t, new.h, new.w), mode="trilinear")
        return torch.cat([text, video.flatten(2).transpose(1, 2)], dim=1)

    if old != new:
        source = source.changed(name, (1, num_text + new.num_tokens, width), interpolated)
    return replace(source, facts=source.facts | {key: getattr(config, key) for key in _SIZES})


def as_in_run(base: WeightSource, run: WeightSource) -> WeightSource:
    """Return the model that a run started from with the input channels and the position table that the run gave
    it; another source's as it is."""
    if not run.facts:
        return base
    is_wider = "patch_embedding.weight" in run.shapes  # trained, as new channels are
    return fitted(base, TransformerConfig(**run.facts), is_wider, run.positions)

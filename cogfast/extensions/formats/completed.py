"""Completes the weights of a run that trained and saved a part of a model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from cogfast.config.values import counted
from cogfast.extensions.formats.adapters import (
    check_member,
    merge_lora,
    open_adapter,
    without_adapters,
)
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.identify import identify, lacking_of
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource

logger = logging.getLogger(__name__)
# Facts about the training, which what was trained later passes on to the base that it is combined with.
TRAINING_FACTS = ("rotary_positions", "trained_size")


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
    if not base.exists():
        raise ValueError(
            f"{source.description}: has a part of the model, and {base}, which has the rest, does not exist; "
            "give it: cogfast convert BASE DST --to diffusers --merge-lora RUN"
        )
    logger.info(
        "%s: %s are read from %s", source.description, counted(len(lacking), "tensor"), base
    )
    rest = without_adapters(completed(open_source(base)))
    shared = {name: shape for name, shape in source.shapes.items() if name in rest.shapes}
    whole = merge_lora(rest, replace(source, shapes=shared))
    # Modules of a user's own network are in the run alone.
    own = {name: shape for name, shape in source.shapes.items() if name not in shared}
    facts = {**whole.facts, **{k: source.facts[k] for k in TRAINING_FACTS if k in source.facts}}
    return replace(
        whole,
        description=source.description,
        facts=facts,
        shapes=whole.shapes | own,
        dtypes=whole.dtypes | {name: source.dtypes[name] for name in own},
        read=lambda name, shard: (source if name in own else whole).read(name, shard),
    )


def adapters_for(config: TransformerConfig, path: str) -> WeightSource:
    """Open the adapters that a model of this config starts from (args.load_lora).

    Raises:
        ValueError: there are none, or they were trained on another model.
    """
    adapter = open_adapter(path)
    check_member(adapter, Family.of_config(config), "the model")
    return adapter

"""Addresses of weights in a configuration, as they are written in a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from typing import Any

from cogfast.core.addresses import hint, shown
from cogfast.core.values import leaves, select

# Keys of `model` with which a run trains, and saves, only a part of the network
_OF_PARTS = ("trainable_modules", "network_config.params.modules.lora_config")


def weight_addresses(sections: Mapping[str, Any], is_of_run: bool = False) -> dict[str, str]:
    """Return {dotted key: address} of weights in plain sections. is_of_run: of those that its own lack."""
    args, model = (sections.get(name) or {} for name in ("args", "model"))
    # Text, since the values of a run's file are not checked yet.
    frozen = str(model.get("not_trainable_prefixes") or "")
    part = re.sub(r"first_stage_model|conditioner|\W", "", frozen)
    is_part = part or any(select(model, key) for key in _OF_PARTS)
    names = ["load", "load_lora"] if not is_of_run else ["load"] if is_part else []
    given = leaves({"args": {name: args.get(name) for name in names}, "model": model})
    return {k: v for k, v in given.items() if isinstance(v, str) and "://" in v}


def as_words(values: Mapping[str, str]) -> tuple[str, str]:
    """Return " key=value" for each, for a shell, and what the reader of the command must know of them."""
    words = [f"{key}={value}" for key, value in values.items()]
    return "".join(f" {shlex.quote(word)}" for word in shown(words)), hint(" ".join(words))

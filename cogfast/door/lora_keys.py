"""args.lora_rank, lora_alpha and lora_modules, which set the params of SAT's lora_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cogfast.config.sat_network import LORA, LORA_KEY, lora_targets
from cogfast.core.keys import DEFAULT, find_origin, level
from cogfast.core.values import KeyProblem, check_mapping, select, show, validated
from cogfast.train.keys import TrainKeys

# Key of args -> the param of lora_config that it sets
_LORA_KEYS = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_modules": "target_modules"}


def fold_lora(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Move args.lora_rank, lora_alpha and lora_modules to lora_config. Updates both arguments.

    The command line beats files; two keys of one level must not contradict each other.
    """
    args, model = config["args"], config["model"]
    found = {name: args.pop(name) for name in _LORA_KEYS}
    given = {name: value for name, value in found.items() if value is not None}
    if given:
        _set_lora(model, given, origins)
    for name in found:
        del origins[f"args.{name}"]


def _set_lora(model: dict[str, Any], given: Mapping[str, Any], origins: dict[str, str]) -> None:
    validated(given, TrainKeys, "args")
    network = select(model, "network_config.params.modules")
    first, value = next(iter(given.items()))
    key = f"args.{first}"
    if not isinstance(network, dict):
        raise KeyProblem(key, f"{key}={show(value)} has no model; add a model's file to --base")
    found = network.get("lora_config")
    node = dict(found) if isinstance(found, dict) else {}
    params = dict(check_mapping(LORA_KEY, node.get("params")))
    for name, value in given.items():
        key, long = f"args.{name}", f"{LORA_KEY}.{_LORA_KEYS[name]}"
        before, here, there = params.get(_LORA_KEYS[name]), origins[key], find_origin(origins, long)
        if name == "lora_modules":
            is_same = lora_targets(key, value) == (before and lora_targets(long, before))
        else:
            is_same = value == before
        if before is not None and not is_same:
            if level(here) == level(there):
                text = f"{key}={show(value)}, but {long}={show(before)} ({there}); keep one of them"
                raise KeyProblem(key, text)
            if level(here) < level(there):
                continue
        params[_LORA_KEYS[name]], origins[long] = value, here
    if "r" not in params:
        text = f"{key}={show(value)} has no rank beside it; set args.lora_rank, such as 64"
        raise KeyProblem(key, text)
    # A lora_config of SAT's files keeps SAT's default, which is 1.
    if "target" not in node and "lora_alpha" not in params:
        params["lora_alpha"], origins[f"{LORA_KEY}.lora_alpha"] = params["r"], DEFAULT
    network["lora_config"] = {"target": LORA, **node, "params": params}
    frozen, of_rank = "model.not_trainable_prefixes", find_origin(origins, f"{LORA_KEY}.r")
    if origins[frozen] == DEFAULT or level(of_rank) > level(origins[frozen]):
        model["not_trainable_prefixes"], origins[frozen] = ["all"], of_rank

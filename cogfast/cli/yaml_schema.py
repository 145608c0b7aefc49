"""The JSON schema by which editors complete and check our YAML files: docs/cogfast.schema.json.

`python -m cogfast.cli.option_table` writes it beside docs/options.md. A file may hold a part of a
configuration, so that nothing is required, and an interpolation ${...} in place of any value.
"""

from __future__ import annotations

import importlib
from typing import Any

from cogfast.cli.parameters import parameters_of
from cogfast.config import sat_network
from cogfast.config.arguments import ModelArguments, TrainArguments
from cogfast.config.components import NONE, PLACES
from cogfast.config.deepspeed_keys import DeepSpeedSection
from cogfast.config.sat_classes import NETWORKS, TARGETS
from cogfast.config.sat_unused import UNUSED
from cogfast.config.sections import COMPONENTS, CONDITIONER, ONLY
from cogfast.config.values import is_component_schema, json_schema

_REFERENCE = {"$ref": "#/$defs/reference"}
# Class of the network's module -> the model of its params
_MODULES = {
    "pos_embed_config": {
        sat_network.POSITION_SINCOS: sat_network.SincosParams,
        sat_network.POSITION_ROTARY: sat_network.RotaryParams,
    },
    "patch_embed_config": {sat_network.PATCH_EMBED: sat_network.PatchParams},
    "adaln_layer_config": {sat_network.ADALN: sat_network.AdalnParams},
    "final_layer_config": {sat_network.FINAL_LAYER: sat_network.NoParams},
    "lora_config": {sat_network.LORA: sat_network.LoraParams},
}


def yaml_schema() -> dict[str, Any]:
    """Return the schema of a YAML file."""
    components = {"network_config": _network(), "conditioner_config": _conditioner()}
    for name in COMPONENTS:
        if name not in components:
            components[name] = _component(name.removesuffix("_config"))
    sections = {
        "model": _section("model", ModelArguments, components),
        "data": _component("data"),
        "args": _section("args", TrainArguments),
        "deepspeed": _section("deepspeed", DeepSpeedSection),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a configuration of cogfast",
        **_mapping(sections),
        "$defs": {"reference": {"type": "string", "pattern": r"\$\{.+\}"}},
    }


def _section(name: str, kind: Any, components: dict[str, Any] | None = None) -> dict[str, Any]:
    known = {**_properties(kind), **(components or {})}
    for key in (*UNUSED, *ONLY):
        section, _, inner = key.partition(".")
        if section == name and "." not in inner:
            reason = UNUSED.get(key) or ONLY[key][1]
            known[inner] = {"description": f"accepted, not used: {reason}", "deprecated": True}
    if name == "deepspeed":  # SAT writes these of fp16 at the top
        known |= {key: {"type": "number"} for key in ("loss_scale", "loss_scale_window")}
        known |= {key: {"type": "number"} for key in ("hysteresis", "min_loss_scale")}
    return {"anyOf": [_mapping(known), {"type": "null"}]}


def _properties(kind: Any) -> dict[str, Any]:
    """Return the properties of a model, each of which may be an interpolation."""
    schema = json_schema(kind)
    return {name: _value(node, schema) for name, node in schema["properties"].items()}


def _value(node: dict[str, Any], whole: dict[str, Any]) -> dict[str, Any]:
    kept = {key: node[key] for key in ("description", "default") if key in node}
    if "description" in kept:
        kept["description"] = " ".join(kept["description"].split())
    return {**kept, "anyOf": [*_choices(node, whole), _REFERENCE]}


def _choices(node: dict[str, Any], whole: dict[str, Any]) -> list[dict[str, Any]]:
    if "anyOf" in node:
        return [choice for part in node["anyOf"] for choice in _choices(part, whole)]
    if "$ref" in node:
        node = whole["$defs"][node["$ref"].rpartition("/")[2]]
    plain = {
        k: v for k, v in node.items() if k not in ("title", "description", "default", "format")
    }
    if "properties" in plain:
        return [_mapping({k: _value(v, whole) for k, v in plain["properties"].items()})]
    if "items" in plain:
        plain["items"] = {"anyOf": [*_choices(plain["items"], whole), _REFERENCE]}
    if "prefixItems" in plain:
        plain["prefixItems"] = [
            {"anyOf": [*_choices(p, whole), _REFERENCE]} for p in plain["prefixItems"]
        ]
    # 5e8 is a number in YAML 1.2 and a text in others; OmegaConf reads both as a number.
    return [plain]


def _mapping(known: dict[str, Any], is_closed: bool = True) -> dict[str, Any]:
    closed = {"additionalProperties": False} if is_closed else {}
    return {"type": "object", "properties": known, **closed}


def _module(classes: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a component that takes these classes, of which each has its params."""
    known = {name: node for kind in classes.values() for name, node in _properties(kind).items()}
    for target in classes:
        known |= _unused(target)
    parts = {"target": {"enum": list(classes)}, "params": _or_none(_mapping(known))}
    return {"anyOf": [_mapping(parts), _REFERENCE]}


def _or_none(node: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [node, {"type": "null"}, _REFERENCE]}


def _unused(target: str) -> dict[str, Any]:
    """Return the params of SAT's class that are accepted without effect."""
    name = f"{target.rpartition('.')[2]}."
    return {
        key.removeprefix(name): {"description": f"accepted, not used: {why}", "deprecated": True}
        for key, why in UNUSED.items()
        if key.startswith(name)
    }


def _network() -> dict[str, Any]:
    params = {**_properties(sat_network.NetworkParams), **_unused(NETWORKS[0])}
    inner = {**_properties(sat_network.TransformerArgs), **_unused("transformer_args")}
    params["transformer_args"] = _or_none(_mapping(inner))
    params["modules"] = _mapping({name: _module(kinds) for name, kinds in _MODULES.items()})
    parts = {"target": {"enum": list(NETWORKS)}, "params": _mapping(params)}
    return _mapping(parts)


def _autoencoder() -> dict[str, Any]:
    """Return the params of SAT's autoencoder."""
    coder = {**_properties(sat_network.CoderParams), **_unused("encoder_config")}
    node = _mapping({"target": {"type": "string"}, "params": _or_none(_mapping(coder))})
    names = ("encoder_config", "decoder_config")
    known = {**_properties(sat_network.AutoencoderParams), **dict.fromkeys(names, node)}
    return {**known, "regularizer_config": {"type": "object"}}


def _conditioner() -> dict[str, Any]:
    entry = _component("emb_models")
    beside = {"is_trainable": False, "input_key": "txt", "ucg_rate": 0.0}
    entry["properties"] |= {name: {"default": value} for name, value in beside.items()}
    params = {"emb_models": {"type": "array", "items": entry}, "cor_embs": {}, "cor_p": {}}
    return _mapping({"target": {"enum": [CONDITIONER]}, "params": _mapping(params)})


def _component(name: str) -> dict[str, Any]:
    """Return the schema of a component: the classes of its place, and the params of all of them."""
    place, known = PLACES[name], {}
    targets = [*place.paths, *(sat for sat, one in TARGETS.items() if one.path in place.paths)]
    for path in place.paths:
        module, _, class_name = path.rpartition(".")
        if module.startswith("cogfast") and class_name != "video_autoencoder_from_sat":
            known |= _parameters(getattr(importlib.import_module(module), class_name))
    for target in targets:
        if target in TARGETS:
            known |= {**_unused(target), **dict.fromkeys(TARGETS[target].only, {})}
    if name == "first_stage":
        known |= _autoencoder()
    # Classes of the user's own package have other params.
    target = {"anyOf": [{"enum": sorted({*targets, NONE})}, {"type": "string"}]}
    return _mapping({"target": target, "params": _or_none(_mapping(known, is_closed=False))})


def _parameters(kind: Any) -> dict[str, Any]:
    found = {}
    for parameter, schema, meaning in parameters_of(kind):
        name = parameter.name
        if is_component_schema(schema):
            found[f"{name}_config"] = _or_none(_component(name))
        else:
            found[name] = _value({"description": meaning, **schema}, schema)
    return found

"""Writes docs/options.md, the list of all keys, and the JSON schema by which editors complete and check our
YAML files, configs/cogfast.schema.json: `python -m scripts.write_options`.

A test compares both files with what this writes, and fails for a key without a meaning. In the schema, a
file may hold a part of a configuration, so that nothing is required, and an interpolation ${...} in place
of any value. The params of a component are completed but not checked there.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cogfast.cli.option_table import Group, groups, parameters_of, render
from cogfast.config.components import PLACES, with_defaults
from cogfast.config.sat_classes import TARGETS
from cogfast.config.sat_network import NETWORK_KEY, NETWORK_MODELS, VAE_KEY
from cogfast.config.sat_unused import LOSS_SCALING, NETWORKS, Only, Unused, rules
from cogfast.config.yaml_files import CONFIGS, to_dict
from cogfast.core.values import is_component_schema, json_schema, leaves, show
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.door.load import load_config
from cogfast.door.sections import COMPONENTS, CONDITIONER
from cogfast.train.keys import ModelKeys, TrainKeys

FILE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
SCHEMA = CONFIGS / "cogfast.schema.json"
_REFERENCE = {"$ref": "#/$defs/reference"}


_STARTS = """## Defaults of `cogfast train FOLDER`

`cogfast train FOLDER --data PATH` and `--base MODEL.yaml sft.yaml` begin with the files of `configs/` for the model. These keys have other
values there than the defaults below, which are those of a configuration without these files. "The model's": models differ.

Most runs set some of these: `args.train_iters`, `args.lr`, `args.batch_size`, `args.gradient_accumulation_steps`, `args.lora_alpha`,
`args.save_interval`, `args.keep_last`, `args.eval_interval`, `args.eval_prompts`, `args.eval_num_samples`, `args.latent_cache`, `args.fit`,
`data.params.video_size`, `data.params.max_num_frames` and `data.params.short_clips`.
`python -m scripts.write_options` writes this page from the source.

| key | default | `cogfast train FOLDER` | with `--lora RANK` |
| --- | --- | --- | --- |
"""
_OPTIMIZER = "deepspeed.optimizer.params"
# Keys that the words of the command set
_BY_WORDS = ("args.load", "args.save", "args.train_data", "args.lora_rank", "args.mode")


def page(found: list[Group]) -> str:
    """Return docs/options.md: all keys, and in front of them what `cogfast train FOLDER` sets."""
    introduction, _, rest = render(found).partition("\n## ")
    return f"{introduction}\n{_STARTS}{''.join(_start_rows(found))}\n## {rest}"


def _start_rows(found: list[Group]) -> Iterator[str]:
    plain, lora = _start_values([]), _start_values(["lora.yaml"])
    rows = [(group.title, option) for group in found for option in group.options]
    for title, option in rows:
        # The optimizer's parameters stand in a group of each class, without their section.
        key = (
            f"{_OPTIMIZER}.{option.key}" if title == f"{_OPTIMIZER} of FusedEmaAdam" else option.key
        )
        values = [plain.get(key, []), lora.get(key, [])]
        default = yaml.safe_load(option.default) if option.default else None
        known = (default, option.default)  # YAML reads off as false, and 1e-08 as text
        if key in _BY_WORDS or all(
            one in known or show(one) in known for each in values for one in each
        ):
            continue
        texts = [one if isinstance(one, str) else show(one) for one, *_ in values]
        cells = [
            f"`{text}`" if one[1:] == one[:-1] else "the model's"
            for text, one in zip(texts, values, strict=True)
        ]
        yield f"| `{key}` | `{option.default}` | {' | '.join(cells)} |\n"


def _start_values(files: list[str]) -> dict[str, list[Any]]:
    """Return {key: its values for the models of configs/}, of what is set and of defaults."""
    values: dict[str, list[Any]] = {}
    words = ["args.lora_rank=64", "args.experiment_name=lora"] if files else []
    for model in sorted(CONFIGS.glob("cogvideox*.yaml")):
        paths = [model, *(CONFIGS / name for name in [*files, "sft.yaml"])]
        sections = load_config(paths, words).sections()
        for name, section in sections.items():
            for key, value in leaves(with_defaults(to_dict(section), name, {})).items():
                values.setdefault(f"{name}.{key.replace('# ', '')}", []).append(value)
    return values


def yaml_schema() -> dict[str, Any]:
    """Return the schema of a YAML file."""
    components = {name: _component(name.removesuffix("_config")) for name in COMPONENTS[1:-1]}
    for (key, _), kind in NETWORK_MODELS.items():
        if key == VAE_KEY:
            components["first_stage_config"]["properties"]["params"]["properties"] |= _properties(
                kind
            )
        elif key == NETWORK_KEY:
            components["network_config"] = _node(list(NETWORKS), _properties(kind))
    components["conditioner_config"] = _node(
        [CONDITIONER], {"emb_models": {"type": "array", "items": _component("emb_models")}}
    )
    sections = {
        "model": _section("model", ModelKeys, components),
        "data": _component("data"),
        "args": _section("args", TrainKeys),
        "deepspeed": _section("deepspeed", DeepSpeedKeys, dict.fromkeys(LOSS_SCALING, {})),
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a configuration of cogfast",
        **_mapping(sections),
        "$defs": {"reference": {"type": "string", "pattern": r"\$\{.+\}"}},
    }


def _section(name: str, kind: Any, more: dict[str, Any] | None = None) -> dict[str, Any]:
    known = {**_properties(kind), **(more or {})}
    reasons = {key: rule.why for key, rule in rules(Unused, name).items()}
    reasons |= {key: rule.fix for key, rule in rules(Only, name).items()}
    for key, reason in reasons.items():
        inner = key.partition(".")[2]
        if "." not in inner:
            known[inner] = {"description": f"accepted, not used: {reason}", "deprecated": True}
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


def _mapping(known: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": known, "additionalProperties": False}


def _node(targets: list[str], params: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a component. Classes of the user's own package have other params."""
    target = {"anyOf": [{"enum": sorted(targets)}, {"type": "string"}]}
    known = {"type": ["object", "null"], "properties": params}
    return {"type": ["object", "null"], "properties": {"target": target, "params": known}}


def _component(name: str) -> dict[str, Any]:
    """Return the schema of a component: the classes of its place, and the params of all of them."""
    place, params = PLACES[name], {}
    targets = [*place.paths, *(sat for sat, one in TARGETS.items() if one.path in place.paths)]
    for path in place.paths:
        module, _, class_name = path.rpartition(".")
        if module.startswith("cogfast") and class_name != "video_autoencoder_from_sat":
            params |= _parameters(getattr(importlib.import_module(module), class_name))
    return _node(targets, params)


def _parameters(kind: Any) -> dict[str, Any]:
    found = {}
    for parameter, schema, meaning in parameters_of(kind):
        name = parameter.name
        if is_component_schema(schema):
            found[f"{name}_config"] = {"anyOf": [_component(name), _REFERENCE]}
        else:
            found[name] = _value({"description": meaning, **schema}, schema)
    return found


def main() -> None:
    found = list(groups())
    # A key without a meaning is worth no row: the command fails before it writes.
    missing = [one.key for group in found for one in group.options if not one.meaning]
    if missing:
        raise ValueError(f"nothing describes {', '.join(missing)}; write what they mean")
    FILE.write_text(page(found), encoding="utf-8")
    text = json.dumps(yaml_schema(), indent=1, ensure_ascii=False) + "\n"
    SCHEMA.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

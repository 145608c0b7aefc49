"""The configuration of a run for its page: values by section, their origins, what differs from defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from cogfast.model.weights.formats.checkpoint_manifest import step_of
from cogfast.schema.arguments import ModelArguments, TrainArguments
from cogfast.schema.merged_config import DEFAULT, SECTIONS, find_origin, to_dict
from cogfast.schema.yaml_files import read_yaml

NAME = "training_config.yaml"
_MARKED = re.compile(r"training_config-from-([\w-]+)\.yaml")


@dataclass(frozen=True, slots=True)
class Setting:
    """A key of the configuration. default, origin: None if unknown."""

    key: str
    value: str
    default: str | None
    origin: str | None
    is_set: bool  # it differs from its default, or has none and was given


@dataclass(frozen=True, slots=True)
class Settings:
    """All keys of a run, in the order of its file. changes: {file: lines}, one for each resumption
    that changed keys."""

    sections: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    plain: Mapping[str, object] = field(default_factory=dict)  # dotted key -> value
    changes: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def is_known(self) -> bool:
        return bool(self.plain)

    def get(self, key: str) -> object:
        return self.plain.get(key)

    @property
    def is_lora(self) -> bool:
        has_adapters = any(".lora_config." in key for key in self.plain)
        return has_adapters or self.get("model.lora_train") is True


def read_settings(folder: Path, origins: Mapping[str, str] | None) -> tuple[Settings, list[str]]:
    """Read the configuration of a run and its changes. Returns it with notes about damaged files.

    origins: {dotted key: origin} without defaults; None: unknown, for a run of an older version.
    """
    notes: list[str] = []
    plain: dict[str, object] = {}
    changes: dict[str, list[str]] = {}
    for path in _files(folder):
        try:
            loaded = dict(_leaves(to_dict(read_yaml(path, path.name, is_plain=True))))
        except (ValueError, OmegaConfBaseException) as error:
            notes.append(str(error).splitlines()[0])
            continue
        if plain:
            changes[path.name] = [
                f"{key}: {show(plain.get(key))} → {show(loaded.get(key))}"
                for key in {**plain, **loaded}
                if plain.get(key) != loaded.get(key)
            ]
        plain = loaded
    defaults = _defaults()
    sections: dict[str, list[Setting]] = {}
    for key, value in plain.items():
        section = key.partition(".")[0]
        name = section if section in SECTIONS else "other"
        sections.setdefault(name, []).append(_setting(key, value, defaults, origins))
    return Settings(sections, plain, changes), notes


def _setting(
    key: str, value: object, defaults: Mapping[str, object], origins: Mapping[str, str] | None
) -> Setting:
    origin = None if origins is None else find_origin(origins, key)
    has_default = key in defaults
    if has_default:
        is_set = value != defaults[key]
    elif key.startswith("model."):
        # A YAML file lists every part of the network, most of them as published.
        is_set = origin is not None and not origin.endswith((".yaml", ".yml", DEFAULT))
    else:
        is_set = origin != DEFAULT
    return Setting(key, show(value), show(defaults[key]) if has_default else None, origin, is_set)


def _files(folder: Path) -> list[Path]:
    """Return the configuration of the first start, then those of resumptions, by their steps."""
    first = folder / NAME
    marked = [
        (step, path)
        for path in folder.glob("training_config-from-*.yaml")
        if (match := _MARKED.fullmatch(path.name)) and (step := step_of(Path(match[1]))) is not None
    ]
    return [path for path in (first, *(path for _, path in sorted(marked))) if path.is_file()]


def _defaults() -> dict[str, object]:
    args, model = TrainArguments(), ModelArguments()
    found = {f"args.{f.name}": getattr(args, f.name) for f in fields(args)}
    found |= {f"model.{f.name}": getattr(model, f.name) for f in fields(model)}
    return found


def show(value: object) -> str:
    """Format a value for a reader: JSON, but text without quotes where it cannot be mistaken."""
    if isinstance(value, str) and value and value == value.strip():
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


def _leaves(node: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, value). A list of mappings is taken item by item."""
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = dict(enumerate(node))
    if isinstance(node, dict) and (node or not key):
        for name, value in node.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, node

"""The merged configuration and the origin of each of its values."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import yaml
from omegaconf import DictConfig, OmegaConf

from cogfast.config.yaml_files import to_dict
from cogfast.core.addresses import hint, shown, with_urls
from cogfast.core.keys import SECTIONS, Settings, find_origin, with_origins
from cogfast.core.values import leaves, put

if TYPE_CHECKING:
    from cogfast.train.run.opened import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A merged and checked configuration. A section that no file contains is empty."""

    model: DictConfig
    data: DictConfig
    args: DictConfig
    deepspeed: DictConfig
    origins: dict[str, str]  # dotted key of a value -> file name, "command line" or "default"
    unused: dict[str, str] = field(default_factory=dict)  # accepted key without effect -> reason
    allow_import: tuple[str, ...] = ()  # packages whose classes a target may name

    def sections(self) -> dict[str, DictConfig]:
        """The sections by name, in the order in which they are printed."""
        return dict(zip(SECTIONS, (self.model, self.data, self.args, self.deepspeed), strict=True))

    def to_yaml(self) -> str:
        """Return all sections as YAML; loading it gives the same values."""
        return OmegaConf.to_yaml(with_urls(to_dicts(self)))

    @property
    def run(self) -> Run:
        """The run that the sections describe, each in its type; classes of components are imported."""
        from cogfast.door.run import open_run

        with with_origins(self.origins):
            return open_run(to_dicts(self), self.origins, self.unused, self.allow_import)

    def with_values(self, values: Settings) -> Config:
        """Return the configuration with {dotted key: (value, origin)}, which are not checked again.

        With the origin None, values that are still there keep theirs.
        """
        if not values:
            return self
        sections, origins = to_dicts(self), dict(self.origins)
        for key, (value, origin) in values.items():
            put(sections, key, value)
            kept = leaves(value, key) if origin is None else ()
            below = [name for name in origins if f"{name}.".startswith(f"{key}.")]
            for name in [name for name in below if name not in kept]:
                del origins[name]
            if origin is not None:
                origins[key] = origin
        made = {name: OmegaConf.create(section) for name, section in sections.items()}
        return replace(self, **made, origins=origins)

    def filled(
        self, find: Callable[[dict[str, dict[str, Any]], Mapping[str, str]], Settings]
    ) -> Config:
        """Return the configuration with the settings that `find` returns for plain sections and origins."""
        with with_origins(self.origins):
            return self.with_values(find(to_dicts(self), self.origins))

    def describe(self, complete: Callable[..., Any] = lambda node, *_: node) -> str:
        """Return YAML with the origin of each value as a comment (`--dry-run`); complete: with_defaults."""
        whole = replace(self, origins=dict(self.origins))
        rows: list[tuple[str, str]] = []
        for name, section in self.sections().items():
            rows.append((f"{name}:" if len(section) else f"{name}: {{}}", ""))
            plain = with_urls(complete(to_dict(section), name, whole.origins))
            rows += [("  " + text, origin) for text, origin in whole._rows(plain, (name,))]
        width = min(72, max(len(text) for text, _ in rows))
        lines = [f"{text:<{width}}  # {origin}" if origin else text for text, origin in rows]
        lines += [f"# {key} is accepted and not used: {why}" for key, why in self.unused.items()]
        lines += [f"#{note}" for note in [hint("\n".join(lines))] if note]
        return shown("\n".join(lines) + "\n")

    def _rows(self, node: Mapping, path: tuple[str, ...]) -> Iterator[tuple[str, str]]:
        """Yield the YAML lines of a mapping, each with the origin of its value."""
        for key, value in node.items():
            here = (*path, str(key))
            if isinstance(value, dict) and value:
                yield f"{key}:", ""
                yield from (("  " + text, origin) for text, origin in self._rows(value, here))
            elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
                yield f"{key}:", ""
                for i, item in enumerate(value):
                    for n, (text, origin) in enumerate(self._rows(item, (*here, str(i)))):
                        yield ("    " if n else "  - ") + text, origin
            else:
                yield f"{key}: {_flow(value)}", find_origin(self.origins, ".".join(here))


def to_dicts(config: Config) -> dict[str, dict[str, Any]]:
    """Return all sections, by name."""
    return {name: to_dict(section) for name, section in config.sections().items()}


def move_origin(origins: dict[str, str], old: str, new: str) -> None:
    """Give the key `new` the origin of `old`, whose value moves there."""
    origins[new] = find_origin(origins, old)
    origins.pop(old, None)


def _flow(value: object) -> str:
    """Format a value as one line of YAML."""
    if isinstance(value, str):
        plain = yaml.safe_dump(value, width=10**6).removesuffix("\n").removesuffix("\n...")
        return plain if "\n" not in plain else json.dumps(value)
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).strip().removesuffix("\n...")

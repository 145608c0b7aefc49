"""A class that a configuration names (`target`) with its arguments (`params`), checked and not yet built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cogfast.core.keys import SECTIONS
from cogfast.core.values import KeyProblem

_SECTIONS = tuple(f"{name}." for name in SECTIONS)  # how a message with a key starts
NONE = "torch.nn.Identity"  # upstream's files use it for a component that is left out


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """A class and its arguments."""

    kind: Callable[..., Any]
    arguments: Mapping[str, Any]  # by name; a component, or a list of components, is built first
    key: str  # its dotted key; "" without one
    target: str  # the name that the configuration has for `kind`
    params: Mapping[str, Any]  # as the configuration has them, with SAT's names

    def build(self, **given: object) -> Any:
        """Build the object. given: additional arguments."""
        built = {name: _built(value) for name, value in self.arguments.items()}
        try:
            return self.kind(**built, **given)
        except (TypeError, ValueError) as error:
            if not self.key or str(error).startswith(_SECTIONS):
                raise
            raise KeyProblem(self.key, f"{self.key}: {error}") from error  # --traceback shows where

    def with_param(self, name: str, value: object) -> Component:
        """Return the component with another value of a param, which is not checked."""
        arguments, params = {**self.arguments, name: value}, {**self.params, name: value}
        return replace(self, arguments=arguments, params=params)

    def named(self, name: str) -> str:
        """Return the dotted key of a param."""
        return f"{self.key}.params.{name}"


def is_none(node: Mapping | None) -> bool:
    """Return whether a component is left out of the configuration."""
    return node is None or node["target"] == NONE


def _built(value: Any) -> Any:
    """Return a value with its components built, in mappings and lists of its own.

    A class may change them, and the run keeps its own: it saves them, and builds again.
    """
    if isinstance(value, dict):
        return {key: _built(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_built(inner) for inner in value]
    return value.build() if isinstance(value, Component) else value

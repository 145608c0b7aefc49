"""The parameters of a component's constructor, with their JSON schemas and what they mean."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from cogfast.config.values import json_schema

# Parameters that the assembly of a run fills in
_SET_BY_CODE = ("dtype", "device", "inner", "state", "params", "kernels", "args", "kwargs")


def comments_of(kind: type) -> dict[str, str]:
    """Return {parameter of the constructor, or field of the dataclass: the comment above it}.

    Python drops comments when it compiles, so they are read from the source.
    """
    lines = inspect.getsource(importlib.import_module(kind.__module__)).splitlines()
    tree = ast.parse("\n".join(lines))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    body = next(node for node in classes if node.name == kind.__name__).body
    found: dict[str, str] = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = _above(lines, node.lineno)
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            arguments = [*node.args.args, *node.args.kwonlyargs]
            found |= {one.arg: _above(lines, one.lineno) for one in arguments}
    return found


def _above(lines: Sequence[str], number: int) -> str:
    """Return the comment above a line, whose number counts from 1."""
    first = number - 1
    while lines[first - 1].strip().startswith("#"):
        first -= 1
    text = " ".join(line.strip().removeprefix("#").strip() for line in lines[first : number - 1])
    # Comments speak Python, and readers of the table write YAML.
    return re.sub(r"\bNone\b", "null", text)


def parameters_of(kind: type) -> Iterator[tuple[inspect.Parameter, dict[str, Any], str]]:
    """Yield (parameter, JSON schema, meaning) of a constructor, or of a data set's fields."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("cogfast")]
    meanings: dict[str, str] = {}
    for base in reversed(bases):
        meanings |= comments_of(base)
    call = kind if dataclasses.is_dataclass(kind) else kind.__init__
    # Defaults from the signature, types from the hints: strings in one, objects in the other.
    hints = typing.get_type_hints(call, include_extras=True)
    for name, parameter in inspect.signature(kind).parameters.items():
        if name not in _SET_BY_CODE:
            yield parameter, json_schema(hints[name]), meanings.get(name, "")

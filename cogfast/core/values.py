"""Checks plain values from YAML, JSON and command lines with pydantic, and writes the errors about them.

Types, ranges and unknown keys are checked here alone: `validated` turns a plain value into a type, and
its errors are one line with key, value and rule. `Model` is the base of the models of a section.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
import reprlib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from annotated_types import Interval
from pydantic import BaseModel, ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import SchemaError

from cogfast.core.addresses import shown

# Strict: text is no number and true is no 1. A string below a field is its description.
STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)
_WORDS = {
    "boolean": "true or false",
    "integer": "a whole number",
    "number": "a number",
    "string": "text",
    "null": "null",
    "object": "a mapping",
}
_OF_KEY = ("missing", "extra_forbidden", "unexpected_keyword_argument")
_PROPERTIES = {"target": {"type": "string"}, "params": {"type": "object"}}
_COMPONENT = {"type": "object", "properties": _PROPERTIES, "required": ["target"]}

_MOST_LISTED = 12  # known keys or list items in a message, which must stay one line
_MOST_SHOWN = 100  # characters of a key or a value in a message
_MOST_COMPARED = 200  # characters of a name; difflib takes quadratic time
_MOST_IN_LINE = 380  # characters of a message
_MOST_BITS = 256  # of an integer that is printed in full
OF_TEXTS = "\n\t\u00a0\u202f\u3000\u200c\u200d"  # blanks and joiners in captions of many languages
_brief = reprlib.Repr()  # prints at most six levels with four keys or six items each


class KeyProblem(ValueError):
    """A problem with one dotted `key`. load_config adds the file that set the key."""

    def __init__(self, key: str, text: str):
        # A message stays one line, also for a key of thousands of characters.
        super().__init__(text.replace(key, cut(key)) if len(key) > _MOST_SHOWN else text)
        self.key = key


class Problems(ValueError):
    """Several problems, reported together with one line each."""


def cut(text: str, most: int = _MOST_SHOWN) -> str:
    """Return `text` as it is shown, with `...` for its middle if it has more than `most` characters."""
    text, half = shown(text[: 10**6]), (most - 3) // 2  # first, so that no secret is cut in two
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"


def one_line(text: str) -> str:
    """Join a message to one line. A long one loses its middle, where the user's value is quoted."""
    return cut(" ".join(text.split()), _MOST_IN_LINE)


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: "1 video", "3 videos". plural: if it is not the noun with s."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def join(where: str, key: str) -> str:
    """Return the dotted key of `key` inside `where`."""
    return f"{where}.{key}" if where else key


def unknown_key(where: str, key: str, known: Iterable[str]) -> KeyProblem:
    """Return the error for an unknown key, with the most similar known key as a suggestion."""
    known = sorted(set(known))
    hint = nearest(key, known)
    if not hint and 0 < len(known) <= _MOST_LISTED:
        hint = f"; known keys: {', '.join(known)}"
    return KeyProblem(join(where, key), f"unknown key {join(where, key)}{hint}")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar known name, or an empty string."""
    known = list(known) if len(name) <= _MOST_COMPARED else []
    # 0.6 is difflib's default: a key with a few wrong letters passes, an unrelated one does not.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def nearest_folder(path: Path) -> str:
    """Return `; did you mean X?` for the folder beside `path` with the most similar name, or ""."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    return nearest(path.name, [folder.name for folder in beside if folder.is_dir()])


def check_keys(section: Mapping, known: Collection[str], where: str) -> None:
    """Raise KeyProblem for the first key of `section` that is not in `known`."""
    for key in section:
        if key not in known:
            raise unknown_key(where, str(key), known)


def show(value: object) -> str:
    """Format a value as the user would have written it in YAML, shortened if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        items = [show(item) for item in value[:_MOST_LISTED]]
        return cut(f"[{', '.join(items + ['...'] * (len(value) > _MOST_LISTED))}]")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, str):
        return repr(cut(value))
    try:
        return cut(repr(value) if isinstance(value, int | float) else _brief.repr(shown(value)))
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return f"a {type(value).__name__}"


def printable(text: str, keep: str = "") -> str:
    """Return a text as it is shown, with escapes for characters that a terminal would interpret (control and
    direction characters). keep: characters that are left as they are.
    """
    if (text := shown(text)).isprintable():
        return text
    escaped = lambda c: c.encode("unicode_escape").decode()
    return "".join(c if c.isprintable() or c in keep else escaped(c) for c in text)


def Range(low: float, high: float) -> Interval:
    """A number from `low` to `high`, inclusive: Annotated[int, Range(1, 10)]."""
    return Interval(ge=low, le=high)


class Model(BaseModel):
    """A mapping with these keys and no others."""

    model_config = STRICT | ConfigDict(frozen=True)


class _Schema(GenerateJsonSchema):
    """The JSON schema of a type, in which a class of Python is a component."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def is_instance_schema(self, schema: Any) -> dict[str, Any]:
        return dict(_COMPONENT)

    callable_schema = is_instance_schema


def validated(value: object, kind: Any, where: str = "", text: bytes | str | None = None) -> Any:
    """Return a value from YAML or JSON in its type. where: its dotted key; KeyProblem if it does not fit.

    As in JSON, a list may become a tuple, and a mapping a dataclass. text: the value as JSON.
    """
    try:
        # Only pydantic's mode for JSON takes a list for a tuple where it takes no text for a number.
        if text is None:
            text = json.dumps(value, ensure_ascii=False, default=lambda _: {}).encode()
        return _adapter(kind).validate_json(text, strict=True)
    except UnicodeEncodeError:
        text = f"{where}=" * bool(where) + ascii(show(value))
        raise KeyProblem(where, f"{text} must be valid Unicode") from None
    except ValidationError as error:
        raise problem_of(error, json_schema(kind), value, where) from None


def check_mapping(key: str, value: object) -> Mapping:
    """Return `value`, which must be a mapping. null counts as an empty mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise KeyProblem(key, f"{key}={show(value)} must be a mapping")
    return {} if value is None else value


def problem_of(
    error: ValidationError, schema: dict, value: Any, where: str, is_option: bool = False
) -> KeyProblem:
    """Return pydantic's first error as one line with key, value and rule.

    schema: the JSON schema of the type that `value`, at the key `where`, was checked against.
    is_option: write --key value.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    kind, location = first["type"], first["loc"]
    # A tuple that is too short has a missing item.
    is_of_key = kind in _OF_KEY and isinstance(location[-1], str)
    key, node = where, _resolved(schema, schema)
    for part in location[:-1] if is_of_key else location:
        inner = _inside(node, part, schema)
        if inner is None or not isinstance(value, Mapping | list | tuple):
            break
        key = f"{key}[{part}]" if isinstance(part, int) else join(key, part)
        held: Any = value
        value, node = held[part], inner
    if is_of_key and kind == "missing":
        return KeyProblem(key, f"key {join(key, str(location[-1]))} is missing; set it")
    if is_of_key:
        return unknown_key(key, str(location[-1]), node.get("properties", {}))
    own = str(first.get("ctx", {}).get("error", ""))  # the message of a check of cogfast's
    if kind == "value_error" and own:
        return KeyProblem(key, own)
    rule = describe(node, schema)
    # A value that may be null has its words one level below.
    words = [word for part in node.get("anyOf", [node]) for word in part.get("enum", ())]
    near = nearest(value, map(str, words)) if isinstance(value, str) else ""
    if not rule:  # the type of another package, which pydantic describes
        return KeyProblem(key, f"{key}={show(value)}: {first['msg'][:1].lower()}{first['msg'][1:]}")
    if is_option:
        return KeyProblem(key, f"--{key} {printable(cut(str(value)))}: must be {rule}{near}")
    shown = f"{key}={show(value)}" if key else show(value)
    if only := _only(node):
        return KeyProblem(key, f"{shown}: only {only} is supported; use it")
    parts = re.findall(r"[^\s,x*]+", value) if isinstance(value, str) else []
    items = node.get("items") or {}
    if items.get("type") == "string" and "enum" not in items and isinstance(value, str):
        hint = f"; write [{printable(json.dumps(cut(value), ensure_ascii=False))}]"  # one item
    else:
        is_list = node.get("type") == "array" and len(parts) > 1
        hint = f"; write [{', '.join(map(printable, parts))}]" if is_list else ""
    return KeyProblem(key, f"{shown} must be {rule}{near or hint}")


def describe(node: dict, whole: dict | None = None, most: float = math.inf) -> str:
    """Describe the values that a JSON schema allows. whole: the schema that `node` refers to.

    most: a limit from here on is left out.
    """
    node = _resolved(node, whole or node)
    if "anyOf" in node or "oneOf" in node:
        parts = node.get("anyOf") or node["oneOf"]
        return " or ".join(dict.fromkeys(describe(part, whole, most) for part in parts))
    if "enum" in node or "const" in node:
        values = node.get("enum", [node.get("const")])
        listed = ", ".join(value if isinstance(value, str) else show(value) for value in values)
        return f"one of {listed}" if len(values) > 1 else listed
    if is_component_schema(node):
        return "given as target and params"
    if node.get("type") == "array":
        if "prefixItems" in node:
            items = ", ".join(describe(item, whole, most) for item in node["prefixItems"])
            return f"a list of {len(node['prefixItems'])} ({items})"
        words, longest = "a list", node.get("maxItems")
        if longest is not None:
            words += " of " + "at most " * (longest != node.get("minItems")) + str(longest)
        items = describe(node["items"], whole, most) if node.get("items") else ""
        return f"{words} (each item: {items})" if items else words
    words = _WORDS.get(node.get("type", ""), "")
    if node.get("format") == "path":
        return "a path"
    if "format" in node:
        return f"{words} {node['format']}".strip()
    if "minimum" in node or "maximum" in node:
        low, high = node.get("minimum", -math.inf), node.get("maximum", math.inf)
        if low > -most and high < most:
            return f"{words} from {low:g} to {high:g}"
        return words if low <= -most else f"{words} >= {low:g}"
    return words


def _only(node: dict) -> str:
    """Return the only legal value of a schema; "" if it has several."""
    if "const" in node or node.get("type") == "null":
        return show(node.get("const"))
    if "minimum" in node and node["minimum"] == node.get("maximum"):
        return show(node["minimum"])
    return "[]" if node.get("maxItems") == 0 else ""


def is_component_schema(node: dict) -> bool:
    """Whether a JSON schema takes a mapping with target and params, or null."""
    parts = [part for part in node.get("anyOf", [node]) if part.get("type") != "null"]
    return any(part.get("required") == ["target"] for part in parts)


@functools.cache
def json_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type."""
    return _adapter(kind).json_schema(schema_generator=_Schema)


@functools.cache
def _adapter(kind: Any) -> TypeAdapter:
    # A model and a dataclass have their own configuration.
    for given in (ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True), None):
        with suppress(PydanticUserError, SchemaError):
            return TypeAdapter(kind, config=given)
    return TypeAdapter(Any)  # of another package's constructor, which checks its arguments itself


def _resolved(node: dict, whole: dict) -> dict:
    """Follow a reference inside `whole`. The only choice beside null is the node."""
    while True:
        parts = [part for part in node.get("anyOf", ()) if part.get("type") != "null"]
        if "$ref" in node:
            node = whole["$defs"][node["$ref"].rpartition("/")[2]]
        elif len(parts) == 1 and "$ref" in parts[0]:
            node = parts[0]
        else:
            return node


def _inside(node: dict, part: int | str, whole: dict) -> dict | None:
    """Return the schema of a key or of an item; None if the error is about the whole value."""
    if isinstance(part, int):
        found = node.get("items")
    else:
        found = node.get("properties", {}).get(part, node.get("additionalProperties"))
    if not isinstance(found, dict):
        return None
    if not found:
        return {"additionalProperties": {}}
    found = _resolved(found, whole)
    # A list of numbers is shown whole.
    return None if isinstance(part, int) and found.get("type") not in ("object", "array") else found


def select(node: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings; None if there is none."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def put(node: dict[str, Any], key: str, value: object) -> None:
    """Set the value at a dotted key of nested mappings and lists, and add the mappings that are missing."""
    *path, last = key.split(".")
    inner: Any = node
    for part in path:
        if isinstance(inner, list):
            inner = inner[int(part)]
        else:
            below = inner.get(part)
            inner[part] = inner = {} if below is None else below
    inner[last] = value


def leaves(node: object, key: str = "") -> dict[str, object]:
    """Return {dotted key: value} of plain sections. A list of mappings is taken item by item, another
    list is one value."""
    if isinstance(node, list) and any(isinstance(item, dict) for item in node):
        node = dict(enumerate(node))
    if not isinstance(node, dict):
        return {key: node}
    found: dict[str, object] = {}
    for name, inner in node.items():
        found |= leaves(inner, f"{key}.{name}" if key else str(name))
    return found

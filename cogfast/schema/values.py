"""Checks single keys and values: unknown keys (with a suggestion), and types by annotation."""

from __future__ import annotations

import dataclasses
import difflib
import math
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    Path: "a path",
    type(None): "null",
}
_SEQUENCES = (list, tuple, set, frozenset, Sequence, Collection, Iterable)
_MOST_LISTED = 12  # known keys or list items in a message, which must stay one line
_MOST_SHOWN = 100  # characters of a key or a value in a message
_MOST_COMPARED = 200  # characters of a name; difflib takes quadratic time
_MOST_IN_LINE = 380  # characters of a message
_MOST_BITS = 256  # of an integer that is printed in full
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
    """Replace the middle of `text` by `...` if it has more than `most` characters."""
    half = (most - 3) // 2
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
    text = f"unknown key {join(where, key)}"
    hint = nearest(key, known)
    if hint:
        text += hint
    elif known and len(known) <= _MOST_LISTED:
        text += f"; known keys: {', '.join(known)}"
    return KeyProblem(join(where, key), text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` for the most similar known name, or an empty string."""
    known = list(known) if len(name) <= _MOST_COMPARED else []
    # 0.6 is difflib's default: a key with a few wrong letters passes, an unrelated one does not.
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def check_keys(section: Mapping, known: Collection[str], where: str) -> None:
    """Raise KeyProblem for the first key of `section` that is not in `known`."""
    for key in section:
        if key not in known:
            raise unknown_key(where, str(key), known)


def check_type(key: str, value: object, annotation: object) -> None:
    """Raise KeyProblem if a YAML value does not fit the type annotation."""
    if not fits(value, annotation):
        text = f"{key}={show(value)} must be {describe_type(annotation)}"
        # A size as other programs write it: 64x96 is [64,96].
        sides = value.split("x") if isinstance(value, str) else []
        if len(sides) > 1 and all(side.isdigit() for side in sides):
            text += f"; write {key}=[{','.join(sides)}]"
        raise KeyProblem(key, text)


def check_mapping(key: str, value: object) -> Mapping:
    """Return `value`, which must be a mapping. null counts as an empty mapping."""
    if value is not None and not isinstance(value, Mapping):
        raise KeyProblem(key, f"{key}={show(value)} must be a mapping")
    return {} if value is None else value


def check_fields(section: Mapping, schema: type, where: str) -> None:
    """Check the keys and types of a section against a dataclass."""
    # include_extras keeps the rules of Annotated.
    hints = typing.get_type_hints(schema, include_extras=True)
    known = [f.name for f in dataclasses.fields(schema)]
    check_keys(section, known, where)
    for key, value in section.items():
        check_type(join(where, key), value, hints[key])


def show(value: object) -> str:
    """Format a value as the user would have written it in YAML, shortened if it is long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        shown = [show(item) for item in value[:_MOST_LISTED]]
        return cut(f"[{', '.join(shown + ['...'] * (len(value) > _MOST_LISTED))}]")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of about {int(value.bit_length() * math.log10(2))} digits"
    if isinstance(value, str):
        return repr(cut(value))
    try:
        return cut(repr(value) if isinstance(value, int | float) else _brief.repr(value))
    except ValueError:  # Python refuses to print an integer of thousands of digits
        return f"a {type(value).__name__}"


def printable(text: str, keep: str = "") -> str:
    """Escape the characters that a terminal would interpret (control and direction characters).

    keep: characters that are left as they are.
    """
    if text.isprintable():
        return text
    escaped = (c.encode("unicode_escape").decode() for c in text)
    return "".join(
        c if c.isprintable() or c in keep else e for c, e in zip(text, escaped, strict=True)
    )


def describe_type(annotation: object) -> str:
    """Describe the allowed values of a type annotation for an error message."""
    origin, args = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, Mapping):  # a schema as in json_files
        return "a mapping"
    if origin is None and annotation in _KINDS:
        return _KINDS[annotation]
    if origin is Annotated:  # with rules of json_files
        return " ".join([describe_type(args[0]), *map(str, args[1:])])
    if origin is Literal:
        return "one of " + ", ".join(show(a) if not isinstance(a, str) else a for a in args)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(describe_type(a) for a in args))
    # Messages say "list" throughout: YAML and JSON have no tuples.
    if origin is tuple and args and args[-1] is not Ellipsis:
        return f"a list of {len(args)} ({', '.join(describe_type(a) for a in args)})"
    if annotation in _SEQUENCES or origin in _SEQUENCES:
        return f"a list (each item: {describe_type(args[0])})" if args else "a list"
    if annotation in (dict, Mapping) or origin in (dict, Mapping):
        return "a mapping"
    if dataclasses.is_dataclass(annotation):
        return "a mapping of " + ", ".join(f.name for f in dataclasses.fields(annotation))
    if origin is Callable:
        return "given as target and params"
    return f"a {getattr(annotation, '__name__', annotation)}, given as target and params"


def takes_component(annotation: object) -> bool:
    """Whether a value of this annotation is built from target and params."""
    if get_origin(annotation) in (Union, types.UnionType):
        return any(map(takes_component, get_args(annotation)))
    is_cogfast = isinstance(annotation, type) and annotation.__module__.startswith("cogfast")
    return is_cogfast or get_origin(annotation) is Callable


def fits(value: object, annotation: object) -> bool:
    """Whether a value from YAML or JSON fits a type annotation."""
    origin, args = get_origin(annotation), get_args(annotation)
    # bool is a subclass of int in Python, but `true` is no number in YAML.
    if annotation is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return abs(value) <= sys.float_info.max  # false for NaN; any int compares
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if annotation is Path:
        return isinstance(value, str)
    if isinstance(annotation, Mapping):
        return isinstance(value, Mapping)
    if isinstance(annotation, type) and annotation in _KINDS:
        return isinstance(value, annotation)
    if origin is Annotated:  # with rules of json_files
        return fits(value, args[0]) and all(rule.allows(value) for rule in args[1:])
    if origin is Literal:
        # 1, 1.0 and true are equal in Python and different choices in YAML.
        return any(value == a and type(value) is type(a) for a in args)
    if origin in (Union, types.UnionType):
        return any(fits(value, a) for a in args)
    if annotation in _SEQUENCES or origin in _SEQUENCES:
        return isinstance(value, list | tuple) and _items_fit(value, origin, args)
    if annotation in (dict, Mapping) or origin in (dict, Mapping):
        return isinstance(value, Mapping)
    if dataclasses.is_dataclass(annotation):
        return isinstance(value, Mapping | annotation)
    if takes_component(annotation):  # a component is checked by components.py
        return not isinstance(value, str | int | float | list | dict | None)
    return True  # Any, and classes of other packages, whose constructors check their arguments


def _items_fit(value: Sequence, origin: Any, args: tuple) -> bool:
    if not args:
        return True
    if origin is tuple and args[-1] is not Ellipsis:
        return len(value) == len(args) and all(map(fits, value, args))
    return all(fits(item, args[0]) for item in value)

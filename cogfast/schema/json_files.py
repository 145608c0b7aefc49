"""Reads JSON from untrusted sources: downloaded folders, other tools, damaged files.

The content is checked against a schema before use. Every failure is a ValueError of one line:
file, key, value, rule, fix. A schema is a type:

    bool, int, float, str, None, Any, Literal[...], X | Y, list[X], tuple[X, Y], dict[X, Y]
    Annotated[X, rule]    with an additional rule: Range(low, high), or Inside() for file names
    a dataclass           a mapping -> an instance; unknown keys are ignored
    {key: type}           a mapping -> a dict that keeps unknown keys; NotRequired[type] marks a
                          key that may be absent
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import stat
import types
import typing
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any, NotRequired, Union, get_args, get_origin

from cogfast.schema.values import describe_type, fits, join, show

# Limits. The index of a model with a million tensors is smaller than 64 MiB.
MOST_BYTES = 64 << 20  # of a file
MOST_NESTED = 32  # levels of lists and mappings
_MOST_NAME = 1024  # bytes of a relative path
_MOST_PART = 240  # bytes of one path component; file systems allow 255, and suffixes are added
_MOST_SHOWN = 100  # characters of a value or a key in a message
_AGAIN = "copy it again"


@dataclass(frozen=True, slots=True)
class Range:
    """A number from `low` to `high`, inclusive."""

    low: float
    high: float

    def allows(self, value: float | int) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class Inside:
    """A relative path that stays inside the folder: not absolute, no `..`, no component that is too
    long for file systems."""

    def allows(self, value: str) -> bool:
        # A folder written on one system is read on another: the path must be harmless on both.
        parts = (PurePosixPath(value), PureWindowsPath(value))
        is_rooted = any(path.is_absolute() or path.drive or path.root for path in parts)
        is_up = any(".." in path.parts for path in parts)
        length = lambda text: len(text.encode("utf-8", "surrogatepass"))
        is_long = (
            length(value) > _MOST_NAME or max(map(length, parts[0].parts), default=0) > _MOST_PART
        )
        # "", "." and ".." name folders; a NUL ends a name for the system, not for Python.
        is_name = bool(value.strip(".")) and "\0" not in value
        return is_name and not (is_rooted or is_up or is_long)

    def __str__(self) -> str:
        return "that names a file inside the folder"


Size = Annotated[int, Range(1, 2**24)]  # a width, a length, a number of layers
InsideName = Annotated[str, Inside()]


class _Mismatch(Exception):
    """A value that does not fit its schema. is_near: its basic type fits, but not its rules."""

    def __init__(self, key: str, text: str, is_near: bool) -> None:
        super().__init__(text)
        self.key, self.is_near = key, is_near


def read_json(
    path: str | Path, schema: Any = dict[str, Any], fix: str = _AGAIN, most_bytes: int = MOST_BYTES
) -> Any:
    """Read the file at `path` and return its content as `schema` describes.

    fix: the end of error messages, what the user can do.
    """
    return parse_json(read_limited(path, most_bytes, fix), schema, str(path), fix)


def parse_json(text: bytes | str, schema: Any, where: str, fix: str = _AGAIN) -> Any:
    """Parse JSON text that is part of another file, as read_json does. where: names it in errors."""
    try:
        text = text if isinstance(text, str) else text.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_mapping, parse_constant=_no_number)
        _walk(value)
    except RecursionError:
        text = f"its values are nested more than {MOST_NESTED} levels deep"
        raise _error(where, text, fix) from None
    except UnicodeDecodeError as error:
        raise _error(where, f"damaged: byte {error.start} is not UTF-8 text", fix) from None
    except (
        ValueError
    ) as error:  # JSONDecodeError, integers of too many digits, and the errors of the hooks below
        raise _error(where, f"damaged JSON ({brief(str(error))})", fix) from None
    return check(value, schema, where, fix)


def check(value: object, schema: Any, where: str, fix: str = _AGAIN) -> Any:
    """Check a parsed JSON value against `schema` and convert it. where: names it in errors."""
    try:
        return _checked(value, schema, "")
    except _Mismatch as error:
        raise _error(where, str(error), fix) from None


def read_limited(path: str | Path, most_bytes: int, fix: str = _AGAIN) -> bytes:
    """Read a regular file of at most `most_bytes`.

    ValueError for a larger file, a folder, a pipe (which is opened without blocking), or a file of
    the system that has nothing to read yet, such as /proc/kmsg.
    """
    try:
        # Opening a pipe without a writer would wait forever; for a regular file the flag does nothing.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise _error(str(path), "not a regular file", fix)
            # A byte more than allowed shows a larger file, even one that is still growing.
            content = file.read(most_bytes + 1)
            if content is None:
                raise _error(str(path), "it has no content yet", fix)
    except OSError as error:
        raise _error(str(path), f"cannot be read ({error.strerror})", fix) from None
    if len(content) > most_bytes:
        text = f"larger than {most_bytes} bytes, the limit for this kind of file"
        raise _error(str(path), text, fix)
    return content


def read_name(path: str | Path) -> str:
    """Read a file such as `latest`, whose only text is the name of a file or folder beside it."""
    try:
        name = read_limited(path, _MOST_NAME).decode("utf-8").strip()
    except UnicodeDecodeError:
        raise _error(str(path), "damaged: not UTF-8 text", _AGAIN) from None
    return check(name, InsideName, str(path))


def brief(text: str) -> str:
    """Shorten a value or message to one printable line."""
    # Cut first: the value may have gigabytes.
    text = " ".join(text[: 4 * _MOST_SHOWN].split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."


def _error(where: str, text: str, fix: str) -> ValueError:
    return ValueError(f"{where}: {text}; {fix}")


def _mapping(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Python keeps the last of equal keys; another reader of the file may keep the first.
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"key {brief(twice)} occurs twice")
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _walk(value: object) -> None:
    """Refuse what json accepts: deep nesting, infinite numbers (1e999), unpaired surrogates."""
    # Breadth first with a list per level: recursion would overflow on the nesting it looks for.
    level: list[Any] = [value]
    for depth in itertools.count():
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                if not item.isascii() and any("\ud800" <= c <= "\udfff" for c in item):
                    raise ValueError("a string with an unpaired surrogate")
            elif isinstance(item, float):
                if not math.isfinite(item):
                    raise ValueError("a number beyond the range of floats")
            elif isinstance(item, dict | list):
                if depth == MOST_NESTED:
                    raise RecursionError
                below += item
                below += item.values() if isinstance(item, dict) else ()
        if not below:
            return
        level = below


def _checked(value: Any, schema: Any, key: str) -> Any:
    if isinstance(schema, Mapping):
        return _checked_keys(value, schema, key)
    if dataclasses.is_dataclass(schema):
        return _checked_fields(value, schema, key)
    origin, args = get_origin(schema), get_args(schema)
    if origin is Annotated:
        found = _checked(value, args[0], key)
        if not all(rule.allows(found) for rule in args[1:]):
            raise _mismatch(key, value, schema, is_near=True)
        return found
    if origin in (Union, types.UnionType):
        return _checked_union(value, schema, key)
    if origin is list and isinstance(value, list):
        return [_checked(v, args[0], f"{key}[{i}]") for i, v in enumerate(value)]
    if origin is tuple and isinstance(value, list):
        kinds = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_checked(v, kind, f"{key}[{i}]") for i, (v, kind) in pairs)
    elif origin is dict and isinstance(value, dict):
        return {
            _checked(k, args[0], key): _checked(v, args[1], join(key, brief(k)))
            for k, v in value.items()
        }
    elif fits(value, schema):
        # JSON may write 1 for 1.0; fields of type float get floats.
        return float(value) if schema is float else value
    raise _mismatch(key, value, schema)


def _checked_union(value: Any, schema: Any, key: str) -> Any:
    """Check against the first schema that fits. If none does, report one whose basic type fits."""
    near = None
    for kind in get_args(schema):
        try:
            return _checked(value, kind, key)
        except _Mismatch as error:
            near = error if error.is_near or error.key != key else near
    raise near or _mismatch(key, value, schema)


def _checked_fields(value: Any, schema: Any, key: str) -> Any:
    if not isinstance(value, dict):
        raise _mismatch(key, value, dict)
    hints, given = _hints(schema), {}
    for field in dataclasses.fields(schema):
        if field.name in value:
            place = join(key, field.name)
            given[field.name] = _checked(value[field.name], hints[field.name], place)
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise _Mismatch(key, f"key {join(key, field.name)} is missing", is_near=True)
    return schema(**given)


def _checked_keys(value: Any, schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _mismatch(key, value, dict)
    found = dict(value)
    for name, kind in schema.items():
        is_optional = get_origin(kind) is NotRequired
        if name in value:
            kind = get_args(kind)[0] if is_optional else kind
            found[name] = _checked(value[name], kind, join(key, name))
        elif not is_optional:
            raise _Mismatch(key, f"key {join(key, name)} is missing", is_near=True)
    return found


@functools.cache
def _hints(schema: Any) -> dict[str, Any]:
    return typing.get_type_hints(schema, include_extras=True)


def _mismatch(key: str, value: object, schema: Any, is_near: bool = False) -> _Mismatch:
    rule, shown = describe_type(schema), brief(show(value))
    text = f"{brief(key)}={shown} must be {rule}" if key else f"{shown} must be {rule}"
    return _Mismatch(key, text, is_near)

"""Reads JSON from untrusted sources: downloaded folders, other tools, damaged files.

The content is checked against a type before use (values.py). Every failure is a ValueError of
one line: file, key, value, rule, fix. A dataclass ignores unknown keys; `keys` makes the type of a
mapping that keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Annotated, Any

from annotated_types import Predicate
from pydantic import ConfigDict, FailFast, WithJsonSchema
from pydantic_core import from_json
from typing_extensions import TypedDict  # that of Python 3.11 cannot be read by pydantic

from cogfast.core.files import LFS, is_lfs_pointer, read_limited
from cogfast.core.values import KeyProblem, Range, cut, printable, validated

# Limit. The index of a model with a million tensors is smaller than 64 MiB.
MOST_BYTES = 64 << 20  # of a file
_MOST_NAME = 1024  # bytes of a relative path
_MOST_PART = 240  # bytes of one path component; file systems allow 255, and suffixes are added
_MOST_SHOWN = 100  # characters of a value or a key in a message
_AGAIN = "copy it again"


def is_inside(value: str) -> bool:
    """Whether a relative path stays inside its folder: not absolute, no `..`, and no component that is
    too long for file systems."""
    # A folder written on one system is read on another: the path must be harmless on both.
    parts = (PurePosixPath(value), PureWindowsPath(value))
    is_rooted = any(path.is_absolute() or path.drive or path.root for path in parts)
    is_up = any(".." in path.parts for path in parts)
    length = lambda text: len(text.encode("utf-8", "surrogatepass"))
    is_long = length(value) > _MOST_NAME or max(map(length, parts[0].parts), default=0) > _MOST_PART
    # "", "." and ".." name folders; a NUL ends a name for the system, not for Python.
    return bool(value.strip(".")) and "\0" not in value and not (is_rooted or is_up or is_long)


Size = Annotated[int, Range(1, 2**24)]  # a width, a length, a number of layers
InsideName = Annotated[
    str,
    Predicate(is_inside),
    WithJsonSchema({"type": "string", "format": "that names a file inside the folder"}),
]
# An error of each of a million entries would fill the memory.
InsideNames = Annotated[dict[str, InsideName], FailFast()]


def keys(kinds: Mapping[str, Any]) -> Any:
    """Return the type of a mapping with these keys, and others, which are kept as they are.

    NotRequired[...] marks a key that may be absent.
    """
    make: Any = TypedDict  # a type checker wants the keys written out
    made = make("made", dict(kinds))
    made.__pydantic_config__ = ConfigDict(extra="allow", allow_inf_nan=False)
    return made


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
        value = from_json(text, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # 1e999 was read as infinity
    except ValueError as error:
        if is_lfs_pointer(where):
            raise ValueError(f"{where}: {LFS}") from None
        raise _error(where, f"damaged JSON ({brief(str(error))})", fix) from None
    return check(value, schema, where, fix, text)


def check(
    value: object, schema: Any, where: str, fix: str = _AGAIN, text: bytes | str | None = None
) -> Any:
    """Check a parsed JSON value against a type and convert it. where: names it in errors.

    text: that of the value, if there is one.
    """
    try:
        return validated(value, schema, text=text)
    except KeyProblem as error:
        line = printable(" ".join(str(error).removesuffix("; set it").split()))
        raise _error(where, line, fix) from None


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
    return cut(printable(" ".join(cut(text, 4 * _MOST_SHOWN).split())), _MOST_SHOWN)


def _error(where: str, text: str, fix: str) -> ValueError:
    return ValueError(f"{where}: {text}; {fix}")

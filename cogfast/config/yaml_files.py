"""Reads YAML that may be damaged or hostile, and bounds what its interpolations ${...} grow to.

OmegaConf reads aliases (*name) and interpolations without a limit: a file of a kilobyte can name a
terabyte. Sizes are therefore counted before OmegaConf copies or resolves anything.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cogfast.core.files import read_limited
from cogfast.core.values import KeyProblem, cut, one_line

CONFIGS = Path(__file__).resolve().parents[1] / "configs"  # the package's own files
# Upstream's files mark paths that the user must fill in: "{your CogVideoX SAT folder}/transformer".
PLACEHOLDER = re.compile(r"\{your [^}]*\}")
_MOST_BYTES = 2**19  # of a file
_MOST_NESTED = 50  # levels of a file
_MOST_VALUES = 10**5  # of a file with its aliases, or of a configuration with its interpolations
_CHARACTERS = 10  # of a text that count as one more value
_PER_REFERENCE = 10  # values that one interpolation counts as: resolving it takes longer
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_MARK = "${"
_INNER = "has an interpolation ${...} that is nested or not closed; write the value instead"
_OF_RUN = "is an interpolation, but a run's file has resolved values only; write one"
_PART = "which is an interpolation itself; refer to the key that it stands for"


def read_yaml(path: Path, name: str, is_plain: bool = False) -> DictConfig:
    """Read the mapping in a file, without resolving it. ValueError of one line for anything else.

    name: for messages. is_plain: refuse interpolations, as in a run's own file: its values were
    resolved when it was written, and a downloaded file must not read the environment.
    """
    content = read_limited(path, _MOST_BYTES, "give a YAML file")
    try:
        text = content.decode("utf-8")
        check_nesting(text)
        loaded = OmegaConf.load(io.StringIO(text))
        if isinstance(loaded, DictConfig):
            check_interpolations(loaded, is_plain)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{name}{line}: not valid YAML: {what}") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{name}: {error.full_key}: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a text file in UTF-8; give a YAML file") from None
    except OSError as error:  # OmegaConf's where the whole file is one number
        raise ValueError(f"{name}: cannot be read: {error}; give a YAML file") from None
    except KeyProblem as error:
        raise ValueError(one_line(f"{name}: {error}")) from None
    # Dates, say, and what check_nesting refuses.
    except (ValueError, ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(one_line(f"{name}: a value cannot be read: {error}")) from None
    if isinstance(loaded, ListConfig):
        text = f"{name}: must be a mapping with sections model, data, args or deepspeed, not a list"
        raise ValueError(text)
    return loaded


def to_dict(section: DictConfig) -> dict[str, Any]:
    """Return a section as dicts, lists and plain values, with interpolations resolved."""
    # A cast: OmegaConf types the result as whatever any of its nodes can hold.
    return cast(dict[str, Any], OmegaConf.to_container(section, resolve=True))


def check_nesting(text: str) -> None:
    """Raise ValueError for YAML that nests deeply, contains itself, or grows by its aliases."""
    sizes: dict[int, int] = {}

    def count(node: yaml.Node, above: tuple[int, ...]) -> int:
        # A node above itself is an alias inside its own anchor.
        if id(node) in above or len(above) > _MOST_NESTED:
            text = f"nested more than {_MOST_NESTED} levels deep; a configuration needs 12"
            raise ValueError(text)
        if id(node) not in sizes and not isinstance(node, yaml.ScalarNode):
            here, parts = (*above, id(node)), node.value
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            sizes[id(node)] = 1 + sum(count(part, here) for part in parts)
        size = sizes.get(id(node), 1)
        if size > _MOST_VALUES:
            raise ValueError(f"more than {_MOST_VALUES} values once aliases (*name) are expanded")
        return size

    try:
        # compose builds nodes only: an alias is the same node again, however often it is named.
        try:
            root = yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        except yaml.YAMLError:
            # It takes 15 times as long, and its errors say more.
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            count(root, ())
    except RecursionError:
        text = f"nested more than {_MOST_NESTED} levels deep; a configuration needs 12"
        raise ValueError(text) from None


def check_plain(sections: object, why: str = _OF_RUN) -> None:
    """Raise KeyProblem for an interpolation, as in a configuration that a run has stored."""
    for path, text in _texts(_as_mappings(sections), ()):
        if _MARK in text:
            key = ".".join(path)
            raise KeyProblem(key, f"{key}={cut(text)!r} {why}")


def check_interpolations(config: DictConfig, is_plain: bool = False) -> None:
    """Raise KeyProblem if the values of `config` are too many or too long once they are resolved.

    is_plain: or if it has interpolations. Undefined names and circular references are left to OmegaConf,
    which stops at the first.
    """
    raw = _as_mappings(OmegaConf.to_container(config, resolve=False))
    if is_plain:
        check_plain(raw)
    for path, text in _texts(raw, ()):
        if _MARK in _REFERENCE.sub("", text):
            key = ".".join(path)
            raise KeyProblem(key, f"{key}={cut(text)!r} {_INNER}")
    sizes: dict[tuple[str, ...], int] = {}

    def size(node: object, path: tuple[str, ...]) -> int:
        """Return an upper bound of the number of values below `node` once they are resolved."""
        if path in sizes:
            return sizes[path]
        sizes[path], total = 0, 1  # 0: a circle, which OmegaConf refuses
        if isinstance(node, dict):
            total += sum(size(value, (*path, key)) for key, value in node.items())
        elif isinstance(node, str):
            total += len(node) // _CHARACTERS
            for target in _targets(node, path):
                found, place = _find(raw, target)
                if place != target and isinstance(found, str) and _MARK in found:
                    key, other = ".".join(path), ".".join(place)
                    raise KeyProblem(
                        key, f"{key}={cut(node)!r} names a part of {cut(other)}, {_PART}"
                    )
                total += _PER_REFERENCE + size(found, place)
        if total > _MOST_VALUES:
            key = ".".join(path)
            text = f"{key or 'the configuration'} has more than {_MOST_VALUES} values"
            raise KeyProblem(key, f"{text} once ${{...}} are resolved; write the values instead")
        sizes[path] = total
        return total

    size(raw, ())


def _as_mappings(node: object) -> object:
    """Convert lists to mappings by index, and keys to text, as interpolations refer to them."""
    if not isinstance(node, dict | list):
        return node
    pairs = node.items() if isinstance(node, dict) else enumerate(node)
    named = {str(key): _as_mappings(value) for key, value in pairs}
    if len(named) < len(node):
        raise ValueError("a key occurs both as text and as a number; keys must be text")
    return named


def _texts(node: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(node, str):
        yield path, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _texts(value, (*path, key))


def _targets(text: str, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the paths that interpolations in a text at `path` may read; a resolver's arguments, too."""
    for inner in _REFERENCE.findall(text):
        for name in inner.partition(":")[2].split(",") if ":" in inner else [inner]:
            name = name.strip(" '\"")
            num_dots = len(name) - len(name.lstrip("."))
            above = path[:-num_dots] if num_dots else ()
            yield (*above, *re.findall(r"[^.\[\]]+", name))


def _find(root: object, path: tuple[str, ...]) -> tuple[object, tuple[str, ...]]:
    """Return the node at `path` and its path, or those of a text on the way, perhaps an interpolation."""
    node = root
    for depth, part in enumerate(path):
        if not isinstance(node, dict):
            return node, path[:depth]
        node = node.get(part)
    return node, path

"""Configuration: load, merge, override, check every key, build objects from target/params.

The files are SAT's YAML: sections `model`, `data`, `args` and `deepspeed`; of several files the
later wins, and `key=value` words of the command line win over all. Every value keeps its origin.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cogfast.schema.components import instantiate, resolve
from cogfast.schema.config import COMMAND_LINE, SECTIONS, Config, find_origin
from cogfast.schema.sections import check_sections, complete_sections
from cogfast.schema.values import KeyProblem, cut, one_line

__all__ = ["Config", "data_arguments", "instantiate", "load_config", "resolve"]

_MOST_BYTES = 2**19  # of a file
_MOST_NESTED = 50  # levels of a file
_MOST_VALUES = 10**5  # of a file, those of aliases included
_OMEGACONF_ERRORS = (
    OmegaConfBaseException,
    ValueError,
    IndexError,
    TypeError,
    AttributeError,
    KeyError,
    AssertionError,
    RecursionError,
)


def load_config(
    paths: Sequence[str | Path],
    overrides: Sequence[str] = (),
    allow_import: Sequence[str] = (),
) -> Config:
    """Merge the YAML files and the `key=value` overrides, and check every key of the result.

    Targets are those of component_places.py, and classes that a package of `allow_import` defines.
    """
    origins: dict[str, str] = {}
    merged = OmegaConf.create({})
    for path, name in zip(paths, _file_names(paths), strict=True):
        loaded = _read_yaml(Path(path), name)
        _forget_replaced(origins, loaded)
        origins.update(dict.fromkeys(_leaf_keys(loaded), name))
        try:
            merged = OmegaConf.merge(merged, loaded)
        except _OMEGACONF_ERRORS as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(one_line(f"{name}: cannot be merged: {what}")) from None
    for word in overrides:
        _override(merged, word, origins)
    try:
        for key in OmegaConf.missing_keys(merged):
            raise KeyProblem(key, f"{key} has no value (???)")
        plain = OmegaConf.to_container(merged, resolve=True)
        complete_sections(plain, origins)
        unused = check_sections(plain, origins, tuple(allow_import))
    except OmegaConfBaseException as error:
        key, what = error.full_key, str(error).splitlines()[0]
        raise ValueError(one_line(f"{find_origin(origins, key)}: {key}: {what}")) from None
    except RecursionError:
        text = "an interpolation ${...} refers to itself, or values nest too deeply"
        raise ValueError(f"{paths[-1] if paths else COMMAND_LINE}: {text}") from None
    except KeyProblem as problem:
        text = f"{find_origin(origins, problem.key)}: {problem}"
        raise ValueError(one_line(text)) from None
    sections = {name: OmegaConf.create(plain.get(name) or {}) for name in SECTIONS}
    return Config(**sections, origins=origins, unused=unused, allow_import=tuple(allow_import))


def data_arguments(config: Config) -> dict[str, object]:
    """The arguments of the data set, in our names whoever's the section has; {} without one."""
    return resolve(config.data, config.allow_import)[1] if config.data else {}


class _Refused(Exception):
    """What is wrong with a text of YAML."""


def _check_nesting(text: str) -> None:
    """Refuse YAML that nests deeply, holds itself, or grows by its aliases."""
    sizes: dict[int, int] = {}

    def count(node: yaml.Node, above: tuple[int, ...]) -> int:
        if id(node) in above or len(above) > _MOST_NESTED:
            raise _Refused(f"it nests deeper than {_MOST_NESTED} levels; sections need 12")
        if id(node) not in sizes and not isinstance(node, yaml.ScalarNode):
            here, parts = (*above, id(node)), node.value
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            sizes[id(node)] = 1 + sum(count(part, here) for part in parts)
        size = sizes.get(id(node), 1)
        if size > _MOST_VALUES:
            raise _Refused(f"it has more than {_MOST_VALUES} values, by its aliases (*name)")
        return size

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is not None:
            count(root, ())
    except RecursionError:
        raise _Refused(f"it nests deeper than {_MOST_NESTED} levels; sections need 12") from None


def _read_yaml(path: Path, name: str) -> DictConfig:
    if not path.is_file():
        raise ValueError(f"--base {path}: no such file")
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise ValueError(f"{name}: larger than {_MOST_BYTES} bytes, so it is no configuration")
        text = path.read_text(encoding="utf-8")
        _check_nesting(text)
        loaded = OmegaConf.load(io.StringIO(text))
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f" line {where.line + 1}" if where else ""
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ValueError(f"{name}{line}: not valid YAML: {what}") from None
    except OmegaConfBaseException as error:
        raise ValueError(f"{name}: {error.full_key}: {str(error).splitlines()[0]}") from None
    except UnicodeDecodeError:
        raise ValueError(f"{name}: not a text file") from None
    except OSError as error:  # also where the whole file is one number
        raise ValueError(f"{name}: cannot be read: {error}") from None
    except _Refused as error:
        raise ValueError(f"{name}: {error}") from None
    except (ValueError, ArithmeticError, AttributeError, TypeError) as error:  # dates, say
        if str(error).startswith(f"{name}: "):
            raise
        raise ValueError(one_line(f"{name}: a value cannot be read: {error}")) from None
    if isinstance(loaded, ListConfig):
        raise ValueError(f"{name}: holds a list; sections {', '.join(SECTIONS)} are expected")
    return loaded


def _file_names(paths: Sequence[str | Path]) -> list[str]:
    """Short names of the files; the whole path where two files are called the same."""
    short = [Path(path).name for path in paths]
    return [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]


def _leaf_keys(node: DictConfig, prefix: str = "") -> Iterator[str]:
    """Dotted keys of all values; a list counts as one value since merging replaces it whole."""
    for key in node:
        child = node._get_node(key)  # the node, not its value: interpolations stay unresolved
        if isinstance(child, DictConfig) and not child._is_none() and len(child):
            yield from _leaf_keys(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _forget_replaced(origins: dict[str, str], loaded: DictConfig) -> None:
    """Drop origins of values inside what `loaded` replaces by a plain value or a list."""
    for key in _leaf_keys(loaded):
        for old in [name for name in origins if name.startswith(key + ".")]:
            if OmegaConf.select(loaded, key) != {}:
                del origins[old]


def _override(merged: DictConfig, word: str, origins: dict[str, str]) -> None:
    """Apply one `key=value` word; the value is read as YAML, or as text where it is none."""
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ValueError(f"command line: {cut(word)!r} is not key=value")
    try:
        # a comment or a second line would get lost
        is_text = not text or text.startswith("#") or " #" in text or "\n" in text
        _check_nesting("" if is_text else text)
        value = text if is_text else OmegaConf.create(f"value: {text}")._get_node("value")
    except (yaml.YAMLError, OmegaConfBaseException):
        value = text
    except (_Refused, ValueError, ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(one_line(f"command line: {cut(key)} cannot be set: {error}")) from None
    try:
        OmegaConf.update(merged, key, value, merge=True, force_add=True)
    except _OMEGACONF_ERRORS as error:  # what OmegaConf raises for keys that it cannot read
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(one_line(f"command line: {cut(key)} cannot be set: {what}")) from None
    dotted = key.replace("[", ".").replace("]", "")
    for old in [name for name in origins if name.startswith(dotted + ".")]:
        del origins[old]
    if isinstance(value, DictConfig):
        origins.update({f"{dotted}.{leaf}": COMMAND_LINE for leaf in _leaf_keys(value)})
    origins[dotted] = COMMAND_LINE

"""Configuration: load, merge, override, check every key, build objects from target/params.

The files are SAT's YAML with sections `model`, `data`, `args` and `deepspeed`. A later file
overrides an earlier one, and `key=value` arguments of the command line override all files. The
file that each value came from is kept for error messages.
"""

from __future__ import annotations

import difflib
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cogfast.config.yaml_files import (
    CONFIGS,
    check_interpolations,
    check_nesting,
    check_plain,
    read_yaml,
    to_dict,
)
from cogfast.core.addresses import CACHE_VARIABLE, check_address, is_url
from cogfast.core.keys import COMMAND_LINE, DEFAULT, SECTIONS, find_origin
from cogfast.core.values import KeyProblem, Problems, cut, leaves, one_line, show
from cogfast.door.deepspeed_keys import fold
from cogfast.door.merged_config import Config
from cogfast.door.sections import check_sections, complete_sections
from cogfast.train.keys import TrainKeys

_COMMAND_KEY = TrainKeys.key("eval_command")
# Files and folders that are not read from an object store
_LOCAL_KEYS = [
    f"args.{name}"
    for name in ["eval_prompt_file", "eval_images", "input_file", "output_dir", "local_cache"]
]
# OmegaConf raises all of these for input that it cannot merge.
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
    is_of_run: bool = False,
    settings: Mapping[str, tuple[object, str]] | None = None,
) -> Config:
    """Merge the YAML files and the `key=value` overrides, and check every key of the result.

    A `target` may name the classes listed in config/components.py and classes that a package in
    `allow_import` defines. is_of_run: the files belong to a run to sample, perhaps downloaded: interpolations
    in them are refused, and classes that only training needs are left out. settings: {dotted key: (value,
    origin)}, applied between files and overrides, but for keys of a user's own file that no option sets; a
    mapping among them replaces the files' one. Raises ValueError with file, key, value and fix.
    """
    origins: dict[str, str] = {}
    merged: DictConfig = OmegaConf.create({})
    stored = next(filter(is_url, map(str, paths)), None)
    if stored is not None:
        raise ValueError(f"--base {stored}: must be a path of this machine; give one")
    missing = [path for path in paths if not _locate(path).is_file()]
    if missing:
        raise Problems("\n".join(one_line(f"--base {path}: {_near(path)}") for path in missing))
    paths = [_locate(path) for path in paths]
    short = [path.name for path in paths]
    # For messages; the whole path if two files have the same name
    names = [n if short.count(n) == 1 else str(p) for n, p in zip(short, paths, strict=True)]
    for path, name in zip(paths, names, strict=True):
        loaded = _without_empty_sections(read_yaml(path, name, is_plain=is_of_run), name)
        _set_origins(origins, dict(_leaves(loaded)), name)
        try:
            whole = OmegaConf.merge(merged, loaded) if merged else loaded
            assert isinstance(whole, DictConfig), "two mappings merge to a mapping"
            merged = whole
            check_interpolations(merged)
        except _OMEGACONF_ERRORS as error:
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(one_line(f"{name}: cannot be merged: {what}")) from None
    ignored = _ignored_of_files(merged, origins)
    own = {n for path, n in zip(paths, names, strict=True) if CONFIGS not in path.parents}
    for key, (value, origin) in (settings or {}).items():
        # A user's own file counts more than the folder's, and an option more than both.
        if not (is_of_run or origin.startswith("--")) and origins.get(key) in own:
            continue
        _set(merged, key, value, origins, origin, merge=False)
    for override in overrides:
        _override(merged, override, origins)
    try:
        if overrides or settings:
            check_interpolations(merged)
        for key in OmegaConf.missing_keys(merged):
            raise KeyProblem(key, f"{key} has no value (???); set it in a file or with {key}=VALUE")
        plain = to_dict(merged)
        # OmegaConf would resolve it a second time.
        check_plain(plain, "contains ${ once it is resolved; remove it")
        complete_sections(plain, origins)
        _check_addresses(plain)
        unused = check_sections(plain, tuple(allow_import), is_of_run) | fold(plain, origins, names)
    except OmegaConfBaseException as error:
        key, what = error.full_key or "", str(error).splitlines()[0]
        raise ValueError(one_line(f"{find_origin(origins, key)}: {key}: {what}")) from None
    except RecursionError:
        text = "an interpolation ${...} refers to itself, or values nest too deeply"
        raise ValueError(f"{paths[-1] if paths else COMMAND_LINE}: {text}") from None
    except KeyProblem as problem:
        text = f"{find_origin(origins, problem.key)}: {problem}"
        raise ValueError(one_line(text)) from None
    sections = {name: OmegaConf.create(plain.get(name) or {}) for name in SECTIONS}
    unused |= _without_effect(plain["args"])
    unused |= {key: why for key, why in ignored.items() if origins[key] == DEFAULT}
    if (cache := sections["args"].get("local_cache")) is not None:
        os.environ[CACHE_VARIABLE] = cache  # for all processes of the run
    return Config(**sections, origins=origins, unused=unused, allow_import=tuple(allow_import))


# {key of args: the schedules that read it}
_OF_SCHEDULES = {
    "min_lr_ratio": ("linear", "cosine", "cosine_with_restarts", "polynomial"),
    "lr_num_cycles": ("cosine_with_restarts",),
    "lr_power": ("polynomial",),
    "lr_decay_style": ("sat",),
    "lr_decay_iters": ("sat",),
    "lr_decay_ratio": ("sat",),
}
_OF_EVALUATIONS = ("valid_data", "eval_prompts", "eval_prompt_file", "eval_images", "eval_command")


def _without_effect(args: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of args that training does not read because of other keys, with the reason."""
    found, defaults = {}, TrainKeys()
    if args["mode"] == "inference":
        return {}
    for name, schedules in _OF_SCHEDULES.items():
        if args[name] != getattr(defaults, name) and args["lr_schedule"] not in schedules:
            found[f"args.{name}"] = f"args.lr_schedule={args['lr_schedule']} does not read it"
    if not (args["eval_interval"] or args["eval_at_start"] or args["eval_at_end"]):
        why = "the run has no evaluations; set args.eval_interval"
        found |= {f"args.{name}": why for name in _OF_EVALUATIONS if args[name]}
    if args["keep_best"] and not args["save_interval"]:
        found["args.keep_best"] = "only the last checkpoint is saved; set args.save_interval"
    return found


def _check_addresses(plain: dict[str, Any]) -> None:
    """Raise KeyProblem for an address that would be read as a path, or is given in place of one."""
    for key, value in leaves(plain).items():
        for text in value if isinstance(value, list) else [value]:
            if not isinstance(text, str):
                continue
            if key in _LOCAL_KEYS and is_url(text):
                raise KeyProblem(
                    key, f"{key}={cut(text)}: must be a path of this machine; give one"
                )
            try:
                check_address(text)
            except ValueError as error:
                raise KeyProblem(key, f"{key}={error}") from None


def _locate(path: str | Path) -> Path:
    """Return `path`, or cogfast's own file for a missing `sft.yaml`, `control.yaml` or `configs/sft.yaml`."""
    path = Path(path)
    file = next(CONFIGS.rglob(path.name), None) if path.suffix == ".yaml" else None
    if file is None or path.exists():
        return path
    return file if path in (Path(file.name), "configs" / file.relative_to(CONFIGS)) else path


def _near(path: str | Path) -> str:
    """Return what an error says of a missing file: similar names beside it and among cogfast's."""
    path = Path(path)
    known = {file.stem: file.name for file in sorted(CONFIGS.rglob("*.yaml"))}
    known |= {file.stem: str(file) for file in path.parent.glob("*.yaml")}
    near = difflib.get_close_matches(path.stem, known)
    if near:
        return f"no such file; did you mean {' or '.join(known[name] for name in near)}?"
    return "no such file; give the path of a YAML file"


def _without_empty_sections(loaded: DictConfig, name: str) -> DictConfig:
    """Return a file's mapping without sections that have no key, such as one with comments alone.

    Merged, they would remove that section of the files below.
    """
    for section in SECTIONS:
        node = loaded._get_node(section)
        if not isinstance(node, Node):
            continue
        if node._is_none():
            del loaded[section]
        elif not isinstance(node, DictConfig):
            raise ValueError(f"{name}: {section}={show(node._value())} must be a mapping")
    return loaded


def _ignored_of_files(merged: DictConfig, origins: dict[str, str]) -> dict[str, str]:
    """Remove what only the command line may set, since a file may have been downloaded with a run.

    Returns {key: reason}.
    """
    key, args = _COMMAND_KEY, merged._get_node("args")
    name = key.removeprefix("args.")
    node = args._get_node(name) if isinstance(args, DictConfig) else None
    if not isinstance(args, DictConfig) or not isinstance(node, Node) or node._is_none():
        return {}
    del args[name]
    # A mapping has the origins of its values.
    names = [each for each in origins if f"{each}.".startswith(f"{key}.")]
    file = [origins.pop(each) for each in names][-1]
    return {key: f"{file} sets it, but a command runs only if the command line gives it"}


def _leaves(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (dotted key, node) of all values. A list is one value, since merging replaces it whole."""
    for key in node:
        child = node._get_node(key)  # the node, not its value: interpolations stay unresolved
        if isinstance(child, DictConfig) and not child._is_none() and len(child):
            yield from _leaves(child, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", child


def _set_origins(origins: dict[str, str], leaves: Mapping[str, object], source: str) -> None:
    """Record that `source` set these values, and forget the origins of the values they replace."""
    for key, value in leaves.items():
        inner = [name for name in origins if name.startswith(key + ".")]
        # An empty mapping (a leaf that is a DictConfig) replaces nothing in another mapping.
        if inner and isinstance(value, DictConfig) and not value._is_none():
            continue
        # A value that was replaced by a mapping has no origin either.
        for old in (*inner, *_parents(key)):
            origins.pop(old, None)
        origins[key] = source


def _parents(key: str) -> Iterator[str]:
    """Yield "a.b" and "a" for "a.b.c". Stop below a list, whose other items keep its origin."""
    while "." in key:
        key, _, name = key.rpartition(".")
        if name.isdigit():
            return
        yield key


def _override(merged: DictConfig, override: str, origins: dict[str, str]) -> None:
    """Apply one `key=value` argument. The value is parsed as YAML; if that fails, it is text."""
    origin, (key, equals, text) = COMMAND_LINE, override.partition("=")
    if not equals or not key:
        raise ValueError(f"{origin}: {cut(override)!r} is not key=value")
    if re.search(r"[][]", re.sub(r"\[[^][]+\]", "", key)):
        raise ValueError(f"{origin}: {cut(key)!r} is not a key: a bracket has no partner")
    try:
        # YAML would drop a comment and everything after the first line; keep such a value as text.
        is_text = not text or text.startswith("#") or " #" in text or "\n" in text
        check_nesting("" if is_text else text)
        # The node, not its value: interpolations stay unresolved.
        value = (
            text if is_text else DictConfig(OmegaConf.create(f"value: {text}"))._get_node("value")
        )
    except (yaml.YAMLError, OmegaConfBaseException):
        # YAML does not read [s3://bucket/s-{000..099}.tar].
        is_list = text.startswith("[") and text.endswith("]")
        value = [item.strip() for item in text[1:-1].split(",")] if is_list else text
    except (ValueError, ArithmeticError, AttributeError, TypeError) as error:
        raise ValueError(one_line(f"{origin}: {cut(key)} cannot be set: {error}")) from None
    if key in ("args.train_data", "args.valid_data") and origins.get(key) == origin:
        text = "%s is given twice, and only the last one counts: %s; give one list, in quotes, since a shell expands {..}"
        logging.getLogger(__name__).info(text, key, show(value))
    # The check takes 10 ms; load_config checks the whole once more after the last override.
    _set(merged, key, value, origins, origin, is_checked="${" in text)


def _set(
    merged: DictConfig,
    key: str,
    value: object,
    origins: dict[str, str],
    origin: str,
    merge: bool = True,
    is_checked: bool = False,
) -> None:
    """Set one dotted key and its origin. is_checked: check the interpolations after it."""
    # Keys that are set after it would begin an empty section.
    if key in SECTIONS and not isinstance(value, dict | DictConfig):
        given = value._value() if isinstance(value, Node) else value
        raise ValueError(f"{origin}: {key}={show(given)} must be a mapping")
    try:
        value = OmegaConf.create(value) if isinstance(value, dict | list) else value
        OmegaConf.update(merged, key, value, merge=merge, force_add=True)
        if is_checked:
            check_interpolations(merged)
    except _OMEGACONF_ERRORS as error:
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(one_line(f"{origin}: {cut(key)} cannot be set: {what}")) from None
    dotted = key.replace("[", ".").replace("]", "")
    inner: dict[str, object] = {}
    if isinstance(value, DictConfig) and len(value):
        inner = {f"{dotted}.{name}": node for name, node in _leaves(value)}
    _set_origins(origins, inner or {dotted: value}, origin)

"""Writes docs/options.md, the table of all keys: `python -m cogfast.cli.option_table`.

A key's name, type and default come from the dataclass, the constructor or the mapping of types that
checks it. Its meaning is the comment above it in that place's source. A test compares the file with
what this module writes, and fails for a key without a meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from cogfast.data.datasets import ListedVideos, VideoList, VideoShards
from cogfast.model.autoencoder import video_autoencoder_from_sat
from cogfast.model.config import TransformerConfig
from cogfast.schema import deepspeed_keys, sat_network
from cogfast.schema.arguments import ModelArguments, TrainArguments
from cogfast.schema.json_files import Range
from cogfast.schema.places import PLACES
from cogfast.schema.sat_classes import TARGETS
from cogfast.schema.sat_unused import UNUSED
from cogfast.schema.values import describe_type, show, takes_component

FILE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
REQUIRED = "required"
_GROUP = re.compile(r"--- (.+) ---")
# Place of a component -> the key of its params, without the target's part of it
_COMPONENTS = {
    "denoiser": "model.denoiser_config.params",
    "scaling": "scaling_config.params",
    "discretization": "discretization_config.params",
    "loss_fn": "model.loss_fn_config.params",
    "sigma_sampler": "sigma_sampler_config.params",
    "sampler": "model.sampler_config.params",
    "guider": "guider_config.params",
    "dyn_thresh": "dyn_thresh_config.params",
    "first_stage": "model.first_stage_config.params",
    "emb_models": "model.conditioner_config.params.emb_models[0].params",
    "optimizer": "deepspeed.optimizer.params",
}
# The params of SAT's class are those of its nested sections.
_WRITTEN_OUT = ("cogfast.model.autoencoder.video_autoencoder_from_sat",)
# Parameters that the assembly of a run fills in
_SET_BY_CODE = ("dtype", "device", "inner", "state", "params", "kernels", "args", "kwargs")
_INTRODUCTION = """\
# Options

All keys of a configuration, with their defaults. A key is set in a YAML file or on the command line as `key=value`
(`args.train_iters=100`); `cogfast train --dry-run` prints every value with its origin. Upper limits of 100000 and above, which only
catch typing errors, are left out here. `python -m cogfast.cli.option_table` writes this file from the source.
"""
_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
}
_NO_LIMIT = 10**5


@dataclass(frozen=True, slots=True)
class Option:
    key: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Group:
    """A heading of a level, options, and text in front of them.

    A table without defaults has no column for them; one without types lists keys only.
    """

    title: str
    options: list[Option] = field(default_factory=list)
    text: str = ""
    level: int = 3


class Comments:
    """The comments of a module that stand above fields, parameters and keys of mappings."""

    def __init__(self, module: str) -> None:
        # Comments are in the source alone: Python drops them when it compiles.
        source = inspect.getsource(importlib.import_module(module))
        self.lines, self.tree = source.splitlines(), ast.parse(source)

    def of_class(self, name: str) -> dict[str, tuple[str, str]]:
        """Return {field: (meaning, group)} of a dataclass."""
        found, group = {}, ""
        for node in self._definition(ast.ClassDef, name).body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                meaning, header = self._above(node, node.target.id)
                # A group lasts until the next comment between dashes.
                group = header or group
                found[node.target.id] = meaning, group
        return found

    def of_call(self, name: str) -> dict[str, str]:
        """Return {parameter: meaning} of a function, or of a class's constructor."""
        definition = self._definition(ast.ClassDef | ast.FunctionDef, name)
        if isinstance(definition, ast.ClassDef):
            functions = [n for n in definition.body if isinstance(n, ast.FunctionDef)]
            definition = next(n for n in functions if n.name == "__init__")
        arguments = definition.args
        # In any order: the caller asks by name, in the order of the signature.
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        return {argument.arg: self._above(argument, argument.arg)[0] for argument in every}

    def of_mapping(self, name: str) -> dict[str, str]:
        """Return {key: meaning} of a mapping that the module assigns to `name`.

        A key of a mapping in it is `outer.inner`.
        """
        nodes = [n for n in self.tree.body if isinstance(n, ast.Assign | ast.AnnAssign)]
        targets = lambda node: node.targets if isinstance(node, ast.Assign) else [node.target]
        value = next(n.value for n in nodes if ast.unparse(targets(n)[0]) == name)
        assert isinstance(value, ast.Dict), f"{name} is a mapping with its keys written out"
        return self._keys(value)

    def _keys(self, mapping: ast.Dict, where: str = "") -> dict[str, str]:
        found: dict[str, str] = {}
        for key, value in zip(mapping.keys, mapping.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                name, meaning = where + key.value, self._above(key, f'"{key.value}"')[0]
                # A section may be named once inside its parent and once with its own keys.
                found[name] = meaning or found.get(name, "")
                if isinstance(value, ast.Dict):
                    found |= self._keys(value, f"{name}.")
            elif isinstance(value, ast.Name):  # **another mapping of the module
                found |= self.of_mapping(value.id)
        return found

    def _definition(self, kind: Any, name: str) -> Any:
        found: Any = [node for node in self.tree.body if isinstance(node, kind)]
        return next(node for node in found if node.name == name)

    def _above(self, node: Any, text: str) -> tuple[str, str]:
        """Return the comment directly above a node, and the last group that it begins.

        text: what the node's line must begin with; a name later in the line has no comment of its own.
        """
        first = node.lineno - 1
        if not self.lines[first].strip().startswith(text):
            return "", ""
        comments: list[str] = []
        # All lines of comments up to the statement before it.
        while self.lines[first - 1].strip().startswith("#"):
            first -= 1
            comments.insert(0, self.lines[first].strip().removeprefix("#").strip())
        groups = [match[1] for line in comments if (match := _GROUP.fullmatch(line))]
        meaning = " ".join(line for line in comments if not _GROUP.fullmatch(line))
        return meaning, groups[-1] if groups else ""


def groups() -> Iterator[Group]:
    """Yield all groups of options in the order of the file."""
    yield Group("args", text="How a run trains, evaluates and samples.", level=2)
    yield from _of_dataclass("args", TrainArguments)
    text = "`data.target` names the class of the data set ([data.md](data.md)), `data.params` describe it."
    yield Group("data", text=text, level=2)
    for kind in (ListedVideos, VideoList, VideoShards):
        (group,) = _of_dataclass("data.params", kind)
        users = "all data sets" if kind is ListedVideos else kind.__name__
        yield dataclasses.replace(group, title=f"data.params of {users}")
    text = "The network and what is around it, each a class (`target`) with `params`."
    yield Group("model", text=text, level=2)
    (group,) = _of_dataclass("model", ModelArguments)
    yield dataclasses.replace(group, title="model without its components")
    yield from _network()
    for name in _COMPONENTS:
        if name != "optimizer":
            yield from _of_place(name)
    yield from _deepspeed()
    # One row per reason: a dozen keys of the autoencoder's training share one.
    reasons: dict[str, list[str]] = {}
    for key, reason in UNUSED.items():
        reasons.setdefault(reason, []).append(key)
    text = "SAT's keys that have no effect here. A run that sets one logs it with the reason."
    rows = [Option("`, `".join(keys), "", "", reason) for reason, keys in reasons.items()]
    yield Group("Accepted and not used", rows, text, level=2)


def _of_dataclass(where: str, schema: type) -> Iterator[Group]:
    """Yield the groups of a dataclass's own fields, by the comments between dashes."""
    comments = Comments(schema.__module__).of_class(schema.__name__)
    hints = typing.get_type_hints(schema, include_extras=True)
    found: dict[str, list[Option]] = {}
    # Inherited fields have their comments in the base class, which has a group of its own.
    for one in dataclasses.fields(schema):
        if one.name in comments:
            meaning, group = comments[one.name]
            option = Option(f"{where}.{one.name}", type_of(hints[one.name]), _default(one), meaning)
            found.setdefault(group, []).append(option)
    for name, options in found.items():
        yield Group(f"{where}: {name}", options)


def type_of(annotation: Any) -> str:
    """Describe the values of an annotation in few words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated and isinstance(inner[1], Range):
        low, high = inner[1].low, inner[1].high
        limits = "" if low <= -_NO_LIMIT else f" >= {low:g}"
        if high < _NO_LIMIT:
            limits = f" from {low:g} to {high:g}"
        return type_of(inner[0]) + limits
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(type_of, inner)))
    if origin is Literal:
        return ", ".join(show(value).strip("'") for value in inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return f"list of {len(inner)} ({type_of(inner[0])})"
    if origin in (list, Sequence) and inner:
        return f"list ({type_of(inner[0])})"
    return _WORDS.get(annotation) or describe_type(annotation)


def _default(one: dataclasses.Field | inspect.Parameter) -> str:
    """Return the default of a field or a parameter as YAML has it."""
    factory = getattr(one, "default_factory", dataclasses.MISSING)
    if factory is not dataclasses.MISSING:
        return show(factory())
    if one.default in (dataclasses.MISSING, inspect.Parameter.empty):
        return REQUIRED
    return one.default if isinstance(one.default, str) and one.default else show(one.default)


def _network() -> Iterator[Group]:
    """Yield the groups of SAT's network_config and first_stage_config."""
    model = {one.name: _default(one) for one in dataclasses.fields(TransformerConfig)}
    where = "model.network_config.params"
    own = model | dict.fromkeys(sat_network.NETWORK_REQUIRED, REQUIRED) | {"time_embed_dim": "null"}
    yield _of_mapping(where, "NETWORK_PARAMS", own)
    own = {"checkpoint_activations": "false", **model}
    yield _of_mapping(f"{where}.transformer_args", "TRANSFORMER_ARGS", own)
    where = f"{where}.modules"
    position = f"{where}.pos_embed_config.params"
    own = {**model, "text_length": "0"}
    yield _of_mapping(position, "SINCOS_PARAMS", own, " of Basic3DPositionEmbeddingMixin")
    own = {
        "theta": model["rope_theta"],
        "learnable_pos_embed": model["learnable_position"],
        "positions": model["rotary_positions"],
    }
    yield _of_mapping(position, "ROTARY_PARAMS", own, " of Rotary3DPositionEmbeddingMixin")
    yield _of_mapping(f"{where}.patch_embed_config.params", "PATCH_PARAMS", {})
    yield _of_mapping(f"{where}.adaln_layer_config.params", "ADALN_PARAMS", {"qk_ln": "true"})
    own = {
        "lora_alpha": model["lora_alpha"],
        "lora_dropout": model["lora_dropout"],
        "layer_range": model["lora_layers"],
        "target_modules": show(["query_key_value", "dense"]),
    }
    yield _of_mapping(f"{where}.lora_config.params", "LORA_PARAMS", own)
    where = "model.first_stage_config.params"
    parameters = inspect.signature(video_autoencoder_from_sat).parameters
    own = {name: _default(parameter) for name, parameter in parameters.items()}
    users = " of SAT's VideoAutoencoderInferenceWrapper"
    yield _of_mapping(where, "AUTOENCODER_PARAMS", own, users)
    own = {"in_channels": "3", "out_ch": "3", "double_z": "true", "temporal_compress_times": "4"}
    users = ", and of decoder_config"
    yield _of_mapping(f"{where}.encoder_config.params", "CODER_PARAMS", own, users)


def _of_place(name: str) -> Iterator[Group]:
    """Yield a group for each constructor of the classes that a place of components allows."""
    place, found = PLACES[name], {}
    for path in place.paths:
        module, _, class_name = path.rpartition(".")
        if module.startswith("cogfast") and path not in _WRITTEN_OUT:
            kind = getattr(importlib.import_module(module), class_name)
            # Samplers share one constructor, and so one table.
            owner = next(base for base in kind.__mro__ if "__init__" in vars(base))
            found.setdefault(owner, []).append(kind)
    for owner, kinds in found.items():
        targets = [
            target
            for kind in kinds
            for target in (*_sat_names(kind), f"{kind.__module__}.{kind.__name__}")
        ]
        text = f"`target`: `{'`, `'.join(targets)}`"
        options = [] if owner is object else _of_constructor(owner)
        names = ", ".join(kind.__name__ for kind in kinds)
        yield Group(f"{_COMPONENTS[name]} of {names}", options, text)


def _sat_names(kind: type) -> list[str]:
    path = f"{kind.__module__}.{kind.__name__}"
    return [name for name, sat in TARGETS.items() if sat.path == path and name != path]


def _of_constructor(kind: Any) -> list[Option]:
    meanings = Comments(kind.__module__).of_call(kind.__name__)
    hints = typing.get_type_hints(kind.__init__, include_extras=True)
    # Defaults from the signature, types from the hints: strings in one, objects in the other.
    parameters = inspect.signature(kind).parameters
    return [
        Option(
            f"{name}_config" if takes_component(hints[name]) else name,
            "a component" if takes_component(hints[name]) else type_of(hints[name]),
            _default(parameter),
            meanings[name],
        )
        for name, parameter in parameters.items()
        if name not in _SET_BY_CODE
    ]


def _deepspeed() -> Iterator[Group]:
    """Yield the groups of the deepspeed section. A key of a section needs no comment of its own."""
    text = "DeepSpeed's configuration. A key that is left out has DeepSpeed's default or the one given here."
    yield Group("deepspeed", text=text, level=2)
    meanings = Comments(deepspeed_keys.__name__)
    kinds = deepspeed_keys.TOP_KEYS
    top = meanings.of_mapping("TOP_KEYS")
    options = [Option(f"deepspeed.{key}", type_of(kinds[key]), "", top[key]) for key in kinds]
    yield Group("deepspeed: top level", options)
    inner = meanings.of_mapping("SECTION_KEYS")
    options, others = [], []
    for section, kinds in deepspeed_keys.SECTION_KEYS.items():
        plain = []
        for key, kind in kinds.items():
            meaning = inner.get(f"{section}.{key}")
            if meaning:
                row = Option(f"deepspeed.{section}.{key}", type_of(kind), "", meaning)
                options.append(row)
            else:
                plain.append(key)
        others.append(Option(f"deepspeed.{section}", "", "", ", ".join(plain)))
    yield Group("deepspeed: in its sections", options)
    yield from _of_place("optimizer")
    text = "DeepSpeed's documentation describes these; their names and types are checked here."
    yield Group("deepspeed: passed on unchanged", others, text)


def _of_mapping(where: str, name: str, defaults: Mapping[str, str], users: str = "") -> Group:
    """Return the group of a mapping of sat_network. A key without a default is required."""
    meanings = Comments(sat_network.__name__).of_mapping(name)
    options = [
        Option(key, type_of(kind), defaults.get(key, REQUIRED), meanings[key])
        for key, kind in getattr(sat_network, name).items()
    ]
    return Group(where + users, options)


def render(found: Iterable[Group]) -> str:
    """Return the text of docs/options.md."""
    parts = [_INTRODUCTION]
    for group in found:
        parts.append(f"{'#' * group.level} {group.title}\n")
        parts += [group.text + "\n"] if group.text else []
        parts += [_table(group.options)] if group.options else []
    return "\n".join(parts)


def _table(options: Sequence[Option]) -> str:
    """Return a table in Markdown. Options without a type have a reason in place of a meaning."""
    heads = ["key", "type", "default", "meaning"]
    if not options[0].default:
        heads = ["key", "type", "meaning"] if options[0].type else ["key", ""]
    rows = [heads, ["---"] * len(heads)]
    for one in options:
        default = one.default if one.default in ("", REQUIRED) else f"`{one.default}`"
        # Comments speak Python, and readers of the table write YAML.
        meaning = re.sub(r"\bNone\b", "null", one.meaning)
        rows.append([f"`{one.key}`", *(cell for cell in (one.type, default) if cell), meaning])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main(argv: Sequence[str]) -> None:
    file = Path(argv[0]) if argv else FILE
    found = list(groups())
    # A key without a meaning is worth no row: the command fails before it writes.
    missing = [one.key for group in found for one in group.options if not one.meaning]
    if missing:
        raise ValueError(f"no comment above {', '.join(missing)}; write one with its meaning")
    file.write_text(render(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

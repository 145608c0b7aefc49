"""The list of all keys, which `--help-all` prints and scripts/write_options.py writes to docs/options.md.

A key's name, type and default come from the pydantic model or the constructor that checks it. Its meaning
is the description in the model, or the comment above the constructor's parameter.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from cogfast.config.components import OWN_OPTIMIZERS, PLACES, SET_BY_CODE
from cogfast.config.sat_classes import TARGETS
from cogfast.config.sat_network import NETWORK_MODELS
from cogfast.config.sat_unused import Unused, rules
from cogfast.core.values import describe, is_component_schema, json_schema, show
from cogfast.data.datasets import ListedVideos, VideoList, VideoShards
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.moved import find, public_module
from cogfast.train.keys import GROUPS, ModelKeys, TrainKeys

REQUIRED = "required"
# Places of components -> the key of their params. The key of another place is that of its component, without
# that of the component around it.
_PARAMS = {
    "emb_models": "model.conditioner_config.params.emb_models[0].params",
    "optimizer": "deepspeed.optimizer.params",
}
_IN_MODEL = ("denoiser", "loss_fn", "sampler", "first_stage")
# The params of SAT's class are those of its nested sections.
_WRITTEN_OUT = ("cogfast.model.autoencoder.video_autoencoder_from_sat",)
_INTRODUCTION = """\
# Options

All keys of a configuration, with their defaults. A key is set in a YAML file or on the command line as `key=value`
(`args.train_iters=100`); `cogfast train --dry-run` prints values with their origin: what is set, the defaults of `args`, and
as comments those of components, but for network and text encoder. Upper limits of 100000 and above, which only catch typing errors, are left out.
"""
_NO_LIMIT = 10**5


@dataclass(frozen=True, slots=True)
class Option:
    """A key. type, default: "" if it has no effect; then the meaning is the reason."""

    key: str
    type: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Group:
    """A heading of a level, options, and text in front of them."""

    title: str
    options: list[Option] = field(default_factory=list)
    text: str = ""
    level: int = 3


def groups() -> Iterator[Group]:
    yield Group("args", text="How a run trains, evaluates and samples.", level=2)
    of_args: list[Group] = []
    for option in of_model(TrainKeys, "args."):
        if title := GROUPS.get(option.key.partition(".")[2]):
            of_args.append(Group(f"args: {title}"))
        of_args[-1].options.append(option)
    yield from of_args
    text = "`data.target` names the class of the data set ([data.md](data.md)), `data.params` describe it."
    yield Group("data", text=text, level=2)
    common = _of_call(ListedVideos, "data.params.")
    yield Group("data.params of all data sets", common)
    for kind in (VideoList, VideoShards):
        own = [one for one in _of_call(kind, "data.params.") if one not in common]
        yield Group(f"data.params of {kind.__name__}", own)
    text = "The network and what is around it, each a class (`target`) with `params`."
    yield Group("model", text=text, level=2)
    yield Group("model without its components", of_model(ModelKeys, "model."))
    for (where, users), kind in NETWORK_MODELS.items():
        yield Group(f"{where}{users}", of_model(kind))
    for name in PLACES:
        if name not in ("network", "data", "optimizer"):
            yield from _of_place(name)
    text = "DeepSpeed's configuration, whose documentation describes the keys of its sections."
    yield Group("deepspeed", of_model(DeepSpeedKeys, "deepspeed."), text, level=2)
    yield from _of_place("optimizer")
    # One row per reason: a dozen keys of the autoencoder's training share one.
    reasons: dict[str, list[str]] = {}
    for key, rule in rules(Unused).items():
        reasons.setdefault(rule.why, []).append(key)
    text = "SAT's keys that have no effect here. A run that sets one logs it with the reason."
    rows = [Option("`, `".join(keys), "", "", reason) for reason, keys in reasons.items()]
    yield Group("Accepted and not used", rows, text, level=2)


def of_model(kind: Any, where: str = "") -> list[Option]:
    """Return the fields of a pydantic model or dataclass that have a description."""
    schema, fields = json_schema(kind), kind.__pydantic_fields__
    rows = []
    for name, node in schema["properties"].items():
        if fields[name].description is None:
            continue  # it has one legal value
        default = REQUIRED
        if not fields[name].is_required():
            default = _shown(fields[name].get_default(call_default_factory=True))
        meaning = " ".join(fields[name].description.split())
        rows.append(Option(where + name, describe(node, schema, _NO_LIMIT), default, meaning))
    return rows


def _shown(default: Any) -> str:
    return default if isinstance(default, str) and default else show(default)


def _of_place(name: str) -> Iterator[Group]:
    """Yield a group for each constructor of the classes that a place of components allows."""
    found: dict[type, list[type]] = {}
    for path in PLACES[name].paths:
        if path.startswith("cogfast.") and path not in _WRITTEN_OUT:
            kind = find(path)
            # Samplers share one constructor, and so one list.
            owner = next(base for base in kind.__mro__ if "__init__" in vars(base))
            found.setdefault(owner, []).append(kind)
    key = _PARAMS.get(name, f"{'model.' * (name in _IN_MODEL)}{name}_config.params")
    for owner, kinds in found.items():
        targets: list[str] = []
        for kind in kinds:
            path = f"{public_module(kind)}.{kind.__name__}"
            targets += [kind.__name__] * (path in OWN_OPTIMIZERS.values())
            targets += [sat for sat, one in TARGETS.items() if one.path == path != sat] + [path]
        text = f"`target`: `{'`, `'.join(targets)}`"
        options = [] if owner is object else _of_call(owner)
        yield Group(f"{key} of {', '.join(kind.__name__ for kind in kinds)}", options, text)


def _of_call(kind: Any, where: str = "") -> list[Option]:
    rows = []
    for parameter, schema, meaning in parameters_of(kind):
        is_built = is_component_schema(schema)
        words = "a component" if is_built else describe(schema, most=_NO_LIMIT)
        default = REQUIRED if parameter.default is parameter.empty else _shown(parameter.default)
        key = f"{where}{parameter.name}{'_config' if is_built else ''}"
        rows.append(Option(key, words, default, meaning))
    return rows


def comments_of(kind: type) -> dict[str, str]:
    """Return {parameter of the constructor, or field of the dataclass: the comment above it}.

    Python drops comments when it compiles, so they are read from the source.
    """
    lines = inspect.getsource(importlib.import_module(kind.__module__)).splitlines()
    classes = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.ClassDef)]
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
        if name not in SET_BY_CODE:
            yield parameter, json_schema(hints[name]), meanings.get(name, "")


def render(found: Iterable[Group]) -> str:
    """Return the text of docs/options.md."""
    parts = [_INTRODUCTION]
    for group in found:
        parts.append(f"{'#' * group.level} {group.title}\n")
        parts += [group.text + "\n"] if group.text else []
        lines = ""
        for one in group.options:
            default = REQUIRED if one.default == REQUIRED else f"default `{one.default}`"
            notes = f" ({one.type}; {default})" if one.type else ""
            lines += f"- `{one.key}`{notes}: {one.meaning}\n"
        parts += [lines] if lines else []
    return "\n".join(parts)

"""Builds objects from `{target: class path, params: {...}}` nodes, the components of SAT's YAML.

A param `foo` or `foo_config` that is itself a component is built first and passed as the argument
`foo`. Keys and values are checked against the constructor's signature before anything is built.

A place is the last part of a component's key without `_config`: model.denoiser_config is a
`denoiser`, and scaling_config in its params is a `scaling`. PLACES lists the classes that a `target`
may name at each place. SAT's class paths (TARGETS in sat_classes.py) are also accepted. Any other
class must be defined in a package that --allow-import names on the same command line.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeGuard, get_args, get_origin

from omegaconf import DictConfig

from cogfast.config.sat_classes import TARGETS, SatClass
from cogfast.config.sat_unused import NETWORKS
from cogfast.config.yaml_files import to_dict
from cogfast.core.component import NONE, Component
from cogfast.core.keys import DEFAULT
from cogfast.core.values import (
    KeyProblem,
    check_keys,
    check_mapping,
    cut,
    is_component_schema,
    join,
    json_schema,
    leaves,
    nearest,
    unknown_key,
    validated,
)
from cogfast.extensions.table import component_rows
from cogfast.moved import find


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """what: name in messages. names: classes in `module`. others: further dotted paths."""

    what: str
    module: str
    names: Sequence[str]
    others: Sequence[str]

    @property
    def paths(self) -> tuple[str, ...]:
        return (*(f"{self.module}.{name}" for name in self.names), *self.others)


# torch's optimizers for dense gradients that step without a closure
_OPTIMIZERS = "AdamW Adam Adafactor Adagrad Adadelta Adamax ASGD NAdam RAdam RMSprop Rprop SGD"
_SAMPLERS = "VPSDEDPMPP2MSampler VPODEDPMPP2MSampler VideoDDIMSampler"
_GUIDERS = "VanillaCFG DynamicCFG IdentityGuider"
_THRESHOLDINGS = "NoDynamicThresholding StaticThresholding"
_AUTOENCODERS = "VideoAutoencoder video_autoencoder_from_sat"
_DATA_SETS = "VideoFolder VideoManifest VideoList VideoShards"
_SCHEDULE, _FUSED = "ZeroSNRDDPMDiscretization", "cogfast.kernels.fused_ema_adam.FusedEmaAdam"
_DIFFUSION, _MODEL = "cogfast.diffusion", "cogfast.model"
# (place, its name in messages, module, classes in it, further dotted paths but for those of extensions)
_PLACES = (
    ("network", "network", f"{_MODEL}.transformer", "assemble_transformer"),
    ("denoiser", "denoiser", f"{_DIFFUSION}.denoiser", "DiscreteDenoiser"),
    ("scaling", "scaling", f"{_DIFFUSION}.denoiser", "VideoScaling"),
    ("discretization", "discretization", f"{_DIFFUSION}.noise_schedule", _SCHEDULE),
    ("loss_fn", "loss", f"{_DIFFUSION}.loss", "VideoDiffusionLoss", NONE),
    ("sigma_sampler", "sigma sampler", f"{_DIFFUSION}.timestep_sampling", "DiscreteSampling"),
    ("sampler", "sampler", f"{_DIFFUSION}.sampler", _SAMPLERS, NONE),
    ("guider", "guider", f"{_DIFFUSION}.guidance", _GUIDERS),
    ("dyn_thresh", "thresholding", f"{_DIFFUSION}.guidance", _THRESHOLDINGS),
    ("first_stage", "first stage", f"{_MODEL}.autoencoder", _AUTOENCODERS, NONE),
    ("emb_models", "text encoder", f"{_MODEL}.text_encoder", "T5TextEncoder ByteTextEncoder", NONE),
    ("data", "data set", "cogfast.data.datasets", _DATA_SETS),
    ("optimizer", "optimizer", "torch.optim", _OPTIMIZERS, _FUSED),
)
PLACES = {
    # NONE comes last.
    name: Place(
        what, module, classes.split(), sorted([*others, *component_rows(name)], key=NONE.__eq__)
    )
    for name, what, module, classes, *others in _PLACES
}
# type of deepspeed.optimizer in any case -> the class of an extension
OWN_OPTIMIZERS = {path.rpartition(".")[2].lower(): path for path in component_rows("optimizer")}


def own_optimizer(section: Mapping | None) -> str:
    """Return the key of OWN_OPTIMIZERS of a section {type, params}, or ""."""
    kind = str((section or {}).get("type"))
    name = kind.rpartition(".")[2].lower()
    is_own = kind.lower() == name or kind in OWN_OPTIMIZERS.values()
    return name if is_own and name in OWN_OPTIMIZERS else ""


def _place_of(key: str) -> str:
    """Return the place of a component by its dotted key: `emb_models` for `a.emb_models[0]`."""
    return re.sub(r"\[\d+\]$", "", key).rpartition(".")[2].removesuffix("_config")


def allowed_path(path: str, place: str) -> str | None:
    """Return cogfast's class path for a target that its place lists, else None.

    place: "" searches all places.
    """
    found = TARGETS[path].path if path in TARGETS else path
    places = [PLACES[place]] if place in PLACES else [] if place else PLACES.values()
    return found if any(found in one.paths for one in places) else None


def own_targets(sections: Mapping) -> dict[str, str]:
    """Return {dotted key: path} of the targets that PLACES does not list. sections: plain."""
    found = {}
    for key, path in leaves(sections).items():
        where, _, last = key.rpartition(".")
        is_target = last == "target" or key == "deepspeed.optimizer.type"
        if is_target and isinstance(path, str) and "." in path and allowed_path(path, "") is None:
            found[where] = path
    return found


def own_objective(model: Mapping) -> str | None:
    """Say which of a plain model section's classes may give a run another objective than the pipelines'."""
    kinds, own = ("denoiser", "scaling", "discretization"), own_targets({"model": model}).items()
    names = ", ".join(sorted({path for key, path in own if _place_of(key) in kinds}))
    text = "but diffusers samples by v-prediction and its own schedule"
    return f"trained with {names}, {text}" if names else None


def describe_place(path: str, place: str) -> str:
    """Describe what a place allows, for the error about `path`: the most similar name, or all."""
    if place and place not in PLACES:
        return f"cogfast has no class for {place}"
    if place == "network":
        return f"only {NETWORKS[0]} is supported; use it"
    known = PLACES[place].paths if place else [p for one in PLACES.values() for p in one.paths]
    names = {*known, *(name for name, sat in TARGETS.items() if sat.path in known)}
    hint = nearest(path, names).removeprefix("; ")
    if not place:
        return hint or "it is not listed in cogfast/config/components.py"
    one = PLACES[place]
    listed = " or ".join((f"{', '.join(one.names)} of {one.module}", *one.others))
    return f"unknown {one.what}; {hint or f'use {listed}'}"


_KNOWN_ROOTS = ("cogfast", "torch", *{path.partition(".")[0] for path in TARGETS})
_PLAIN = (bool, int, float, str, type(None))
# Parameters that the assembly of a run fills in
SET_BY_CODE = ("dtype", "device", "inner", "state", "params", "kernels", "args", "kwargs")
# Additional keys of the entries of conditioner_config.params.emb_models.
_BESIDE_TARGET = ("is_trainable", "input_key", "ucg_rate")


def component_of(
    node: Mapping,
    allow_import: Sequence[str] = (),
    where: str = "",
    given: Collection[str] | None = (),
    unused: dict[str, str] | None = None,
) -> Component:
    """Return what a `{target, params}` node describes, with the components inside it, after checking all.

    where: the node's dotted key, for messages. given: arguments that `build` gets; None allows missing ones.
    unused: receives keys that are accepted but not used, with the reasons.
    """
    node = to_dict(node) if isinstance(node, DictConfig) else node
    unused = {} if unused is None else unused
    target, found = _arguments(node, where, allow_import, given, unused)
    arguments = {}
    for name, (value, key) in found.items():
        inner = [
            component_of(one, allow_import, at, unused=unused)
            for one, at in _components(value, key)
        ]
        arguments[name] = (inner[0] if is_component(value) else inner) if inner else value
    params = node.get("params") or {}
    return Component(
        kind=target, arguments=arguments, key=where, target=node["target"], params=params
    )


def instantiate(
    node: Mapping, allow_import: Sequence[str] = (), where: str = "", **given: object
) -> Any:
    """Build the object that a `{target, params}` node describes.

    where: the node's dotted key, for messages. given: additional arguments.
    """
    return component_of(node, allow_import, where, given).build(**given)


def resolve(node: Mapping, allow_import: Sequence[str] = ()) -> tuple[Callable, dict[str, Any]]:
    """Return a node's callable and its checked arguments. Nested components stay nodes."""
    node = to_dict(node) if isinstance(node, DictConfig) else node
    target, arguments = _arguments(node, "", allow_import, None, {})
    return target, {name: value for name, (value, _) in arguments.items()}


def with_defaults(node: Any, where: str, origins: dict[str, str]) -> Any:
    """Return a plain node with the defaults of its components as YAML comments, which `origins` gets."""
    if not isinstance(node, dict):
        return node
    found = {k: with_defaults(v, join(where, k), origins) for k, v in node.items()}
    sat = TARGETS.get(path := str(node.get("target")), SatClass(path=path))
    if not sat.arguments and allowed_path(sat.path, ""):  # SAT nests the network's params
        params, section = node.get("params") or {}, "params" if node.get("params") else "# params"
        for name, one in _parameters(find(sat.path)).items():
            if isinstance(one.default, _PLAIN) and name not in {*params, *SET_BY_CODE, *PLACES}:
                found.setdefault(section, {})[f"# {name}"] = sat.defaults.get(name, one.default)
                origins[f"{where}.{section}.# {name}"] = DEFAULT
    return found


def is_component(node: object) -> TypeGuard[Mapping]:
    return isinstance(node, Mapping) and "target" in node


def import_target(
    path: str, key: str, allow_import: Sequence[str] = (), place: str = ""
) -> Callable:
    """Import the class or function of a dotted path if it is allowed.

    place: the place of the component (config/components.py); "": any place, for nodes that were checked
    before. The path is checked first: importing a module runs its code.
    """
    allowed = allowed_path(path, place)
    if allowed is not None:
        row = component_rows(place).get(allowed)
        return find(allowed) if row is None else row.load(place)
    for package in allow_import:
        if path.startswith(f"{package}."):
            return _import_allowed(path, key, package)
    hint = describe_place(path, place)
    root = path.partition(".")[0]
    if "did you mean" not in hint and root.isidentifier() and root not in _KNOWN_ROOTS:
        # The path may be that of a file from elsewhere: its package is no advice.
        hint += "; a class that you wrote needs --allow-import with the name of your package"
    raise KeyProblem(key, f"{key}={cut(path)}: {hint}")


def _import_allowed(path: str, key: str, package: str) -> Callable:
    """Import a class or function that `package` itself defines, not one that it only imports."""
    # Names such as pkg.__builtins__.eval would lead out of the package.
    if not all(part.isidentifier() and not part.startswith("__") for part in path.split(".")):
        raise KeyProblem(key, f"{key}={cut(path)} is not a dotted name of a class or function")
    module_name, _, name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        # The current folder is not searched: it may be a download.
        is_gone = getattr(error, "name", None) == package
        fix = "; add the folder that contains it to PYTHONPATH" if is_gone else ""
        raise KeyProblem(key, f"{key}={path}: importing it failed: {error}{fix}") from error
    found = getattr(module, name, None)
    if found is None:
        hint = nearest(name, dir(module))
        raise KeyProblem(key, f"{key}={path}: {module_name} has no {name}{hint}")
    home = str(getattr(found, "__module__", None))
    is_code = inspect.isclass(found) or inspect.isfunction(found)
    if not is_code or not f"{home}.".startswith(f"{package}."):
        text = f"{key}={cut(path)} is not a class or function that {package} defines"
        raise KeyProblem(key, text + (f", but one of {home}" if is_code else ""))
    return found


def _arguments(
    node: object,
    where: str,
    allow_import: Sequence[str],
    given: Collection[str] | None,
    unused: dict[str, str],
) -> tuple[Callable, dict[str, tuple[Any, str]]]:
    """Return a node's callable and its arguments with their dotted keys, under cogfast's names."""
    if not isinstance(node, Mapping) or not isinstance(node.get("target"), str):
        text = f"{where or 'component'} must be a mapping with target and params"
        if where == "model.network_config":
            text += "; give the model's file first: --base cogvideox_5b.yaml control.yaml sft.yaml"
        raise KeyProblem(where, text)
    check_keys(node, ("target", "params", *_BESIDE_TARGET), where)
    path, where_target, where_params = node["target"], join(where, "target"), join(where, "params")
    params = check_mapping(where_params, node.get("params"))
    target = import_target(path, where_target, allow_import, _place_of(where))
    if path in TARGETS:
        try:
            params = TARGETS[path].translate(params, where_params, path, unused)
        except KeyProblem:
            raise
        except ValueError as error:  # raised without a key
            raise KeyProblem(where_params, f"{where_params}: {error}") from None
    parameters, hints = _parameters(target), hints_of(target)
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments: dict[str, tuple[Any, str]] = {}
    for given_name, value in params.items():
        name, key = given_name, join(where_params, given_name)
        if name not in parameters and name.endswith("_config"):
            name = name.removesuffix("_config")
        if name not in parameters and not takes_any:
            if where == "data" and (other := data_set_with(given_name, key)):
                text = f"unknown key {key}; {other} has it: set data.target to that"
                raise KeyProblem(key, text)
            known = {k: v for k, v in parameters.items() if k not in (given or ())}
            raise unknown_key(where_params, given_name, _known_names(known, hints, params))
        if name in (given or ()):
            raise KeyProblem(key, f"{key} is set by the trainer itself; remove it")
        if name in arguments:
            raise KeyProblem(key, f"{key} and {arguments[name][1]} both set {name}")
        arguments[name] = _fit(value, hints.get(name, Any), key), key
    if given is None:
        return target, arguments
    for name in given:
        if name not in parameters and not takes_any:
            text = f"{where_target}={path} must accept the argument {name}"
            raise KeyProblem(where_target, text)
    for name, one in parameters.items():
        is_optional = one.default is not one.empty or one.kind in (
            one.VAR_POSITIONAL,
            one.VAR_KEYWORD,
        )
        if not is_optional and name not in {*arguments, *given}:
            text = f"{join(where_params, name)} is missing; {target.__name__} needs it"
            raise KeyProblem(where_params, text)
    return target, arguments


def _fit(value: object, annotation: object, key: str) -> object:
    """Check a value. A mapping for a dataclass argument is converted to the dataclass."""
    is_union = get_origin(annotation) in (typing.Union, types.UnionType)
    options = get_args(annotation) if is_union else (annotation,)
    if any(dict in (o, get_origin(o)) or Mapping in (o, get_origin(o)) for o in options):
        return value  # the constructor takes the mapping as it is, even if it has a target
    is_plain = all(o in _PLAIN or get_origin(o) is Annotated for o in options)
    # The translation of SAT's params builds dataclasses.
    if dataclasses.is_dataclass(value) or (_components(value, key) and not is_plain):
        return value
    kind = next((o for o in options if isinstance(o, type) and dataclasses.is_dataclass(o)), None)
    if kind is None or not isinstance(value, Mapping):
        validated(value, annotation, key)
        is_of_tuple = get_origin(annotation) is tuple
        return tuple(value) if is_of_tuple and isinstance(value, list | tuple) else value
    hints = hints_of(kind)
    check_keys(value, [one.name for one in dataclasses.fields(kind)], key)
    fields = {k: _fit(v, hints[k], join(key, k)) for k, v in value.items()}
    try:
        return kind(**fields)
    except ValueError as error:  # about a combination of fields
        # In SAT's network_config the fields of the argument `config` are params themselves.
        where = key.removesuffix(".config")
        raise KeyProblem(where, f"{where}: {error}") from None


def _components(value: object, key: str) -> list[tuple[Any, str]]:
    """Return the components that a value is or lists, with their dotted keys."""
    if is_component(value):
        return [(value, key)]
    if isinstance(value, list) and value and all(map(is_component, value)):
        return [(item, f"{key}[{i}]") for i, item in enumerate(value)]
    return []


def data_set_with(name: str, key: str) -> str | None:
    """Return the dotted path of a data set that has a parameter of this name, if any does."""
    paths = PLACES["data"].paths
    return next((p for p in paths if name in _parameters(import_target(p, key, (), "data"))), None)


def _parameters(target: Callable) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(target).parameters)
    except ValueError:  # a C function without a signature: allow any arguments
        return {"arguments": inspect.Parameter("arguments", inspect.Parameter.VAR_KEYWORD)}


@functools.cache
def hints_of(target: Callable) -> Mapping[str, Any]:
    """Return the types of a callable's parameters, which take a millisecond to find; {} if they cannot be found."""
    try:
        # A dataclass itself, whose hints are found in the modules of its base classes, too.
        is_plain_class = inspect.isclass(target) and "__dataclass_fields__" not in vars(target)
        call = target.__init__ if is_plain_class else target
        return typing.get_type_hints(call, include_extras=True)
    except (NameError, TypeError, AttributeError):  # annotations imported under TYPE_CHECKING only
        return {}


def _known_names(parameters: Mapping, hints: Mapping, params: Mapping) -> list[str]:
    """Return the keys to suggest, as `foo_config` (SAT's spelling) where a component is expected."""
    names = []
    for name in parameters:
        is_built = is_component_schema(json_schema(hints.get(name, Any))) and name not in params
        if f"{name}_config" in params or is_built:
            name = f"{name}_config"
        if name not in ("args", "kwargs", "self"):
            names.append(name)
    return names

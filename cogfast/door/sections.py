"""Checks and completes the four sections of a merged configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Len, MaxLen

from cogfast.config.components import (
    OWN_OPTIMIZERS,
    component_of,
    data_set_with,
    import_target,
    is_component,
    own_targets,
)
from cogfast.config.sat_network import LORA, LORA_KEY, lora_targets
from cogfast.config.sat_unused import (
    KEYS,
    NETWORKS,
    InPlaceOf,
    Only,
    Refused,
    Same,
    Unused,
    rules,
    take,
)
from cogfast.core.keys import COMMAND_LINE, DEFAULT, SECTIONS, Keys, Share, find_origin, level
from cogfast.core.values import (
    KeyProblem,
    Model,
    check_keys,
    check_mapping,
    join,
    nearest,
    select,
    show,
    unknown_key,
    validated,
)
from cogfast.distributed.keys import DeepSpeedKeys
from cogfast.door.deepspeed_keys import check_own_sections, prepare
from cogfast.train.keys import ModelKeys, TrainKeys

COMPONENTS = (
    "network_config",
    "denoiser_config",
    "loss_fn_config",
    "sampler_config",
    "first_stage_config",
    "conditioner_config",
)


class _ConditionerParams(Model):
    """The params of SAT's GeneralConditioner: CogVideoX has one text encoder, or none."""

    emb_models: Annotated[list[dict[str, Any]], Len(0, 1)]
    cor_embs: Annotated[list, MaxLen(0)] = []
    cor_p: Annotated[list, MaxLen(0)] | None = None


class _TextEncoderEntry(Model):
    """The keys beside target and params of a text encoder, which is frozen and reads captions."""

    is_trainable: Literal[False] = False
    input_key: Literal["txt"] = "txt"
    ucg_rate: Share = 0.0


CONDITIONER = "sgm.modules.GeneralConditioner"
_NUMBERS = ("lr", "eps", "weight_decay", "momentum")
# Params of DeepSpeed's Adam and AdamW that torch's AdamW does not have
_DEEPSPEED_ADAM_KEYS = ("adam_w_mode", "bias_correction", "torch_adam", "set_grad_none")


def complete_sections(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Move keys to the place where they are read and fill in defaults. Updates both arguments."""
    for name, section in config.items():
        if name not in SECTIONS:
            home = next((s for s in (TrainKeys, ModelKeys) if name in s.model_fields), None)
            if home is not None:
                text = f"unknown key {name}; did you mean {home.key(name)}?"
                raise KeyProblem(name, text)
            raise unknown_key("", str(name), SECTIONS)
        _require_text_keys(section, name)
    _remove_overruled(config, origins)
    deepspeed = config.get("deepspeed") or {}
    optimizer = deepspeed.get("optimizer")
    params = optimizer.get("params") or {} if isinstance(optimizer, dict) else None
    has_no_decay = isinstance(params, dict) and "weight_decay" not in params
    prepare(deepspeed, origins)
    for name, schema in (("model", ModelKeys), ("args", TrainKeys)):
        section = config.setdefault(name, {})
        for key, value in schema().model_dump().items():
            if key not in section:
                section[key] = value
                origins[f"{name}.{key}"] = DEFAULT
    args = config["args"]
    moved = {key: args.pop(key.partition(".")[2]) for key in rules(Same, "args")}
    if given := {key: value for key, value in moved.items() if value is not None}:
        _set_lora(config["model"], given, origins)
    for key in moved:
        del origins[key]
    for key in ("train_data", "valid_data"):
        if isinstance(args[key], str | None):  # one folder; SAT's flag takes several
            args[key] = [args[key]] if args[key] else []
    # SAT gives its optimizer the params alone, and FusedEmaAdam's default is 0.
    if has_no_decay and origins["args.weight_decay"] == DEFAULT:
        args["weight_decay"] = 0.0


def _set_lora(model: dict[str, Any], given: Mapping[str, Any], origins: dict[str, str]) -> None:
    """Set args.lora_rank, lora_alpha and lora_modules, by dotted key, in SAT's lora_config.

    The command line beats files; two keys of one level must not contradict each other.
    """
    validated({key.partition(".")[2]: value for key, value in given.items()}, TrainKeys, "args")
    network = select(model, "network_config.params.modules")
    key, value = next(iter(given.items()))
    if not isinstance(network, dict):
        raise KeyProblem(key, f"{key}={show(value)} has no model; add a model's file to --base")
    found = network.get("lora_config")
    node = dict(found) if isinstance(found, dict) else {}
    params = dict(check_mapping(LORA_KEY, node.get("params")))
    to = rules(Same, "args")
    for key, value in given.items():
        long, name = to[key].key, to[key].key.rpartition(".")[2]
        before, here, there = params.get(name), origins[key], find_origin(origins, long)
        if name == "target_modules":
            is_same = lora_targets(key, value) == (before and lora_targets(long, before))
        else:
            is_same = value == before
        if before is not None and not is_same:
            if level(here) == level(there):
                text = f"{key}={show(value)}, but {long}={show(before)} ({there}); keep one of them"
                raise KeyProblem(key, text)
            if level(here) < level(there):
                continue
        params[name], origins[long] = value, here
    if "r" not in params:
        text = f"{key}={show(value)} has no rank beside it; set args.lora_rank, such as 64"
        raise KeyProblem(key, text)
    # A lora_config of SAT's files keeps SAT's default, which is 1.
    if "target" not in node and "lora_alpha" not in params:
        params["lora_alpha"], origins[f"{LORA_KEY}.lora_alpha"] = params["r"], DEFAULT
    network["lora_config"] = {"target": LORA, **node, "params": params}
    frozen, of_rank = "model.not_trainable_prefixes", find_origin(origins, f"{LORA_KEY}.r")
    if origins[frozen] == DEFAULT or level(of_rank) > level(origins[frozen]):
        model["not_trainable_prefixes"], origins[frozen] = ["all"], of_rank


def _remove_overruled(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Remove the keys of files that would count in place of a key of the command line."""
    for key, rule in rules(InPlaceOf).items():
        found = [name for name in (key, *rule.keys) if select(config, name) is not None]
        is_word = {name: find_origin(origins, name) == COMMAND_LINE for name in found}
        if not is_word.pop(key, True) and any(is_word.values()):
            take(config, key.split("."))
            for name in [name for name in origins if f"{name}.".startswith(f"{key}.")]:
                del origins[name]


def _leave_out_training(config: dict[str, Any]) -> dict[str, str]:
    """Remove what sampling does not build if a class in it is the user's own, but for the params of a data
    set. Return {key: reason}."""
    own, parts = own_targets(config), ("data", "model.loss_fn_config", "deepspeed.optimizer")
    found = [key for key in parts if any(f"{name}.".startswith(f"{key}.") for name in own)]
    for key in found:
        take(config, ("data.target" if key == "data" else key).split("."))
    return dict.fromkeys(found, "sampling does not need it")


def check_sections(
    config: dict[str, Any], allow_import: tuple[str, ...], is_sampled: bool = False
) -> dict[str, str]:
    """Check every key and value. Return accepted keys without effect, with the reasons."""
    unused = _leave_out_training(config) if is_sampled else {}
    _check_section(config["args"], TrainKeys, unused)
    _check_section(config["model"], ModelKeys, unused, COMPONENTS)
    for name in COMPONENTS:
        node, where = config["model"].get(name), f"model.{name}"
        if node is None:
            continue
        target = node["target"] if name == "network_config" and is_component(node) else None
        if isinstance(target, str) and target not in NETWORKS:
            import_target(target, f"{where}.target", allow_import, "network")
            # A class of the user's own takes the params of cogfast's.
            node = {**node, "target": NETWORKS[0]}
        if name == "conditioner_config":
            _check_conditioner(node, where, allow_import, unused)
        else:
            component_of(node, allow_import, where, unused=unused)
    # assemble_datasets gives data_dir: args.train_data or args.valid_data.
    if config.get("data") and "data" not in unused:
        component_of(config["data"], allow_import, "data", ("data_dir",), unused)
    _check_deepspeed(config.get("deepspeed") or {}, allow_import, unused)
    return unused


def _require_text_keys(node: object, where: str) -> None:
    """Refuse keys that are not text: YAML parses `7:` as a number and `on:` as a boolean."""
    children = node.items() if isinstance(node, dict) else ()
    if isinstance(node, list):
        children = ((str(i), item) for i, item in enumerate(node))
    for key, child in children:
        if not isinstance(key, str):
            inner = join(where, str(key))
            text = f"unknown key {inner}: keys must be text, but YAML reads {show(key)}; quote it"
            raise KeyProblem(inner, text)
        _require_text_keys(child, join(where, key))


def _check_section(
    section: Mapping,
    schema: type[Keys],
    unused: dict[str, str],
    components: tuple[str, ...] = (),
) -> None:
    where, known = schema.section, [*schema.model_fields, *components]
    for name, value in section.items():
        key = join(where, name)
        rule = KEYS.get(key)
        if name in known:
            continue
        if isinstance(rule, Only):
            if value not in rule.values:
                raise KeyProblem(key, f"{key}={show(value)}: {rule.fix}")
        elif isinstance(rule, Unused):
            unused[key] = rule.why
        elif where == "args" and data_set_with(name, key):
            raise KeyProblem(key, f"unknown key {key}; did you mean data.params.{name}?")
        else:
            others = [*rules(Unused, where), *rules(Only, where)]
            raise unknown_key(where, name, [*known, *(k.partition(".")[2] for k in others)])
    validated({k: v for k, v in section.items() if k in schema.model_fields}, schema, where)


def _check_conditioner(
    node: object, where: str, allow_import: tuple[str, ...], unused: dict[str, str]
) -> None:
    """Check SAT's GeneralConditioner, which may hold one frozen text encoder or none."""
    node = check_mapping(where, node)
    check_keys(node, ("target", "params"), where)
    if node.get("target") != CONDITIONER:
        key = f"{where}.target"
        raise KeyProblem(key, f"{key}={show(node.get('target'))}: use {CONDITIONER}")
    where = f"{where}.params"
    params = check_mapping(where, node.get("params"))
    validated(params, _ConditionerParams, where)
    for entry in params["emb_models"]:
        here = f"{where}.emb_models[0]"
        beside = {k: v for k, v in entry.items() if k in _TextEncoderEntry.model_fields}
        validated(beside, _TextEncoderEntry, here)
        component_of(entry, allow_import, here, unused=unused)


def _check_deepspeed(
    section: Mapping, allow_import: tuple[str, ...], unused: dict[str, str]
) -> None:
    where = "deepspeed"
    for name in section:
        key = join(where, name)
        if isinstance(rule := KEYS.get(key), Refused):
            raise KeyProblem(key, f"{key}: {rule.fix}")
    # A key of args has the type and the range of both.
    kinds = get_type_hints(TrainKeys, include_extras=True)
    for key, same in rules(Same, where).items():
        value = select(section, key.partition(".")[2])
        if value is not None:
            validated(value, kinds[same.key.partition(".")[2]], key)
    validated(section, DeepSpeedKeys, where)
    for key, silent in rules(Unused, where).items():
        if select(section, key.partition(".")[2]) is not None:
            unused[key] = silent.why
    check_own_sections(section)
    if section.get("optimizer"):
        _check_optimizer(section["optimizer"], allow_import, unused)


def _check_optimizer(
    section: Mapping, allow_import: tuple[str, ...], unused: dict[str, str]
) -> None:
    where = "deepspeed.optimizer"
    kind, params = str(section["type"]), section.get("params") or {}
    for name in _NUMBERS:  # torch accepts text here and fails later
        if name in params:
            validated(params[name], float, f"{where}.params.{name}")
    target = OWN_OPTIMIZERS.get(kind.lower(), kind)
    # DeepSpeed takes its own names in any case, such as AdamW and adamw.
    if kind.lower() in ("adam", "adamw"):
        target = "torch.optim.AdamW"
        for name in _DEEPSPEED_ADAM_KEYS:
            validated(params.get(name, True), bool, f"{where}.params.{name}")
        params = {k: v for k, v in params.items() if k not in _DEEPSPEED_ADAM_KEYS}
    elif "." not in target:
        own = " with args.optimizer_moments=8bit" if "8bit" in kind.lower() else ""
        known = f"sat.ops.FusedEmaAdam{own}, Prodigy, Muon, Adam, AdamW or a class of torch.optim"
        names = ("sat.ops.FusedEmaAdam", "Prodigy", "Muon", "Adam", "AdamW")
        near = "" if own else nearest(kind, names)
        raise KeyProblem(f"{where}.type", f"{where}.type={kind}: use {known}{near}")
    try:
        node = {"target": target, "params": params}
        component_of(node, allow_import, where, ("params",), unused)
    except KeyProblem as problem:
        text = str(problem).replace(f"{where}.target", f"{where}.type")
        raise KeyProblem(problem.key.replace(".target", ".type"), text) from None

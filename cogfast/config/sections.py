"""Checks and completes the four sections of a merged configuration."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cogfast.config.arguments import (
    PAIRS,
    TRAINING_PAIRS,
    ModelArguments,
    TrainArguments,
    deepspeed_value,
    select,
)
from cogfast.config.components import check_component, is_component
from cogfast.config.deepspeed_keys import (
    REFUSED_DEEPSPEED,
    DeepSpeedSection,
    check_own_sections,
    fill_auto,
)
from cogfast.config.merged_config import (
    COMMAND_LINE,
    DEFAULT,
    SECTIONS,
    find_origin,
    move_origin,
)
from cogfast.config.sat_classes import NETWORKS
from cogfast.config.sat_network import LORA_KEY
from cogfast.config.sat_unused import UNUSED
from cogfast.config.values import (
    KeyProblem,
    check_keys,
    check_mapping,
    join,
    show,
    unknown_key,
    validated,
)

COMPONENTS = (
    "network_config",
    "denoiser_config",
    "loss_fn_config",
    "sampler_config",
    "first_stage_config",
    "conditioner_config",
)
# key -> (legal values, what to do instead of setting another)
ONLY: dict[str, tuple[tuple[object, ...], str]] = {
    "model.compile_model": ((False, None), "use args.compile=true, which compiles each block"),
    "model.use_pd": ((False, None), "progressive distillation is not in this version; use false"),
    "model.lr_scale": ((None,), "super-resolution input is not in this version; remove it"),
    "model.network_wrapper": (
        (None, "sgm.modules.diffusionmodules.wrappers.OpenAIWrapper"),
        "the network is called directly; remove it",
    ),
    "args.sdedit": ((False,), "SAT's code does not read it; use false"),
    "args.iterable_dataset": ((False,), "data sets are read by index; use false"),
    "args.deepspeed_config": ((None,), "put its contents into the deepspeed section of a file"),
}
_DECAYING = ("linear", "cosine", "cosine_with_restarts", "polynomial")
# key of args -> values of lr_schedule that read it
_READ_BY: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr_decay_style", "lr_decay_iters", "lr_decay_ratio"), ("sat",)),
    "min_lr_ratio": _DECAYING,
    "lr_num_cycles": ("cosine_with_restarts",),
    "lr_power": ("polynomial",),
    "lr_first_step": ("constant", "constant_with_warmup", *_DECAYING),
}
# SAT's sft.yaml puts these at the top of the deepspeed section, but DeepSpeed reads them in fp16.
_LOSS_SCALING = ("loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")
# Names of other trainers -> the params of LoRA
_LORA_NAMES = {"lora_rank": "r", "lora_r": "r", "lora_alpha": "lora_alpha"}
CONDITIONER = "sgm.modules.GeneralConditioner"
# DeepSpeed's optimizer names, and those of their params that torch's AdamW does not have.
_DEEPSPEED_ADAM = ("adam", "adamw")
_NUMBERS = ("lr", "eps", "weight_decay", "momentum")
_DEEPSPEED_ADAM_KEYS = ("adam_w_mode", "bias_correction", "torch_adam", "set_grad_none")


def complete_sections(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Move keys to the place where they are read and fill in defaults. Updates both arguments."""
    for name, section in config.items():
        if name not in SECTIONS:
            raise _unknown_section(name)
        _require_text_keys(section, name)
        if section is None:
            config[name] = {}
        elif not isinstance(section, dict):
            raise KeyProblem(name, f"{name}={show(section)} must be a mapping")
    deepspeed = config.get("deepspeed") or {}
    for name in _LOSS_SCALING:
        if name in deepspeed:
            value, fp16 = deepspeed.pop(name), deepspeed.setdefault("fp16", {})
            if isinstance(fp16, dict) and name not in fp16:
                fp16[name] = value
                move_origin(origins, f"deepspeed.{name}", f"deepspeed.fp16.{name}")
    zero = deepspeed.get("zero_optimization")
    if isinstance(zero, dict) and isinstance(zero.get("cpu_offload"), bool):
        is_offloaded = zero.pop("cpu_offload")
        if is_offloaded and "offload_optimizer" not in zero:
            zero["offload_optimizer"] = {"device": "cpu"}  # DeepSpeed's replacement of the key
            where = "deepspeed.zero_optimization"
            move_origin(origins, f"{where}.cpu_offload", f"{where}.offload_optimizer.device")
    for name, schema in (("model", ModelArguments), ("args", TrainArguments)):
        section = config.setdefault(name, {})
        for f, value in zip(fields(schema), vars_of(schema), strict=True):
            if f.name not in section:
                section[f.name] = value
                origins[f"{name}.{f.name}"] = DEFAULT
    args = config["args"]
    for key in ("train_data", "valid_data"):
        if isinstance(args[key], str):  # one folder; SAT's flag takes several
            args[key] = [args[key]] if args[key] else []
        elif args[key] is None:
            args[key] = []
    _spread_checkpointing(config, origins)
    fill_auto(config, origins)
    optimizer = deepspeed.get("optimizer")
    params = optimizer.get("params") or {} if isinstance(optimizer, dict) else None
    # SAT gives its optimizer the params alone, and FusedEmaAdam's default is 0.
    has_none = isinstance(params, dict) and "weight_decay" not in params
    if has_none and origins["args.weight_decay"] == DEFAULT:
        args["weight_decay"] = 0.0


def settle_pairs(config: dict[str, Any], origins: dict[str, str]) -> dict[str, str]:
    """Give both keys of each pair in PAIRS the value that wins. Updates both arguments.

    The command line wins over files. In one file the deepspeed section wins, as in SAT; two files, or
    two words of the command line, must not contradict each other. Returns the keys of `args` that
    a file sets in vain, with the reason.
    """
    args, deepspeed = config["args"], config.get("deepspeed") or {}
    defaults, unused = TrainArguments(), {}
    for name, inner in PAIRS.items():
        value, found = args[name], deepspeed_value(deepspeed, name)
        if args["mode"] == "inference" and name in TRAINING_PAIRS:
            continue
        key, other = f"args.{name}", f"deepspeed.{inner}"
        # A section that has one precision switches the other one off.
        is_implied = name in ("bf16", "fp16") and name not in deepspeed
        here = origins.get(key, DEFAULT)
        there = find_origin(origins, other)
        if is_implied:
            rival = "fp16" if name == "bf16" else "bf16"
            there = find_origin(origins, f"deepspeed.{rival}")
            if found is False and value and not deepspeed_value(deepspeed, rival):
                # The section has the other precision only to switch it off.
                _put(deepspeed, inner, value)
                origins[other] = here
                continue
        if found is None or found == value:
            if found is not None and here == DEFAULT:
                origins[key] = there
            continue
        if _level(here) > _level(there):
            _put(deepspeed, inner, value)
            origins[other] = here
            continue
        # A run's own file contains the defaults, too.
        is_meant = here != DEFAULT and (_level(here) > 0 or value != getattr(defaults, name))
        if is_meant and _level(here) == _level(there):
            if here != there or _level(here) > 0:
                of = "" if here == there else f" in {there}"
                text = f"{key}={show(value)}, but {other}={show(found)}{of}; change one of them"
                hint = "" if _level(here) else ", or set one on the command line"
                raise KeyProblem(key, text + hint)
            unused[key] = f"{other}={show(found)} takes precedence in a file"
        args[name], origins[key] = found, there
    return unused


def _level(origin: str) -> int:
    """Return 2 for key=value words, 1 for options of `cogfast finetune`, 0 for files and defaults."""
    return 2 if origin == COMMAND_LINE else int(origin.startswith("--"))


def _put(node: dict[str, Any], key: str, value: object) -> None:
    *above, last = key.split(".")
    for part in above:
        node = node.setdefault(part, {})
    node[last] = value


def check_sections(
    config: dict[str, Any], origins: Mapping[str, str], allow_import: tuple[str, ...]
) -> dict[str, str]:
    """Check every key and value. Return accepted keys without effect, with the reasons."""
    unused: dict[str, str] = {}
    _check_section(config["args"], TrainArguments, "args", unused, ())
    _name_unread_rates(config["args"], unused)
    _check_section(config["model"], ModelArguments, "model", unused, COMPONENTS)
    for name in COMPONENTS:
        node, where = config["model"].get(name), f"model.{name}"
        if node is None:
            continue
        if name == "network_config" and is_component(node) and node["target"] not in NETWORKS:
            key = f"{where}.target"
            text = f"{key}={show(node['target'])}: only {NETWORKS[0]} is supported; use it"
            raise KeyProblem(key, text)
        if name == "conditioner_config":
            _check_conditioner(node, where, allow_import, unused)
        else:
            check_component(node, where, allow_import, unused)
    # assemble_datasets gives data_dir: args.train_data or args.valid_data.
    if config.get("data"):
        check_component(config["data"], "data", allow_import, unused, given=("data_dir",))
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


def vars_of(schema: type) -> list[object]:
    """Return the default values of a dataclass, in the order of its fields."""
    instance = schema()
    return [getattr(instance, f.name) for f in fields(schema)]


def _unknown_section(name: str) -> KeyProblem:
    problem = unknown_key("", str(name), SECTIONS)
    for section, schema in (("args", TrainArguments), ("model", ModelArguments)):
        if name in {f.name for f in fields(schema)}:
            return KeyProblem(str(name), f"unknown key {name}; did you mean {section}.{name}?")
    return problem


def _spread_checkpointing(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Copy args.checkpoint_activations, if set, over the network's own value."""
    value = config["args"]["checkpoint_activations"]
    network = config["model"].get("network_config")
    params = network.get("params") if isinstance(network, dict) else None
    if value is None or not isinstance(params, dict):
        return
    inner = params.setdefault("transformer_args", {})
    if isinstance(inner, dict) and inner.get("checkpoint_activations") != value:
        inner["checkpoint_activations"] = value
        key = "model.network_config.params.transformer_args.checkpoint_activations"
        origins[key] = origins.get("args.checkpoint_activations", DEFAULT)


def _check_section(
    section: Mapping,
    schema: type,
    where: str,
    unused: dict[str, str],
    components: tuple[str, ...],
) -> None:
    names = [f.name for f in fields(schema)]
    silent = [key.partition(".")[2] for key in UNUSED if key.startswith(f"{where}.")]
    single = [key.partition(".")[2] for key in ONLY if key.startswith(f"{where}.")]
    for name, value in section.items():
        key = join(where, name)
        if name in names:
            continue
        if key in ONLY:
            allowed, fix = ONLY[key]
            if value not in allowed:
                raise KeyProblem(key, f"{key}={show(value)}: {fix}")
        elif key in UNUSED:
            unused[key] = UNUSED[key]
        elif name in _LORA_NAMES and where == "args":
            text = (
                f"unknown key {key}; set {LORA_KEY}.{_LORA_NAMES[name]}, and add configs/lora.yaml"
            )
            raise KeyProblem(key, f"{text} to --base")
        elif name not in components:
            raise unknown_key(where, str(name), [*names, *silent, *single, *components])
    validated({k: v for k, v in section.items() if k in names}, schema, where)


def _name_unread_rates(args: Mapping, unused: dict[str, str]) -> None:
    """Add the keys about the learning rate that args.lr_schedule does not read."""
    schedule = args["lr_schedule"]
    defaults = TrainArguments()
    for key, readers in _READ_BY.items():
        # A run's saved configuration also contains the defaults.
        if schedule not in readers and args[key] != getattr(defaults, key):
            unused[f"args.{key}"] = f"read by lr_schedule={', '.join(readers)} only"
    if schedule == "constant" and not args["lr_first_step"] and args["warmup_steps"]:
        unused["args.warmup_steps"] = (
            "lr_schedule=constant with lr_first_step=0 has no warm-up; constant_with_warmup has"
        )


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
    for name, value in params.items():
        if name in ("cor_embs", "cor_p"):
            if value:
                text = f"{where}.{name}: only an empty list is supported; remove it"
                raise KeyProblem(join(where, name), text)
        elif name != "emb_models":
            raise unknown_key(where, name, ("emb_models",))
    entries, key = params.get("emb_models"), f"{where}.emb_models"
    if not isinstance(entries, list):
        raise KeyProblem(key, f"{key}={show(entries)} must be a list of text encoders")
    if len(entries) > 1:
        text = f"{key} lists {len(entries)} encoders, but CogVideoX uses one, for captions; remove the rest"
        raise KeyProblem(key, text)
    for entry in entries:
        here = f"{key}[0]"
        if not is_component(entry):
            raise KeyProblem(here, f"{here} must be a mapping with target and params")
        for name, kind in (("is_trainable", bool), ("input_key", str), ("ucg_rate", float)):
            if name in entry:
                validated(entry[name], kind, join(here, name))
        if entry.get("is_trainable"):
            raise KeyProblem(here, f"{here}.is_trainable=true: text encoders are frozen; use false")
        if entry.get("input_key", "txt") != "txt":
            raise KeyProblem(
                here, f"{here}.input_key={entry['input_key']} must be txt, the key of captions"
            )
        if not 0 <= entry.get("ucg_rate", 0.0) <= 1:
            raise KeyProblem(here, f"{here}.ucg_rate={entry['ucg_rate']} must be from 0 to 1")
        check_component(entry, here, allow_import, unused)


def _check_deepspeed(
    section: Mapping, allow_import: tuple[str, ...], unused: dict[str, str]
) -> None:
    where = "deepspeed"
    for name in section:
        if name in REFUSED_DEEPSPEED:
            key = join(where, name)
            raise KeyProblem(key, f"{key}: {REFUSED_DEEPSPEED[name]}")
    # A key of args has the type and the range of both.
    kinds = typing.get_type_hints(TrainArguments, include_extras=True)
    for name, inner in PAIRS.items():
        value = select(section, inner)
        if value is not None:
            validated(value, kinds[name], join(where, inner))
    validated(section, DeepSpeedSection, where)
    for key, reason in UNUSED.items():
        if key.startswith(f"{where}.") and select(section, key.partition(".")[2]) is not None:
            unused[key] = reason
    check_own_sections(section)
    if section.get("optimizer"):
        _check_optimizer(section["optimizer"], allow_import, unused)


def _check_optimizer(
    section: Mapping, allow_import: tuple[str, ...], unused: dict[str, str]
) -> None:
    where = "deepspeed.optimizer"
    kind, params = section["type"], section.get("params") or {}
    for name in _NUMBERS:  # torch accepts text here and fails later
        if name in params:
            validated(params[name], float, f"{where}.params.{name}")
    # DeepSpeed takes its own names in any case, such as AdamW and adamw.
    if kind.lower() in _DEEPSPEED_ADAM:
        for name in _DEEPSPEED_ADAM_KEYS:
            validated(params.get(name, True), bool, f"{where}.params.{name}")
        params = {k: v for k, v in params.items() if k not in _DEEPSPEED_ADAM_KEYS}
    elif "." not in kind:
        own = " with args.optimizer_moments=8bit" if "8bit" in kind.lower() else ""
        raise KeyProblem(
            f"{where}.type",
            f"{where}.type={kind}: use sat.ops.FusedEmaAdam{own}, Adam, AdamW or a class of torch.optim",
        )
    target = "torch.optim.AdamW" if kind.lower() in _DEEPSPEED_ADAM else kind
    try:
        check_component(
            {"target": target, "params": params}, where, allow_import, unused, given=("params",)
        )
    except KeyProblem as problem:
        text = str(problem).replace(f"{where}.target", f"{where}.type")
        raise KeyProblem(problem.key.replace(".target", ".type"), text) from None

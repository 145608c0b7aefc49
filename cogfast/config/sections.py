"""Checks and completes the four sections of a merged configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_type_hints

from annotated_types import Len, MaxLen

from cogfast.config.arguments import ModelArguments, TrainArguments
from cogfast.config.components import (
    OWN_OPTIMIZERS,
    check_component,
    data_set_with,
    import_target,
    is_component,
    own_targets,
)
from cogfast.config.deepspeed_keys import (
    FOLDED,
    LOSS_SCALING,
    REFUSED_DEEPSPEED,
    DeepSpeedSection,
    check_own_sections,
    prepare,
    take,
)
from cogfast.config.merged_config import SECTIONS
from cogfast.config.sat_classes import NETWORKS
from cogfast.config.sat_network import NETWORK_KEY, fold_lora
from cogfast.config.sat_unused import UNUSED
from cogfast.core.keys import COMMAND_LINE, DEFAULT, Keys, Share, find_origin
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
    "args.trusted_cache": ((None,), "caches of other trainers are not read; use cogfast cache"),
    "args.deepspeed_config": ((None,), "put its contents into the deepspeed section of a file"),
}
_RECOMPUTE = "args.checkpoint_activations", f"{NETWORK_KEY}.transformer_args.checkpoint_activations"
_SAMPLES = ("batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
# Key that counts in place of others wherever it is set -> the others. FOLDED and LoRA's short names, which
# set the same value, have rules of their own.
_IN_PLACE_OF = {
    "args.train_iters": ("args.epochs",),
    "args.epochs": ("args.train_iters",),
    "args.warmup_steps": ("args.warmup",),
    "args.activation_checkpointing": _RECOMPUTE,
    "args.checkpoint_activations": _RECOMPUTE[1:],
    "args.run_folder": ("args.save",),
    "args.valid_data": ("args.split",),
    "args.eval_prompts": ("args.eval_prompt_file",),
    "args.eval_prompt_file": ("args.eval_prompts",),
    "model.lora_train": ("model.not_trainable_prefixes",),
    "deepspeed.train_batch_size": [f"{s}.{n}" for s in ("args", "deepspeed") for n in _SAMPLES],
    "deepspeed.zero_optimization.offload_optimizer": ("deepspeed.zero_optimization.cpu_offload",),
    **{f"deepspeed.fp16.{name}": (f"deepspeed.{name}",) for name in LOSS_SCALING},
}


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
    _remove_overruled(config, origins)
    deepspeed = config.get("deepspeed") or {}
    optimizer = deepspeed.get("optimizer")
    params = optimizer.get("params") or {} if isinstance(optimizer, dict) else None
    has_no_decay = isinstance(params, dict) and "weight_decay" not in params
    prepare(deepspeed, origins)
    for name, schema in (("model", ModelArguments), ("args", TrainArguments)):
        section = config.setdefault(name, {})
        for key, value in schema().model_dump().items():
            if key not in section:
                section[key] = value
                origins[f"{name}.{key}"] = DEFAULT
    fold_lora(config, origins)
    args = config["args"]
    for key in ("train_data", "valid_data"):
        if isinstance(args[key], str):  # one folder; SAT's flag takes several
            args[key] = [args[key]] if args[key] else []
        elif args[key] is None:
            args[key] = []
    # SAT gives its optimizer the params alone, and FusedEmaAdam's default is 0.
    if has_no_decay and origins["args.weight_decay"] == DEFAULT:
        args["weight_decay"] = 0.0


def _remove_overruled(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Remove the keys of files that would count in place of a key of the command line."""
    for key, others in _IN_PLACE_OF.items():
        found = [name for name in (key, *others) if select(config, name) is not None]
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
    _check_section(config["args"], TrainArguments, "args", unused, ())
    _check_section(config["model"], ModelArguments, "model", unused, COMPONENTS)
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
            check_component(node, where, allow_import, unused)
    # assemble_datasets gives data_dir: args.train_data or args.valid_data.
    if config.get("data") and "data" not in unused:
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


def _unknown_section(name: str) -> KeyProblem:
    problem = unknown_key("", str(name), SECTIONS)
    for section, schema in (("args", TrainArguments), ("model", ModelArguments)):
        if name in schema.model_fields:
            return KeyProblem(str(name), f"unknown key {name}; did you mean {section}.{name}?")
    return problem


def _check_section(
    section: Mapping,
    schema: type[Keys],
    where: str,
    unused: dict[str, str],
    components: tuple[str, ...],
) -> None:
    names = [*schema.model_fields]
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
        elif name not in components:
            if where == "args" and data_set_with(str(name), key):
                raise KeyProblem(key, f"unknown key {key}; did you mean data.params.{name}?")
            raise unknown_key(where, str(name), [*names, *silent, *single, *components])
    validated({k: v for k, v in section.items() if k in names}, schema, where)


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
    kinds = get_type_hints(TrainArguments, include_extras=True)
    for inner, name in FOLDED.items():
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
    elif "." not in kind and kind.lower() not in OWN_OPTIMIZERS:
        own = " with args.optimizer_moments=8bit" if "8bit" in kind.lower() else ""
        known = f"sat.ops.FusedEmaAdam{own}, Prodigy, Muon, Adam, AdamW or a class of torch.optim"
        names = ("sat.ops.FusedEmaAdam", "Prodigy", "Muon", "Adam", "AdamW")
        near = "" if own else nearest(kind, names)
        raise KeyProblem(f"{where}.type", f"{where}.type={kind}: use {known}{near}")
    target = OWN_OPTIMIZERS.get(kind.lower(), kind)
    if kind.lower() in _DEEPSPEED_ADAM:
        target = "torch.optim.AdamW"
    try:
        check_component(
            {"target": target, "params": params}, where, allow_import, unused, given=("params",)
        )
    except KeyProblem as problem:
        text = str(problem).replace(f"{where}.target", f"{where}.type")
        raise KeyProblem(problem.key.replace(".target", ".type"), text) from None

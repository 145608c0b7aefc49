"""The `deepspeed` section of a file: its keys, and what of it is kept in `args`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from cogfast.config.sat_unused import LOSS_SCALING, take_moved
from cogfast.core.keys import DEFAULT, find_origin, level
from cogfast.core.values import KeyProblem, join, problem_of, show
from cogfast.door.merged_config import move_origin
from cogfast.train.keys import TrainKeys

_AUTO = "auto"


def prepare(section: dict[str, Any], origins: dict[str, str]) -> None:
    """Move keys to where DeepSpeed reads them, and take out "auto". Updates both arguments.

    Where a file says "auto", args has the value, or DeepSpeed's default applies. The norm of gradients
    is clipped at 1, as accelerate does.
    """
    for name in LOSS_SCALING:
        if name in section:
            value, fp16 = section.pop(name), section.setdefault("fp16", {})
            if isinstance(fp16, dict) and name not in fp16:
                fp16[name] = value
                move_origin(origins, f"deepspeed.{name}", f"deepspeed.fp16.{name}")
    zero = section.get("zero_optimization")
    if isinstance(zero, dict) and isinstance(zero.get("cpu_offload"), bool):
        _move_cpu_offload(zero, origins)
    if section.get("gradient_clipping") == _AUTO:
        section["gradient_clipping"] = 1.0
    _remove_auto(section, "deepspeed", origins)


def _move_cpu_offload(zero: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace DeepSpeed's older key by `offload_optimizer`, which counts where files set both."""
    names = "cpu_offload", "offload_optimizer.device"
    old, new = (f"deepspeed.zero_optimization.{name}" for name in names)
    is_offloaded, offload = zero.pop("cpu_offload"), zero.get("offload_optimizer", {})
    offload = offload if isinstance(offload, dict) else {"device": "none"}  # null
    device = offload.get("device", "none")
    here, there = (level(find_origin(origins, key)) for key in (old, new))
    if is_offloaded and "device" not in offload:
        zero["offload_optimizer"] = {**offload, "device": "cpu"}
        move_origin(origins, old, new)
    # SAT's files say cpu_offload: false, which is no wish.
    elif is_offloaded != (device != "none") and here == there and (is_offloaded or here > 0):
        raise KeyProblem(old, f"{old}={show(is_offloaded)}, but {new}={show(device)}; keep one")


def _remove_auto(node: dict[str, Any], where: str, origins: dict[str, str]) -> None:
    for name, value in list(node.items()):
        key = join(where, name)
        if isinstance(value, dict):
            _remove_auto(value, key, origins)
        elif value == _AUTO:
            del node[name]
            origins.pop(key, None)


def fold(
    config: dict[str, Any], origins: dict[str, str], files: Sequence[str] = ()
) -> dict[str, str]:
    """Move the values that are the same as keys of args from the deepspeed section to args. Updates config and origins.

    The command line wins over files. In one file the deepspeed section wins, as in SAT; two files, or
    two words of the command line, must not contradict each other. files: their names as origins, in
    the order of merging. Returns the keys of args that a file sets in vain, with the reason.
    """
    args = config["args"]
    found = [
        (name, value, other, find_origin(origins, source))
        for name, (value, other, source) in take_moved(config).items()
    ]
    for _, _, other, _ in found:
        origins.pop(other, None)
    unused, defaults = {}, TrainKeys()
    for name, value, other, there in found:
        key, before = f"args.{name}", args[name]
        here = origins.get(key, DEFAULT)
        if value == before or level(here) > level(there):
            origins[key] = there if here == DEFAULT else here
            continue
        # A run's own file contains the defaults, too; a file above it has what its user wrote.
        is_above = here in files and there in files and files.index(here) > files.index(there)
        is_changed = level(here) > 0 or before != getattr(defaults, name)
        if here != DEFAULT and (is_changed or is_above) and level(here) == level(there):
            if here != there or level(here) > 0:
                of = "" if here == there else f" in {there}"
                text = f"{key}={show(before)}, but {other}={show(value)}{of}; change one of them"
                hint = "" if level(here) else ", or set one on the command line"
                raise KeyProblem(key, text + hint)
            unused[key] = f"{other}={show(value)} takes precedence in a file"
        args[name], origins[key] = value, there
    for name, rival in (("bf16", "fp16"), ("fp16", "bf16")):
        here, there = (origins.get(f"args.{one}", DEFAULT) for one in (name, rival))
        if args[name] and args[rival] and level(here) > level(there):
            args[rival], origins[f"args.{rival}"] = False, here
    return unused


def check_own_sections(section: Mapping[str, Any]) -> None:
    """Check the sections that DeepSpeed has models for, which refuse unknown keys."""
    if not any(section.get(name) for name in ("zero_optimization", "bf16", "fp16")):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    for name, model in models.items():
        given = section.get(name) or {}
        try:
            model(**given)
        except ValidationError as error:
            raise problem_of(error, _keys(model), given, f"deepspeed.{name}") from None
    size = (section.get("zero_optimization") or {}).get("zero_hpz_partition_size", 1)
    if size != 1:
        key = "deepspeed.zero_optimization.zero_hpz_partition_size"
        text = f"{key}={size}: hpZ's second copy of the weights is not supported"
        raise KeyProblem(key, f"{text}; remove it: ZeRO-3's gathers overlap computation")


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model of DeepSpeed's, without types: its own cannot be generated."""
    known = {}
    for key, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        known[field.alias or key] = _keys(inner[0]) if inner else {}
    return {"properties": known, "additionalProperties": {}}

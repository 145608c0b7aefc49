"""Reads a DeepSpeed file of CogVideo's trainer, or the variables of `accelerate launch`, and compares
them with the options.

`accelerate launch --config_file F -m cogfast finetune ...` starts the ranks as torchrun does. F may also
name a DeepSpeed file, or describe ZeRO itself; accelerate's own trainer reads both from variables.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogfast.config.arguments import select
from cogfast.config.merged_config import to_dict
from cogfast.config.yaml_files import read_yaml
from cogfast.core.files import read_limited
from cogfast.core.values import show
from cogfast.finetune.schemas import Args

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**19
_LAUNCH = Path("accelerate launch")  # named in messages in place of a file
_FIX = "give a DeepSpeed configuration in JSON or YAML"
# Key of the file -> the option that sets the same
_SAME = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
_PREFIX = "ACCELERATE_"
# Parallelism that cogfast does not have, since DeepSpeed's ZeRO shards
_REFUSED = ("USE_FSDP", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG")


def read_launch(
    environment: Mapping[str, str],
) -> tuple[Path | None, dict[str, Any], str | None]:
    """Return what the variables of `accelerate launch` set: the file of DeepSpeed's configuration, without
    one the deepspeed section that the launch describes itself ({} without ZeRO), and the precision (None if
    accelerate's own default applies, which the trainer's option replaces).

    Raises ValueError for a kind of parallelism that cogfast does not have.
    """
    given = {
        name.removeprefix(_PREFIX): text
        for name, text in environment.items()
        # accelerate writes "none" for settings that its file leaves out.
        if name.startswith(_PREFIX) and text.lower() not in ("", "none")
    }
    for name in _REFUSED:
        if _is_true(given.get(name, "")):
            raise ValueError(
                f"{_PREFIX}{name}={given[name]} is not supported, since cogfast shards with DeepSpeed's "
                "ZeRO; change the file of accelerate launch --config_file: distributed_type DEEPSPEED or "
                "MULTI_GPU"
            )
    # "no" is also accelerate's default, so it does not contradict --mixed_precision.
    precision = given.get("MIXED_PRECISION", "no").lower()
    asked = None if precision == "no" else precision
    if "DEEPSPEED_CONFIG_FILE" in given:
        return Path(given["DEEPSPEED_CONFIG_FILE"]), {}, asked
    if not _is_true(given.get("USE_DEEPSPEED", "")):
        return None, {}, asked
    # 2 is accelerate's default stage.
    zero: dict[str, Any] = {"stage": _number(given, "DEEPSPEED_ZERO_STAGE", int) or 2}
    for part in ("optimizer", "param"):
        name = f"DEEPSPEED_OFFLOAD_{part.upper()}"
        if f"{name}_DEVICE" in given:
            zero[f"offload_{part}"] = {"device": given[f"{name}_DEVICE"].lower()}
            if f"{name}_NVME_PATH" in given:
                zero[f"offload_{part}"]["nvme_path"] = given[f"{name}_NVME_PATH"]
    section: dict[str, Any] = {"zero_optimization": zero}
    for key, kind in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        value = _number(given, key.upper(), kind)
        section |= {} if value is None else {key: value}
    return None, section, asked


def _number(given: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    text = given.get(name, "auto")
    if text == "auto":  # the trainer's option has the value
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{_PREFIX}{name}={text} must be a number; change the file of accelerate launch "
            "--config_file"
        ) from None


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "y", "t", "on")


def deepspeed_settings(args: Args) -> dict[str, tuple[Any, str]]:
    """Return {key of the deepspeed section: (value, the file)}.

    Without a file, they come from the variables of `accelerate launch`; {} if there are none.

    "auto" where an option has the value is left out. Raises ValueError where the file contradicts
    an option: which of them wins would be a guess.
    """
    given, section, precision = read_launch(os.environ)
    if precision not in (None, args.mixed_precision):
        _refuse(args, "mixed_precision", f"{_LAUNCH} --config_file", "mixed_precision", precision)
    # A file is complete: it replaces what the launch says about ZeRO.
    if file := args.deepspeed_config or given:
        section = _read(file)
    file = file or _LAUNCH
    if section.pop("scheduler", None) is not None:
        logger.info("%s: its scheduler is not used; --lr_scheduler sets the learning rate", file)
    for key, name in _SAME.items():
        found = select(section, key)
        if found not in (None, "auto", getattr(args, name)):
            _refuse(args, name, file, key, found)
    optimizer = _mapping(file, section.pop("optimizer", None), "optimizer")
    params = _mapping(file, optimizer.get("params"), "optimizer.params")
    kind = str(optimizer.get("type", args.optimizer))
    if kind.lower() != args.optimizer.lower():
        _refuse(args, "optimizer", file, "optimizer.type", kind)
    # Two options for one key, so _SAME cannot list it.
    betas = params.get("betas")
    if betas not in (None, "auto", [args.beta1, args.beta2]):
        _refuse(args, "beta1", file, "optimizer.params.betas", betas)
    # Both sections must agree with the one option: a file may switch on one and leave out the other.
    for name in ("bf16", "fp16"):
        is_on = select(section, f"{name}.enabled")
        if isinstance(is_on, bool) and is_on != (args.mixed_precision == name):
            _refuse(args, "mixed_precision", file, f"{name}.enabled", is_on)
    settings = {f"deepspeed.optimizer.params.{key}": value for key, value in params.items()}
    if "type" in optimizer:
        settings["deepspeed.optimizer.type"] = kind
    for key, value in section.items():
        # Key by key: the whole section would replace what --mixed_precision has set in it.
        if isinstance(value, dict) and key in ("bf16", "fp16"):
            settings |= {f"deepspeed.{key}.{name}": inner for name, inner in value.items()}
        else:
            settings[f"deepspeed.{key}"] = value
    return {key: (value, file.name) for key, value in settings.items() if value != "auto"}


def _read(file: Path) -> dict[str, Any]:
    text = read_limited(file, _MOST_BYTES, _FIX)
    try:
        # Upstream's files are JSON named .yaml. Two of them have a key twice, which YAML refuses, first
        # as "auto": JSON takes the last.
        found = json.loads(text)
    except (ValueError, RecursionError):
        return to_dict(read_yaml(file, str(file), is_plain=True))
    return _mapping(file, found, "the file")


def _mapping(file: Path, found: object, key: str) -> dict[str, Any]:
    if not isinstance(found, Mapping | None):
        raise ValueError(f"{file}: {key}={show(found)} must be a mapping; correct it")
    return dict(found or {})


def _refuse(args: Args, option: str, file: Path | str, key: str, value: object) -> None:
    given = show(getattr(args, option)).strip("'")
    raise ValueError(
        f"--{option} {given}, but {file} has {key}={show(value)}; change one of "
        "them, or set it to auto"
    )

"""Reads a DeepSpeed file of CogVideo's trainer, and compares it with the options."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogfast.config.json_files import read_limited
from cogfast.config.merged_config import to_dict
from cogfast.config.values import show
from cogfast.config.yaml_files import read_yaml
from cogfast.finetune.accelerate import read_launch
from cogfast.finetune.schemas import Args

logger = logging.getLogger(__name__)

_MOST_BYTES = 2**19
_LAUNCH = Path("accelerate launch")  # named in messages in place of a file
FIX = "give a DeepSpeed configuration in JSON or YAML"
# Key of the file -> the option that sets the same
_SAME = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}


def deepspeed_settings(args: Args) -> dict[str, tuple[Any, str]]:
    """Return {key of the deepspeed section: (value, the file)}.

    Without a file, they come from the variables of `accelerate launch`; {} if there are none.

    "auto" where an option has the value is left out. Raises ValueError where the file contradicts
    an option: which of them wins would be a guess.
    """
    launch = read_launch(os.environ)
    file = args.deepspeed_config or launch.file
    if launch.precision not in (None, args.mixed_precision):
        option = f"--mixed_precision {args.mixed_precision}"
        raise ValueError(
            f"{option}, but the file of {_LAUNCH} --config_file has mixed_precision="
            f"{launch.precision}; give --mixed_precision {launch.precision}, or change the file"
        )
    # A file is complete: it replaces what the launch says about ZeRO.
    section = dict(launch.section) if file is None else _read(file)
    file = file or _LAUNCH
    if section.pop("scheduler", None) is not None:
        logger.info("%s: its scheduler is not used; --lr_scheduler sets the learning rate", file)
    for key, name in _SAME.items():
        _compare(file, section, key, name, getattr(args, name))
    optimizer = _mapping(file, section.pop("optimizer", None), "optimizer")
    given_params = _mapping(file, optimizer.get("params"), "optimizer.params")
    kind = str(optimizer.get("type", args.optimizer))
    if kind.lower() != args.optimizer.lower():
        _refuse(f"--optimizer {args.optimizer}", file, "optimizer.type", kind)
    # Two options for one key, so _SAME cannot list it.
    betas = _select(optimizer, "params.betas")
    if betas not in (None, "auto", [args.beta1, args.beta2]):
        given = f"--beta1 {args.beta1} --beta2 {args.beta2}"
        _refuse(given, file, "optimizer.params.betas", betas)
    # Both sections must agree with the one option: a file may switch on one and leave out the other.
    for name in ("bf16", "fp16"):
        is_on = _select(section, f"{name}.enabled")
        if isinstance(is_on, bool) and is_on != (args.mixed_precision == name):
            _refuse(f"--mixed_precision {args.mixed_precision}", file, f"{name}.enabled", is_on)
    params = {k: v for k, v in given_params.items() if v != "auto"}
    settings = {f"deepspeed.optimizer.params.{key}": value for key, value in params.items()}
    if "type" in optimizer:
        settings["deepspeed.optimizer.type"] = kind
    for key, value in section.items():
        # Key by key: the whole section would replace what --mixed_precision has set in it.
        if isinstance(value, dict) and key in ("bf16", "fp16"):
            inner = {f"deepspeed.{key}.{k}": v for k, v in value.items() if v != "auto"}
            settings |= inner
        elif value != "auto":
            settings[f"deepspeed.{key}"] = value
    return {key: (value, file.name) for key, value in settings.items()}


def _read(file: Path) -> dict[str, Any]:
    text = read_limited(file, _MOST_BYTES, FIX)
    try:
        # Upstream's files are JSON named .yaml. Two of them have a key twice, which YAML refuses, first
        # as "auto": JSON takes the last.
        found = json.loads(text)
    except (ValueError, RecursionError):
        return to_dict(read_yaml(file, str(file), is_plain=True))
    if not isinstance(found, dict):
        raise ValueError(f"--deepspeed_config {file}: contains no mapping; {FIX}")
    return found


def _mapping(file: Path | str, found: object, key: str) -> dict[str, Any]:
    if not isinstance(found, Mapping | None):
        raise ValueError(
            f"{file}: {key}={show(found)} must be a mapping; correct it, or remove {key}"
        )
    return dict(found or {})


def _compare(file: Path, section: Mapping, key: str, name: str, wanted: object) -> None:
    found = _select(section, key)
    if found not in (None, "auto", wanted):
        _refuse(f"--{name} {show(wanted)}", file, key, found)


def _refuse(option: str, file: Path, key: str, value: object) -> None:
    raise ValueError(
        f"{option}, but {file} has {key}={show(value)}; change one of them, or set it to auto"
    )


def _select(section: Mapping, key: str) -> Any:
    node: Any = section
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node

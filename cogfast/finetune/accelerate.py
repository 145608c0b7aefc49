"""Reads the settings of `accelerate launch` from the variables that it sets for its processes.

`accelerate launch --config_file F -m cogfast finetune ...` starts the ranks as torchrun does. F may also
name a DeepSpeed file, or describe ZeRO itself; accelerate's own trainer reads both from variables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PREFIX = "ACCELERATE_"
_PRECISIONS = ("no", "fp16", "bf16")
_REFUSED = {
    "USE_FSDP": "FSDP",
    "USE_MEGATRON_LM": "Megatron-LM",
    "USE_PARALLELISM_CONFIG": "a parallelism_config",
}
_DEVICES = ("none", "cpu", "nvme")
_FIX = "change the file of accelerate launch --config_file"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launch by accelerate.

    file: DeepSpeed's configuration, whose values replace those of `section`. section: the content of
    the deepspeed section that the launch describes itself; {} without ZeRO. precision: None if
    accelerate's own default applies, which the trainer's option replaces.
    """

    file: Path | None = None
    section: dict[str, Any] = field(default_factory=dict)
    precision: str | None = None


def read_launch(environment: Mapping[str, str]) -> Launch:
    """Return the settings in the variables of `accelerate launch`; an empty Launch without them.

    Raises ValueError for a kind of parallelism or a precision that cogfast does not have.
    """
    for name, what in _REFUSED.items():
        if _is_true(environment.get(_PREFIX + name, "")):
            raise ValueError(
                f"{_PREFIX}{name}={environment[_PREFIX + name]}: {what} is not supported, since cogfast "
                f"shards with DeepSpeed's ZeRO; {_FIX}: distributed_type DEEPSPEED or MULTI_GPU"
            )
    precision = environment.get(_PREFIX + "MIXED_PRECISION", "no").lower()
    if precision not in _PRECISIONS:
        raise ValueError(
            f"{_PREFIX}MIXED_PRECISION={precision} must be one of {', '.join(_PRECISIONS)}; {_FIX}"
        )
    # "no" is also accelerate's default, so it does not contradict --mixed_precision.
    asked = None if precision == "no" else precision
    # accelerate writes "none" for settings that its file leaves out.
    file = environment.get(_PREFIX + "DEEPSPEED_CONFIG_FILE", "none")
    if file not in ("", "none"):
        return Launch(file=Path(file), precision=asked)
    uses_zero = _is_true(environment.get(_PREFIX + "USE_DEEPSPEED", ""))
    return Launch(section=_section(environment) if uses_zero else {}, precision=asked)


def _section(environment: Mapping[str, str]) -> dict[str, Any]:
    # 2 is accelerate's default stage.
    zero: dict[str, Any] = {"stage": _number(environment, "DEEPSPEED_ZERO_STAGE", int, 2)}
    for part in ("optimizer", "param"):
        name = f"DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE"
        device = environment.get(_PREFIX + name, "none").lower()
        if device not in _DEVICES:
            raise ValueError(
                f"{_PREFIX}{name}={device} must be one of {', '.join(_DEVICES)}; {_FIX}"
            )
        if device != "none":
            zero[f"offload_{part}"] = {"device": device}
        if device == "nvme":
            path = environment.get(f"{_PREFIX}DEEPSPEED_OFFLOAD_{part.upper()}_NVME_PATH")
            zero[f"offload_{part}"] |= {} if path is None else {"nvme_path": path}
    section: dict[str, Any] = {"zero_optimization": zero}
    for key, kind in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        value = _number(environment, key.upper(), kind, None)
        section |= {} if value is None else {key: value}
    return section


def _number(environment: Mapping[str, str], name: str, kind: type, absent: int | None) -> Any:
    text = environment.get(_PREFIX + name, "auto")
    if text in ("auto", "none"):  # the trainer's option has the value
        return absent
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{_PREFIX}{name}={text} must be a number; {_FIX}") from None


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "y", "t", "on")

"""Trainer classes by upstream's model names and training types. finetune/models.py fills it."""

from __future__ import annotations

import sys
from typing import Any

from cogfast.core.values import cut, nearest

# {name: the folder of its classes in upstream's finetune/models}
BUILT_IN = {
    "cogvideox-t2v": "cogvideox_t2v",
    "cogvideox-i2v": "cogvideox_i2v",
    "cogvideox1.5-t2v": "cogvideox1_5_t2v",
    "cogvideox1.5-i2v": "cogvideox1_5_i2v",
}
TRAINING_TYPES = ("lora", "sft")
SUPPORTED_MODELS: dict[str, dict[str, type[Any]]] = {name: {} for name in BUILT_IN}


def register(model_name: str, training_type: str, trainer_cls: type[Any]) -> None:
    """Register a trainer class. Raises ValueError if the name has a class for this training type."""
    if training_type not in TRAINING_TYPES:
        types = " or ".join(map(repr, TRAINING_TYPES))
        raise ValueError(f"register: training_type={training_type!r} must be {types}")
    known = SUPPORTED_MODELS.setdefault(model_name, {})
    if training_type in known:
        text = f"register: model_name={model_name!r} already has the {training_type} trainer "
        text += f"{known[training_type].__name__}; register {trainer_cls.__name__} under another model_name"
        raise ValueError(text)
    known[training_type] = trainer_cls


def get_model_cls(model_name: str, training_type: str) -> type[Any]:
    """Return the class of a model name and training type, built-in or registered."""
    check_name(model_name)
    found = SUPPORTED_MODELS[model_name]
    if training_type not in found:
        text = f"--training_type {cut(training_type)}: the model {model_name} has only "
        raise ValueError(f"{text}{' and '.join(sorted(found))}; use one of them")
    return found[training_type]


def check_name(model_name: str) -> None:
    if model_name not in SUPPORTED_MODELS:
        text = f"--model_name {cut(model_name)}: must be one of "
        text += f"{', '.join(SUPPORTED_MODELS)}{nearest(model_name, SUPPORTED_MODELS)}"
        raise ValueError(text)


def show_supported_models() -> None:
    """Write all model names and their training types to stdout."""
    for name, classes in SUPPORTED_MODELS.items():
        sys.stdout.write(f"{name}: {', '.join(sorted(classes))}\n")

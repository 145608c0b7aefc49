"""Names that users of CogVideo's diffusers trainer import. Each is loaded when it is first used."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

_MODULES = {
    "Args": "schemas",
    "Components": "schemas",
    "Trainer": "trainer",
    **dict.fromkeys(("register", "get_model_cls", "show_supported_models"), "registry"),
}
_CLASS = re.compile(r"CogVideoX(1_5)?(T2V|I2V)(Lora|Sft)Trainer")


def __getattr__(name: str) -> Any:
    found = _CLASS.fullmatch(name)
    if found is not None:
        version, kind, training = found.groups()
        model = f"cogvideox{'1.5' if version else ''}-{kind.lower()}"
        return import_module(f"{__name__}.registry").get_model_cls(model, training.lower())
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

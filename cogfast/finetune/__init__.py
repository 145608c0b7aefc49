"""Names that users of CogVideo's diffusers trainer import. Each is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_MODULES = {
    "Args": "schemas",
    "Trainer": "trainer",
    **dict.fromkeys(("register", "get_model_cls", "show_supported_models"), "registry"),
    **{
        f"CogVideoX{version}{kind}{training}Trainer": (
            f"models.cogvideox{version}_{kind.lower()}.{training.lower()}_trainer"
        )
        for version in ("", "1_5")
        for kind in ("T2V", "I2V")
        for training in ("Lora", "Sft")
    },
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

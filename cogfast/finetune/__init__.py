"""Names that users of CogVideo's diffusers trainer import. Each is loaded when it is first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_OF_REGISTRY = ("register", "get_model_cls", "show_supported_models")
_MODULES = {"Args": "schemas", "Components": "schemas", "Trainer": "trainer"}
_MODULES |= dict.fromkeys(_OF_REGISTRY, "registry")


def __getattr__(name: str) -> Any:
    if name in _OF_REGISTRY or name.startswith("CogVideoX"):
        models = import_module(f"{__name__}.models")  # registers the built-in classes
        if name in vars(models):
            return getattr(models, name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

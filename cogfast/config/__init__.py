"""Configuration: reads YAML files, checks every key and builds the objects that they name."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cogfast.config.components import instantiate, resolve
    from cogfast.config.load import data_arguments, load_config, with_words
    from cogfast.config.merged_config import Config

__all__ = ["Config", "data_arguments", "instantiate", "load_config", "resolve", "with_words"]

# Each is loaded when it is first used: `cogfast --help` imports a part of this folder, and no torch.
_MODULES = {
    "Config": "merged_config",
    **dict.fromkeys(("instantiate", "resolve"), "components"),
    **dict.fromkeys(("data_arguments", "load_config", "with_words"), "load"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)

"""Public names whose files have moved: users, their configurations and cache keys keep the old ones."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

# {public name: where it is now}
MOVED = {
    "cogfast.config.Config": "cogfast.door.merged_config.Config",
    "cogfast.config.instantiate": "cogfast.config.components.instantiate",
    "cogfast.config.load_config": "cogfast.door.load.load_config",
    "cogfast.config.resolve": "cogfast.config.components.resolve",
    "cogfast.distributed.optimizers.Muon": "cogfast.extensions.prodigy_muon.optimizers.Muon",
    "cogfast.distributed.optimizers.Prodigy": "cogfast.extensions.prodigy_muon.optimizers.Prodigy",
    "cogfast.model.diffusers_kernels.apply_to_diffusers": "cogfast.extensions.diffusers_kernels.diffusers_kernels.apply_to_diffusers",
    "cogfast.model.diffusers_kernels.restore": "cogfast.extensions.diffusers_kernels.diffusers_kernels.restore",
    "cogfast.model.wavelet_autoencoder.WaveletAutoencoder": "cogfast.extensions.wavelet.wavelet_autoencoder.WaveletAutoencoder",
    "cogfast.model.wavelet_autoencoder.WaveletState": "cogfast.extensions.wavelet.wavelet_autoencoder.WaveletState",
    "cogfast.model.weights.sat.to_sat_state_dict": "cogfast.extensions.formats.sat.to_sat_state_dict",
}
_MODULES = {new: old.rpartition(".")[0] for old, new in MOVED.items()}  # public, by where they are


def find(path: str) -> Any:
    """Import what a dotted name names, also where that has moved."""
    module, _, name = MOVED.get(path, path).rpartition(".")
    return getattr(import_module(module), name)


def public_module(kind: Callable) -> str:
    """Return the module that users know a class or function by, which is part of cache keys."""
    return _MODULES.get(f"{kind.__module__}.{kind.__qualname__}", kind.__module__)


def attributes_of(module: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose public names have moved."""
    names = [old.removeprefix(f"{module}.") for old in MOVED if old.rpartition(".")[0] == module]

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return find(f"{module}.{name}")

    return attribute, lambda: names

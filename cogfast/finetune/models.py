"""Upstream's eight trainer classes, under the names of its modules.

`from cogfast.finetune.models.cogvideox_t2v.lora_trainer import CogVideoXT2VLoraTrainer` works as in
CogVideo's diffusers trainer: importing this module makes the modules of that path.
"""

from __future__ import annotations

import sys
from types import ModuleType

from cogfast.finetune.registry import BUILT_IN, TRAINING_TYPES, register
from cogfast.finetune.trainer import Trainer

__path__: list[str] = []  # a module with submodules, none of which is a file


def _module(name: str) -> ModuleType:
    return sys.modules.setdefault(name, ModuleType(name, __doc__))


for _model, _folder in BUILT_IN.items():
    _package = _module(f"{__name__}.{_folder}")
    _package.__path__ = []
    _stem = _folder.replace("cogvideox", "CogVideoX").replace("_t2v", "T2V").replace("_i2v", "I2V")
    for _type in TRAINING_TYPES:
        _trainer = _module(f"{_package.__name__}.{_type}_trainer")
        _name = f"{_stem}{_type.title()}Trainer"
        _what = "adapters" if _type == "lora" else "all weights"
        _body = {"__module__": _trainer.__name__, "__doc__": f"Trains {_what} of {_model}."}
        _class = type(_name, (Trainer,), _body)
        vars(_trainer)[_name] = globals()[_name] = _class
        register(_model, _type, _class)

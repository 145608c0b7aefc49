"""The frozen encoders have the methods that the Protocols of a first stage and a text encoder name."""

from __future__ import annotations

import importlib
import inspect
from typing import Protocol

import pytest

from cogfast.config.components import NONE, PLACES
from cogfast.model.autoencoder import FirstStage
from cogfast.model.text_encoder import TextEncoder

# Functions that build one of the classes are not checked here.
CLASSES = [
    (path, protocol)
    for place, protocol in (("first_stage", FirstStage), ("emb_models", TextEncoder))
    for path in PLACES[place].paths
    if path != NONE and path.rpartition(".")[2][0].isupper()
]


@pytest.mark.parametrize(("path", "protocol"), CLASSES)
def test_an_encoder_has_the_methods_of_its_protocol(path: str, protocol: type[Protocol]) -> None:
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    methods = {n: f for n, f in vars(protocol).items() if inspect.isfunction(f) and f.__doc__}
    methods.pop("__call__", None)  # of nn.Module, which calls `forward`
    assert methods and ("encode" in methods or "forward" in methods)
    for name, method in methods.items():
        wanted = inspect.signature(method).parameters.keys()
        assert inspect.signature(getattr(found, name)).parameters.keys() == wanted, name


def test_both_places_are_checked() -> None:
    assert len(CLASSES) == 4

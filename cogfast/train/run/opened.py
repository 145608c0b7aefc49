"""A run as its configuration describes it: cogfast/door opens it, phases.py hands out its parts."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from cogfast.core.component import Component
from cogfast.core.keys import Settings
from cogfast.core.values import put
from cogfast.model.config import TransformerConfig
from cogfast.model.keys import ModelKeys
from cogfast.model.transformer import Network, network_class
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import TrainKeys


@dataclass(frozen=True, kw_only=True)
class Run:
    """The sections of a configuration, each in its type. A component that is left out is None."""

    args: TrainKeys
    model: ModelKeys
    network_target: str  # the name that the configuration has for its class; "" without one
    fields: dict[str, Any]  # of TransformerConfig, also those that no network can have together
    denoiser: Component | None
    loss: Component | None
    sampler: Component | None
    frozen: FrozenParts
    data: Component | None  # its argument data_dir is not set
    data_arguments: Mapping[str, Any]  # under cogfast's names, also without the class
    sections: Mapping[str, dict[str, Any]]  # plain values, as the run saves them
    origins: Mapping[str, str]  # dotted key of a value -> file name, "command line" or "default"
    unused: Mapping[str, str]  # accepted key without effect -> reason
    allow_import: tuple[str, ...]  # packages whose classes a target may name
    decided: Settings = field(default_factory=dict)  # what with_values has changed

    @cached_property
    def network(self) -> Network:
        kind = network_class(self.network_target, self.allow_import)
        return Network(kind, TransformerConfig(**self.fields), self.network_target, self.model)

    @property
    def deepspeed(self) -> dict[str, Any]:
        return self.sections["deepspeed"]

    @property
    def tensors(self) -> Mapping[str, Any]:
        """{name: shape} of the tensors that samples have beside the video."""
        return self.data_arguments.get("tensors") or {}

    @property
    def is_masked(self) -> bool:
        """Whether the loss takes masks of the samples."""
        return self.loss is not None and self.loss.params.get("masked") is not None

    def with_values(self, values: Mapping[str, Any], origin: str) -> Run:
        """Return the run with other values of args, or of params of the first stage or the data set, by dotted key."""
        if not values:
            return self
        sections, args = deepcopy(dict(self.sections)), self.args
        frozen, data = self.frozen, self.data
        for key, value in values.items():
            put(sections, key, value)
            where, _, name = key.rpartition(".")
            if where == args.section:
                args = args.changed(**{name: value})
            elif frozen.first_stage is not None and where == f"{frozen.first_stage.key}.params":
                frozen = replace(frozen, first_stage=frozen.first_stage.with_param(name, value))
            elif data is not None and where == f"{data.key}.params":
                data = data.with_param(name, value)
            else:
                raise AssertionError(f"{key}: is opened once")
        return replace(
            self,
            args=args,
            sections=sections,
            origins={**self.origins, **dict.fromkeys(values, origin)},
            decided={**self.decided, **{key: (value, origin) for key, value in values.items()}},
            frozen=frozen,
            data=data,
            data_arguments=self.data_arguments if data is None else data.arguments,
        )


class Opens(Protocol):
    """A configuration as load_config returns it."""

    @property
    def run(self) -> Run: ...

    def with_values(self, values: Settings) -> Opens: ...

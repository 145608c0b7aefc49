"""A run as its merged configuration describes it, read once."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from cogfast.config.arguments import ModelArguments, TrainArguments
from cogfast.config.components import component_of, is_none
from cogfast.config.merged_config import Config, to_dict, to_dicts
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.component import Component
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import Network, network_class


class Run:
    """The sections of a configuration, each in its type. A component that is left out is None."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.origins, self.allow_import = config.origins, config.allow_import

    @cached_property
    def args(self) -> TrainArguments:
        return TrainArguments.from_config(self.config)

    @cached_property
    def model(self) -> ModelArguments:
        return ModelArguments.from_config(self.config)

    @property
    def network_target(self) -> str:
        """The name that the configuration has for the network's class."""
        return self.config.model.network_config.target

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of the network's TransformerConfig, also those that no network can have together."""
        return transformer_arguments(self.config.model.network_config.params)

    @cached_property
    def network(self) -> Network:
        target = self.network_target
        kind = network_class(target, self.config.allow_import)
        return Network(kind, TransformerConfig(**self.fields), target, self.model)

    @property
    def denoiser(self) -> Component | None:
        return self.part("denoiser_config")

    @property
    def loss(self) -> Component | None:
        return self.part("loss_fn_config")

    @property
    def sampler(self) -> Component | None:
        return self.part("sampler_config")

    @property
    def first_stage(self) -> Component | None:
        return self.part("first_stage_config")

    @cached_property
    def _text(self) -> tuple[Component | None, float]:
        node = self.config.model.get("conditioner_config")
        entries = [] if node is None else to_dict(node)["params"].get("emb_models") or []
        if not entries:
            return None, 0.0
        entry, where = entries[0], "model.conditioner_config.params.emb_models[0]"
        bare = {"target": entry["target"], "params": entry.get("params")}
        found = None if is_none(bare) else component_of(bare, self.config.allow_import, where, None)
        return found, float(entry.get("ucg_rate", 0.0))

    @property
    def text_encoder(self) -> Component | None:
        return self._text[0]

    @property
    def text_dropout(self) -> float:
        """The fraction of captions to drop."""
        return self._text[1]

    @cached_property
    def data(self) -> Component | None:
        """The data set; its argument data_dir is not set."""
        node = self.config.data
        return (
            component_of(node, self.config.allow_import, "data", None) if "target" in node else None
        )

    @cached_property
    def data_arguments(self) -> Mapping[str, Any]:
        """The data set's arguments under cogfast's names."""
        if self.data is None:  # its class is left out
            return to_dict(self.config.data).get("params") or {}
        return self.data.arguments

    @cached_property
    def deepspeed(self) -> dict[str, Any]:
        return to_dict(self.config.deepspeed)

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        """All sections as plain values."""
        return to_dicts(self.config)

    @property
    def is_masked(self) -> bool:
        """Whether the loss takes masks of the samples."""
        return self.loss is not None and self.loss.params.get("masked") is not None

    def part(self, name: str) -> Component | None:
        """Return a component of the model section."""
        node = self.config.model.get(name)
        if is_none(node):
            return None
        return component_of(node, self.config.allow_import, f"model.{name}", None)

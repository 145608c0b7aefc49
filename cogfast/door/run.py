"""Opens a merged configuration: each section in its type, read once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cogfast.config.components import component_of
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.component import Component, is_none
from cogfast.core.values import validated
from cogfast.train.frozen_encoders import FrozenParts
from cogfast.train.keys import ModelKeys, TrainKeys
from cogfast.train.run.opened import Run

_TEXT_ENCODER = "model.conditioner_config.params.emb_models[0]"


def open_run(
    sections: Mapping[str, dict[str, Any]],
    origins: Mapping[str, str],
    unused: Mapping[str, str],
    allow: tuple[str, ...],
) -> Run:
    """Open the sections of a checked configuration, plain. The others: fields of Config."""
    args, model, data = (sections[name] for name in ("args", "model", "data"))
    network = model.get("network_config") or {}
    params = network.get("params") or {}
    if args.get("activation_checkpointing") is None:
        asks = args.get("checkpoint_activations")
        recompute = params.get("transformer_args") or {}
        asks = recompute.get("checkpoint_activations") if asks is None else asks
        args = {**args, "activation_checkpointing": "auto" if asks else "none"}
    if args.get("train_iters") is None and args.get("epochs") is None:
        args = {**args, "train_iters": 10000}  # SAT's default
    of_keys = lambda section, kind: {k: v for k, v in section.items() if k in kind.model_fields}

    def part(key: str, node: Mapping[str, Any] | None) -> Component | None:
        return None if node is None or is_none(node) else component_of(node, allow, key, None)

    names = ("denoiser_config", "loss_fn_config", "sampler_config", "first_stage_config")
    denoiser, loss, sampler, first_stage = (part(f"model.{n}", model.get(n)) for n in names)
    entries = ((model.get("conditioner_config") or {}).get("params") or {}).get("emb_models")
    entry = (entries or [{}])[0]
    encoder = {"target": entry["target"], "params": entry.get("params")} if entry else None
    videos = component_of(data, allow, "data", None) if "target" in data else None
    of_text = part(_TEXT_ENCODER, encoder), float(entry.get("ucg_rate", 0.0))
    return Run(
        args=validated(of_keys(args, TrainKeys), TrainKeys, "args"),
        model=validated(of_keys(model, ModelKeys), ModelKeys, "model"),
        network_target=network.get("target", ""),
        fields=transformer_arguments(params) if network else {},
        denoiser=denoiser,
        loss=loss,
        sampler=sampler,
        frozen=FrozenParts(first_stage, *of_text),
        data=videos,
        data_arguments=(data.get("params") or {}) if videos is None else videos.arguments,
        sections=sections,
        origins=origins,
        unused=unused,
        allow_import=allow,
    )

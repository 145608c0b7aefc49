"""Loads a transformer's weights from any supported format: SAT, diffusers or cogfast."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cogfast.core.values import counted
from cogfast.extensions.formats.adapters import (
    adapters_of,
    check_config,
    check_member,
    only_adapters,
    open_adapter,
)
from cogfast.extensions.formats.completed import completed, fitted
from cogfast.model.config import Family, TransformerConfig, derived_models
from cogfast.model.keys import LearnedPositions
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.identify import identify, may_be_left_out
from cogfast.model.weights.open import open_source
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import Shapes, Target, WeightSource, first_of, num_blocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of loading. Names in `missing` and `lacking` are cogfast's, the rest the checkpoint's."""

    description: str
    num_loaded: int
    missing: list[str]  # these keep their initial values: adapters, computed tables, added modules
    unexpected: list[str]
    lacking: list[str]  # of `missing`, those that a run's checkpoint leaves to its base model

    def __str__(self) -> str:
        line = f"{self.description}: {self.num_loaded} tensors loaded"
        # Adapters come from elsewhere or are new, and a base model has what a run's checkpoint lacks.
        missing = [n for n in self.missing if n not in self.lacking and not is_lora_parameter(n)]
        return f"{line}; {len(missing)} not in it: {first_of(missing)}" if missing else line

    def log(self) -> None:
        """Log what was loaded, and a warning for tensors that the model does not have."""
        logger.info("%s", self)
        if self.unexpected:
            text = "%s: %s with unknown names, which the model does not have and cogfast does not use: %s"
            number = counted(len(self.unexpected), "tensor")
            logger.warning(text, self.description, number, first_of(self.unexpected))


def load_transformer(
    transformer: DiffusionTransformer,
    path: str | Path,
    ema: bool | None = False,
    allow_missing: bool = False,
    shards: Mapping[str, Shard] | None = None,
    held: Mapping[str, Target] | None = None,
    new_channels: bool = False,
    positions: LearnedPositions | None = None,
    is_base: bool = False,
) -> LoadReport:
    """Copy the weights at `path` into the transformer and return a report.

    path: a SAT folder (with `latest`), one iteration of it or its .pt file; a diffusers pipeline or
    transformer folder; a run of cogfast or one of its checkpoints. ema: load the moving average; None:
    that of a run, if it has one. A checkpoint without adapters also loads into a model with LoRA, whose adapters
    keep their values. allow_missing: accept checkpoints that lack other tensors too, and bf16
    weights in fp16. shards: the shard that the transformer holds of a parameter, by name. held: weights that are no parameters, by name. new_channels: input
    channels that the checkpoint lacks get weights of zero. positions: model.learned_positions. is_base: for a run that
    saved a part of a model, read the rest from the model that it started from. ValueError for another member of the family and for damage.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path}: no such folder; set args.load to a checkpoint or leave it out")
    source = open_source(path, ema)
    source = completed(source) if is_base else source
    source = fitted(source, transformer.config, new_channels, positions)
    # With another alpha they would train and sample at another strength.
    if adapters_of(source) is not None:
        # Other weights that a run trained are loaded with them.
        check_config(only_adapters(replace(source, trained=frozenset())), transformer.config)
    return load_source(transformer, source, str(path), allow_missing, shards, held)


def load_adapters(
    transformer: DiffusionTransformer,
    path: str,
    shards: Mapping[str, Shard] | None = None,
    held: Mapping[str, Target] | None = None,
) -> LoadReport:
    """Load adapters into a model with LoRA, and log what they are; otherwise as load_source."""
    adapter = open_adapter(path)
    check_member(adapter, Family.of_config(transformer.config), "the model")
    report = load_source(transformer, adapter, path, shards=shards, held=held)
    logger.info("%s: %s", adapter.description, adapters_of(adapter))
    return report


def load_source(
    transformer: DiffusionTransformer,
    source: WeightSource,
    path: str,
    allow_missing: bool = False,
    shards: Mapping[str, Shard] | None = None,
    held: Mapping[str, Target] | None = None,
) -> LoadReport:
    """Load from an open source; otherwise as load_transformer. path: the name in error messages."""
    # args.force_train and args.force_inference also permit bf16 weights in fp16.
    is_bf16 = not allow_missing and source.main_dtype == torch.bfloat16
    if is_bf16 and transformer.dtype == torch.float16:
        raise ValueError(
            f"{path}: has bf16 weights, and models trained in bf16 overflow in fp16, whose largest "
            "number is 65504 (NaN, black videos); set deepspeed.bf16.enabled=true and "
            "deepspeed.fp16.enabled=false, or args.force_train=true to continue (sampling: "
            "args.force_inference=true)"
        )
    parameters: dict[str, Target] = {**dict(transformer.named_parameters()), **(held or {})}
    parameters |= transformer.kept_buffers()
    shards = shards or {}
    # Shapes of whole parameters, as in the file, also where this rank has a shard.
    wanted = {n: shards[n].shape if n in shards else p.shape or (1,) for n, p in parameters.items()}
    # A part of a model, such as the adapters of a run, does not show the family member.
    if not source.is_partial:
        found = identify(source, transformer.config.out_channels)
        check_family(path, Family.of_config(found), transformer.config)
        check_depth_and_width(path, source.shapes, transformer.config)

    unexpected, loaded = list(source.unexpected), []
    for name in source.shapes:
        # With LoRA a parameter is one level deeper.
        module, _, kind = name.rpartition(".")
        names = (name, f"{module}.original.{kind}")
        target = next((candidate for candidate in names if candidate in parameters), None)
        if target is None:
            unexpected.append(name)
        elif source.shapes[name] == tuple(wanted[target]):
            loaded.append((name, target))
        # 2B's own table is computed for its own video size.
        elif name != "position_table.weight" or transformer.config.position != "sincos":
            raise ValueError(
                f"{path}: {name} has shape {list(source.shapes[name])} in the checkpoint and "
                f"{list(wanted[target])} in the model; use the config that belongs to the checkpoint "
                "(for a learned position table its num_frames, latent_height and latent_width)"
            )
    missing = sorted(parameters.keys() - {target for _, target in loaded})
    may_lack = transformer.added | may_be_left_out(transformer)
    required = [n for n in missing if n not in may_lack and not is_lora_parameter(n)]
    if required and not source.is_partial and not allow_missing:
        text = f"{path}: {len(required)} tensors of the model are not in the checkpoint, first {first_of(required)}"
        raise ValueError(f"{text}; use a complete checkpoint")
    new = sorted(transformer.added.intersection(missing))
    if new and unexpected and not source.is_partial and not allow_missing:
        text = f"{path}: tensors have unknown names ({first_of(unexpected)})"
        text += f", and what {type(transformer).__name__} adds is not there ({first_of(new)})"
        raise ValueError(f"{text}; rename one of them, or set args.force_train=true to leave both")
    with torch.no_grad():
        # One tensor at a time, so that model and checkpoint are never in memory together.
        for name, target in loaded:
            parameter = parameters[target]
            parameter.copy_(source.read(name, shards.get(target)).reshape(parameter.shape))
    lacking = required if source.is_partial else []
    return LoadReport(source.description, len(loaded), missing, unexpected, lacking)


def check_family(path: str, found: Family, config: TransformerConfig) -> None:
    """Raise ValueError if a checkpoint's tensors belong to another member than the config."""
    wanted = Family.of_config(config)
    if found == wanted:
        return
    fix = f"use {found.member.config_file} or a checkpoint of {wanted.member.name}"
    if found.is_derived:  # also beside the file of an image-to-video model
        fix = f"use {found.member.config_file} with configs/conditions/control.yaml behind it"
        fix += ", if it is a control model"
    elif found.member == wanted.member and found.in_channels != wanted.in_channels:
        fix = "set in_channels and model.conditions to those of the checkpoint"
        if found.in_channels < wanted.in_channels:
            fix += ", or add channels to it with model.new_channels=zero"
    known = derived_models(found.in_channels, found.out_channels)
    about = f" ({known})" if known else ""
    raise ValueError(f"{path}: the checkpoint is {found}{about}, the config says {wanted}; {fix}")


def check_depth_and_width(path: str, shapes: Shapes, config: TransformerConfig) -> None:
    found = (num_blocks(shapes), shapes["patch_embedding.weight"][0])
    wanted = (config.num_layers, config.hidden_size)
    if found != wanted:
        text = f"{path}: the checkpoint has {found[0]} blocks of width {found[1]}"
        text += f", the config num_layers={wanted[0]} and hidden_size={wanted[1]}"
        raise ValueError(f"{text}; use the config that belongs to the checkpoint")

"""Configures sampling from a model folder that is not a run of cogfast.

Chooses the file of configs/ for the model, and takes sampler and noise schedule from a diffusers
pipeline.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.weights.formats.diffusers import find_diffusers_folder
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source
from cogfast.model.weights.vae.image_scale import stock_scale
from cogfast.model.weights.vae.names import read_vae_config
from cogfast.schema.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.train.preflight.inferred import precision_values
from cogfast.train.preflight.pipeline_folder import (
    SAMPLERS,
    discretization_values,
    read_scheduler,
)

logger = logging.getLogger(__name__)

# configs/ in the source tree and in an installed package
_CONFIGS = (
    Path(__file__).resolve().parents[3] / "configs",
    Path(sys.prefix, "share/cogfast/configs"),
)
_NUMBERS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "in_channels",
    "out_channels",
    "time_embed_dim",
    "num_frames",
    "time_compressed_rate",
    "elementwise_affine",
)
_INTERPOLATIONS = ("height_interpolation", "width_interpolation", "time_interpolation")
# Key of scheduler_config.json, also a param of the samplers -> diffusers' default
_SPACING = {"timestep_spacing": "leading", "set_alpha_to_one": True, "steps_offset": 0}


def find_config(folder: Path) -> tuple[Path, list[str]]:
    """Return the file of configs/ for the model in `folder`, and overrides that fit it to the model.

    The folder may be in diffusers', SAT's or cogfast's format. Overrides are key=value strings.
    """
    try:
        source = open_source(folder)
    except ValueError as error:
        # Its format is known: the error is about its content.
        if find_diffusers_folder(folder) is not None:
            raise
        text = f"{error} (it has no training_config.yaml either, so it is not a run's folder)"
        raise ValueError(text) from None
    model = identify(source)
    family = Family.of_config(model)
    if model.in_channels not in (model.out_channels, 2 * model.out_channels):
        known = family.maybe_derived or "no model of the family has these"
        raise ValueError(
            f"{folder}: the model has {model.in_channels} input channels for {model.out_channels} of "
            f"output: {known}; use a CogVideoX model"
        )
    if family.is_derived:
        logger.warning(
            "%s: %s; it is taken for %s", folder, family.maybe_derived, family.member.name
        )
    files = [place / Path(family.member.config_file).name for place in _CONFIGS]
    file = next((path for path in files if path.is_file()), None)
    if file is None:
        raise ValueError(
            f"{folder} has {family.member.name}, but {files[0]} does not exist; give the model's YAML: "
            f"--base model.yaml inference.yaml args.load={folder}"
        )
    values = {"args.load": str(folder), "args.mode": "inference"}
    values |= _network_values(model) | precision_values(source)
    values |= _pipeline_values(folder, model.position == "rotary")
    if (folder / "vae" / "config.json").is_file():
        factor = read_vae_config(folder / "vae").scaling_factor
        values |= {} if factor is None else {"model.scale_factor": factor}
        if family.member.has_image:
            joins_frames = model.patch_size.joins_frames
            values["model.image_latent_scale"] = stock_scale(joins_frames, folder)
    return file, [f"{key}={json.dumps(value)}" for key, value in values.items()]


def _network_values(model: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the model and data sections that describe the model."""
    patch, position = model.patch_size, POSITION_KEY
    size = [model.latent_height, model.latent_width]
    # 1.5's table is larger than its videos, enough for any aspect ratio.
    least = Family.of_config(model).member.table_size if patch.joins_frames else (0, 0)
    values: dict[str, Any] = {name: getattr(model, name) for name in _NUMBERS}
    values["patch_size"] = [patch.t, patch.h, patch.w] if patch.joins_frames else patch.h
    values["latent_height"], values["latent_width"] = map(max, size, least)
    if model.ofs_embed_dim is not None:
        values["ofs_embed_dim"] = model.ofs_embed_dim
    values["modules.patch_embed_config.params.text_hidden_size"] = model.text_hidden_size
    values = {f"{NETWORK_KEY}.{key}": value for key, value in values.items()}
    values[f"{position}.text_length"] = model.text_length
    if model.position == "sincos":
        values |= {f"{position}.{name}": getattr(model, name) for name in _INTERPOLATIONS}
    else:
        values[f"{position}.hidden_size_head"] = model.head_width
        values[f"{position}.theta"] = model.rope_theta
        values[f"{position}.positions"] = model.rotary_positions
    if model.lora_rank is not None:
        values[f"{NETWORK_KEY}.modules.lora_config"] = _lora_node(model)
    if not patch.joins_frames or max(size) < max(least):
        values["data.params.video_size"] = [side * SPATIAL_COMPRESSION for side in size]
    return values


def _lora_node(model: TransformerConfig) -> dict[str, Any]:
    params = {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
    params["target_modules"] = list(model.lora_targets)
    if model.lora_layers is not None:
        params["layer_range"] = list(model.lora_layers)
    return {"target": "sat.model.finetune.lora2.LoraMixin", "params": params}


def _pipeline_values(folder: Path, is_rotary: bool) -> dict[str, Any]:
    """Return sampler, noise schedule and positions of a diffusers pipeline; {} without a scheduler."""
    scheduler = read_scheduler(folder)
    if scheduler is None:
        return {}
    where = "model.denoiser_config.params.discretization_config.params"
    values: dict[str, Any] = {}
    for name, value in discretization_values(scheduler).items():
        values[f"{where}.{name}"] = value
    # Use the timesteps and positions of the pipeline, so that the latents equal its own.
    if is_rotary:
        values[f"{POSITION_KEY}.positions"] = "pipeline"
    for key, absent in _SPACING.items():
        values[f"model.sampler_config.params.{key}"] = scheduler.get(key, absent)
    target = f"sgm.modules.diffusionmodules.sampling.{SAMPLERS[scheduler['_class_name']]}"
    return {"model.sampler_config.target": target, **values}

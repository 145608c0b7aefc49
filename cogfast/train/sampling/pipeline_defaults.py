"""Configures sampling from a model folder that is not a run of cogfast.

Chooses the file of configs/ for the model, and takes VAE, text encoder, sampler and noise schedule
from a diffusers pipeline.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from omegaconf import OmegaConf

from cogfast.config import Config
from cogfast.model.config import TransformerConfig
from cogfast.model.weights.family import Family
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source
from cogfast.model.weights.vae.names import read_vae_config
from cogfast.schema.config import to_dict
from cogfast.schema.json_files import Range, brief, read_json
from cogfast.schema.places import is_none
from cogfast.schema.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.schema.values import show
from cogfast.shapes import SPATIAL_COMPRESSION
from cogfast.train.preflight.frozen_parts import PLACEHOLDER
from cogfast.train.preflight.precision import precision_values

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
    "elementwise_affine",
)
_INTERPOLATIONS = ("height_interpolation", "width_interpolation", "time_interpolation")
_SAMPLERS = {
    "CogVideoXDPMScheduler": "VPSDEDPMPP2MSampler",
    "CogVideoXDDIMScheduler": "VideoDDIMSampler",
}
# Key of scheduler_config.json -> (value that CogVideoX needs, diffusers' default)
_SCHEDULE = {
    "beta_schedule": ("scaled_linear", "scaled_linear"),
    "prediction_type": ("v_prediction", "epsilon"),
    "rescale_betas_zero_snr": (True, False),
    "num_train_timesteps": (1000, 1000),
    "trained_betas": (None, None),
}
_SCHEDULER = {
    "_class_name": str,
    "snr_shift_scale": NotRequired[Annotated[float, Range(0.01, 100)]],
    "beta_start": NotRequired[Annotated[float, Range(1e-9, 1)]],
    "beta_end": NotRequired[Annotated[float, Range(1e-9, 1)]],
    "timestep_spacing": NotRequired[Literal["leading", "linspace", "trailing"]],
    "set_alpha_to_one": NotRequired[bool],
    "steps_offset": NotRequired[Annotated[int, Range(0, 1000)]],
}
# Key of scheduler_config.json -> (param of the discretization, diffusers' default)
_DISCRETIZATION = {
    "snr_shift_scale": ("shift_scale", 3.0),
    "beta_start": ("linear_start", 0.00085),
    "beta_end": ("linear_end", 0.0120),
}
# Key of scheduler_config.json, also a param of the samplers -> diffusers' default
_SPACING = {"timestep_spacing": "leading", "set_alpha_to_one": True, "steps_offset": 0}


def find_config(folder: Path) -> tuple[Path, list[str]]:
    """Return the file of configs/ for the model in `folder`, and overrides that fit it to the model.

    The folder may be in diffusers', SAT's or cogfast's format. Overrides are key=value strings.
    """
    try:
        source = open_source(folder)
    except ValueError as error:
        text = f"{error} (it has no training_config.yaml either, so it is not a run's folder)"
        raise ValueError(text) from None
    model = identify(source)
    family = Family.of_config(model)
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
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return {}
    scheduler = read_json(file, _SCHEDULER)
    name = scheduler["_class_name"]
    wrong = {
        key: scheduler.get(key, absent)
        for key, (only, absent) in _SCHEDULE.items()
        if scheduler.get(key, absent) != only
    }
    if name not in _SAMPLERS or wrong:
        needed = ", ".join(f"{key}={only}" for key, (only, _) in _SCHEDULE.items())
        raise ValueError(
            f"{file}: {brief(name)} with {brief(show(wrong)) if wrong else 'its settings'} is not "
            f"CogVideoX's sampling; use {' or '.join(_SAMPLERS)} with {needed}"
        )
    where = "model.denoiser_config.params.discretization_config.params"
    values = {
        f"{where}.{param}": scheduler.get(key, absent)
        for key, (param, absent) in _DISCRETIZATION.items()
    }
    # Use the timesteps and positions of the pipeline, so that the latents equal its own.
    if is_rotary:
        values[f"{POSITION_KEY}.positions"] = "pipeline"
    for key, absent in _SPACING.items():
        values[f"model.sampler_config.params.{key}"] = scheduler.get(key, absent)
    target = f"sgm.modules.diffusionmodules.sampling.{_SAMPLERS[name]}"
    return {"model.sampler_config.target": target, **values}


def fill_from_pipeline(config: Config) -> Config:
    """Fill in VAE and text encoder from args.load if it is the folder of a diffusers pipeline.

    Only encoders that the configuration leaves out or has upstream's placeholder for are replaced.
    """
    folder = None if config.args.get("load") is None else Path(config.args.load)
    if folder is None or not (folder / "vae" / "config.json").is_file():
        return config
    model = to_dict(config.model)
    found: list[str] = []  # keys taken from the folder
    stage = model.get("first_stage_config")
    if (
        stage is None
        or is_none(stage)
        or _is_unnamed(stage, "ckpt_path")
        or _is_unnamed(stage, "path")
    ):
        params = {"path": str(folder / "vae")}
        target = "cogfast.model.autoencoder.VideoAutoencoder"
        model["first_stage_config"] = {"target": target, "params": params}
        factor = read_vae_config(folder / "vae").scaling_factor
        model["scale_factor"] = model["scale_factor"] if factor is None else factor
        found += ["model.scale_factor", "model.first_stage_config"]
    conditioner = model.get("conditioner_config") or {"params": {}}
    for i, entry in enumerate(conditioner["params"].get("emb_models") or []):
        if _is_unnamed(entry, "model_dir") and (folder / "text_encoder").is_dir():
            entry["params"]["model_dir"] = str(folder)
            found.append(f"model.conditioner_config.params.emb_models.{i}.params.model_dir")
    # Messages about these keys must name the folder, no longer the YAML file.
    origins = {k: v for k, v in config.origins.items() if not k.startswith(tuple(found))}
    return dataclasses.replace(
        config,
        model=OmegaConf.create(model),
        origins=origins | dict.fromkeys(found, str(folder)),
    )


def _is_unnamed(node: dict[str, Any], key: str) -> bool:
    value = (node.get("params") or {}).get(key)
    return isinstance(value, str) and PLACEHOLDER.search(value) is not None

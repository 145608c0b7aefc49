"""Takes what a configuration leaves out from a model's folder or a diffusers pipeline of the hub.

For a pipeline in args.load: VAE, text encoder and tokenizer, the scale of the latents and the noise
schedule. For `cogfast sample FOLDER`: also the file of configs/ and the network. Of a hub model only
the files that cogfast reads are downloaded; none of them can run code.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from omegaconf import OmegaConf

from cogfast.config import Config, resolve
from cogfast.config.arguments import ModelArguments
from cogfast.config.components import is_none
from cogfast.config.json_files import InsideNames, brief, keys, read_json
from cogfast.config.merged_config import DEFAULT, refuse, to_dict
from cogfast.config.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.config.values import Range, show
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.model.autoencoder import VideoAutoencoder, video_autoencoder_from_sat
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.weights.formats.diffusers import find_diffusers_folder
from cogfast.model.weights.identify import identify
from cogfast.model.weights.image_scale import difference, pipeline_code, stock_scale
from cogfast.model.weights.open import open_source
from cogfast.model.weights.vae import read_vae_config
from cogfast.train.preflight.frozen_parts import PLACEHOLDER
from cogfast.train.preflight.inferred import precision_values

logger = logging.getLogger(__name__)

_STAGE = "model.first_stage_config"
_SCALE = "model.scale_factor"
_ENCODERS = "model.conditioner_config.params.emb_models"
# Dotted keys of the model section where a noise schedule is configured.
_SCHEDULES = (
    "denoiser_config.params.discretization_config",
    "loss_fn_config.params.sigma_sampler_config.params.discretization_config",
    "sampler_config.params.discretization_config",
)
_SCHEDULER = keys(
    {
        "_class_name": str,
        "snr_shift_scale": NotRequired[Annotated[float, Range(0.01, 100)]],
        "beta_start": NotRequired[Annotated[float, Range(1e-9, 1)]],
        "beta_end": NotRequired[Annotated[float, Range(1e-9, 1)]],
        "timestep_spacing": NotRequired[Literal["leading", "linspace", "trailing"]],
        "set_alpha_to_one": NotRequired[bool],
        "steps_offset": NotRequired[Annotated[int, Range(0, 1000)]],
    }
)
# diffusers' schedulers for CogVideoX -> SAT's samplers
SAMPLERS = {
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
# Key of scheduler_config.json -> (param of the discretization, diffusers' default)
_DISCRETIZATION = {
    "snr_shift_scale": ("shift_scale", 3.0),
    "beta_start": ("linear_start", 0.00085),
    "beta_end": ("linear_end", 0.0120),
}
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
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
_WANTED = ["model_index.json", "scheduler/*.json", "tokenizer/*.json", "tokenizer/spiece.model"]
_WANTED += [f"{part}/*.{suffix}" for part in _WEIGHTS for suffix in ("json", "safetensors")]
_DUPLICATES = ["*.fp16*"]  # the same weights, rounded
_VOCABULARY = ("spiece.model", "tokenizer.json")


def is_hub_id(name: str) -> bool:
    """Whether `name` is the id of a model of the hub and no path on this machine."""
    return _ID.fullmatch(name) is not None and not Path(name).exists()


def hub_folder(name: str, key: str = "args.load", may_download: bool = True) -> Path:
    """Return the folder of a diffusers pipeline of the hub, with all files that cogfast reads.

    name: its id, OWNER/MODEL. The local cache is used without a look at the network if it has every
    file. The hub's client downloads each file once per machine, also if several ranks ask for it.
    """
    from huggingface_hub import constants, snapshot_download

    # HTTPError is that of the HTTP package that this version of the hub's client uses.
    from huggingface_hub.errors import HFValidationError, HTTPError, RepositoryNotFoundError

    cache, why = constants.HF_HUB_CACHE, ""
    for is_local in (True, False) if may_download else (True,):
        if not is_local:
            logger.info("%s=%s: downloading the files of the pipeline from the hub", key, name)
        try:
            found = snapshot_download(
                name,
                allow_patterns=_WANTED,
                ignore_patterns=_DUPLICATES,
                local_files_only=is_local,
            )
        except HFValidationError as error:
            raise ValueError(
                f"{key}={name}: no such folder, and not a model id ({error}); correct it"
            ) from None
        except RepositoryNotFoundError as error:  # also for gated and private models
            raise ValueError(
                f"{key}={name}: no such folder, and no model of this name on the hub that you may read "
                f"(status {error.response.status_code}); correct the path or the name, or run hf auth "
                "login"
            ) from None
        except (HTTPError, FileNotFoundError, ConnectionError) as error:
            if not is_local:
                why += f"; the hub cannot be reached ({' '.join(str(error).split())[:120]})"
        except OSError as error:
            raise ValueError(
                f"{key}={name}: cannot be downloaded to {cache} ({error}); free disk space in that "
                "folder, or set HF_HOME to another folder"
            ) from None
        else:
            folder = Path(found)
            missing = next(
                (file for file in _needed(folder) if not (folder / file).is_file()), None
            )
            if missing is None:
                return folder
            why = f" ({folder} has no {missing})"
    if not may_download:
        why += "; --dry-run and the configuration of a run download nothing"
    raise ValueError(
        f"{key}={name}: no such folder, and no complete CogVideoX pipeline of this name in the hub's "
        f"cache {cache}{why}; run hf download {name} on a machine with network access, set HF_HOME to "
        f"the folder of its cache, or set {key} to the folder of a pipeline"
    )


def _needed(folder: Path) -> Iterator[str]:
    """Yield the files that a whole pipeline has, shards included."""
    yield from ("model_index.json", "scheduler/scheduler_config.json")
    # Either file is enough for the tokenizer; the message names the first if there is none.
    is_there = [name for name in _VOCABULARY if (folder / "tokenizer" / name).is_file()]
    yield f"tokenizer/{(is_there or _VOCABULARY)[0]}"
    for part, whole in _WEIGHTS.items():
        yield f"{part}/config.json"
        index = f"{part}/{whole}.index.json"
        if (folder / index).is_file():
            shards = read_json(folder / index, keys({"weight_map": InsideNames}))["weight_map"]
            yield from (f"{part}/{name}" for name in sorted(set(shards.values())))
        else:
            yield f"{part}/{whole}"


def read_scheduler(folder: Path) -> dict[str, Any] | None:
    """Read a pipeline's scheduler_config.json; None if it has none.

    ValueError if the scheduler is not CogVideoX's: a model of another schedule or prediction would be
    trained and sampled wrongly.
    """
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return None
    scheduler = read_json(file, _SCHEDULER)
    kind = scheduler["_class_name"]
    if kind not in SAMPLERS:
        wrong, needed = f"_class_name={brief(kind)}", f"_class_name={' or '.join(SAMPLERS)}"
    else:
        given = {key: scheduler.get(key, absent) for key, (_, absent) in _SCHEDULE.items()}
        keys = [key for key, (only, _) in _SCHEDULE.items() if given[key] != only]
        if not keys:
            return scheduler
        wrong = ", ".join(f"{key}={brief(show(given[key]))}" for key in keys)
        needed = ", ".join(f"{key}={show(_SCHEDULE[key][0])}" for key in keys)
    raise ValueError(
        f"{file}: {wrong} is not CogVideoX's noise schedule, which has {needed}; use the folder of a "
        "CogVideoX model"
    )


def discretization_values(scheduler: dict[str, Any]) -> dict[str, float]:
    """Return the params of the discretization for the content of a scheduler_config.json."""
    return {param: scheduler.get(key, absent) for key, (param, absent) in _DISCRETIZATION.items()}


def warn_of_image_scale(config: Config, is_end: bool = False) -> None:
    """Warn if the first frame's scale is not that of diffusers' pipeline. is_end: of a run."""
    model = ModelArguments.from_config(config)
    if not model.noised_image_input:
        return
    patch, load = config.model.network_config.params.patch_size, config.args.get("load")
    stock = stock_scale(not isinstance(patch, int) and patch[0] > 1, Path(load) if load else None)
    text = difference(model.image_latent_scale, stock, model.scale_factor)
    if text is not None and is_end:
        code = pipeline_code(model.image_latent_scale, model.scale_factor)
        logger.warning("%s; before sampling there: %s", text, code)
    elif text is not None:
        logger.warning("%s; model.image_latent_scale=%s is the same", text, stock)


def fill_from_pipeline(config: Config, may_download: bool = True) -> Config:
    """Fill in what `config` leaves out from args.load if it is a diffusers pipeline.

    args.load: the folder of a pipeline, or the hub's id of one, which becomes the folder in the local
    cache. A value that the configuration sets stays; upstream's placeholders count as left out.
    may_download: whether a model that is not in the cache is downloaded.
    """
    load = config.args.get("load")
    if load is not None and is_hub_id(load):
        origins = config.origins | {"args.load": f"hub model {load}"}
        load = str(hub_folder(load, may_download=may_download))
        args = OmegaConf.merge(config.args, {"load": load})
        config = dataclasses.replace(config, args=args, origins=origins)
    parts = ("vae/config.json", "scheduler/scheduler_config.json")
    if load is None or not any((Path(load) / part).is_file() for part in parts):
        return config
    model, folder = to_dict(config.model), Path(load)
    # Dotted keys that are taken from the folder, and keys that it replaces whole.
    found, replaced = [], []
    stage = model.get("first_stage_config")
    if (folder / "vae" / "config.json").is_file() and _has_no_path(config, stage):
        kept = _kept_params(stage)
        model["first_stage_config"] = {
            "target": "cogfast.model.autoencoder.VideoAutoencoder",
            "params": {"path": str(folder / "vae"), **kept},
        }
        found += [f"{_STAGE}.target", f"{_STAGE}.params.path"]
        replaced = [
            k for k in config.origins if k.startswith(_STAGE) and k.split(".")[-1] not in kept
        ]
        # The factor belongs to the VAE: with another one, latents would not be of the trained
        # scale.
        factor = read_vae_config(folder / "vae").scaling_factor
        if factor is not None and factor != model["scale_factor"]:
            _check_scale(config, folder, factor)
            model["scale_factor"] = factor
            found.append(_SCALE)
    conditioner = model.get("conditioner_config") or {}
    for i, entry in enumerate((conditioner.get("params") or {}).get("emb_models") or []):
        if _is_placeholder(entry, "model_dir") and (folder / "text_encoder").is_dir():
            entry["params"]["model_dir"] = str(folder)
            found.append(f"{_ENCODERS}.{i}.params.model_dir")
    found += _fill_schedules(model, folder)
    # Messages about these keys must name the folder, no longer the YAML file.
    origins = {key: origin for key, origin in config.origins.items() if key not in replaced}
    return dataclasses.replace(
        config,
        model=OmegaConf.create(model),
        origins=origins | dict.fromkeys(found, str(folder)),
    )


def _has_no_path(config: Config, stage: dict[str, Any] | None) -> bool:
    """Whether a configuration does not say where the weights of the first stage are."""
    if stage is None or is_none(stage):
        return True
    if _is_placeholder(stage, "path") or _is_placeholder(stage, "ckpt_path"):
        return True
    params = stage.get("params") or {}
    target, _ = resolve({"target": stage["target"], "params": params}, config.allow_import)
    is_named = any(params.get(name) for name in ("path", "ckpt_path", "inner"))
    return target in (VideoAutoencoder, video_autoencoder_from_sat) and not is_named


def _is_placeholder(node: dict[str, Any], key: str) -> bool:
    value = (node.get("params") or {}).get(key)
    return isinstance(value, str) and PLACEHOLDER.search(value) is not None


def _kept_params(stage: dict[str, Any] | None) -> dict[str, Any]:
    """Return the params of a first stage that still apply if its weights come from elsewhere."""
    # Chunks and tiles are choices of the user, whichever file the weights come from.
    own = set(inspect.signature(VideoAutoencoder).parameters) - {"path", "inner", "dtype"}
    params = {} if stage is None or is_none(stage) else stage.get("params") or {}
    return {name: value for name, value in params.items() if name in own}


def _check_scale(config: Config, folder: Path, factor: float) -> None:
    if config.origins.get(_SCALE, DEFAULT) != DEFAULT:
        given = config.model.scale_factor
        refuse(
            config,
            _SCALE,
            f"{_SCALE}={given}, but {folder / 'vae' / 'config.json'} has scaling_factor={factor}, and "
            f"the model needs its own; set {_SCALE}={factor}, or use the file of the model",
        )


def _fill_schedules(model: dict[str, Any], folder: Path) -> list[str]:
    """Fill the noise schedules of a model section; return the keys that were set."""
    scheduler = read_scheduler(folder)
    if scheduler is None:
        return []
    values = discretization_values(scheduler)
    defaults = inspect.signature(ZeroSNRDDPMDiscretization).parameters
    found = []
    # Denoiser, loss and sampler may each have a schedule of their own in the YAML.
    for where, node in _discretizations(model):
        params = node.get("params") or {}
        for name, value in values.items():
            # Equal to the pipeline's already, written out or by default.
            if params.get(name, defaults[name].default) == value:
                continue
            if name not in params:
                node["params"] = params | {name: value}
                params = node["params"]
                found.append(f"{where}.{name}")
            else:
                logger.info(
                    "%s.%s=%s, but the model of args.load was trained with %s (%s)",
                    where,
                    name,
                    params[name],
                    value,
                    folder / "scheduler" / "scheduler_config.json",
                )
    return found


def _discretizations(model: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the configured discretizations that have SAT's params, each with the key of these."""
    for path in _SCHEDULES:
        node: Any = model
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and str(node.get("target")).endswith("ZeroSNRDDPMDiscretization"):
            yield f"model.{path}.params", node


def find_config(folder: Path) -> tuple[Path, list[str]]:
    """Return the file of configs/ for the model in `folder`, and overrides that fit it to the model.

    The folder may be in diffusers' or SAT's format. Overrides are key=value strings.
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

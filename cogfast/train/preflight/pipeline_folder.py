"""Takes what a configuration leaves out from the diffusers pipeline that args.load names.

These are VAE, text encoder and tokenizer, the scale of the latents and the noise schedule.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from omegaconf import OmegaConf

from cogfast.config import Config, resolve
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.model.autoencoder import VideoAutoencoder, video_autoencoder_from_sat
from cogfast.model.weights.vae.image_scale import difference, pipeline_code, stock_scale
from cogfast.model.weights.vae.names import read_vae_config
from cogfast.schema.arguments import ModelArguments
from cogfast.schema.json_files import Range, brief, read_json
from cogfast.schema.merged_config import DEFAULT, refuse, to_dict
from cogfast.schema.places import is_none
from cogfast.schema.values import show
from cogfast.train.preflight.frozen_parts import PLACEHOLDER
from cogfast.train.preflight.hub_cache import hub_folder, is_hub_id

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
_SCHEDULER = {
    "_class_name": str,
    "snr_shift_scale": NotRequired[Annotated[float, Range(0.01, 100)]],
    "beta_start": NotRequired[Annotated[float, Range(1e-9, 1)]],
    "beta_end": NotRequired[Annotated[float, Range(1e-9, 1)]],
    "timestep_spacing": NotRequired[Literal["leading", "linspace", "trailing"]],
    "set_alpha_to_one": NotRequired[bool],
    "steps_offset": NotRequired[Annotated[int, Range(0, 1000)]],
}
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
        folder = hub_folder(load, may_download=may_download)
        args = OmegaConf.merge(config.args, {"load": str(folder)})
        origins = config.origins | {"args.load": f"hub model {load}"}
        config = dataclasses.replace(config, args=args, origins=origins)
        load = str(folder)
    parts = ("vae/config.json", "scheduler/scheduler_config.json")
    if load is None or not any((Path(load) / part).is_file() for part in parts):
        return config
    model, folder = to_dict(config.model), Path(load)
    # Dotted keys that are taken from the folder, and keys whose values in the files it replaces whole.
    found, replaced = [], []
    stage = model.get("first_stage_config")
    if (folder / "vae" / "config.json").is_file() and _has_no_path(config, stage):
        kept = _kept_params(stage)
        model["first_stage_config"] = {
            "target": "cogfast.model.autoencoder.VideoAutoencoder",
            "params": {"path": str(folder / "vae"), **kept},
        }
        found += [f"{_STAGE}.target", f"{_STAGE}.params.path"]
        replaced.append((_STAGE, [f"{_STAGE}.params.{name}" for name in kept]))
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
    origins = {key: origin for key, origin in config.origins.items() if _stays(key, replaced)}
    return dataclasses.replace(
        config,
        model=OmegaConf.create(model),
        origins=origins | dict.fromkeys(found, str(folder)),
    )


def _stays(key: str, replaced: list[tuple[str, list[str]]]) -> bool:
    return all(not key.startswith(above) or key in kept for above, kept in replaced)


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

"""Takes what a configuration leaves out from a model's folder or a diffusers pipeline of the hub.

For a pipeline in args.load: VAE, text encoder and tokenizer, the scale of the latents and the noise
schedule. For `cogfast sample FOLDER`: also the file of configs/ and the network. Of a hub model only
the files that cogfast reads are downloaded; none of them can run code.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import torch

from cogfast.config.sat_network import NETWORK_KEY, POSITION_KEY, NetworkParams
from cogfast.config.sat_unused import BF16, DENOISER, FIRST_STAGE, FP16, SAMPLER, TEXT_ENCODERS
from cogfast.config.yaml_files import CONFIGS, PLACEHOLDER
from cogfast.core.addresses import is_hub_id, is_url
from cogfast.core.component import is_none
from cogfast.core.json_files import InsideNames, keys, read_json
from cogfast.core.keys import COMMAND_LINE, DEFAULT, Settings, find_origin
from cogfast.core.shapes import SPATIAL_COMPRESSION
from cogfast.core.values import KeyProblem, Problems, Range, nearest_folder, select
from cogfast.data.keys import data_param
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.extensions.conditions.check import condition_values
from cogfast.extensions.formats.image_scale import stock_scale
from cogfast.extensions.formats.vae import read_vae_config
from cogfast.extensions.stores.mirror import copy_of
from cogfast.extensions.stores.weight_addresses import as_words, weight_addresses
from cogfast.model.autoencoder import VideoAutoencoder
from cogfast.model.config import Family, TransformerConfig
from cogfast.model.keys import ModelKeys, WeightKeys
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

_LOAD = WeightKeys.key("load")
_SCALE = ModelKeys.key("scale_factor")
# Dotted keys of the model section where a noise schedule is configured.
_SCHEDULES = (
    "denoiser_config.params.discretization_config",
    "loss_fn_config.params.sigma_sampler_config.params.discretization_config",
    "sampler_config.params.discretization_config",
)
# diffusers' schedulers for CogVideoX -> SAT's samplers
_SAMPLERS = {
    "CogVideoXDPMScheduler": "VPSDEDPMPP2MSampler",
    "CogVideoXDDIMScheduler": "VideoDDIMSampler",
}
# CogVideoX's noise schedule. A key may be absent if diffusers' default is CogVideoX's value.
_SCHEDULER = keys(
    {
        "_class_name": Literal["CogVideoXDPMScheduler", "CogVideoXDDIMScheduler"],
        "prediction_type": Literal["v_prediction"],
        "rescale_betas_zero_snr": Literal[True],
        "beta_schedule": NotRequired[Literal["scaled_linear"]],
        "num_train_timesteps": NotRequired[Literal[1000]],
        "trained_betas": NotRequired[None],
        "snr_shift_scale": NotRequired[Annotated[float, Range(0.01, 100)]],
        "beta_start": NotRequired[Annotated[float, Range(1e-9, 1)]],
        "beta_end": NotRequired[Annotated[float, Range(1e-9, 1)]],
        "timestep_spacing": NotRequired[Literal["leading", "linspace", "trailing"]],
        "set_alpha_to_one": NotRequired[bool],
        "steps_offset": NotRequired[Annotated[int, Range(0, 1000)]],
    }
)
# diffusers' defaults: of params of the samplers, and of the noise schedule
_SPACING = {"timestep_spacing": "leading", "set_alpha_to_one": True, "steps_offset": 0}
_BETAS = {"snr_shift_scale": 3.0, "beta_start": 0.00085, "beta_end": 0.0120}
# Param of the discretization -> key of scheduler_config.json
_DISCRETIZATION = dict(zip(("shift_scale", "linear_start", "linear_end"), _BETAS, strict=True))
_INTERPOLATIONS = ("height_interpolation", "width_interpolation", "time_interpolation")
_WEIGHTS = {
    "transformer": "diffusion_pytorch_model.safetensors",
    "vae": "diffusion_pytorch_model.safetensors",
    "text_encoder": "model.safetensors",
}
_WANTED = ["model_index.json", "scheduler/*.json", "tokenizer/*.json", "tokenizer/spiece.model"]
_WANTED += [f"{part}/*.{suffix}" for part in _WEIGHTS for suffix in ("json", "safetensors")]
_DUPLICATES = ["*.fp16*"]  # the same weights, rounded


def hub_folder(name: str, key: str = _LOAD, may_download: bool = True) -> Path:
    """Return the folder of a diffusers pipeline of the hub, with all files that cogfast reads.

    name: its id, OWNER/MODEL. The local cache is used without a look at the network if it has every
    file. The hub's client downloads each file once per machine, also if several ranks ask for it.
    ValueError if the pipeline is not in the cache and cannot be downloaded.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, HTTPError

    # A name of a run is no model's, and the hub should not be asked for it.
    if name.startswith("runs/"):
        raise ValueError(f"{key}={name}: no such folder; give a run or a model that exists")
    why = ""
    for is_local in (True, False) if may_download else (True,):
        if not is_local:
            logger.info("%s=%s: downloading the files of the pipeline from the hub", key, name)
        try:
            found = snapshot_download(
                name, allow_patterns=_WANTED, ignore_patterns=_DUPLICATES, local_files_only=is_local
            )
        except (HFValidationError, HTTPError, OSError) as error:
            # The second error says more than that the cache lacks the model.
            why = f" ({' '.join(str(error).split())[:100]})"
            continue
        if (missing := missing_file(Path(found))) is None:
            return Path(found)
        why = f" ({found} has no {missing})"
    download = "; --dry-run and a run's file download nothing, nor does plan" * (not may_download)
    fix = "correct it (a relative path starts at the current folder)"
    # Beside other folders, a wrong path is more likely than a model that was not downloaded.
    if not Path(name).parent.is_dir():
        fix += f", or run hf download {name} on a machine with network access and set HF_HOME to the folder of its cache"
    text = f"{key}={name}: no such folder, and no complete CogVideoX pipeline of this name in the hub's cache "
    text += f"{constants.HF_HUB_CACHE}{why}{download}; {fix}{nearest_folder(Path(name))}"
    raise ValueError(text)


def missing_file(folder: Path) -> str | None:
    """Return the first file that a whole pipeline has and a folder lacks; None if it has all."""
    return next((file for file in _needed_files(folder) if not (folder / file).is_file()), None)


def _needed_files(folder: Path) -> Iterator[str]:
    """Yield the files that a whole pipeline has, shards included."""
    yield from ("model_index.json", "scheduler/scheduler_config.json")
    # Either file is enough for the tokenizer.
    has_fast = (folder / "tokenizer" / "tokenizer.json").is_file()
    yield "tokenizer/tokenizer.json" if has_fast else "tokenizer/spiece.model"
    for part, whole in _WEIGHTS.items():
        yield f"{part}/config.json"
        index = f"{part}/{whole}.index.json"
        if (folder / index).is_file():
            shards = read_json(folder / index, keys({"weight_map": InsideNames}))["weight_map"]
            yield from (f"{part}/{name}" for name in sorted(set(shards.values())))
        else:
            yield f"{part}/{whole}"


def _read_scheduler(folder: Path) -> dict[str, Any] | None:
    """Return a pipeline's scheduler_config.json with diffusers' defaults; None if it has none.

    ValueError for another schedule or prediction: the model would be trained and sampled wrongly.
    """
    file = folder / "scheduler" / "scheduler_config.json"
    if not file.is_file():
        return None
    return _SPACING | _BETAS | read_json(file, _SCHEDULER, "use the folder of a CogVideoX model")


def fill_from_pipeline(
    sections: Mapping[str, Any],
    origins: Mapping[str, str],
    may_download: bool = True,
    is_of_run: bool = False,
) -> Settings:
    """Return the settings for what a configuration leaves out, if args.load is a diffusers pipeline.

    args.load: the folder of a pipeline, or the hub's id of one, which becomes the folder in the local
    cache. A value that the configuration sets stays; upstream's placeholders count as left out. sections: plain.
    may_download: whether a model that is not in the cache is downloaded. is_of_run: the file of a run, which may
    have been received, sets what is no word of the command line: it starts no download.
    """
    found = _copies(sections, origins, may_download, is_of_run)
    load = found[_LOAD][0] if _LOAD in found else sections["args"].get("load")
    if load is None or is_url(load):
        return found
    if is_hub_id(load):
        may_download = may_download and not _is_theirs(origins, _LOAD, is_of_run)
        folder = hub_folder(load, may_download=may_download)
        found[_LOAD] = str(folder), f"hub model {load}"
    else:
        folder = Path(load)
    has_vae = (folder / "vae" / "config.json").is_file()
    scheduler, model = _read_scheduler(folder), sections["model"]
    stage = model.get("first_stage_config")
    is_left_out = any(_is_placeholder(stage, key) for key in ("path", "ckpt_path"))
    # Messages about what is taken from the folder name it, not the YAML file.
    if has_vae and (is_left_out or is_none(stage)):
        # Chunks and tiles are choices of the user, whichever file the weights come from.
        own = set(inspect.signature(VideoAutoencoder).parameters) - {"path", "inner", "dtype"}
        params = (stage or {}).get("params") or {}
        kept = {name: value for name, value in params.items() if name in own}
        path, target = str(folder / "vae"), "cogfast.model.autoencoder.VideoAutoencoder"
        found[FIRST_STAGE] = {"target": target, "params": {"path": path, **kept}}, None
        found[f"{FIRST_STAGE}.target"] = target, str(folder)
        found[f"{FIRST_STAGE}.params.path"] = path, str(folder)
        # The factor belongs to the VAE: with another one, latents would not be of the trained scale.
        given, factor = model["scale_factor"], read_vae_config(folder / "vae").scaling_factor
        if factor is not None and factor != given:
            if origins.get(_SCALE, DEFAULT) != DEFAULT:
                text = f"{_SCALE}={given}, but {folder}/vae/config.json has scaling_factor={factor}"
                raise KeyProblem(_SCALE, f"{text}; set the same, or use the file of the model")
            found[_SCALE] = factor, str(folder)
    if not has_vae and scheduler is None:
        return found
    for i, entry in enumerate(select(model, "conditioner_config.params.emb_models") or []):
        if _is_placeholder(entry, "model_dir") and (folder / "text_encoder").is_dir():
            found[f"{TEXT_ENCODERS}.{i}.params.model_dir"] = str(folder), str(folder)
    if scheduler is not None:
        values = _schedules(model, scheduler)
        found |= {key: (value, str(folder)) for key, value in values.items()}
    return found


def _is_theirs(origins: Mapping[str, str], key: str, is_of_run: bool) -> bool:
    """Return whether the file of a run, which may have been received, sets a key; --base may name it, too."""
    origin = find_origin(origins, key)
    return origin != COMMAND_LINE and (is_of_run or Path(origin).name.startswith("training_config"))


def _copies(
    sections: Mapping[str, Any], origins: Mapping[str, str], may_download: bool, is_of_run: bool
) -> dict[str, tuple[Any, str | None]]:
    """Return the folders of this machine for the URLs of weights; what the run writes has the URLs."""
    given = weight_addresses(sections)
    theirs = {k: v for k, v in given.items() if _is_theirs(origins, k, is_of_run)}
    if theirs and (is_of_run or may_download):
        words, note = as_words(theirs)
        text = (
            f"{find_origin(origins, min(theirs))}: the file of a run starts no download; add to the"
        )
        text += f" command, with these addresses or your folders{note}:"
        lines = textwrap.wrap(words, 360, break_long_words=False, break_on_hyphens=False)
        raise Problems("\n".join([text, *lines]))
    found: dict[str, tuple[Any, str | None]] = {}
    for key, value in given.items() if may_download else ():
        try:
            found[key] = str(copy_of(value)), None
        except OSError as error:
            why = str(error).removeprefix(f"{value}: ")
            raise KeyProblem(key, f"{key}={value}: {why}") from None
    return found


def _is_placeholder(node: dict[str, Any] | None, key: str) -> bool:
    value = select(node, f"params.{key}")
    return isinstance(value, str) and PLACEHOLDER.search(value) is not None


def _schedules(model: Mapping[str, Any], scheduler: dict[str, Any]) -> dict[str, Any]:
    """Return {dotted key: value} of the noise schedules of a model section."""
    defaults = inspect.signature(ZeroSNRDDPMDiscretization).parameters
    found = {}
    for path in _SCHEDULES:
        node = select(model, path)
        if node is None or not node["target"].endswith("ZeroSNRDDPMDiscretization"):
            continue
        params = node.get("params") or {}
        for name, value in ((name, scheduler[key]) for name, key in _DISCRETIZATION.items()):
            key = f"model.{path}.params.{name}"
            if name not in params and value != defaults[name].default:
                found[key] = value
            elif params.get(name, value) != value:
                text = "%s=%s, but the model of args.load was trained with %s"
                logger.warning(text, key, params[name], value)
    return found


def find_config(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file of configs/ for the model in `folder`, and the keys that fit it to the model.

    The folder may be in diffusers' or SAT's format.
    """
    source = open_source(folder)
    model = identify(source)
    family = Family.of_config(model)
    file = CONFIGS / Path(family.member.config_file).name
    values: dict[str, Any] = {_LOAD: str(folder), TrainKeys.key("mode"): "inference"}
    values |= _network_values(model) | condition_values(folder, family)
    # A machine without a GPU runs fp16 weights in float32, which represents them exactly.
    has_gpu = torch.cuda.is_available()
    values[FP16] = source.main_dtype == torch.float16 and has_gpu
    values[BF16] = source.main_dtype == torch.bfloat16
    scheduler = _read_scheduler(folder)
    if scheduler is not None:
        where = f"{DENOISER}.params.discretization_config.params"
        values |= {f"{where}.{name}": scheduler[key] for name, key in _DISCRETIZATION.items()}
        # Use the timesteps and positions of the pipeline, so that the latents equal its own.
        if model.position == "rotary":
            values[f"{POSITION_KEY}.positions"] = "pipeline"
        values |= {f"{SAMPLER}.params.{key}": scheduler[key] for key in _SPACING}
        sampler = f"sgm.modules.diffusionmodules.sampling.{_SAMPLERS[scheduler['_class_name']]}"
        values[f"{SAMPLER}.target"] = sampler
    if (folder / "vae" / "config.json").is_file():
        factor = read_vae_config(folder / "vae").scaling_factor
        values |= {} if factor is None else {_SCALE: factor}
        if family.member.has_image:
            values[ModelKeys.key("image_latent_scale")] = stock_scale(
                model.patch_size.joins_frames, folder
            )
    return file, values


def _network_values(model: TransformerConfig) -> dict[str, Any]:
    """Return the keys of the model and data sections that describe the model."""
    patch = model.patch_size
    size = [model.latent_height, model.latent_width]
    # 1.5's table is larger than its videos, enough for any aspect ratio.
    least = Family.of_config(model).member.table_size if patch.joins_frames else (0, 0)
    fields = {field.name for field in dataclasses.fields(TransformerConfig)} - {*_INTERPOLATIONS}
    names = [name for name in NetworkParams.model_fields if name in fields]
    network: dict[str, Any] = {name: getattr(model, name) for name in names}
    network["patch_size"] = [patch.t, patch.h, patch.w] if patch.joins_frames else patch.h
    network["latent_height"], network["latent_width"] = map(max, size, least)
    network["modules.patch_embed_config.params.text_hidden_size"] = model.text_hidden_size
    if model.lora_rank is not None:
        params = {"r": model.lora_rank, "lora_alpha": model.lora_alpha}
        params["target_modules"] = list(model.lora_targets)
        if model.lora_layers is not None:
            params["layer_range"] = list(model.lora_layers)
        lora = {"target": "sat.model.finetune.lora2.LoraMixin", "params": params}
        network["modules.lora_config"] = lora
    position: dict[str, Any] = {"text_length": model.text_length}
    if model.position == "sincos":
        position |= {name: getattr(model, name) for name in _INTERPOLATIONS}
    else:
        position["hidden_size_head"] = model.head_width
        position |= {"theta": model.rope_theta, "positions": model.rotary_positions}
    values = {f"{NETWORK_KEY}.{key}": value for key, value in network.items()}
    values |= {f"{POSITION_KEY}.{key}": value for key, value in position.items()}
    if not patch.joins_frames or max(size) < max(least):
        values[data_param("video_size")] = [side * SPATIAL_COMPRESSION for side in size]
    return values

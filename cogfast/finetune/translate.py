"""Translates the arguments of CogVideo's diffusers trainer into an ordinary configuration.

Every value has the option that set it as its origin, so that `--dry-run` and error messages name it.

`accelerate launch --config_file F -m cogfast finetune ...` starts the ranks as torchrun does. F may also
name a DeepSpeed file, or describe ZeRO itself; accelerate's own trainer reads both from variables.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cogfast.config.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.config.yaml_files import read_yaml, to_dict
from cogfast.core.addresses import is_hub_id
from cogfast.core.files import read_limited
from cogfast.core.keys import DEFAULT, Given
from cogfast.core.values import cut, nearest, select, show
from cogfast.door.load import load_config
from cogfast.door.merged_config import Config
from cogfast.extensions.pipeline_folder.pipeline_folder import (
    fill_from_pipeline,
    find_config,
    hub_folder,
)
from cogfast.finetune.registry import BUILT_IN, check_name
from cogfast.finetune.schemas import PLACEHOLDER, Args
from cogfast.model.config import COGVIDEOX_2B, Family
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source

logger = logging.getLogger(__name__)

TRAINER = "CogVideo's trainer"  # origin of values that it does not let users choose
_SAMPLING = "sgm.modules.diffusionmodules"
_GUIDER = {"target": f"{_SAMPLING}.guiders.VanillaCFG", "params": {"scale": 6.0}}
_LORA = f"{NETWORK_KEY}.modules.lora_config"
# Types of deepspeed.optimizer, and the parameters that make them what CogVideo's trainer builds
_OPTIMIZERS = {
    "adamw": ("sat.ops.FusedEmaAdam", {}),
    "adam": ("sat.ops.FusedEmaAdam", {"adam_w_mode": False}),
    "prodigy": ("Prodigy", {"decouple": False}),
}
# Elements per reduction: adapters have about 0.1 billion weights, a 5B model 5.6 billion.
_BUCKET = {"lora": 50_000_000, "sft": 500_000_000}
_MOST_BYTES = 2**19  # of a DeepSpeed file
_LAUNCH = Path("accelerate launch")  # named in messages in place of a file
_FIX = "give a DeepSpeed configuration in JSON or YAML"
# Key of the file -> the option that sets the same
_SAME = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "epsilon",
    "optimizer.params.weight_decay": "weight_decay",
}
_PREFIX = "ACCELERATE_"
# Parallelism that cogfast does not have, since DeepSpeed's ZeRO shards
_REFUSED = ("USE_FSDP", "USE_MEGATRON_LM", "USE_PARALLELISM_CONFIG")


def translate(args: Args) -> Config:
    """Return the checked configuration. Reads the model's folder, but no weights and no videos."""
    base, settings = _model_settings(args)
    if (name := args.optimizer.lower()) not in _OPTIMIZERS:
        text = f"--optimizer {cut(args.optimizer)}: must be adamw, adam or prodigy (came needs whole matrices"
        raise ValueError(f"{text}, which ZeRO splits){nearest(name, _OPTIMIZERS)}")
    settings |= _settings(args)
    # The file of --deepspeed_config comes last: it replaces the zero_optimization that is set here.
    settings |= deepspeed_settings(args)
    return load_config([base], args.overrides, settings=settings).filled(fill_from_pipeline)


def _model_settings(args: Args) -> tuple[Path, Given]:
    folder = args.model_path
    if is_hub_id(str(folder)):
        # --dry-run downloads nothing.
        may_download = not (args.dry_run or args.plan is not None)
        folder = hub_folder(str(folder), "--model_path", may_download=may_download)
    if not (folder / "transformer" / "config.json").is_file():
        text = f"--model_path {cut(str(folder))}: has no transformer/config.json; give the folder or the hub id of "
        raise ValueError(f"{text}a CogVideoX pipeline of diffusers")
    _check_family(args, Family.of_config(identify(open_source(folder))))
    base, values = find_config(folder)
    settings: Given = {key: (value, str(folder)) for key, value in values.items()}
    # Their trainer gives every size integer positions, and precision is an option.
    for key in (f"{POSITION_KEY}.positions", "deepspeed.bf16.enabled", "deepspeed.fp16.enabled"):
        settings.pop(key, None)
    chunks, number = "auto" if args.enable_tiling else "frames", 1 if args.enable_slicing else None
    settings |= {
        "args.mode": ("finetune", TRAINER),
        "args.load": (str(folder), "--model_path"),
        # Captions and images are never dropped, and samples are those of the pipeline's defaults.
        "model.conditioner_config.params.emb_models[0].ucg_rate": (0.0, TRAINER),
        "model.sampler_config.target": (f"{_SAMPLING}.sampling.VPSDEDPMPP2MSampler", TRAINER),
        "model.sampler_config.params.num_steps": (50, TRAINER),
        "model.sampler_config.params.guider_config": (_GUIDER, TRAINER),
        "model.first_stage_config.params.encode_chunks": (chunks, "--enable_tiling"),
        "model.en_and_decode_n_samples_a_time": (number, "--enable_slicing"),
    }
    if args.model_type == "i2v":
        settings["model.noised_image_dropout"] = (0.0, TRAINER)
        settings["model.image_latent_scale"] = ("trainer", TRAINER)
    if args.training_type == "lora":
        settings |= {
            "model.not_trainable_prefixes": (["all"], "--training_type"),
            f"{_LORA}.target": ("sat.model.finetune.lora2.LoraMixin", "--training_type"),
            f"{_LORA}.params.r": (args.rank, "--rank"),
            f"{_LORA}.params.lora_alpha": (args.lora_alpha, "--lora_alpha"),
            f"{_LORA}.params.target_modules": (args.target_modules, "--target_modules"),
        }
    return base, settings


def _check_family(args: Args, family: Family) -> None:
    """Raise ValueError if the name, the type or the precision does not fit the model's folder."""
    check_name(args.model_name)
    member = family.member
    name = member.diffusers_trainer_name
    kind = name[-3:]
    # A registered name of the user's own says nothing about the model.
    if (args.model_name in BUILT_IN and args.model_name != name) or args.model_type != kind:
        text = f"--model_name {args.model_name} --model_type {args.model_type}: {args.model_path} "
        text += f"has in_channels={family.in_channels}, {member.name}; use --model_name {name} --model_type {kind}"
        raise ValueError(text)
    if args.mixed_precision == "fp16" and member is not COGVIDEOX_2B:
        text = f"--mixed_precision fp16: only CogVideoX-2B was trained in fp16, {member.name} overflows in it"
        raise ValueError(f"{text}; use bf16")


def _data(args: Args) -> Given:
    """Return the settings of the data, without those that _settings adds."""
    frames, *size = args.train_resolution
    # If no rate is given, frames are spread and short clips are padded, as in their trainer.
    selection = args.frame_selection or ("uniform" if args.fps is None else "timestamp")
    short = "pad" if selection == "uniform" else "skip"
    captions, videos = str(args.caption_column), str(args.video_column)
    settings: Given = {
        "data.params.video_size": (size, "--train_resolution"),
        "data.params.max_num_frames": (frames, "--train_resolution (frames x rows x columns)"),
        "data.params.frame_selection": (selection, "--frame_selection"),
        "data.params.short_clips": (short, "--frame_selection"),
        "data.params.resize": (args.resize, "--resize"),
        "args.num_workers": (args.num_workers, "--num_workers"),
        "args.collective_timeout": (args.nccl_timeout, "--nccl_timeout"),
    }
    # One name for both is a file of metadata, or the folder of one.
    if captions == videos:
        settings["data.target"] = ("cogfast.data.datasets.VideoManifest", "--video_column")
        settings["args.train_data"] = ([str(args.data_root / videos)], "--data_root")
    else:
        settings |= {
            "data.target": ("cogfast.data.datasets.VideoList", TRAINER),
            "data.params.caption_column": (captions, "--caption_column"),
            "data.params.video_column": (videos, "--video_column"),
            "args.train_data": ([str(args.data_root)], "--data_root"),
        }
    # Upstream encodes before training and keeps the result in data_root/cache; so does cogfast, in a
    # folder of its own, since the formats differ.
    cache = args.latent_cache or str(args.data_root / "cache" / "cogfast")
    if cache != "none":
        settings["args.latent_cache"] = (cache, "--latent_cache")
        settings["args.encode_first"] = (True, "--latent_cache")
    return settings


def _settings(args: Args) -> Given:
    """Return the settings of data, training and the run. Their order is that of a configuration's text."""
    of = lambda option: (getattr(args, option), f"--{option}")
    kind, params = _OPTIMIZERS[args.optimizer.lower()]
    recomputing = "auto" if args.gradient_checkpointing else "none"
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": _BUCKET[args.training_type]}
    settings = _data(args) | {
        "data.params.fps": of("fps"),
        "data.params.image_column": of("image_column"),
        "args.epochs": of("train_epochs"),
        "args.train_iters": of("train_steps"),
        "args.seed": of("seed"),
        "args.batch_size": of("batch_size"),
        "args.gradient_accumulation_steps": of("gradient_accumulation_steps"),
        "args.lr": of("learning_rate"),
        "args.weight_decay": of("weight_decay"),
        "args.lr_schedule": of("lr_scheduler"),
        "args.warmup_steps": of("lr_warmup_steps"),
        # The option is a whole number, the key may be a fraction.
        "args.lr_num_cycles": (float(args.lr_num_cycles), "--lr_num_cycles"),
        "args.lr_power": of("lr_power"),
        # PyTorch's schedulers start at 0: the first step of a warm-up has learning rate 0.
        "args.lr_first_step": (0, TRAINER),
        "args.activation_checkpointing": (recomputing, "--gradient_checkpointing"),
        "deepspeed.bf16.enabled": (args.mixed_precision == "bf16", "--mixed_precision"),
        "deepspeed.fp16.enabled": (args.mixed_precision == "fp16", "--mixed_precision"),
        "deepspeed.gradient_clipping": of("max_grad_norm"),
        "deepspeed.optimizer.type": (kind, "--optimizer"),
        **{f"deepspeed.optimizer.params.{k}": (v, "--optimizer") for k, v in params.items()},
        "deepspeed.optimizer.params.beta3": of("beta3"),
        "deepspeed.optimizer.params.betas": ([args.beta1, args.beta2], "--beta1"),
        "deepspeed.optimizer.params.eps": of("epsilon"),
        "deepspeed.zero_optimization": (zero, DEFAULT),
        "args.experiment_name": (f"{args.model_name}-{args.training_type}", "--model_name"),
        "args.run_folder": of("output_dir"),
        "args.folder_layout": ("finetune", TRAINER),
        # A file of adapters is small; a model of 5B takes 11 GB in every checkpoint.
        "args.export": ("all" if args.training_type == "lora" else "last", "--training_type"),
        "args.save_interval": of("checkpointing_steps"),
        "args.keep_last": of("checkpointing_limit"),
        "args.log_interval": (10, DEFAULT),
        "args.wandb": (args.report_to in ("wandb", "all"), "--report_to"),
        "args.wandb_project_name": of("tracker_name"),
        "args.export_interval": of("export_interval"),
        "args.resume": of("resume_from_checkpoint"),
    }
    if args.do_validation:
        # Checked by Args.
        assert args.validation_dir is not None and args.validation_prompts is not None
        prompts = args.validation_dir / args.validation_prompts
        settings |= {
            "args.eval_interval": of("validation_steps"),
            "args.eval_prompt_file": (prompts, "--validation_prompts"),
            "args.eval_at_end": (True, TRAINER),
            "args.eval_with_ema": (False, TRAINER),  # as the exported weights
            "args.sampling_fps": of("gen_fps"),
            "args.negative_prompt": ("", TRAINER),  # the pipelines' default
        }
        if args.validation_images is not None and args.model_type == "i2v":
            images = args.validation_dir / args.validation_images
            settings["args.eval_images"] = (images, "--validation_images")
    # A number of steps replaces the number of epochs, as it does upstream.
    unused = {*_without_effect(args), *["train_epochs"] * (args.train_steps is not None)}
    return {
        key: (str(value) if isinstance(value, Path) else value, origin)
        for key, (value, origin) in settings.items()
        if value is not None and origin.removeprefix("--") not in unused
    }


def read_launch(
    environment: Mapping[str, str],
) -> tuple[Path | None, dict[str, Any], str | None]:
    """Return what the variables of `accelerate launch` set: the file of DeepSpeed's configuration, without
    one the deepspeed section that the launch describes itself ({} without ZeRO), and the precision (None if
    accelerate's own default applies, which the trainer's option replaces).

    Raises ValueError for a kind of parallelism that cogfast does not have.
    """
    given = {
        name.removeprefix(_PREFIX): text
        for name, text in environment.items()
        # accelerate writes "none" for settings that its file leaves out.
        if name.startswith(_PREFIX) and text.lower() not in ("", "none")
    }
    for name in _REFUSED:
        if _is_true(given.get(name, "")):
            text = f"{_PREFIX}{name}={given[name]} is not supported, since cogfast shards with DeepSpeed's ZeRO"
            text += "; change the file of accelerate launch --config_file: distributed_type DEEPSPEED or MULTI_GPU"
            raise ValueError(text)
    # "no" is also accelerate's default, so it does not contradict --mixed_precision.
    precision = given.get("MIXED_PRECISION", "no").lower()
    asked = None if precision == "no" else precision
    if "DEEPSPEED_CONFIG_FILE" in given:
        return Path(given["DEEPSPEED_CONFIG_FILE"]), {}, asked
    if not _is_true(given.get("USE_DEEPSPEED", "")):
        return None, {}, asked
    stage = _number(given, "DEEPSPEED_ZERO_STAGE", int)
    zero: dict[str, Any] = {"stage": 2 if stage is None else stage}  # accelerate's default
    for part in ("optimizer", "param"):
        name = f"DEEPSPEED_OFFLOAD_{part.upper()}"
        if f"{name}_DEVICE" in given:
            zero[f"offload_{part}"] = {"device": given[f"{name}_DEVICE"].lower()}
            if f"{name}_NVME_PATH" in given:
                zero[f"offload_{part}"]["nvme_path"] = given[f"{name}_NVME_PATH"]
    section: dict[str, Any] = {"zero_optimization": zero}
    for key, kind in (("gradient_accumulation_steps", int), ("gradient_clipping", float)):
        value = _number(given, key.upper(), kind)
        section |= {} if value is None else {key: value}
    return None, section, asked


def _number(given: Mapping[str, str], name: str, kind: type[int] | type[float]) -> Any:
    text = given.get(name, "auto")
    if text == "auto":  # the trainer's option has the value
        return None
    try:
        return kind(text)
    except ValueError:
        raise ValueError(
            f"{_PREFIX}{name}={text} must be a number; change the file of accelerate launch "
            "--config_file"
        ) from None


def _is_true(text: str) -> bool:
    return text.lower() in ("1", "true", "yes", "y", "t", "on")


def deepspeed_settings(args: Args) -> Given:
    """Return {key of the deepspeed section: (value, the file)}.

    Without a file, they come from the variables of `accelerate launch`; {} if there are none.

    "auto" where an option has the value is left out. Raises ValueError where the file contradicts
    an option: which of them wins would be a guess.
    """
    given, section, precision = read_launch(os.environ)
    if precision not in (None, args.mixed_precision):
        _refuse(args, "mixed_precision", f"{_LAUNCH} --config_file", "mixed_precision", precision)
    # A file is complete: it replaces what the launch says about ZeRO.
    if file := args.deepspeed_config or given:
        section = _read(file)
    file = file or _LAUNCH
    if section.pop("scheduler", None) is not None:
        logger.info("%s: its scheduler is not used; --lr_scheduler sets the learning rate", file)
    for key, name in _SAME.items():
        found = select(section, key)
        if found not in (None, "auto", getattr(args, name)):
            _refuse(args, name, file, key, found)
    optimizer = _mapping(file, section.pop("optimizer", None), "optimizer")
    params = _mapping(file, optimizer.get("params"), "optimizer.params")
    kind = str(optimizer.get("type", args.optimizer))
    if kind.lower() != args.optimizer.lower():
        _refuse(args, "optimizer", file, "optimizer.type", kind)
    # Two options for one key, so _SAME cannot list it.
    betas = params.get("betas")
    if betas not in (None, "auto", [args.beta1, args.beta2]):
        _refuse(args, "beta1", file, "optimizer.params.betas", betas)
    # Both sections must agree with the one option: a file may switch on one and leave out the other.
    for name in ("bf16", "fp16"):
        is_on = select(section, f"{name}.enabled")
        if isinstance(is_on, bool) and is_on != (args.mixed_precision == name):
            _refuse(args, "mixed_precision", file, f"{name}.enabled", is_on)
    settings = {f"deepspeed.optimizer.params.{key}": value for key, value in params.items()}
    if "type" in optimizer:
        settings["deepspeed.optimizer.type"] = kind
    for key, value in section.items():
        # Key by key: the whole section would replace what --mixed_precision has set in it.
        if isinstance(value, dict) and key in ("bf16", "fp16"):
            settings |= {f"deepspeed.{key}.{name}": inner for name, inner in value.items()}
        else:
            settings[f"deepspeed.{key}"] = value
    return {key: (value, file.name) for key, value in settings.items() if value != "auto"}


def _read(file: Path) -> dict[str, Any]:
    text = read_limited(file, _MOST_BYTES, _FIX)
    try:
        # Upstream's files are JSON named .yaml. Two of them have a key twice, which YAML refuses, first
        # as "auto": JSON takes the last.
        found = json.loads(text)
    except (ValueError, RecursionError):
        return to_dict(read_yaml(file, str(file), is_plain=True))
    return _mapping(file, found, "the file")


def _mapping(file: Path, found: object, key: str) -> dict[str, Any]:
    if not isinstance(found, Mapping | None):
        raise ValueError(f"{file}: {key}={show(found)} must be a mapping; correct it")
    return dict(found or {})


def _refuse(args: Args, option: str, file: Path | str, key: str, value: object) -> None:
    given = show(getattr(args, option)).strip("'")
    text = f"--{option} {given}, but {file} has {key}={show(value)}; change one of them, or set it to auto"
    raise ValueError(text)


def _without_effect(args: Args) -> dict[str, str]:
    """Return {option that has no effect in this run: the reason}."""
    is_lora = args.training_type == "lora"
    is_placeholder = str(args.resume_from_checkpoint) == PLACEHOLDER
    no_adapters = "--training_type sft has no adapters"
    rows = [
        ("resume_from_checkpoint", is_placeholder, "the placeholder of CogVideo's scripts"),
        ("rank", not is_lora, no_adapters),
        ("lora_alpha", not is_lora, no_adapters),
        ("export_interval", is_lora, "each LoRA checkpoint has its file for diffusers"),
        ("image_column", args.model_type == "t2v", "a text-to-video model takes no images"),
        ("pin_memory", True, "batches for a GPU are always pinned"),
        ("beta3", args.optimizer.lower() != "prodigy", "adamw and adam have two betas"),
    ]
    return {name: reason for name, is_unused, reason in rows if is_unused}


def notices(args: Args) -> list[str]:
    """Return a line for each option that is set and has no effect in this run."""
    return [
        f"--{name} {getattr(args, name)} has no effect: {reason}"
        for name, reason in _without_effect(args).items()
        if getattr(args, name) != Args.model_fields[name].default
    ]

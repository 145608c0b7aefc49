"""Translates the arguments of CogVideo's diffusers trainer into an ordinary configuration.

Every value has the option that set it as its origin, so that `--dry-run` and error messages name it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cogfast.config import Config, load_config
from cogfast.config.sat_network import NETWORK_KEY, POSITION_KEY
from cogfast.core.keys import DEFAULT
from cogfast.core.values import cut, nearest
from cogfast.extensions.pipeline_folder.pipeline_folder import (
    fill_from_pipeline,
    find_config,
    hub_folder,
    is_hub_id,
)
from cogfast.finetune.deepspeed_file import deepspeed_settings
from cogfast.finetune.registry import BUILT_IN, check_name
from cogfast.finetune.schemas import PLACEHOLDER, Args
from cogfast.model.config import COGVIDEOX_2B, Family
from cogfast.model.weights.identify import identify
from cogfast.model.weights.open import open_source

Settings = dict[str, tuple[Any, str]]  # dotted key -> (value, origin)
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


def translate(args: Args) -> Config:
    """Return the checked configuration. Reads the model's folder, but no weights and no videos."""
    base, settings = _model_settings(args)
    # The file of --deepspeed_config comes last: it replaces the zero_optimization that is set here.
    settings |= _data_settings(args) | _training_settings(args) | _run_settings(args)
    return fill_from_pipeline(
        load_config([base], args.overrides, settings=settings | deepspeed_settings(args))
    )


def _model_settings(args: Args) -> tuple[Path, Settings]:
    folder = args.model_path
    if is_hub_id(str(folder)):
        # --dry-run downloads nothing.
        may_download = not (args.dry_run or args.plan is not None)
        folder = hub_folder(str(folder), "--model_path", may_download=may_download)
    if not (folder / "transformer" / "config.json").is_file():
        raise ValueError(
            f"--model_path {cut(str(folder))}: has no transformer/config.json; give the folder or the "
            "hub id of a CogVideoX pipeline of diffusers"
        )
    _check_family(args, Family.of_config(identify(open_source(folder))))
    base, values = find_config(folder)
    settings: Settings = {key: (value, str(folder)) for key, value in values.items()}
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
            f"{_LORA}.params.r": _same(args, "rank"),
            f"{_LORA}.params.lora_alpha": (args.lora_alpha, "--lora_alpha"),
            f"{_LORA}.params.target_modules": _same(args, "target_modules"),
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
        raise ValueError(
            f"--model_name {args.model_name} --model_type {args.model_type}: {args.model_path} has "
            f"in_channels={family.in_channels}, {member.name}; use --model_name {name} "
            f"--model_type {kind}"
        )
    if args.mixed_precision == "fp16" and member is not COGVIDEOX_2B:
        raise ValueError(
            f"--mixed_precision fp16: only CogVideoX-2B was trained in fp16, {member.name} overflows "
            "in it; use bf16"
        )


def _data_settings(args: Args) -> Settings:
    frames, *size = args.train_resolution
    # If no rate is given, frames are spread and short clips are padded, as in their trainer.
    selection = args.frame_selection or ("uniform" if args.fps is None else "timestamp")
    short = "pad" if selection == "uniform" else "skip"
    captions, videos = str(args.caption_column), str(args.video_column)
    settings: Settings = {
        "data.params.video_size": (size, "--train_resolution"),
        "data.params.max_num_frames": (frames, "--train_resolution (frames x rows x columns)"),
        "data.params.frame_selection": (selection, "--frame_selection"),
        "data.params.short_clips": (short, "--frame_selection"),
        "data.params.resize": _same(args, "resize"),
        "args.num_workers": _same(args, "num_workers"),
        "args.collective_timeout": _same(args, "nccl_timeout"),
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
    cache = args.latent_cache or args.data_root / "cache" / "cogfast"
    if str(cache) != "none":
        settings["args.latent_cache"] = (str(cache), "--latent_cache")
        settings["args.encode_first"] = (True, "--latent_cache")
    if args.fps is not None:
        settings["data.params.fps"] = _same(args, "fps")
    if args.image_column is not None and args.model_type == "i2v":
        settings["data.params.image_column"] = (str(args.image_column), "--image_column")
    return settings


def _training_settings(args: Args) -> Settings:
    name = args.optimizer.lower()
    if name not in _OPTIMIZERS:
        raise ValueError(
            f"--optimizer {cut(args.optimizer)}: must be adamw, adam or prodigy (came needs whole "
            f"matrices, which ZeRO splits){nearest(name, _OPTIMIZERS)}"
        )
    kind, params = _OPTIMIZERS[name]
    optimizer = {key: (value, "--optimizer") for key, value in params.items()}
    if kind == "Prodigy":
        optimizer["beta3"] = _same(args, "beta3")
    optimizer |= {"betas": ([args.beta1, args.beta2], "--beta1"), "eps": _same(args, "epsilon")}
    # A number of steps replaces the number of epochs, as it does upstream.
    amount: Settings = {"args.epochs": _same(args, "train_epochs")}
    if args.train_steps is not None:
        amount = {"args.train_iters": _same(args, "train_steps")}
    if args.seed is not None:
        amount["args.seed"] = _same(args, "seed")
    recomputing = "auto" if args.gradient_checkpointing else "none"
    bucket = _BUCKET[args.training_type]
    zero = {"stage": 2, "overlap_comm": True, "reduce_bucket_size": bucket}
    return {
        **amount,
        "args.batch_size": _same(args, "batch_size"),
        "args.gradient_accumulation_steps": _same(args, "gradient_accumulation_steps"),
        "args.lr": _same(args, "learning_rate"),
        "args.weight_decay": _same(args, "weight_decay"),
        "args.lr_schedule": _same(args, "lr_scheduler"),
        "args.warmup_steps": _same(args, "lr_warmup_steps"),
        # The option is a whole number, the key may be a fraction.
        "args.lr_num_cycles": (float(args.lr_num_cycles), "--lr_num_cycles"),
        "args.lr_power": _same(args, "lr_power"),
        # PyTorch's schedulers start at 0: the first step of a warm-up has learning rate 0.
        "args.lr_first_step": (0, TRAINER),
        "args.activation_checkpointing": (recomputing, "--gradient_checkpointing"),
        "deepspeed.bf16.enabled": (args.mixed_precision == "bf16", "--mixed_precision"),
        "deepspeed.fp16.enabled": (args.mixed_precision == "fp16", "--mixed_precision"),
        "deepspeed.gradient_clipping": _same(args, "max_grad_norm"),
        "deepspeed.optimizer.type": (kind, "--optimizer"),
        **{f"deepspeed.optimizer.params.{key}": given for key, given in optimizer.items()},
        "deepspeed.zero_optimization": (zero, DEFAULT),
    }


def _run_settings(args: Args) -> Settings:
    settings: Settings = {
        "args.experiment_name": (f"{args.model_name}-{args.training_type}", "--model_name"),
        "args.run_folder": (str(args.output_dir), "--output_dir"),
        "args.folder_layout": ("finetune", TRAINER),
        # A file of adapters is small; a model of 5B takes 11 GB in every checkpoint.
        "args.export": ("all" if args.training_type == "lora" else "last", "--training_type"),
        "args.save_interval": _same(args, "checkpointing_steps"),
        "args.keep_last": _same(args, "checkpointing_limit"),
        "args.log_interval": (10, DEFAULT),
        "args.wandb": (args.report_to in ("wandb", "all"), "--report_to"),
        "args.wandb_project_name": _same(args, "tracker_name"),
    }
    if args.export_interval is not None and args.training_type == "sft":
        settings["args.export_interval"] = _same(args, "export_interval")
    resume = args.resume_from_checkpoint
    if resume is not None and str(resume) != PLACEHOLDER:
        settings["args.resume"] = (str(resume), "--resume_from_checkpoint")
    if not args.do_validation:
        return settings
    # Checked by Args.
    assert args.validation_dir is not None and args.validation_prompts is not None
    prompts = args.validation_dir / args.validation_prompts
    settings |= {
        "args.eval_interval": _same(args, "validation_steps"),
        "args.eval_prompt_file": (str(prompts), "--validation_prompts"),
        "args.eval_at_end": (True, TRAINER),
        "args.eval_with_ema": (False, TRAINER),  # as the exported weights
        "args.sampling_fps": _same(args, "gen_fps"),
        "args.negative_prompt": ("", TRAINER),  # the pipelines' default
    }
    if args.validation_images is not None and args.model_type == "i2v":
        images = args.validation_dir / args.validation_images
        settings["args.eval_images"] = (str(images), "--validation_images")
    return settings


def _same(args: Args, option: str) -> tuple[Any, str]:
    """Return the value of an option whose key has the same value, and its origin."""
    return getattr(args, option), f"--{option}"


def notices(args: Args) -> list[str]:
    """Return a line for each option that has no effect in this run."""
    is_lora = args.training_type == "lora"
    is_placeholder = str(args.resume_from_checkpoint) == PLACEHOLDER
    # (option, whether it has no effect, the reason)
    unused = [
        ("resume_from_checkpoint", is_placeholder, "the placeholder of CogVideo's scripts"),
        ("rank", not is_lora, "--training_type sft has no adapters"),
        ("lora_alpha", not is_lora, "--training_type sft has no adapters"),
        ("export_interval", is_lora, "each LoRA checkpoint has its file for diffusers"),
        ("image_column", args.model_type == "t2v", "a text-to-video model takes no images"),
        ("pin_memory", True, "batches for a GPU are always pinned"),
        ("beta3", args.optimizer.lower() != "prodigy", "adamw and adam have two betas"),
    ]
    return [
        f"--{name} {getattr(args, name)} has no effect: {reason}"
        for name, is_unused, reason in unused
        if is_unused and getattr(args, name) != Args.model_fields[name].default
    ]

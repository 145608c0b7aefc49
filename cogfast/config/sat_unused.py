"""SAT's and DeepSpeed's keys that are not used where they stand: the one table of what becomes of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from cogfast.core.keys import COMMAND_LINE, DEFAULT
from cogfast.core.values import show


@dataclass(frozen=True, slots=True)
class Same:
    """The value is kept under another key."""

    key: str


@dataclass(frozen=True, slots=True)
class InPlaceOf:
    """Wherever the key is set, it counts in place of others."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Only:
    """Some values are legal. fix: what to do instead of setting another."""

    values: tuple[object, ...]
    fix: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Something else has its place."""

    fix: str


@dataclass(frozen=True, slots=True)
class Unused:
    """The key is accepted and has no effect."""

    why: str


Rule = TypeVar("Rule", Same, InPlaceOf, Only, Refused, Unused)

# Components of the `model` section, by their dotted keys
NETWORK = "model.network_config"
SAMPLER = "model.sampler_config"
DENOISER = "model.denoiser_config"
LOSS = "model.loss_fn_config"
FIRST_STAGE = "model.first_stage_config"
TEXT_ENCODERS = "model.conditioner_config.params.emb_models"
OPTIMIZER = "deepspeed.optimizer"
BF16, FP16 = "deepspeed.bf16.enabled", "deepspeed.fp16.enabled"
DATA_SET, DATA_PARAMS = "data.target", "data.params"
NETWORK_KEY = f"{NETWORK}.params"
# Both names of the network take SAT's params.
NETWORKS = "dit_video_concat.DiffusionTransformer", "cogfast.model.transformer.DiffusionTransformer"
POSITION_KEY = f"{NETWORK_KEY}.modules.pos_embed_config.params"
LORA_KEY = f"{NETWORK_KEY}.modules.lora_config.params"
_VAE = "VideoAutoencoderInferenceWrapper"
_VAE_TRAINING = (
    "loss_config ema_decay monitor input_key optimizer_config lr_g_factor trainable_ae_params "
    "ae_optimizer_args disc_start_iter trainable_disc_params disc_optimizer_args diff_boost_factor "
    "image_video_weights only_train_decoder additional_decode_keys"
)
# Why keys have no effect -> "section.key" or "SatClass.param" of each of them
_UNUSED = {
    "random draws are functions of seed, step and sample, so there is no state to keep": "args.no_load_rng "
    "args.no_save_rng",
    "a resumed run always continues at its position in the data": "args.resume_dataloader",
    "the device and the launch decide this": "args.device args.local_rank "
    "transformer_args.use_gpu_initialization VPSDEDPMPP2MSampler.device VPODEDPMPP2MSampler.device "
    "VideoDDIMSampler.device FrozenT5Embedder.device",
    "training always goes through DeepSpeed": "args.deepspeed",
    "nccl on GPUs, gloo on CPUs": "args.distributed_backend",
    "a prompt@@image line gives an image, regardless of this key": "args.image2video",
    "SAT's code does not read it": "args.debug args.log_image args.force_pretrain args.final_size "
    "args.grid_num_rows args.lcm_steps args.input_dir model.augmentation_dropout",
    "samples are decoded when they are needed; nothing is kept in blocks": "args.block_size",
    "the merged configuration is always saved as training_config.yaml": "args.save_args",
    "TensorBoard's files are in the run folder": "args.summary_dir",
    "the network's out_channels decides this": "args.latent_channels",
    "there is no test phase; put the folders into valid_data": "args.test_data",
    "data sets are read by index": "args.iterable_dataset_eval",
    "data sets are read by index, mixed in every batch": "args.batch_from_same_dataset",
    "activations are checkpointed by torch, per block": "args.checkpoint_num_layers "
    "args.checkpoint_skip_layers deepspeed.activation_checkpointing "
    "transformer_args.checkpoint_num_layers transformer_args.checkpoint_skip_layers",
    "captions are written beside every sample": "model.log_keys model.no_cond_log",
    "the first stage runs in its own dtype, without autocast": "model.disable_first_stage_autocast",
    "args.lr_schedule, lr_decay_style and warmup set the learning rate": "deepspeed.scheduler",
    "checkpoints hold the exact fp32 weights": "deepspeed.zero_optimization.load_from_fp32_weights",
    "read only with num_classes, which no CogVideoX has": "DiffusionTransformer.adm_in_channels",
    "a setting of SAT's other models; CogVideoX's network does not read it": "DiffusionTransformer.parallel_output "
    "DiffusionTransformer.zero_init_y_embed transformer_args.vocab_size "
    "transformer_args.make_vocab_size_divisible_by transformer_args.parallel_output",
    "the precision comes from the deepspeed section": "DiffusionTransformer.dtype",
    "weights are initialized, then loaded": "transformer_args.skip_init",
    "args.model_parallel_size decides this": "transformer_args.model_parallel_size",
    "SAT's rotary table ignores it": "Rotary3DPositionEmbeddingMixin.height_interpolation "
    "Rotary3DPositionEmbeddingMixin.width_interpolation "
    "Rotary3DPositionEmbeddingMixin.time_interpolation",
    "the network has no cross attention": "LoraMixin.cross_attention",
    "the number of layers is the network's num_layers": "LoraMixin.layer_num",
    "the loss's weight is 1 / (1 - alpha_bar), as in SAT's VideoDiffusionLoss, which ignores it": "DiscreteDenoiser.weighting_config",
    "the network always gets the inputs that it needs": "VideoDiffusionLoss.batch2model_keys",
    "progress is always shown": "VPSDEDPMPP2MSampler.verbose VPODEDPMPP2MSampler.verbose "
    "VideoDDIMSampler.verbose",
    "DeepSpeed clears the gradients": "FusedEmaAdam.set_grad_none",
    "the autoencoder is frozen": " ".join(f"{_VAE}.{name}" for name in _VAE_TRAINING.split())
    + " encoder_config.dropout",
    "the autoencoder is not split over ranks": f"{_VAE}.cp_size encoder_config.gather_norm",
    "the autoencoder is not split": f"{_VAE}.context_parallel_size",
    "read only with attention layers, which the 3D VAE lacks": "encoder_config.resolution",
}

_RECOMPUTE = "args.checkpoint_activations", f"{NETWORK_KEY}.transformer_args.checkpoint_activations"
_SAMPLES = ("batch_size", "gradient_accumulation_steps", "train_micro_batch_size_per_gpu")
# SAT's sft.yaml puts these at the top of the section, but DeepSpeed reads them in fp16.
LOSS_SCALING = ("loss_scale", "loss_scale_window", "hysteresis", "min_loss_scale")

# "section.key" or "SatClass.param" -> what becomes of it
KEYS: dict[str, Same | InPlaceOf | Only | Refused | Unused] = {
    "deepspeed.train_micro_batch_size_per_gpu": Same("args.batch_size"),
    "deepspeed.gradient_accumulation_steps": Same("args.gradient_accumulation_steps"),
    BF16: Same("args.bf16"),
    FP16: Same("args.fp16"),
    "deepspeed.zero_optimization.stage": Same("args.zero_stage"),
    "deepspeed.optimizer.params.lr": Same("args.lr"),
    "deepspeed.optimizer.params.weight_decay": Same("args.weight_decay"),
    "args.lora_rank": Same(f"{LORA_KEY}.r"),
    "args.lora_alpha": Same(f"{LORA_KEY}.lora_alpha"),
    "args.lora_modules": Same(f"{LORA_KEY}.target_modules"),
    "args.train_iters": InPlaceOf(("args.epochs",)),
    "args.epochs": InPlaceOf(("args.train_iters",)),
    "args.warmup_steps": InPlaceOf(("args.warmup",)),
    "args.activation_checkpointing": InPlaceOf(_RECOMPUTE),
    "args.checkpoint_activations": InPlaceOf(_RECOMPUTE[1:]),
    "args.run_folder": InPlaceOf(("args.save",)),
    "args.valid_data": InPlaceOf(("args.split",)),
    "args.eval_prompts": InPlaceOf(("args.eval_prompt_file",)),
    "args.eval_prompt_file": InPlaceOf(("args.eval_prompts",)),
    "model.lora_train": InPlaceOf(("model.not_trainable_prefixes",)),
    "deepspeed.train_batch_size": InPlaceOf(
        tuple(f"{section}.{name}" for section in ("args", "deepspeed") for name in _SAMPLES)
    ),
    "deepspeed.zero_optimization.offload_optimizer": InPlaceOf(
        ("deepspeed.zero_optimization.cpu_offload",)
    ),
    **{f"deepspeed.fp16.{name}": InPlaceOf((f"deepspeed.{name}",)) for name in LOSS_SCALING},
    "model.compile_model": Only((False, None), "use args.compile=true, which compiles each block"),
    "model.use_pd": Only(
        (False, None), "progressive distillation is not in this version; use false"
    ),
    "model.lr_scale": Only((None,), "super-resolution input is not in this version; remove it"),
    "model.network_wrapper": Only(
        (None, "sgm.modules.diffusionmodules.wrappers.OpenAIWrapper"),
        "the network is called directly; remove it",
    ),
    "args.sdedit": Only((False,), "SAT's code does not read it; use false"),
    "args.iterable_dataset": Only((False,), "data sets are read by index; use false"),
    "args.trusted_cache": Only((None,), "caches of other trainers are not read; use cogfast cache"),
    "args.deepspeed_config": Only((None,), "put its contents into the deepspeed section of a file"),
    "deepspeed.amp": Refused("apex mixed precision is not used; enable bf16 or fp16"),
    "deepspeed.torch_autocast": Refused("bf16 and fp16 set the precision; enable one of them"),
    "deepspeed.tensorboard": Refused(
        "TensorBoard logs are always written to the run folder; remove it"
    ),
    "deepspeed.wandb": Refused("set args.wandb=true"),
    "deepspeed.csv_monitor": Refused(
        "metrics are always written to metrics.jsonl in the run folder; remove it"
    ),
    "deepspeed.tensor_parallel": Refused("set args.model_parallel_size"),
    "deepspeed.checkpoint": Refused(
        "DeepSpeed does not write the checkpoints; use args.save_interval and keep_last"
    ),
    "deepspeed.flops_profiler": Refused("the log has TFLOP/s; remove it, or set args.profiling"),
    **{key: Unused(why) for why, keys in _UNUSED.items() for key in keys.split()},
}


def rules(kind: type[Rule], section: str = "") -> dict[str, Rule]:
    """Return the rows of a kind, of all sections or of one, by key."""
    start = section and f"{section}."
    return {k: r for k, r in KEYS.items() if isinstance(r, kind) and k.startswith(start)}


def why_unused(name: str) -> str | None:
    """Return why "section.key" or "SatClass.param" has no effect; None if it has one."""
    rule = KEYS.get(name)
    return rule.why if isinstance(rule, Unused) else None


_OF_TRAINING = ("batch_size", "gradient_accumulation_steps")


def take_moved(sections: Mapping[str, Any]) -> dict[str, tuple[Any, str, str]]:
    """Take the values that are the same as keys of args out of the deepspeed section.

    Returns {name in args: (value, key, key that a file has)}: a section that has one precision switches the
    other one off.
    """
    found: dict[str, tuple[Any, str, str]] = {}
    for key, rule in rules(Same, "deepspeed").items():
        name = rule.key.rpartition(".")[2]
        # args.mode=inference has no use for them: there args.batch_size is the number of videos per prompt.
        if sections["args"]["mode"] == "inference" and name in _OF_TRAINING:
            continue
        value = take(sections.get("deepspeed"), key.split(".")[1:])
        if value is not None:
            found[name] = value, key, key
    for name, rival in (("bf16", "fp16"), ("fp16", "bf16")):
        if found.get(rival, (False,))[0] and name not in found:
            found[name] = False, f"deepspeed.{name}.enabled", found[rival][2]
    return found


def take(node: Any, path: list[str]) -> Any:
    """Remove a value from nested mappings, and the mappings that are empty then; None without one."""
    name, *inner = path
    if not isinstance(node, dict) or name not in node:
        return None
    if not inner:
        return node.pop(name)
    value = take(node[name], inner)
    if node[name] == {}:
        del node[name]
    return value


# Key of args -> SAT's default, where cogfast has another; docs/differences.md has the reasons
_TRAINING = {
    "mode": "pretrain",
    "batch_size": "4",
    "zero_stage": "0",
    "log_interval": "50",
    "keep_last": "all",
    "eval_iters": "100",
    "split": "1000,1,1",
}
_SAMPLING = {
    "batch_size": "4",
    "sampling_image_size": "[768, 1360]",
    "sampling_num_frames": "32",
    "sampling_fps": "8",
}


def own_defaults(args: Mapping[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Return `key=value (SAT: default)` for the keys that no file sets, that this run reads, and that
    have another default in SAT."""
    if args["mode"] == "inference":
        # The command itself sets the mode if there is no file of SAT's kind.
        is_of_file = origins.get("args.mode") not in (COMMAND_LINE, DEFAULT, None)
        defaults = _SAMPLING if is_of_file else {}
    else:
        evaluates = (
            args["eval_interval"] is not None or args["eval_at_start"] or args["eval_at_end"]
        )
        read = {
            "mode": args["lr_schedule"] == "sat",
            "keep_last": (args["train_iters"] or 0) // (args["save_interval"] or 10**9)
            > args["keep_last"],
            "eval_iters": evaluates and args["valid_data"] and not args["strict_eval"],
            "split": evaluates and not args["valid_data"],
        }
        # `cogfast finetune` has the defaults of CogVideo's diffusers trainer.
        is_theirs = args["folder_layout"] == "finetune"
        defaults = {} if is_theirs else {k: v for k, v in _TRAINING.items() if read.get(k, True)}
    return [
        f"args.{key}={show(args[key])} (SAT: {value})"
        for key, value in defaults.items()
        if origins.get(f"args.{key}", DEFAULT) == DEFAULT
    ]

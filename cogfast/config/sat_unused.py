"""SAT's keys that are accepted but have no effect, with the reason for each."""

from __future__ import annotations

from cogfast.config.merged_config import Config
from cogfast.core.keys import COMMAND_LINE, DEFAULT
from cogfast.core.values import show

_DECIDED_HERE = "the device and the launch decide this"
_RNG = "random draws are functions of seed, step and sample, so there is no state to keep"
_ONE_TABLE = "the merged configuration is always saved as training_config.yaml"
_NOT_SAT_NETWORK = "a setting of SAT's other models; CogVideoX's network does not read it"
_SAMPLERS = ("VPSDEDPMPP2MSampler", "VPODEDPMPP2MSampler", "VideoDDIMSampler")
_VAE_FROZEN = "the autoencoder is frozen"
_TORCH_CHECKPOINTING = "activations are checkpointed by torch, per block"

_VAE_TRAINING = (
    "loss_config ema_decay monitor input_key optimizer_config lr_g_factor trainable_ae_params "
    "ae_optimizer_args disc_start_iter trainable_disc_params disc_optimizer_args diff_boost_factor "
    "image_video_weights only_train_decoder additional_decode_keys"
)

# "section.key" or "SatClass.param" -> reason
UNUSED: dict[str, str] = {
    "args.no_load_rng": _RNG,
    "args.no_save_rng": _RNG,
    "args.resume_dataloader": "a resumed run always continues at its position in the data",
    "args.device": _DECIDED_HERE,
    "args.local_rank": _DECIDED_HERE,
    "args.deepspeed": "training always goes through DeepSpeed",
    "args.distributed_backend": "nccl on GPUs, gloo on CPUs",
    "args.image2video": "a prompt@@image line gives an image, regardless of this key",
    "args.debug": "SAT's code does not read it",
    "args.log_image": "SAT's code does not read it",
    "args.force_pretrain": "SAT's code does not read it",
    "args.final_size": "SAT's code does not read it",
    "args.grid_num_rows": "SAT's code does not read it",
    "args.lcm_steps": "SAT's code does not read it",
    "args.input_dir": "SAT's code does not read it",
    "args.block_size": "samples are decoded when they are needed; nothing is kept in blocks",
    "args.save_args": _ONE_TABLE,
    "args.summary_dir": "TensorBoard's files are in the run folder",
    "args.latent_channels": "the network's out_channels decides this",
    "args.test_data": "there is no test phase; put the folders into valid_data",
    "args.iterable_dataset_eval": "data sets are read by index",
    "args.batch_from_same_dataset": "data sets are read by index, mixed in every batch",
    "args.checkpoint_num_layers": _TORCH_CHECKPOINTING,
    "args.checkpoint_skip_layers": _TORCH_CHECKPOINTING,
    "model.log_keys": "captions are written beside every sample",
    "model.disable_first_stage_autocast": "the first stage runs in its own dtype, without autocast",
    "model.augmentation_dropout": "SAT's code does not read it",
    "model.no_cond_log": "captions are written beside every sample",
    "deepspeed.activation_checkpointing": _TORCH_CHECKPOINTING,
    "deepspeed.scheduler": "args.lr_schedule, lr_decay_style and warmup set the learning rate",
    "deepspeed.zero_optimization.load_from_fp32_weights": "checkpoints hold the exact fp32 weights",
    "DiffusionTransformer.adm_in_channels": "read only with num_classes, which no CogVideoX has",
    "DiffusionTransformer.parallel_output": _NOT_SAT_NETWORK,
    "DiffusionTransformer.zero_init_y_embed": _NOT_SAT_NETWORK,
    "DiffusionTransformer.dtype": "the precision comes from the deepspeed section",
    "transformer_args.vocab_size": _NOT_SAT_NETWORK,
    "transformer_args.skip_init": "weights are initialized, then loaded",
    "transformer_args.model_parallel_size": "args.model_parallel_size decides this",
    "transformer_args.checkpoint_num_layers": _TORCH_CHECKPOINTING,
    "transformer_args.checkpoint_skip_layers": _TORCH_CHECKPOINTING,
    "transformer_args.make_vocab_size_divisible_by": _NOT_SAT_NETWORK,
    "transformer_args.use_gpu_initialization": _DECIDED_HERE,
    "transformer_args.parallel_output": _NOT_SAT_NETWORK,
    "Rotary3DPositionEmbeddingMixin.height_interpolation": "SAT's rotary table ignores it",
    "Rotary3DPositionEmbeddingMixin.width_interpolation": "SAT's rotary table ignores it",
    "Rotary3DPositionEmbeddingMixin.time_interpolation": "SAT's rotary table ignores it",
    "LoraMixin.cross_attention": "the network has no cross attention",
    "LoraMixin.layer_num": "the number of layers is the network's num_layers",
    "DiscreteDenoiser.weighting_config": (
        "the loss's weight is 1 / (1 - alpha_bar), as in SAT's VideoDiffusionLoss, which ignores it"
    ),
    "VideoDiffusionLoss.batch2model_keys": "the network always gets the inputs that it needs",
    **dict.fromkeys([f"{sampler}.device" for sampler in _SAMPLERS], _DECIDED_HERE),
    **dict.fromkeys([f"{sampler}.verbose" for sampler in _SAMPLERS], "progress is always shown"),
    "FrozenT5Embedder.device": _DECIDED_HERE,
    "FusedEmaAdam.set_grad_none": "DeepSpeed clears the gradients",
    **dict.fromkeys(
        [f"VideoAutoencoderInferenceWrapper.{name}" for name in _VAE_TRAINING.split()], _VAE_FROZEN
    ),
    "VideoAutoencoderInferenceWrapper.cp_size": "the autoencoder is not split over ranks",
    "VideoAutoencoderInferenceWrapper.context_parallel_size": "the autoencoder is not split",
    "encoder_config.resolution": "read only with attention layers, which the 3D VAE lacks",
    "encoder_config.gather_norm": "the autoencoder is not split over ranks",
    "encoder_config.dropout": _VAE_FROZEN,
}

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


def own_defaults(config: Config) -> list[str]:
    """Return `key=value (SAT: default)` for the keys that no file sets, that this run reads, and that
    have another default in SAT."""
    args, origins = config.args, config.origins
    if args.mode == "inference":
        # The command itself sets the mode if there is no file of SAT's kind.
        is_of_file = origins.get("args.mode") not in (COMMAND_LINE, DEFAULT, None)
        defaults = _SAMPLING if is_of_file else {}
    else:
        evaluates = args.eval_interval is not None or args.eval_at_start or args.eval_at_end
        read = {
            "mode": args.lr_schedule == "sat",
            "keep_last": (args.train_iters or 0) // (args.save_interval or 10**9) > args.keep_last,
            "eval_iters": evaluates and args.valid_data and not args.strict_eval,
            "split": evaluates and not args.valid_data,
        }
        # `cogfast finetune` has the defaults of CogVideo's diffusers trainer.
        is_theirs = args.folder_layout == "finetune"
        defaults = {} if is_theirs else {k: v for k, v in _TRAINING.items() if read.get(k, True)}
    return [
        f"args.{key}={show(args[key])} (SAT: {value})"
        for key, value in defaults.items()
        if origins.get(f"args.{key}", DEFAULT) == DEFAULT
    ]

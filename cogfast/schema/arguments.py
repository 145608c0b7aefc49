"""The `args` and `model` sections as dataclasses: SAT's names and defaults, then ours."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf

from cogfast.schema.config import Config
from cogfast.schema.json_files import Range

Precision = Literal["bf16", "fp16", "fp32"]
PolicyChoice = Literal["auto", "none", "attention_kept", "pointwise", "full"]
Count = Annotated[int, Range(1, 10**9)]  # of steps or the like
Batch = Annotated[int, Range(1, 10**5)]
Size = Annotated[int, Range(1, 2**16)]  # rows, columns, frames, channels


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """The `args` section. Intervals and iterations count optimizer steps."""

    # what runs, from what, into what
    experiment_name: str = "cogfast"
    mode: Literal["pretrain", "finetune", "inference"] = "finetune"
    load: str | None = None  # folder of the weights to start from
    load_lora: str | None = None  # adapters to start from: a LoRA file, a SAT folder or a run
    save: str | None = None  # folder that run folders are made in; none: runs
    resume: str | None = None  # auto, latest, or a run or checkpoint folder
    accept_changes: bool = False  # resume though keys that decide what is trained are other ones
    seed: Annotated[int, Range(-(2**62), 2**62)] = 1234
    train_iters: Count | None = None
    epochs: Count | None = None
    exit_interval: Count | None = None  # stop at a multiple of this many steps
    max_hours: float | None = None  # since the process began: save at the next step, and end
    save_interval: Count | None = 5000  # null: only at the end
    verify_checkpoints: bool = True  # compare the checksums of a checkpoint that is resumed from
    keep_last: Annotated[int, Range(0, 10**6)] = 2  # newest checkpoints that are kept; 0 keeps all
    log_interval: Count = 20
    summary_dir: str | None = None  # TensorBoard's, a folder per run in it; none: the run's own
    wandb: bool = False
    wandb_project_name: str = "default_project"
    deterministic: bool = False  # bitwise repeatable on a GPU, slower
    profiling: Annotated[int, Range(-1, 10**9)] | None = (
        None  # steps done when a profile begins (SAT's key); none or -1: never
    )
    profiling_steps: Annotated[int, Range(1, 1000)] = 3  # how many steps it covers
    profiling_blocks: bool = False  # a range for every block, too

    # data
    train_data: list[str] = field(default_factory=list)
    valid_data: list[str] = field(default_factory=list)
    train_data_weights: list[float] | None = None  # how often an epoch reads each of train_data
    split: str = "1,0,0"  # shares for training, validation and test where valid_data is empty
    latent_cache: str | None = None  # folder that `cogfast cache` fills, to train from
    # of image-to-video: noised first frames that it holds encoded, per clip, of which each step draws
    # one; 0: the frame itself, which each step noises anew and encodes
    cached_noised_images: Annotated[int, Range(0, 1024)] = 0
    num_workers: Annotated[int, Range(0, 256)] = 1
    prefetch_factor: Annotated[int, Range(1, 1024)] = 4  # batches that each worker decodes ahead
    device_prefetch: Annotated[int, Range(0, 64)] = (
        1  # batches copied to a GPU while it works on another
    )
    decode_timeout: Annotated[float, Range(0, 10**6)] = (
        120.0  # seconds that reading one sample may take, 0 for ever
    )
    check_videos: bool = True  # read the headers of all videos before training
    max_bad_fraction: float = 0.05  # share of unreadable samples at which the run ends

    # the step
    batch_size: Batch = 1  # samples per rank and micro-batch, or videos per prompt
    gradient_accumulation_steps: Batch = 1
    model_parallel_size: Annotated[int, Range(0, 1024)] = (
        1  # ranks that share a model (tensor parallelism)
    )
    sequence_parallel: bool = False  # each of them has rows of its own between the linears
    replica_check_interval: Count | None = (
        1000  # steps between looks whether they drift; null: never
    )
    kernels: Literal["triton", "torch"] = "triton"  # torch: plain PyTorch in their place
    compile: bool = False  # each block by torch.compile
    # auto: on a GPU the fastest at the run's shape, measured once and kept in the checkpoint
    attention_backend: Literal[
        "auto", "fa4", "fa3", "fa2", "cudnn", "flash", "efficient", "math"
    ] = "auto"
    # none: transformer_args' checkpoint_activations decides, true is auto and false is "none"
    activation_checkpointing: PolicyChoice | None = None
    checkpoint_activations: bool | None = None  # set, it replaces transformer_args' own
    force_train: bool = False  # train even where the weights of args.load lack some
    bf16: bool = False  # bf16, fp16 and zero_stage count where the deepspeed section has none
    fp16: bool = False
    zero_stage: Annotated[int, Range(0, 3)] = 2
    max_nonfinite_steps: Count = 20  # steps in a row that may be skipped for a non-finite loss

    # learning rate
    lr: Annotated[float, Range(0, 1000)] = (
        1.0e-4  # lr and weight_decay count where deepspeed.optimizer has none
    )
    weight_decay: float = 0.01
    lr_schedule: Literal["sat", "constant", "cosine", "linear"] = "sat"
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    lr_decay_iters: Count | None = None
    lr_decay_ratio: float = 0.1
    warmup: float = 0.01  # share of all steps
    warmup_steps: Annotated[int, Range(0, 10**9)] | None = None  # set, it replaces warmup
    min_lr_ratio: float = 0.0  # the schedule's end over its peak, for lr_schedule other than sat

    # evaluation
    eval_interval: Count | None = None  # none: no evaluation
    eval_iters: Count = 1  # batches per evaluation
    eval_batch_size: Batch | None = None  # none: batch_size
    strict_eval: bool = False  # all of valid_data instead of eval_iters batches
    only_log_video_latents: bool = False  # sample latents, do not decode them
    eval_prompts: list[str] = field(default_factory=list)  # none: captions of valid_data
    eval_num_samples: Annotated[int, Range(0, 10**4)] = (
        1  # videos that are sampled at an evaluation
    )
    eval_sampling_steps: Count | None = None  # none: the sampler's own
    eval_with_ema: bool = True
    eval_timestep_bands: Annotated[int, Range(1, 1000)] = (
        4  # parts of the schedule with a held-out loss of their own
    )

    # sampling
    force_inference: bool = False  # sample even where the weights lack some, or there are none
    input_type: Literal["cli", "txt"] = "cli"
    input_file: str = "input.txt"  # a prompt, or prompt@@image, per line
    output_dir: str = "samples"
    latent_channels: Size | None = None  # none: the network's out_channels
    sampling_image_size: list[Size] | None = None  # rows, columns; none: as trained
    sampling_num_frames: Size | None = None  # latent frames; none: as trained
    sampling_fps: Annotated[int, Range(1, 1000)] | None = (
        None  # none: the training data's, or SAT's 8
    )
    only_save_latents: bool = False
    vae_memory_gib: float | None = None  # that decoding may take; none: what is free

    @classmethod
    def from_config(cls, config: Config) -> TrainArguments:
        """The checked `args`; batch size, accumulation, precision, ZeRO stage, learning rate and
        weight decay come from the deepspeed section where it says them, as in SAT."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in _plain(config.args).items() if k in known}
        deepspeed = _plain(config.deepspeed)
        if values.get("mode") != "inference":
            for name, key in (
                ("batch_size", "train_micro_batch_size_per_gpu"),
                ("gradient_accumulation_steps", "gradient_accumulation_steps"),
            ):
                if deepspeed.get(key) is not None:
                    values[name] = deepspeed[key]
        for name in ("bf16", "fp16"):
            if "bf16" in deepspeed or "fp16" in deepspeed:
                values[name] = bool((deepspeed.get(name) or {}).get("enabled", False))
        stage = (deepspeed.get("zero_optimization") or {}).get("stage")
        values["zero_stage"] = values.get("zero_stage", 2) if stage is None else stage
        optimizer = (deepspeed.get("optimizer") or {}).get("params") or {}
        values |= {name: optimizer[name] for name in ("lr", "weight_decay") if name in optimizer}
        if values.get("activation_checkpointing") is None:
            values["activation_checkpointing"] = "auto" if _asks_to_recompute(config) else "none"
        if values.get("train_iters") is None and values.get("epochs") is None:
            values["train_iters"] = 10000  # SAT's
        return cls(**values)

    @property
    def precision(self) -> Precision:
        """The dtype of weights and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """The `model` section without its components."""

    input_key: str = "mp4"  # the batch's key of the videos
    scale_factor: float = 1.0  # latents = scale_factor * the first stage's
    latent_input: bool = False  # the batch holds latents of the first stage instead of pixels
    en_and_decode_n_samples_a_time: int | None = None  # samples per first-stage call; none: all
    noised_image_input: bool = False  # image-to-video
    noised_image_all_concat: bool = False  # the image's latents beside every frame, not the first
    noised_image_dropout: float = 0.0  # share of samples that see no image
    not_trainable_prefixes: list[str] = field(
        default_factory=lambda: ["first_stage_model", "conditioner"]
    )  # of SAT's parameter names; "all" leaves LoRA matrices to be trained
    lora_train: bool = False  # train only what is called lora_layer in SAT

    @classmethod
    def from_config(cls, config: Config) -> ModelArguments:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in _plain(config.model).items() if k in known})


def _asks_to_recompute(config: Config) -> bool:
    """SAT's key of the network, which args.checkpoint_activations has replaced where it is set."""
    key = "network_config.params.transformer_args.checkpoint_activations"
    return bool(OmegaConf.select(config.model, key, default=False))


def _plain(section: DictConfig) -> dict[str, Any]:
    return OmegaConf.to_container(section, resolve=True)

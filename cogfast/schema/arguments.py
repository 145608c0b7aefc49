"""The `args` and `model` sections as dataclasses, with SAT's names and defaults where SAT has them.

The comment above a field is its meaning in docs/options.md and in `cogfast train --help-all`. A new
field needs one; `python -m cogfast.cli.option_table` then writes its row. A comment between dashes
begins a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from cogfast.schema.json_files import Range
from cogfast.schema.merged_config import Config, to_dict

Precision = Literal["bf16", "fp16", "fp32"]
FolderLayout = Literal["cogfast", "finetune"]
PolicyChoice = Literal["auto", "none", "attention_kept", "pointwise", "full"]
Count = Annotated[int, Range(1, 10**9)]  # steps, epochs, batches
Batch = Annotated[int, Range(1, 10**5)]
Size = Annotated[int, Range(1, 2**16)]  # rows, columns, frames, channels
Moments = Literal["fp32", "8bit"]
ImageLatentScale = Literal["trainer", "pretrained", "pipeline"]
EmaDevice = Literal["device", "cpu"]
# those of diffusers' get_scheduler that CogVideo's diffusers trainer takes
DiffusersSchedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
]
Schedule = Literal["sat", DiffusersSchedule]
# Key of args -> the key of the deepspeed section that sets the same; sections.settle_pairs says which wins
PAIRS = {
    "batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
    "zero_stage": "zero_optimization.stage",
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
}
# With args.mode=inference, args.batch_size is the number of videos per prompt.
TRAINING_PAIRS = ("batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainArguments:
    """The `args` section. Intervals and iterations count optimizer steps."""

    # --- run and weights ---
    # start of the run folder's name
    experiment_name: str = "cogfast"
    # pretrain: leave out the low learning rate of SAT's first 100 steps; inference: for sampling
    mode: Literal["pretrain", "finetune", "inference"] = "finetune"
    # weights to start from: a folder or a file of any format that `cogfast convert` reads, or the id of a
    # diffusers pipeline on the Hugging Face hub. A pipeline also fills in VAE and text encoder
    load: str | None = None
    # adapters to start from: a LoRA file, a SAT folder or a run
    load_lora: str | None = None
    # folder in which run folders are created; None: runs
    save: str | None = None
    # the run folder itself, in place of one with a date below args.save
    run_folder: str | None = None
    # names in the run folder; finetune: those of CogVideo's diffusers trainer (checkpoint-N, logs,
    # validation_res)
    folder_layout: FolderLayout = "cogfast"
    # latest: the newest checkpoint; auto: the same, or a new run if there is none; or the path of a run or
    # checkpoint. A checkpoint-N of CogVideo's diffusers trainer gives its LoRA weights and its step
    resume: str | None = None
    # resume even if training-relevant keys changed
    accept_changes: bool = False
    # decides the order of the data and all noise; in sampling, the first video's noise
    seed: Annotated[int, Range(-(2**62), 2**62)] = 1234
    # steps to train; None: those of args.epochs, or SAT's 10000 without that
    train_iters: Count | None = None
    # passes over the data, in place of train_iters
    epochs: Count | None = None
    # save and stop at the next multiple of this many steps
    exit_interval: Count | None = None
    # hours since the process started, after which the run saves and stops, within two steps
    max_hours: float | None = None
    # steps between checkpoints; None: save only at the end
    save_interval: Count | None = 5000
    # compare the checksums of a checkpoint when resuming
    verify_checkpoints: bool = True
    # checkpoints that also hold files which diffusers loads: pytorch_lora_weights.safetensors of LoRA
    # runs; transformer/ and, with EMA, transformer_ema/ of others, in the run's precision. last: only
    # the checkpoint of the last step
    export: Literal["none", "last", "all"] = "none"
    # with export=last: steps between earlier checkpoints that also hold such files; must be a multiple of
    # save_interval
    export_interval: Count | None = None
    # number of latest checkpoints to keep; 0 keeps all
    keep_last: Annotated[int, Range(0, 10**6)] = 2
    # steps between lines of the log and of metrics.jsonl
    log_interval: Count = 20
    # parent of the TensorBoard folders, one per run; None: inside the run folder
    summary_dir: str | None = None
    # also log to Weights & Biases
    wandb: bool = False
    # project of Weights & Biases
    wandb_project_name: str = "default_project"
    # bitwise reproducible on a GPU, slower
    deterministic: bool = False
    # profile after this many steps (SAT's key); None or -1: never
    profiling: Annotated[int, Range(-1, 10**9)] | None = None
    # number of steps to profile
    profiling_steps: Annotated[int, Range(1, 1000)] = 3
    # also record a range for every block of the network
    profiling_blocks: bool = False

    # --- data ---
    # sources of training data: folders, manifests or shards, as data.target reads them
    train_data: list[str] = field(default_factory=list)
    # sources of held-out data
    valid_data: list[str] = field(default_factory=list)
    # how often an epoch reads each source of train_data
    train_data_weights: list[float] | None = None
    # shares for training, validation and test if valid_data is empty
    split: str = "1,0,0"
    # cache folder that `cogfast cache` filled; training reads it instead of the videos
    latent_cache: str | None = None
    # fill latent_cache as `cogfast cache` does before training; then the encoders leave the memory
    encode_first: bool = False
    # folder that CogVideo's diffusers trainer filled, its data_root/cache: latent_cache takes clips and
    # captions from there, by file name and caption. null: copies of them in latent_cache are not used
    trusted_cache: str | None = None
    # image-to-video: number of noised first frames cached per clip; each step draws one.
    # 0: cache the frame itself; each step noises and encodes it
    cached_noised_images: Annotated[int, Range(0, 1024)] = 0
    # processes per rank that read and decode; 0: the training process reads
    num_workers: Annotated[int, Range(0, 256)] = 1
    # batches that each worker decodes ahead
    prefetch_factor: Annotated[int, Range(1, 1024)] = 4
    # batches copied to the GPU ahead of the one in use
    device_prefetch: Annotated[int, Range(0, 64)] = 1
    # seconds to read one sample; 0: no limit
    decode_timeout: Annotated[float, Range(0, 10**6)] = 120.0
    # read the headers of all videos before training
    check_videos: bool = True
    # fraction of unreadable samples above which the run stops
    max_bad_fraction: float = 0.05

    # --- training step ---
    # samples per rank and micro-batch, the same as deepspeed.train_micro_batch_size_per_gpu; videos per prompt
    # when sampling
    batch_size: Batch = 1
    # micro-batches per step
    gradient_accumulation_steps: Batch = 1
    # number of ranks that share a model (tensor parallelism)
    model_parallel_size: Annotated[int, Range(0, 1024)] = 1
    # number of ranks that share the rows of a sample (context parallelism), for clips that are longer
    # than the memory of one GPU
    context_parallel_size: Annotated[int, Range(0, 1024)] = 1
    # shard activations by rows between the tensor-parallel linears
    sequence_parallel: bool = False
    # seconds that a rank waits for another one in a collective, before the run ends
    collective_timeout: Annotated[int, Range(1, 10**7)] = 1800
    # steps between checks that replicas are still equal; None: never
    replica_check_interval: Count | None = 1000
    # torch: plain PyTorch in place of cogfast's kernels
    kernels: Literal["triton", "torch"] = "triton"
    # torch.compile for each block
    compile: bool = False
    # auto: on a GPU, measure the fastest at the run's shape once and store it in the checkpoint
    attention_backend: Literal[
        "auto", "fa4", "fa3", "fa2", "cudnn", "flash", "efficient", "math"
    ] = "auto"
    # None: follow transformer_args.checkpoint_activations (true: auto, false: "none")
    activation_checkpointing: PolicyChoice | None = None
    # auto: if the memory plan does not fit, change keys that save memory, the cheapest first, until it
    # does; the log has each change with its cost. none: train as configured
    fit: Literal["none", "auto"] = "none"
    # keep the activations that activation_checkpointing keeps in pinned host memory, from a block's forward
    # to its backward pass; the GPU holds those of two blocks. auto: attention_kept, or full
    offload_activations: bool = False
    # keep VAE and text encoder in pinned host memory; each is on the GPU only while it encodes or decodes.
    # On a CPU this changes nothing
    offload_encoders: bool = False
    # if set, replaces transformer_args.checkpoint_activations
    checkpoint_activations: bool | None = None
    # LoRA: weights of the frozen linears in the blocks, in 8 bits and a scale for each row. int8: the smaller
    # error. fp8: products run on fp8 tensor cores (H100, RTX 4090 or newer, bf16). Training and its
    # evaluations use the rounded weights, sampling and exports those of args.load
    quantize_base: Literal["none", "int8", "fp8"] = "none"
    # LoRA: number of last blocks whose frozen linears wait in pinned host memory, a copy for each rank, from
    # where the GPU fetches them one block ahead
    offload_blocks: Annotated[int, Range(0, 10**4)] = 0
    # train even if the weights of args.load are incomplete
    force_train: bool = False
    # weights and activations in bfloat16, the same as deepspeed.bf16.enabled
    bf16: bool = False
    # weights and activations in float16, the same as deepspeed.fp16.enabled
    fp16: bool = False
    # what ZeRO partitions over the ranks: optimizer state (1), gradients (2), weights (3). The same as
    # deepspeed.zero_optimization.stage
    zero_stage: Annotated[int, Range(0, 3)] = 2
    # the moments of FusedEmaAdam. 8bit: blockwise, 2 bytes per trained parameter in place of 8, divided by
    # the data-parallel ranks. A run may resume with the other value
    optimizer_moments: Moments = "fp32"
    # memory of the averaged (EMA) weights of FusedEmaAdam, 4 bytes per trained parameter, divided by the
    # data-parallel ranks. cpu: in host memory, updated over PCIe while the next step computes, with the
    # same numbers
    ema_device: EmaDevice = "device"
    # consecutive steps that may be skipped because of non-finite gradients
    max_nonfinite_steps: Count = 20
    # after a loss or gradient that is not finite: skip its step; stop: save and end the run
    nonfinite: Literal["skip", "stop"] = "skip"

    # --- learning rate ---
    # peak learning rate, the same as deepspeed.optimizer.params.lr
    lr: Annotated[float, Range(0, 1000)] = 1.0e-4
    # weight decay, without norms and biases, the same as deepspeed.optimizer.params.weight_decay. If neither
    # is set, a deepspeed.optimizer has none (0), as in SAT
    weight_decay: float = 0.01
    # sat: SAT's warm-up (at most 5% of lr for 100 steps, then a jump), then lr_decay_style;
    # the others: a linear warm-up, then the decay of that name, as diffusers names them
    lr_schedule: Schedule = "sat"
    # first step of the warm-up. 1: its rate is lr / warmup_steps. 0: its rate is 0, as in diffusers'
    # get_scheduler, and lr_schedule=constant has no warm-up
    lr_first_step: Literal[0, 1] = 1
    # number of decays of lr_schedule=cosine_with_restarts
    lr_num_cycles: Annotated[float, Range(0.01, 10**6)] = 1.0
    # exponent of lr_schedule=polynomial
    lr_power: Annotated[float, Range(0.01, 100)] = 1.0
    # decay of lr_schedule=sat; exponential does not decay, as in SAT
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    # steps of the decay of lr_schedule=sat; None: all steps
    lr_decay_iters: Count | None = None
    # final over peak learning rate of lr_schedule=sat with lr_decay_style=cosine
    lr_decay_ratio: float = 0.1
    # length of the warm-up as a fraction of all steps
    warmup: float = 0.01
    # length of the warm-up in steps; if set, replaces warmup
    warmup_steps: Annotated[int, Range(0, 10**9)] | None = None
    # final over peak learning rate of lr_schedule=linear, cosine, cosine_with_restarts and polynomial;
    # polynomial ends at 1e-7 or above
    min_lr_ratio: float = 0.0

    # --- evaluation ---
    # steps between evaluations; None: no evaluation
    eval_interval: Count | None = None
    # evaluate before the first step, too; a run that resumes does not repeat it
    eval_at_start: bool = False
    # evaluate once more after the last step
    eval_at_end: bool = False
    # batches per evaluation
    eval_iters: Count = 1
    # samples per rank when evaluating; None: batch_size
    eval_batch_size: Batch | None = None
    # evaluate all of valid_data instead of eval_iters batches
    strict_eval: bool = False
    # save sampled latents without decoding them
    only_log_video_latents: bool = False
    # prompts of the videos to sample; empty: captions of valid_data
    eval_prompts: list[str] = field(default_factory=list)
    # instead of eval_prompts: a text file with a prompt or prompt@@image per line
    eval_prompt_file: str | None = None
    # image-to-video: a text file with the path of an image per line, one for each prompt;
    # None: first frames of valid_data
    eval_images: str | None = None
    # videos to sample at each evaluation
    eval_num_samples: Annotated[int, Range(0, 10**4)] = 1
    # sampling steps of these videos; None: the sampler's own number
    eval_sampling_steps: Count | None = None
    # evaluate and sample with the averaged (EMA) weights, if the optimizer keeps them
    eval_with_ema: bool = True
    # copy sampled videos to TensorBoard (as small GIFs) and, with args.wandb, to W&B
    log_videos: bool = True
    # number of timestep bands with a separate training loss and held-out loss
    eval_timestep_bands: Annotated[int, Range(1, 1000)] = 4

    # --- sampling ---
    # sample even if the weights are incomplete or missing
    force_inference: bool = False
    # text of guidance's unconditional half, as --negative-prompt; None: zeros, as dropped captions in
    # training; "": the empty caption, as in diffusers' pipelines
    negative_prompt: str | None = None
    # source of prompts without --prompt: standard input (cli) or input_file (txt)
    input_type: Literal["cli", "txt"] = "cli"
    # file with one prompt or prompt@@image per line
    input_file: str = "input.txt"
    # folder of the sampled videos
    output_dir: str = "samples"
    # channels of the sampled latents; None: the network's out_channels
    latent_channels: Size | None = None
    # rows, columns in pixels; None: the training size
    sampling_image_size: list[Size] | None = None
    # length in latent frames; None: the training length
    sampling_num_frames: Size | None = None
    # frames per second of the files; None: that of the training data, or SAT's 8
    sampling_fps: Annotated[int, Range(1, 1000)] | None = None
    # save latents without decoding them
    only_save_latents: bool = False
    # GiB that the autoencoder may take to encode clips or decode a video; None: the free memory
    vae_memory_gib: float | None = None

    @classmethod
    def from_config(cls, config: Config) -> TrainArguments:
        """Build the arguments from a checked configuration.

        The deepspeed section has the values that settle_pairs chose, and those that were set later.
        """
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in to_dict(config.args).items() if k in known}
        deepspeed = to_dict(config.deepspeed)
        is_training = values.get("mode") != "inference"
        for name in PAIRS:
            value = deepspeed_value(deepspeed, name)
            if value is not None and (is_training or name not in TRAINING_PAIRS):
                values[name] = value
        if values.get("activation_checkpointing") is None:
            values["activation_checkpointing"] = "auto" if _asks_to_recompute(config) else "none"
        if values.get("train_iters") is None and values.get("epochs") is None:
            values["train_iters"] = 10000  # SAT's default
        return cls(**values)

    @property
    def has_evaluation(self) -> bool:
        """Whether training evaluates at all."""
        return self.eval_interval is not None or self.eval_at_start or self.eval_at_end

    @property
    def precision(self) -> Precision:
        """dtype of weights and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelArguments:
    """The `model` section without its components."""

    # key of the videos in a batch; only mp4 is read
    input_key: str = "mp4"
    # latents = scale_factor * output of the first stage
    scale_factor: float = 1.0
    # batches hold first-stage latents instead of pixels
    latent_input: bool = False
    # samples per first-stage call; None: all
    en_and_decode_n_samples_a_time: int | None = None
    # image-to-video: the latents of the first frame, with a little noise, are a part of the input
    noised_image_input: bool = False
    # concatenate the image latents to every frame, not only the first
    noised_image_all_concat: bool = False
    # fraction of samples trained without the image
    noised_image_dropout: float = 0.0
    # scale of the first frame's latents, relative to the VAE's output. trainer: scale_factor, as both
    # upstream trainers; pretrained: 1, as SAT samples; pipeline: 1 / scale_factor, as diffusers'
    # pipeline of CogVideoX1.5-5B-I2V
    image_latent_scale: ImageLatentScale = "trainer"
    # prefixes of SAT's parameter names that are not trained; "all" trains only LoRA matrices
    not_trainable_prefixes: list[str] = field(
        default_factory=lambda: ["first_stage_model", "conditioner"]
    )
    # train only LoRA adapters, whatever not_trainable_prefixes lists
    lora_train: bool = False

    @classmethod
    def from_config(cls, config: Config) -> ModelArguments:
        known = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in to_dict(config.model).items() if k in known})


def deepspeed_value(section: Mapping[str, Any], name: str) -> Any:
    """Return the value of the deepspeed section for a key of PAIRS; None if it has none."""
    # A section that has one precision says that the other one is off, as in SAT.
    if name in ("bf16", "fp16") and {"bf16", "fp16"} & set(section):
        return bool(_select(section, PAIRS[name]))
    return _select(section, PAIRS[name])


def _select(node: Any, key: str) -> Any:
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _asks_to_recompute(config: Config) -> bool:
    """Read SAT's key of the network, which args.checkpoint_activations overwrites if it is set."""
    key = "network_config.params.transformer_args.checkpoint_activations"
    return bool(OmegaConf.select(config.model, key, default=False))

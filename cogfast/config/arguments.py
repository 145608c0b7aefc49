"""The `args` and `model` sections as pydantic dataclasses, with SAT's names and defaults where SAT has them.

The string below a field is its meaning in docs/options.md, in `cogfast train --help-all` and in the JSON
schema that editors read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from annotated_types import Len
from omegaconf import OmegaConf
from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from cogfast.config.merged_config import Config, to_dict
from cogfast.config.values import STRICT, Range, cut, show, validated
from cogfast.extensions.stores.store import parse_cache

Precision = Literal["bf16", "fp16", "fp32"]
FolderLayout = Literal["cogfast", "finetune"]
PolicyChoice = Literal["auto", "none", "attention_kept", "pointwise", "full"]
Count = Annotated[int, Range(1, 10**9)]  # steps, epochs, batches
Batch = Annotated[int, Range(1, 10**5)]
Size = Annotated[int, Range(1, 2**16)]  # rows, columns, frames
Share = Annotated[float, Range(0, 1)]
# The lower limits stand for "above 0".
Hours = Annotated[float, Range(1e-6, 10**6)]
Gibibytes = Annotated[float, Range(1e-6, 10**6)]
Moments = Literal["fp32", "8bit"]
ImageLatentScale = Literal["trainer", "pretrained", "pipeline"]
# Inputs of the network beside the noised latents: a first frame, or a second video
Condition = Literal["image", "control", "frames", "mask", "masked_video"]
LearnedPositions = Literal["resize", "drop"]
EmaDevice = Literal["device", "cpu"]
# those of diffusers' get_scheduler that CogVideo's diffusers trainer takes
DiffusersSchedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
]
Schedule = Literal["sat", DiffusersSchedule]
_MOST_SHARE = 0.95  # of blocks that args.attention leaves out
# SAT's key of the network; args.checkpoint_activations replaces it.
_RECOMPUTE = "network_config.params.transformer_args.checkpoint_activations"
# First key of each group of `args` -> the group's heading in docs/options.md
GROUPS = {
    "experiment_name": "run and weights",
    "train_data": "data",
    "batch_size": "training step",
    "lr": "learning rate",
    "eval_interval": "evaluation",
    "force_inference": "sampling",
}


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class TrainArguments:
    """The `args` section. Intervals and iterations count optimizer steps."""

    experiment_name: str = "cogfast"
    """start of the run folder's name"""
    mode: Literal["pretrain", "finetune", "inference"] = "finetune"
    """pretrain: leave out the low learning rate of SAT's first 100 steps; inference: for sampling"""
    load: str | None = None
    """weights to start from: a folder or a file of any format that `cogfast convert` reads, an address
    of one, or the id of a diffusers pipeline on the Hugging Face hub. A pipeline also fills in VAE and text
    encoder"""
    load_lora: str | None = None
    """adapters to start from: a LoRA file, a SAT folder or a run"""
    lora_rank: Annotated[int, Range(1, 4096)] | None = None
    """train LoRA adapters of this rank, and only them. Short for r of
    model.network_config.params.modules.lora_config.params, like the next two for lora_alpha and
    target_modules"""
    lora_alpha: Annotated[float, Range(-(10**6), 10**6)] | None = None
    """the adapters' output is multiplied by lora_alpha / lora_rank; null: the rank, so that their
    strength is 1"""
    lora_modules: list[str] | None = None
    """linears that get adapters: q, k, v, out (attention), fc1, fc2 (the MLP), or their names in
    target_modules; null: q, k, v and out"""
    save: str | None = None
    """folder in which run folders are created, or its address, such as s3://bucket/runs; null: runs"""
    run_folder: str | None = None
    """the run folder itself, or its address, in place of one with a date below args.save"""
    folder_layout: FolderLayout = "cogfast"
    """names in the run folder; finetune: those of CogVideo's diffusers trainer (checkpoint-N, logs,
    validation_res)"""
    resume: str | None = None
    """latest: the newest checkpoint; auto: the same, or a new run if there is none; or the path or
    address of a run or checkpoint. A checkpoint-N of CogVideo's diffusers trainer gives its LoRA weights and
    its step"""
    accept_changes: bool = False
    """resume even if training-relevant keys changed"""
    seed: Annotated[int, Range(-(2**62), 2**62)] = 1234
    """decides the order of the data and all noise; in sampling, the first video's noise"""
    train_iters: Count | None = None
    """steps to train; null: those of args.epochs, or SAT's 10000 without that"""
    epochs: Count | None = None
    """passes over the data, in place of train_iters"""
    exit_interval: Count | None = None
    """save and stop at the next multiple of this many steps"""
    max_hours: Hours | None = None
    """hours since the process started, after which the run saves and stops, within two steps"""
    save_interval: Count | None = 5000
    """steps between checkpoints; null: save only at the end"""
    export: Literal["none", "last", "all"] = "none"
    """checkpoints that also hold files which diffusers loads: pytorch_lora_weights.safetensors of
    LoRA runs; transformer/ and, with EMA, transformer_ema/ of others, in the run's precision. last:
    only the checkpoint of the last step"""
    export_interval: Count | None = None
    """with export=last: steps between earlier checkpoints that also hold such files; must be a
    multiple of save_interval"""
    keep_last: Annotated[int, Range(0, 10**6)] = 2
    """number of latest checkpoints to keep; 0 keeps all"""
    log_interval: Count = 20
    """steps between lines of the log and of metrics.jsonl"""
    push_to_hub: str | None = None
    """repository of the Hugging Face hub, such as me/my-lora, to which a run that is complete is published
    as `cogfast publish` does; a failure is logged"""
    wandb: bool = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "default_project"
    """project of Weights & Biases"""
    deterministic: bool = False
    """bitwise reproducible on a GPU, slower"""
    profiling: Annotated[int, Range(-1, 10**9)] | None = None
    """profile three steps after this many steps (SAT's key); null or -1: never"""

    train_data: list[str] = field(default_factory=list)
    """sources of training data: folders, manifests or shards, as data.target reads them; paths, or addresses
    such as s3://bucket/clips"""
    valid_data: list[str] = field(default_factory=list)
    """sources of held-out data, like train_data"""
    train_data_weights: list[Annotated[float, Range(0, 10**6)]] | None = None
    """how often an epoch reads each source of train_data"""
    split: str = "1,0,0"
    """shares for training, validation and test if valid_data is empty"""
    latent_cache: str | None = None
    """cache that `cogfast cache` filled, a folder or a URL such as s3://bucket/cache; training reads it
    instead of the videos"""
    encode_first: bool = False
    """fill latent_cache as `cogfast cache` does before training; then the encoders leave the memory"""
    cached_noised_images: Annotated[int, Range(0, 1024)] = 0
    """image-to-video: number of noised first frames cached per clip; each step draws one. 0: cache
    the frame itself; each step noises and encodes it"""
    local_cache: Annotated[str | None, BeforeValidator(lambda x: _local_cache(x))] = None
    """FOLDER or FOLDER:SIZE, such as /nvme:500GB: where this machine keeps copies of files of object stores,
    and at most how many bytes of them. null: COGFAST_LOCAL_CACHE, or ~/.cache/cogfast/objects, and half of its disk"""
    num_workers: Annotated[int, Range(0, 256)] = 1
    """processes per rank that read and decode; 0: the training process reads"""
    prefetch_factor: Annotated[int, Range(1, 1024)] = 4
    """batches that each worker decodes ahead"""
    decode_timeout: Annotated[float, Range(0, 10**6)] = 120.0
    """seconds to read one sample; 0: no limit"""
    max_bad_fraction: Share = 0.05
    """fraction of unreadable samples above which the run stops"""

    batch_size: Batch = 1
    """samples per rank and micro-batch, the same as deepspeed.train_micro_batch_size_per_gpu;
    videos per prompt when sampling"""
    gradient_accumulation_steps: Batch = 1
    """micro-batches per step"""
    model_parallel_size: Annotated[int, Range(0, 1024)] = 1
    """number of ranks that share a model (tensor parallelism)"""
    context_parallel_size: Annotated[int, Range(0, 1024)] = 1
    """number of ranks that share the rows of a sample (context parallelism), for clips that are
    longer than the memory of one GPU"""
    sequence_parallel: bool = False
    """shard activations by rows between the tensor-parallel linears"""
    collective_timeout: Annotated[int, Range(1, 10**7)] = 1800
    """seconds that a rank waits for another one in a collective, before the run ends"""
    elastic: Annotated[Literal["off", "shrink", "wait"], BeforeValidator(lambda x: x or "off")] = (
        "off"
    )
    """under torchrun --nnodes=MIN:MAX --max-restarts=N: what a run does that has lost ranks. It resumes
    by itself, without --resume too, with the global batch of its checkpoint. shrink: with the most
    ranks that divide it, and more accumulation; other ranks idle. wait: once there are as many ranks
    as before ([launch.md](launch.md#restart-by-itself)). off: as started"""
    replica_check_interval: Count | None = 1000
    """steps between checks that replicas are still equal; null: never"""
    kernels: Literal["triton", "torch"] = "triton"
    """torch: plain PyTorch in place of cogfast's kernels"""
    compile: bool = False
    """torch.compile for each block"""
    attention_backend: Literal[
        "auto", "fa4", "fa3", "cudnn", "flash", "efficient", "cogfast", "math"
    ] = "auto"
    """auto: on a GPU, measure the fastest at the run's shape once; on a CPU, cogfast's kernel. The choice is
    stored in the checkpoint"""
    attention: Annotated[str | None, BeforeValidator(lambda x: _attention(x))] = None
    """dense, or sparse:SHARE, which leaves a share of 0 to 0.95 of attention's blocks out
    ([kernels.md](kernels.md#block-sparse-attention)), with attention_backend auto or fa4. null: that
    of args.load, args.load_lora or the sampled run if a run saved them, else dense"""
    sparse_warmup: Annotated[int, Range(0, 10**9)] = 0
    """first steps over which the share of args.attention=sparse:SHARE grows from 0; not with compile"""
    activation_checkpointing: PolicyChoice | None = None
    """null: follow transformer_args.checkpoint_activations (true: auto, false: "none")"""
    fit: Literal["none", "auto"] = "none"
    """auto: if the memory plan does not fit, change keys that save memory, the cheapest first,
    until it does; the log has each change with its cost. none: train as configured"""
    offload_activations: bool = False
    """keep the activations that activation_checkpointing keeps in pinned host memory, from a
    block's forward to its backward pass; the GPU holds those of two blocks. auto: attention_kept,
    or full"""
    offload_encoders: bool = False
    """keep VAE and text encoder in pinned host memory; each is on the GPU only while it encodes or
    decodes. On a CPU this changes nothing"""
    checkpoint_activations: bool | None = None
    """if set, replaces transformer_args.checkpoint_activations"""
    quantize_base: Literal["none", "int8", "fp8"] = "none"
    """LoRA: weights of the frozen linears in the blocks, in 8 bits and a scale for each row. int8:
    the smaller error. fp8: products run on fp8 tensor cores (H100, RTX 4090 or newer, bf16).
    Training and its evaluations use the rounded weights, sampling and exports those of args.load"""
    offload_blocks: Annotated[int, Range(0, 10**4)] = 0
    """LoRA: number of last blocks whose frozen linears wait in pinned host memory, a copy for each
    rank, from where the GPU fetches them one block ahead"""
    force_train: bool = False
    """train even if the weights of args.load are incomplete"""
    bf16: bool = False
    """weights and activations in bfloat16, the same as deepspeed.bf16.enabled"""
    fp16: bool = False
    """weights and activations in float16, the same as deepspeed.fp16.enabled"""
    zero_stage: Annotated[int, Range(0, 3)] = 2
    """what ZeRO partitions over the ranks: optimizer state (1), gradients (2), weights (3). The
    same as deepspeed.zero_optimization.stage"""
    optimizer_moments: Moments = "fp32"
    """the moments of FusedEmaAdam. 8bit: blockwise, 2 bytes per trained parameter in place of 8,
    divided by the data-parallel ranks. A run may resume with the other value"""
    ema_device: EmaDevice = "device"
    """memory of the averaged (EMA) weights of FusedEmaAdam, 4 bytes per trained parameter, divided
    by the data-parallel ranks. cpu: in host memory, updated over PCIe while the next step computes,
    with the same numbers"""
    nonfinite: Literal["skip", "stop"] = "skip"
    """after a loss or gradient that is not finite: skip its step, at most 20 in a row; stop: save and
    end the run"""

    lr: Annotated[float, Range(0, 1000)] = 1.0e-4
    """peak learning rate, the same as deepspeed.optimizer.params.lr"""
    weight_decay: float = 0.01
    """weight decay, without norms and biases, the same as deepspeed.optimizer.params.weight_decay.
    If neither is set, a deepspeed.optimizer has none (0), as in SAT"""
    lr_schedule: Schedule = "sat"
    """sat: SAT's warm-up (at most 5% of lr for 100 steps, then a jump), then lr_decay_style; the
    others: a linear warm-up, then the decay of that name, as diffusers names them"""
    lr_first_step: Annotated[int, Range(0, 1)] = 1
    """first step of the warm-up. 1: its rate is lr / warmup_steps. 0: its rate is 0, as in
    diffusers' get_scheduler, and lr_schedule=constant has no warm-up"""
    lr_num_cycles: Annotated[float, Range(0.01, 10**6)] = 1.0
    """number of decays of lr_schedule=cosine_with_restarts"""
    lr_power: Annotated[float, Range(0.01, 100)] = 1.0
    """exponent of lr_schedule=polynomial"""
    lr_decay_style: Literal["constant", "linear", "cosine", "exponential"] = "linear"
    """decay of lr_schedule=sat; exponential does not decay, as in SAT"""
    lr_decay_iters: Count | None = None
    """steps of the decay of lr_schedule=sat; null: all steps"""
    lr_decay_ratio: Share = 0.1
    """final over peak learning rate of lr_schedule=sat with lr_decay_style=cosine"""
    warmup: Share = 0.01
    """length of the warm-up as a fraction of all steps"""
    warmup_steps: Annotated[int, Range(0, 10**9)] | None = None
    """length of the warm-up in steps; if set, replaces warmup"""
    min_lr_ratio: Share = 0.0
    """final over peak learning rate of lr_schedule=linear, cosine, cosine_with_restarts and
    polynomial; polynomial ends at 1e-7 or above"""

    eval_interval: Count | None = None
    """steps between evaluations; null: no evaluation"""
    eval_at_start: bool = False
    """evaluate before the first step, too; a run that resumes does not repeat it"""
    eval_at_end: bool = False
    """evaluate once more after the last step"""
    eval_iters: Count = 1
    """batches per evaluation; with args.elastic global batches, which do not depend on the ranks"""
    eval_batch_size: Batch | None = None
    """samples per rank when evaluating; null: batch_size"""
    strict_eval: bool = False
    """evaluate all of valid_data instead of eval_iters batches"""
    only_log_video_latents: bool = False
    """save sampled latents without decoding them"""
    eval_prompts: list[str] = field(default_factory=list)
    """prompts of the videos to sample; empty: captions of valid_data"""
    eval_prompt_file: str | None = None
    """instead of eval_prompts: a text file with a prompt or prompt@@image per line"""
    eval_images: str | None = None
    """image-to-video: a text file with the path of an image per line, one for each prompt; null:
    first frames of valid_data"""
    eval_num_samples: Annotated[int, Range(0, 10**4)] = 1
    """videos to sample at each evaluation"""
    eval_sampling_steps: Count | None = None
    """sampling steps of these videos; null: the sampler's own number"""
    eval_with_ema: bool = True
    """evaluate and sample with the averaged (EMA) weights, if the optimizer keeps them"""
    eval_command: str | None = None
    """command that scores sampled videos in the background, such as "python score.py {samples}", which
    becomes their folder; numbers of the JSON object that it prints are logged as score/NAME. Only the
    command line can set it"""
    eval_command_timeout: Count = 3600
    """seconds after which eval_command is killed"""
    keep_best: str | None = None
    """score/NAME: also keep the checkpoint with the highest value; -score/NAME or -valid_loss: with
    the lowest. A value belongs to the newest checkpoint at its step or before"""

    force_inference: bool = False
    """sample even if the weights are incomplete or missing"""
    negative_prompt: str | None = None
    """text of guidance's unconditional half, as --negative-prompt; null: zeros, as dropped captions
    in training; "": the empty caption, as in diffusers' pipelines"""
    input_type: Literal["cli", "txt"] = "cli"
    """source of prompts without --prompt: standard input (cli) or input_file (txt)"""
    input_file: str = "input.txt"
    """file with one prompt or prompt@@image per line"""
    output_dir: str = "samples"
    """folder of the sampled videos"""
    sampling_image_size: Annotated[list[Size], Len(2, 2)] | None = None
    """rows, columns in pixels; null: the training size"""
    sampling_num_frames: Size | None = None
    """length in latent frames; null: the training length"""
    sampling_fps: Annotated[int, Range(1, 1000)] | None = None
    """frames per second of the files; null: that of the training data, or SAT's 8"""
    only_save_latents: bool = False
    """save latents without decoding them"""
    vae_memory_gib: Gibibytes | None = None
    """GiB that the autoencoder may take to encode clips or decode a video; null: the free memory"""

    @classmethod
    def from_config(cls, config: Config) -> TrainArguments:
        """Build the arguments from a checked configuration."""
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in to_dict(config.args).items() if k in known}
        if values.get("activation_checkpointing") is None:
            asks = values.get("checkpoint_activations")
            asks = OmegaConf.select(config.model, _RECOMPUTE) if asks is None else asks
            values["activation_checkpointing"] = "auto" if asks else "none"
        if values.get("train_iters") is None and values.get("epochs") is None:
            values["train_iters"] = 10000  # SAT's default
        return validated(values, cls, "args")

    @property
    def has_evaluation(self) -> bool:
        """Whether training evaluates at all."""
        return self.eval_interval is not None or self.eval_at_start or self.eval_at_end

    @property
    def precision(self) -> Precision:
        """dtype of weights and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


@dataclass(frozen=True, kw_only=True, slots=True, config=STRICT)
class ModelArguments:
    """The `model` section without its components."""

    input_key: str = "mp4"
    """key of the videos in a batch; only mp4 is read"""
    scale_factor: float = 1.0
    """latents = scale_factor * output of the first stage"""
    latent_input: bool = False
    """batches hold first-stage latents instead of pixels"""
    en_and_decode_n_samples_a_time: Batch | None = None
    """samples per first-stage call; null: all"""
    noised_image_input: bool = False
    """image-to-video: the latents of the first frame, with a little noise, are a part of the input"""
    noised_image_all_concat: bool = False
    """concatenate the image latents to every frame, not only the first"""
    noised_image_dropout: Share = 0.0
    """fraction of samples trained without the image"""
    conditions: list[Condition] | None = None
    """inputs beside the noised latents, in the order of their channels. image: the first frame;
    control: a second video through the same autoencoder, such as poses, depth or edges; frames:
    given_frames of the clip; mask and masked_video, behind each other: inpainting (docs/conditions.md);
    null: image with noised_image_input, else none"""
    given_frames: str | None = None
    """frames that the condition frames gives the model: first, last, first_last, random, all, or
    prefix:N for the first N"""
    masked_video_noise: bool = False
    """add a little noise to the masked video; add_noise_in_inpaint_model of CogVideoX-Fun's config.json"""
    condition_dropout: Share = 0.0
    """fraction of samples trained without a condition, drawn for each condition; noised_image_dropout
    is that of the image"""
    new_channels: Literal["zero"] | None = None
    """zero: weights of args.load for fewer input channels get zeros for the others, so that a
    text-to-video model begins as itself and learns new conditions"""
    learned_positions: LearnedPositions | None = None
    """what becomes of the learned position table of CogVideoX-5B-I2V in args.load at another size.
    resize: it is interpolated to num_frames, latent_height and latent_width of the network; drop: it is
    left out of a network whose pos_embed_config.params.learnable_pos_embed is false"""
    image_latent_scale: ImageLatentScale = "trainer"
    """scale of the first frame's latents, relative to the VAE's output. trainer: scale_factor, as
    both upstream trainers; pretrained: 1, as SAT samples; pipeline: 1 / scale_factor, as diffusers'
    pipeline of CogVideoX1.5-5B-I2V"""
    not_trainable_prefixes: list[str] = field(
        default_factory=lambda: ["first_stage_model", "conditioner"]
    )
    """prefixes of SAT's parameter names that are not trained; "all" trains only LoRA matrices"""
    lora_train: bool = False
    """train only LoRA adapters, whatever not_trainable_prefixes lists"""
    trainable_modules: list[str] | None = None
    """names of modules, such as those that a network of your own adds: only their parameters and LoRA
    adapters are trained (docs/extending.md); null: all that not_trainable_prefixes leaves"""

    @classmethod
    def from_config(cls, config: Config) -> ModelArguments:
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in to_dict(config.model).items() if k in known}
        return validated(values, cls, "model")

    @property
    def inputs(self) -> tuple[Condition, ...]:
        """The conditions, in the order of their channels."""
        if self.conditions is not None:
            return tuple(self.conditions)
        return ("image",) if self.noised_image_input else ()


def sparse_share(attention: str) -> float | None:
    """Return the share that args.attention leaves out, None for dense attention. ValueError for others."""
    if attention == "dense":
        return None
    kind, _, share = attention.partition(":")
    if kind == "sparse" and re.fullmatch(r"0(\.\d+)?", share) and float(share) <= _MOST_SHARE:
        return float(share)
    text = f"args.attention={cut(attention)} must be dense or sparse:SHARE, with a SHARE of blocks to leave"
    raise ValueError(f"{text} out from 0 to {_MOST_SHARE}, such as sparse:0.8")


def _attention(value: object) -> str | None:
    """Check a value of args.attention, and write it in one way."""
    if value is None:
        return None
    share = sparse_share(value if isinstance(value, str) else show(value))
    return "dense" if share is None else f"sparse:{share:g}"


def _local_cache(value: object) -> object:
    """Check a value of args.local_cache."""
    if isinstance(value, str):
        parse_cache(value)
    return value


def conditions_of_run(model: Mapping[str, Any]) -> list[str]:
    """Return the conditions of a manifest's model section, which may lack the keys or be damaged."""
    named = model.get("conditions")
    if isinstance(named, list):
        return [str(name) for name in named]
    return ["image"] if model.get("noised_image_input") else []


def select(node: Any, key: str) -> Any:
    """Return the value at a dotted key of nested mappings; None if there is none."""
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node

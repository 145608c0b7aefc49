"""Keys of a training run."""

from __future__ import annotations

from typing import Annotated, Literal

from cogfast.core.keys import After, Count, Keys, Range, Share, ordered
from cogfast.data.keys import DataKeys
from cogfast.distributed.keys import EngineKeys
from cogfast.extensions.table import ExtensionKeys
from cogfast.model.keys import KernelKeys, LoraKeys, ModelKeys, WeightKeys

__all__ = ["GROUPS", "ModelKeys", "TrainKeys"]  # the unions

# First key of each group of `args` -> the group's heading in docs/options.md
GROUPS = {
    "experiment_name": "run and weights",
    "train_data": "data",
    "batch_size": "training step",
    "lr": "learning rate",
    "eval_interval": "evaluation",
    "force_inference": "sampling",
}

FolderLayout = Literal["cogfast", "finetune"]
PolicyChoice = Literal["auto", "none", "attention_kept", "pointwise", "full"]
Hours = Annotated[float, Range(1e-6, 10**6)]  # the lower limit stands for "above 0"
# those of diffusers' get_scheduler that CogVideo's diffusers trainer takes
DiffusersSchedule = Literal[
    "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
]
Schedule = Literal["sat", DiffusersSchedule]


class RunKeys(Keys):
    """The run, its folder, and what it resumes from."""

    experiment_name: str = "cogfast"
    """start of the run folder's name"""
    mode: Literal["pretrain", "finetune", "inference"] = "finetune"
    """pretrain: leave out the low learning rate of SAT's first 100 steps; inference: for sampling"""
    save: Annotated[str | None, After("lora_modules")] = None
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


class StepKeys(Keys):
    """Length of a run, its checkpoints, and what a step keeps in memory. Intervals and iterations count optimizer steps."""

    train_iters: Annotated[Count | None, After("seed")] = None
    """steps to train; null: those of args.epochs, or SAT's 10000 without that"""
    epochs: Count | None = None
    """passes over the data, in place of train_iters"""
    exit_interval: Count | None = None
    """save and stop at the next multiple of this many steps"""
    max_hours: Hours | None = None
    """hours since the process started, after which the run saves and stops, within two steps"""
    save_interval: Count | None = 5000
    """steps between checkpoints; null: save only at the end"""
    keep_last: Annotated[int, Range(0, 10**6), After("export_interval")] = 2
    """number of latest checkpoints to keep; 0 keeps all"""
    activation_checkpointing: Annotated[PolicyChoice | None, After("sparse_warmup")] = None
    """null: follow transformer_args.checkpoint_activations (true: auto, false: "none")"""
    checkpoint_activations: Annotated[bool | None, After("offload_encoders")] = None
    """if set, replaces transformer_args.checkpoint_activations"""


class WatchKeys(Keys):
    """Measurements, checks and logs of a run."""

    log_interval: Annotated[Count, After("keep_last")] = 20
    """steps between lines of the log and of metrics.jsonl"""
    wandb: Annotated[bool, After("push_to_hub")] = False
    """also log to Weights & Biases"""
    wandb_project_name: str = "default_project"
    """project of Weights & Biases"""
    deterministic: bool = False
    """bitwise reproducible on a GPU, slower"""
    profiling: Annotated[int, Range(-1, 10**9)] | None = None
    """profile three steps after this many steps (SAT's key); null or -1: never"""
    replica_check_interval: Annotated[Count | None, After("elastic")] = 1000
    """steps between checks that replicas are still equal; null: never"""
    nonfinite: Annotated[Literal["skip", "stop"], After("ema_device")] = "skip"
    """after a loss or gradient that is not finite: skip its step, at most 20 in a row; stop: save and
    end the run"""


class RateKeys(Keys):
    """Learning rate and weight decay."""

    lr: Annotated[float, Range(0, 1000), After("nonfinite")] = 1.0e-4
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


@ordered
class TrainKeys(
    RunKeys,
    WeightKeys,
    LoraKeys,
    StepKeys,
    WatchKeys,
    DataKeys,
    EngineKeys,
    KernelKeys,
    RateKeys,
    ExtensionKeys,
):
    """The section `args`: what all rooms and extensions declare, with SAT's names."""

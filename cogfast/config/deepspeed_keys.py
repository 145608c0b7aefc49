"""The keys of DeepSpeed's configuration that cogfast passes on, and "auto" values.

transformers and accelerate write "auto" where one of their own options has the value.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ValidationError

from cogfast.config.arguments import Batch, TrainArguments
from cogfast.config.merged_config import DEFAULT
from cogfast.config.values import Model, Range, problem_of

# Micro-batches per step up to which gradients may be summed in bf16. At 32 the error is 7e-3.
_MOST_BF16_SUMMANDS = 4


class DataTypes(Model):
    """`deepspeed.data_types`."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """dtype of accumulated gradients"""


class OptimizerSection(Model):
    """`deepspeed.optimizer`."""

    type: str
    """sat.ops.FusedEmaAdam, Adam, AdamW or a class of torch.optim"""
    params: dict[str, Any] | None = None
    """its arguments"""


class DeepSpeedSection(Model):
    """The top level of the `deepspeed` section. DeepSpeed's own models check the sections in it."""

    train_batch_size: Annotated[int, Range(1, 10**9)] | None = None
    """samples per step of all ranks; must equal the product of the next two and the replicas"""
    train_micro_batch_size_per_gpu: Batch | None = None
    """samples per rank and micro-batch, in place of args.batch_size"""
    gradient_accumulation_steps: Batch | None = None
    """micro-batches per step, in place of args.gradient_accumulation_steps"""
    gradient_clipping: Annotated[float, Range(0, 10**9)] = 0.0
    """largest norm of a step's gradients; 0: no clipping"""
    steps_per_print: Annotated[int, Range(1, 10**9)] | None = None
    """steps between DeepSpeed's own log lines; null: it writes none"""
    prescale_gradients: bool = False
    """divide gradients before they are summed over the ranks"""
    gradient_predivide_factor: float = 1.0
    """part of the division that happens before the sum"""
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    """dtype in which gradients are exchanged; null: their own"""
    zero_optimization: dict[str, Any] = {}
    """ZeRO: stage, in place of args.zero_stage; buckets; offload_optimizer and offload_param, which keep
    state and weights in host memory (device: cpu)"""
    zero_allow_untested_optimizer: bool = True
    """always true here: cogfast builds the optimizer"""
    zero_force_ds_cpu_optimizer: bool = False
    """always false here: cogfast builds the optimizer"""
    bf16: dict[str, Any] | None = None
    """enabled: weights and activations in bfloat16, in place of args.bf16"""
    fp16: dict[str, Any] | None = None
    """enabled: weights and activations in float16, in place of args.fp16; loss_scale (0: it follows
    the overflows), loss_scale_window, initial_scale_power, hysteresis, min_loss_scale (below it the run
    ends)"""
    optimizer: OptimizerSection | None = None
    """type and params of the optimizer"""
    scheduler: dict[str, Any] | None = None
    """accepted, not used; see args.lr_schedule"""
    activation_checkpointing: dict[str, Any] | None = None
    """accepted, not used; see args.activation_checkpointing"""
    data_types: DataTypes | None = None
    """grad_accum_dtype: dtype in which gradients are accumulated"""
    wall_clock_breakdown: bool = False
    """log the time of each phase of a step"""


# Top-level keys that DeepSpeed knows but cogfast does not support, with what to do instead.
REFUSED_DEEPSPEED: dict[str, str] = {
    "amp": "apex mixed precision is not used; enable bf16 or fp16",
    "torch_autocast": "bf16 and fp16 set the precision; enable one of them",
    "tensorboard": "TensorBoard logs are always written to the run folder; remove it",
    "wandb": "set args.wandb=true",
    "csv_monitor": "metrics are always written to metrics.jsonl in the run folder; remove it",
    "curriculum_learning": "not in this version; remove it",
    "data_efficiency": "not in this version; remove it",
    "elasticity": "checkpoints load at any world size; remove it",
    "autotuning": "not in this version; remove it",
    "compression_training": "not in this version; remove it",
    "sparse_attention": "not in this version; remove it",
    "sparse_gradients": "no embedding of the network has sparse gradients; remove it",
    "pipeline": "not in this version; remove it",
    "tensor_parallel": "set args.model_parallel_size",
    "checkpoint": "DeepSpeed does not write the checkpoints; use args.save_interval and keep_last",
    "compile": "torch.compile is not in this version; remove it",
    "flops_profiler": "the log has TFLOP/s; remove it, or set args.profiling",
    "comms_logger": "not in this version; remove it, or set args.profiling",
    "timers": "not in this version; remove it, or set args.profiling",
    "aio": "DeepSpeed's own values are used; remove it",
    "memory_breakdown": "not in this version; remove it",
    "dump_state": "not in this version; remove it",
    "disable_allgather": "not in this version; remove it",
    "disable_python_gc": "not in this version; remove it",
    "log_level": "not in this version; remove it",
}

AUTO = "auto"
_ADAM = ("adam", "adamw")
# Key of deepspeed -> key of args that has the value
_FROM_ARGS = {
    "train_micro_batch_size_per_gpu": "batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
}
_CLIPPING = 1.0  # accelerate's value for "auto", and DeepSpeed's default
# Param of DeepSpeed's Adam and AdamW -> its default
_ADAM_DEFAULTS = {"betas": [0.9, 0.999], "eps": 1e-8}
# Key of zero_optimization -> its value for a width of tokens, as in transformers and accelerate
_FROM_WIDTH: dict[str, Callable[[int], int]] = {
    "reduce_bucket_size": lambda width: width * width,
    "stage3_prefetch_bucket_size": lambda width: int(0.9 * width * width),
    "stage3_param_persistence_threshold": lambda width: 10 * width,
}


def fill_auto(config: dict[str, Any], origins: dict[str, str]) -> None:
    """Replace every "auto" of the deepspeed section, or remove it where DeepSpeed's default applies.

    Updates both arguments. The args section has its defaults already. An origin names the key that
    a value comes from.
    """
    section, args = config.get("deepspeed") or {}, config["args"]
    found: dict[str, tuple[Any, str]] = {}  # dotted key -> (value, where it comes from)
    for key, name in _FROM_ARGS.items():
        found[key] = (args[name], f"args.{name}")
    found["gradient_clipping"] = (_CLIPPING, "auto")
    optimizer = _mapping(section.get("optimizer"))
    for name in ("lr", "weight_decay"):
        found[f"optimizer.params.{name}"] = (args[name], f"args.{name}")
    if str(optimizer.get("type")).lower() in _ADAM:
        for name, value in _ADAM_DEFAULTS.items():
            found[f"optimizer.params.{name}"] = (value, "auto")
    network = _mapping(_mapping(config["model"].get("network_config")).get("params"))
    width = network.get("hidden_size")
    if isinstance(width, int):
        for name, rule in _FROM_WIDTH.items():
            found[f"zero_optimization.{name}"] = (rule(width), "auto: hidden_size")
    is_set = any(origins.get(f"args.{name}", DEFAULT) != DEFAULT for name in ("bf16", "fp16"))
    for name in ("bf16", "fp16"):
        if is_set:
            found[f"{name}.enabled"] = (args[name], f"args.{name}")
        elif _mapping(section.get(name)).get("enabled") == AUTO:
            # The section is removed: then the dtype of the weights decides.
            _forget(section, name, f"deepspeed.{name}", origins)
    _replace(section, "", found, origins)


def _replace(
    node: dict[str, Any],
    where: str,
    found: Mapping[str, tuple[Any, str]],
    origins: dict[str, str],
) -> None:
    for name, value in list(node.items()):
        key = f"{where}{name}"
        # The scheduler is not used at all.
        if isinstance(value, dict) and key != "scheduler":
            _replace(value, f"{key}.", found, origins)
        elif value == AUTO and key in found:
            node[name], origins[f"deepspeed.{key}"] = found[key]
        elif value == AUTO:
            _forget(node, name, f"deepspeed.{key}", origins)


def _forget(node: dict[str, Any], name: str, key: str, origins: dict[str, str]) -> None:
    del node[name]
    for old in [old for old in origins if old == key or old.startswith(f"{key}.")]:
        del origins[old]


def _mapping(node: object) -> dict[str, Any]:
    return node if isinstance(node, dict) else {}


def check_own_sections(section: Mapping[str, Any]) -> None:
    """Check the sections that DeepSpeed has models for, which refuse unknown keys."""
    if not any(section.get(name) for name in ("zero_optimization", "bf16", "fp16")):
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
    }
    for name, model in models.items():
        given = section.get(name) or {}
        try:
            model(**given)
        except ValidationError as error:
            raise problem_of(error, _keys(model), given, f"deepspeed.{name}") from None


def _keys(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a model of DeepSpeed's, without types: its own cannot be generated."""
    known = {}
    for key, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        known[field.alias or key] = _keys(inner[0]) if inner else {}
    return {"properties": known, "additionalProperties": {}}


def stage_and_sums(section: dict, args: TrainArguments) -> tuple[int, str | None]:
    """Return the ZeRO stage that runs, and the dtype in which micro-batches are summed (None: theirs).

    section: of the configuration, `deepspeed`. The sums of many bf16 micro-batches are float32 unless
    it says otherwise. In bf16 DeepSpeed has such sums where it partitions gradients, in stages 2 and 3.
    """
    dtype = (section.get("data_types") or {}).get("grad_accum_dtype")
    if dtype is None and args.bf16 and args.gradient_accumulation_steps > _MOST_BF16_SUMMANDS:
        dtype = "fp32"
    has_wide_sums = args.bf16 and dtype in ("fp32", "float32", "float")
    return max(args.zero_stage, 2 if has_wide_sums else 1), dtype

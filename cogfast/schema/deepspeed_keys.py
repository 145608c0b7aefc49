"""The keys of DeepSpeed's configuration that cogfast passes on, with their types, and "auto" values.

transformers and accelerate write "auto" where one of their own options has the value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from cogfast.schema.arguments import TrainArguments
from cogfast.schema.json_files import Range
from cogfast.schema.merged_config import DEFAULT
from cogfast.schema.values import fits

_COUNT = Annotated[float, Range(0, 10**12)]  # bucket sizes are often written as 5e8
_BATCH = Annotated[int, Range(1, 10**5)]
_CHECKPOINTS = Annotated[int, Range(1, 10**5)] | None
_STEPS = Annotated[int, Range(1, 10**9)] | None
# Micro-batches per step up to which gradients may be summed in bf16. At 32 the error is 7e-3.
_MOST_BF16_SUMMANDS = 4

# Top-level key -> type. The comment above a key is its meaning in docs/options.md. Source:
# deepspeed/runtime/config.py, DeepSpeedConfig._initialize_params.
TOP_KEYS: dict[str, Any] = {
    # samples per step of all ranks; must equal the product of the next two and the replicas
    "train_batch_size": Annotated[int, Range(1, 10**9)],
    # samples per rank and micro-batch, in place of args.batch_size
    "train_micro_batch_size_per_gpu": _BATCH,
    # micro-batches per step, in place of args.gradient_accumulation_steps
    "gradient_accumulation_steps": _BATCH,
    # largest norm of a step's gradients; 0, the default: no clipping
    "gradient_clipping": float,
    # steps between DeepSpeed's own log lines; by default it writes none
    "steps_per_print": _STEPS,
    # divide gradients before they are summed over the ranks
    "prescale_gradients": bool,
    # part of the division that happens before the sum
    "gradient_predivide_factor": float,
    # dtype in which gradients are exchanged; null: their own
    "communication_data_type": Literal["fp32", "fp16", "bf16"] | None,
    # ZeRO: stage, buckets, offloading
    "zero_optimization": Mapping,
    # always true here: cogfast builds the optimizer
    "zero_allow_untested_optimizer": bool,
    # always false here: cogfast builds the optimizer
    "zero_force_ds_cpu_optimizer": bool,
    # train in bfloat16
    "bf16": Mapping,
    # train in float16 with a loss scale
    "fp16": Mapping,
    # the optimizer: type and params
    "optimizer": Mapping,
    # accepted, not used; see args.lr_schedule
    "scheduler": Mapping | None,
    # accepted, not used; see args.activation_checkpointing
    "activation_checkpointing": Mapping,
    # dtype in which gradients are accumulated
    "data_types": Mapping,
    # DeepSpeed's count of operations
    "flops_profiler": Mapping,
    # log of the collectives
    "comms_logger": Mapping,
    # reading and writing of NVMe offloading
    "aio": Mapping,
    # log the time of each phase of a step
    "wall_clock_breakdown": bool,
    # log the memory of each phase of a step
    "memory_breakdown": bool,
    # log DeepSpeed's state at the start
    "dump_state": bool,
    # read by earlier versions of DeepSpeed only
    "disable_allgather": bool,
    # turn Python's garbage collector off
    "disable_python_gc": bool,
    # DeepSpeed's timers
    "timers": Mapping,
    # level of DeepSpeed's log
    "log_level": str,
}

_SHARE = Annotated[float, Range(0, 1)]
_DTYPE = Literal["fp32", "fp16", "bf16"] | None
_OFFLOAD: dict[str, Any] = {
    "device": Literal["none", "cpu", "nvme"],
    "nvme_path": str | None,
    "buffer_count": Annotated[int, Range(1, 10**6)],
    "pin_memory": bool,
}

# Dotted key of a section -> its keys and their types. Sections that are not listed are not checked
# further. Source: deepspeed/runtime/zero/{config,offload_config,leaf_module_config}.py,
# runtime/{precision_config,zenflow/zenflow_config,activation_checkpointing/config}.py,
# runtime/swap_tensor/constants.py, profiling/constants.py, comm/config.py, utils/config.py.
SECTION_KEYS: dict[str, dict[str, Any]] = {
    "zero_optimization": {
        # what is partitioned: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too
        "stage": Literal[0, 1, 2, 3],
        **dict.fromkeys(
            (
                "allgather_partitions",
                "allgather_sequential",
                "contiguous_gradients",
                "cpu_offload_use_pin_memory",
                "elastic_checkpoint",
                "enable_sanity_checks",
                "gather_16bit_weights_on_model_save",
                "ignore_unused_parameters",
                "legacy_stage1",
                "load_from_fp32_weights",
                "log_trace_cache_warnings",
                "memory_efficient_linear",
                "override_module_apply",
                "pipeline_loading_checkpoint",
                "reduce_scatter",
                "round_robin_gradients",
                "save_muon_momentum_buffer_in_memory",
                "stage3_gather_16bit_weights_on_model_save",
                "use_all_reduce_for_fetch_params",
                "use_multi_rank_bucket_allreduce",
                "zero_quantized_gradients",
                "zero_quantized_nontrainable_weights",
                "zero_quantized_weights",
                "compute_grad_norm",
                "overlap_comm",
                "stage3_gather_fp16_weights_on_model_save",
                "cpu_offload_param",
                "cpu_offload",
                "stage3_allgather_sequential",
                "stage3_use_all_reduce_for_fetch_params",
            ),
            bool | None,
        ),
        **dict.fromkeys(
            (
                "allgather_bucket_size",
                "reduce_bucket_size",
                "sub_group_size",
                "max_live_parameters",
                "max_reuse_distance",
                "model_persistence_threshold",
                "module_granularity_threshold",
                "param_persistence_threshold",
                "prefetch_bucket_size",
                "zero_hpz_partition_size",
                "parameter_alignment",
                "stage3_max_live_parameters",
                "stage3_max_reuse_distance",
                "stage3_param_persistence_threshold",
                "stage3_prefetch_bucket_size",
                "stage3_model_persistence_threshold",
                "stage3_module_granularity_threshold",
            ),
            _COUNT | None,
        ),
        # keep optimizer state and master weights in host memory (device: cpu) or on NVMe
        "offload_optimizer": Mapping | None,
        # ZeRO-3: keep weights in host memory (device: cpu) or on NVMe
        "offload_param": Mapping | None,
        "leaf_module": Mapping | None,
        "zenflow": Mapping | None,
    },
    "bf16": {
        # weights and activations in bfloat16, masters and optimizer state in float32
        "enabled": bool,
        "immediate_grad_update": bool,
        "check_grad_overflow": bool,
        "bf16_master_weights_and_grads": bool,
        "bf16_optimizer_states": bool,
    },
    "fp16": {
        # weights and activations in float16, masters and optimizer state in float32
        "enabled": bool,
        "auto_cast": bool,
        # fixed loss scale; 0: a scale that follows the overflows
        "loss_scale": float,
        # steps without an overflow after which the scale doubles
        "loss_scale_window": Annotated[int, Range(1, 10**9)],
        # first scale, as a power of two
        "initial_scale_power": Annotated[int, Range(0, 64)],
        # overflows before the scale halves
        "hysteresis": Annotated[int, Range(1, 10**9)],
        "consecutive_hysteresis": bool,
        # scale below which the run ends
        "min_loss_scale": float,
        "fp16_master_weights_and_grads": bool,
    },
    "optimizer": {
        # sat.ops.FusedEmaAdam, Adam, AdamW or a class of torch.optim
        "type": str,
        # its arguments
        "params": Mapping | None,
        "legacy_fusion": bool,
    },
    "zero_optimization.offload_optimizer": {
        **_OFFLOAD,
        **dict.fromkeys(("pipeline_read", "pipeline_write", "fast_init", "super_offload"), bool),
        **dict.fromkeys(("ratio", "cpuadam_cores_perc"), _SHARE),
    },
    "zero_optimization.offload_param": {
        **_OFFLOAD,
        **dict.fromkeys(("buffer_size", "max_in_cpu"), _COUNT),
    },
    "zero_optimization.leaf_module": dict.fromkeys(
        ("classes", "names", "name_suffixes"), list[str] | str
    ),
    "zero_optimization.zenflow": {
        **dict.fromkeys(("topk_ratio", "auto_ratio", "pt_reserved_cores_perc"), _SHARE),
        "select_strategy": Literal["auto", "step", "epoch"],
        **dict.fromkeys(("select_interval", "update_interval"), _BATCH | Literal["auto"]),
        **dict.fromkeys(("overlap_step", "offload"), bool),
        "full_warm_up_rounds": Annotated[int, Range(0, 10**9)],
    },
    "activation_checkpointing": {
        "number_checkpoints": _CHECKPOINTS,
        **dict.fromkeys(
            (
                "partition_activations",
                "contiguous_memory_optimization",
                "cpu_checkpointing",
                "profile",
                "synchronize_checkpoint_boundary",
            ),
            bool,
        ),
    },
    "data_types": {
        # dtype of accumulated gradients
        "grad_accum_dtype": _DTYPE,
        **dict.fromkeys(("param_dtype", "buffer_dtype"), _DTYPE),
        "keep_in_fp32_modules": Literal["auto"] | list[str],
    },
    "flops_profiler": {
        **dict.fromkeys(("enabled", "detailed"), bool),
        **dict.fromkeys(("recompute_fwd_factor", "module_depth"), float),
        **dict.fromkeys(("profile_step", "top_modules"), _BATCH),
        "output_file": str | None,
    },
    "comms_logger": {
        **dict.fromkeys(("enabled", "prof_all", "verbose", "debug"), bool),
        "prof_ops": list[str],
    },
    "aio": {
        **dict.fromkeys(
            ("block_size", "queue_depth", "intra_op_parallelism"), Annotated[int, Range(1, 2**40)]
        ),
        **dict.fromkeys(("single_submit", "overlap_events", "use_gds"), bool),
    },
    "timers": {"throughput": Mapping},
    "timers.throughput": dict.fromkeys(("enabled", "synchronized"), bool),
}

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
    _replace(section, "", TOP_KEYS, found, origins)


def _replace(
    node: dict[str, Any],
    where: str,
    types: Mapping[str, Any],
    found: Mapping[str, tuple[Any, str]],
    origins: dict[str, str],
) -> None:
    for name, value in list(node.items()):
        key = f"{where}{name}"
        # The scheduler is not used at all.
        if isinstance(value, dict) and key != "scheduler":
            _replace(value, f"{key}.", SECTION_KEYS.get(key, {}), found, origins)
        elif value == AUTO and key in found:
            node[name], origins[f"deepspeed.{key}"] = found[key]
        elif value == AUTO and not fits(AUTO, types.get(name, int)):
            _forget(node, name, f"deepspeed.{key}", origins)


def _forget(node: dict[str, Any], name: str, key: str, origins: dict[str, str]) -> None:
    del node[name]
    for old in [old for old in origins if old == key or old.startswith(f"{key}.")]:
        del origins[old]


def _mapping(node: object) -> dict[str, Any]:
    return node if isinstance(node, dict) else {}


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

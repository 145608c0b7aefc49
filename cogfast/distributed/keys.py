"""Keys of batches, layout and precision."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from cogfast.core.keys import After, Batch, Keys, Model, Range

Precision = Literal["bf16", "fp16", "fp32"]


class EngineKeys(Keys):
    """Samples of a step, the ranks that share them and the model, and the dtype: what DeepSpeed's section
    depends on."""

    batch_size: Annotated[Batch, After("max_bad_fraction")] = 1
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
    zero_stage: Annotated[int, Range(0, 3), After("fp16")] = 2
    """what ZeRO partitions over the ranks: optimizer state (1), gradients (2), weights (3). The
    same as deepspeed.zero_optimization.stage"""

    bf16: Annotated[bool, After("force_train")] = False
    """weights and activations in bfloat16, the same as deepspeed.bf16.enabled"""
    fp16: bool = False
    """weights and activations in float16, the same as deepspeed.fp16.enabled"""

    @property
    def precision(self) -> Precision:
        """dtype of weights and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


class DataTypes(Model):
    """`deepspeed.data_types`."""

    grad_accum_dtype: Literal["fp32", "fp16", "bf16"] | None = None
    """dtype of accumulated gradients"""


class OptimizerSection(Model):
    """`deepspeed.optimizer`."""

    type: str
    """sat.ops.FusedEmaAdam, Prodigy, Muon, Adam, AdamW or a class of torch.optim"""
    params: dict[str, Any] | None = None
    """its arguments"""


class DeepSpeedKeys(Keys):
    """The top level of the `deepspeed` section. DeepSpeed's own models check the sections in it."""

    section: ClassVar[str] = "deepspeed"

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

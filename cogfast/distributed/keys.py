"""Keys of batches, layout and precision."""

from __future__ import annotations

from typing import Annotated, Literal

from cogfast.core.keys import After, Batch, Keys, Range

Precision = Literal["bf16", "fp16", "fp32"]


class LayoutKeys(Keys):
    """Samples of a step, and the ranks that share them and the model."""

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


class PrecisionKeys(Keys):
    """dtype of weights and activations."""

    bf16: Annotated[bool, After("force_train")] = False
    """weights and activations in bfloat16, the same as deepspeed.bf16.enabled"""
    fp16: bool = False
    """weights and activations in float16, the same as deepspeed.fp16.enabled"""

    @property
    def precision(self) -> Precision:
        """dtype of weights and activations."""
        return "bf16" if self.bf16 else "fp16" if self.fp16 else "fp32"


class EngineKeys(LayoutKeys, PrecisionKeys):
    """Keys of args on which DeepSpeed's section depends."""

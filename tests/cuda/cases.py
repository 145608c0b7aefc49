"""The training runs of `make test-cuda`, with the most kernels that one of their steps may launch.

A limit is the number that was launched when it was set: a higher one means that a fusion is lost.
"""

from __future__ import annotations

from dataclasses import dataclass

# Calls in a steady step after which the host waits for the device -> their reason
WAITS = {
    "cudaDeviceSynchronize in deepspeed/accelerator/cuda_accelerator.py:synchronize": (
        "DeepSpeed's overlap_comm, at the end of a backward pass"
    ),
}
# These calls may also wait in a step with a log line.
LOGGING_WAITS = {
    "cudaStreamSynchronize in cogfast/train/run/metrics.py:log": "one read of all numbers",
    "copy to pageable memory in cogfast/train/run/metrics.py:log": "the same read",
}
# ZeRO-3 has DeepSpeed's own step, and with one GPU its gathers wait, too.
_ZERO_3_WAITS = (
    "cudaStreamSynchronize in runtime/zero/partition_parameters.py:wait",
    "cudaStreamSynchronize in runtime/zero/stage3.py:independent_gradient_partition_epilogue",
    "cudaStreamSynchronize in runtime/zero/stage3.py:get_grad_norm_direct",
    "cudaStreamSynchronize in deepspeed/runtime/utils.py:is_invalid_grad_norm",
)
_LARGE = 400_000_000_000  # bytes of a device that holds what no single GPU does

_PRECISION = {
    "bf16": "deepspeed.bf16.enabled=true deepspeed.fp16.enabled=false",
    "fp16": "deepspeed.bf16.enabled=false deepspeed.fp16.enabled=true",
    "fp32": "deepspeed.bf16.enabled=false deepspeed.fp16.enabled=false",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A run of a model. waits: calls that may wait besides WAITS. streams: check side streams."""

    model: str
    mode: str
    launches: int
    policy: str = "full"
    precision: str = "bf16"
    stage: int = 2
    more: str = ""
    waits: tuple[str, ...] = ()
    streams: bool = False
    device_bytes: int | None = None

    @property
    def name(self) -> str:
        parts = [self.model, self.mode, self.precision, f"zero{self.stage}", self.policy]
        parts += [word.rpartition(".")[2] for word in self.more.split()]
        return "-".join(parts)

    @property
    def has_graphs(self) -> bool:
        return "args.cuda_graphs=true" in self.more

    @property
    def words(self) -> list[str]:
        """Return the command-line words that make this run."""
        return [
            *_PRECISION[self.precision].split(),
            f"deepspeed.zero_optimization.stage={self.stage}",
            f"args.activation_checkpointing={self.policy}",
            *self.more.split(),
        ]


CASES = (
    Case(model="2b", mode="sft", launches=1666),
    Case(model="2b", mode="sft", precision="fp16", launches=1694),
    Case(model="2b", mode="lora", precision="fp16", streams=True, launches=1924),
    Case(model="5b", mode="lora", policy="pointwise", launches=2278),
    Case(model="5b", mode="lora", more="args.attention_backend=cudnn", launches=2530),
    Case(model="1.5_5b", mode="lora", launches=2614),
    Case(model="5b", mode="lora", more="args.quantize_base=fp8", launches=3535),
    Case(model="2b", mode="sft", more="args.cuda_graphs=true", launches=286),
    Case(
        model="2b",
        mode="sft",
        precision="fp16",
        stage=1,
        more="args.cuda_graphs=true",
        launches=314,
    ),
    Case(model="5b", mode="lora", policy="pointwise", more="args.cuda_graphs=true", launches=266),
    Case(
        model="5b",
        mode="lora",
        more="args.attention_backend=cudnn args.cuda_graphs=true",
        launches=266,
    ),
    Case(model="2b", mode="sft", stage=3, waits=_ZERO_3_WAITS, launches=2856),
)

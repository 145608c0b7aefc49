"""Measured step times and rates of GPUs, and predictions of a configuration's step from them.

`python -m bench.harness.reference` writes measured.json from results of bench.gpu_run. What was not
measured is not in it.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from cogfast.config import Config
from cogfast.model.config import TransformerConfig
from cogfast.model.lora import DEFAULT_TARGETS
from cogfast.schema.arguments import Precision, TrainArguments
from cogfast.schema.json_files import Range, Size, read_json
from cogfast.train.plan.activations import Policy, describe
from cogfast.train.plan.gpus import Gpu, find_gpu
from cogfast.train.plan.memory import MemoryPlan, network_of
from cogfast.train.plan.step_time import (
    LINK_BETWEEN,
    LINK_SHARE,
    Rates,
    Saving,
    StepTime,
    estimate,
    stated_rates,
)
from cogfast.train.plan.traffic import Layout
from cogfast.train.video_size import largest_size

MEASURED = Path(__file__).with_name("measured.json")
_Positive = Annotated[float, Range(1e-9, 1e9)]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCase:
    """A training step on one device: what its time depends on.

    device: the name in gpus.py, or that of a processor with its threads. lora_rank: None for all
    weights. policy: of activation checkpointing, as `describe` writes it.
    """

    device: str
    num_layers: Size
    hidden_size: Size
    num_tokens: Size
    batch_size: Size
    lora_rank: Size | None
    precision: Precision
    policy: str
    is_compiled: bool

    @classmethod
    def of_run(
        cls,
        config: TransformerConfig,
        num_tokens: int,
        batch_size: int,
        precision: Precision,
        policies: Sequence[Policy],
        is_compiled: bool,
        device: torch.device,
    ) -> StepCase:
        return cls(
            device=device_name(device),
            num_layers=config.num_layers,
            hidden_size=config.hidden_size,
            num_tokens=num_tokens,
            batch_size=batch_size,
            lora_rank=config.lora_rank,
            precision=precision,
            policy=describe(policies),
            is_compiled=is_compiled,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """Median milliseconds of a step with one micro-batch of cached latents, and of its two parts.

    source: the file of results.
    """

    case: StepCase
    step_ms: _Positive
    forward_backward_ms: _Positive | None
    optimizer_ms: _Positive | None
    source: str

    def expected_ms(self, accumulation: int) -> float | None:
        """Return the milliseconds of a step of so many micro-batches; None if that is not known."""
        if self.forward_backward_ms is not None and self.optimizer_ms is not None:
            return accumulation * self.forward_backward_ms + self.optimizer_ms
        return self.step_ms if accumulation == 1 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRates:
    """Rates of a GPU at the shapes of 2B and 5B. gpu: its name in gpus.py."""

    gpu: str
    matmul_tflop_per_s: _Positive
    attention_forward_tflop_per_s: _Positive
    attention_backward_tflop_per_s: _Positive
    copy_gb_per_s: _Positive
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The content of measured.json."""

    rates: list[MeasuredRates]
    steps: list[MeasuredStep]

    def step(self, case: StepCase) -> MeasuredStep | None:
        return next((step for step in self.steps if step.case == case), None)


def read_measured(path: Path = MEASURED) -> Measured:
    return read_json(path, Measured, "run python -m bench.harness.reference")


def find_measured(
    config: TransformerConfig,
    args: TrainArguments,
    num_tokens: int,
    policies: Sequence[Policy],
    device: torch.device,
) -> MeasuredStep | None:
    """Return the measurement of a run's step on one device, if there is one."""
    is_usual = config.lora_targets == DEFAULT_TARGETS and config.lora_layers is None
    is_shared = args.model_parallel_size * args.context_parallel_size > 1
    if is_shared or (config.lora_rank is not None and not is_usual):
        return None
    given = (args.batch_size, args.precision, policies, args.compile, device)
    return read_measured(MEASURED).step(StepCase.of_run(config, num_tokens, *given))


def predict_step(
    config: Config, args: TrainArguments, plan: MemoryPlan, gpu: Gpu, link: float | None = None
) -> StepTime | None:
    """Predict the time of a step; None where that is not known: sampling, and an optimizer in host
    memory.

    link: GB/s of a GPU to other machines; None: the default of step_time.py.
    """
    setup = plan.setup
    if setup.is_sampling or setup.rules.is_offloaded:
        return None
    network, rules = network_of(config), setup.rules
    layout = Layout(
        data_size=rules.data_size // setup.context_size,
        model_size=setup.model_size,
        context_size=setup.context_size,
        zero_stage=1 if rules.stage < 2 else 2 if rules.stage == 2 else 3,
        batch_size=args.batch_size,
        accumulation=rules.accumulation,
        bytes_per_number=rules.weight_bytes,
        splits_rows=args.sequence_parallel,
    )
    rates = rates_of(gpu) if link is None else rates_of(gpu, 1e9 * link)
    return estimate(
        network,
        largest_size(config, network).num_tokens(network),
        layout,
        rates,
        plan.policies,
        overlaps_gradients=rules.overlaps,
        bucket_numel=rules.bucket,
        saving=Saving.of(plan),
    )


def predict_ms(
    config: Config, args: TrainArguments, plan: MemoryPlan, device: torch.device
) -> float | None:
    """Return the milliseconds of a step on this device without VAE and text encoder: on a GPU that is
    known an estimate, else a measurement of the same step, if there is one."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        gpu = find_gpu(properties.name, properties.total_memory / 2**30)
        step = None if gpu is None else predict_step(config, args, plan, gpu)
        return None if step is None else 1000 * step.seconds
    if plan.setup.world_size > 1:
        return None
    network = network_of(config)
    num_tokens = largest_size(config, network).num_tokens(network)
    found = find_measured(network, args, num_tokens, plan.policies, device)
    return None if found is None else found.expected_ms(args.gradient_accumulation_steps)


def rates_of(
    gpu: Gpu, link_between: float = LINK_BETWEEN, measured: Measured | None = None
) -> Rates:
    """Return the measured rates of a GPU, or an estimate from its data sheet. Links are estimated."""
    stated = stated_rates(gpu, link_between)
    for found in (measured or read_measured()).rates:
        if found.gpu == gpu.name:
            return replace(
                stated,
                matmul=found.matmul_tflop_per_s * 1e12,
                attention_forward=found.attention_forward_tflop_per_s * 1e12,
                attention_backward=found.attention_backward_tflop_per_s * 1e12,
                copy=found.copy_gb_per_s * 1e9,
                is_measured=True,
                source=f"rates measured on {gpu.name} ({found.source}); its links and "
                f"PCIe: {LINK_SHARE:.0%} of the data sheet",
            )
    return stated


def device_name(device: torch.device) -> str:
    """Return the name under which a device's measurements are kept."""
    if device.type != "cuda":
        threads = torch.get_num_threads()
        return f"{cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}"
    properties = torch.cuda.get_device_properties(device)
    gpu = find_gpu(properties.name, properties.total_memory / 2**30)
    return properties.name if gpu is None else gpu.name


def cpu_name() -> str:
    """Return the model of the CPU and its extensions for bfloat16."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():  # not Linux
        return platform.processor() or platform.machine()
    text = path.read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1].strip() if found else platform.machine()
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    present = flags[1].split() if flags else []
    # oneDNN emulates bfloat16 where the processor has neither, which changes every bf16 figure.
    labels = {"avx512f": "AVX-512", "amx_bf16": "AMX"}
    extras = [label for flag, label in labels.items() if flag in present]
    return f"{name} ({', '.join(extras)})" if extras else name

"""Measured step times and rates of GPUs, from measured.json, which `python -m bench.harness.reference`
writes from results of bench.gpu_run. What was not measured is not in it."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch

from cogfast.model.config import TransformerConfig
from cogfast.schema.arguments import Precision
from cogfast.schema.json_files import Range, Size, read_json
from cogfast.train.plan.activations import Policy, describe
from cogfast.train.plan.gpus import Gpu, find_gpu
from cogfast.train.plan.step_time import LINK_BETWEEN, LINK_SHARE, Rates, stated_rates

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
                source=f"rates measured on {gpu.name} ({found.source}); its links: "
                f"{LINK_SHARE:.0%} of the data sheet",
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

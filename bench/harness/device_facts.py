"""List the GPU, driver, package versions, video decoder and attention packages of the machine."""

from __future__ import annotations

import ctypes
import importlib
import os
import platform
import subprocess

import torch

from bench.harness.machine import version_of
from bench.harness.outcome import Outcome, Settings

_VERSIONS = ("torch", "triton", "deepspeed", "omegaconf", "transformers", "safetensors", "einops")
_VERSIONS += ("numpy", "matplotlib", "diffusers", "decord", "av")
_VERSIONS += ("flash-attn-4", "nvidia-dali-cuda130")
# Importing `flash_attn` proves nothing: with version 4 it is a namespace that may lack version 2.
_ATTENTION = {
    "flash_attention_4": "flash_attn.cute",
    "flash_attention_3": "flash_attn_interface",
    "flash_attention_2": "flash_attn.flash_attn_interface",
}
_SMI_FIELDS = {
    "driver_version": "driver",
    "clocks.sm": "sm_clock_now",
    "clocks.max.sm": "sm_clock_highest",
    "clocks.mem": "memory_clock_now",
    "power.limit": "power_limit",
}


def list_facts(settings: Settings) -> Outcome:
    """Collect the facts as the numbers of an outcome without rows."""
    numbers: dict[str, object] = {
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "commit": _output_of("git", "rev-parse", "HEAD"),
        "cuda_of_torch": torch.version.cuda,
    }
    if settings.device.type == "cuda":
        numbers |= _gpu(settings.device)
    numbers["nvcuvid"] = _video_decoder()
    numbers |= {name: _importable(module) for name, module in _ATTENTION.items()}
    numbers |= {f"version_{name}": version_of(name) for name in _VERSIONS}
    return Outcome(numbers)


def _gpu(device: torch.device) -> dict[str, object]:
    properties = torch.cuda.get_device_properties(device)
    facts = {
        "gpu": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "memory_gib": properties.total_memory / 2**30,
        "multiprocessors": properties.multi_processor_count,
        "l2_cache_mb": properties.L2_cache_size / 1e6,
        "cudnn": torch.backends.cudnn.version(),
    }
    fields = ",".join(_SMI_FIELDS)
    output = _output_of("nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader")
    if output is not None:  # values carry their units
        facts |= dict(zip(_SMI_FIELDS.values(), output.split(", "), strict=False))
    return facts


def _output_of(*argv: str) -> str | None:
    """Return what a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _video_decoder() -> str:
    """Report whether libnvcuvid loads, as DALI loads it."""
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError as error:
        return f"does not load: {error}"
    return "loads"


def _importable(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken installation raises any type
        return f"no: {type(error).__name__}: {error}".splitlines()[0]
    return "yes"

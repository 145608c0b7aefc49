"""What the machine is and has: GPU, driver, versions, the video decoder, attention packages."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

from bench.harness.outcome import Outcome, Settings

_VERSIONS = (
    *("torch", "triton", "deepspeed", "omegaconf", "transformers", "safetensors", "einops"),
    *("numpy", "matplotlib", "diffusers", "decord", "av", "flash-attn-4", "nvidia-dali-cuda130"),
)
# `flash_attn` alone says nothing: version 4 makes it a namespace without version 2 in it.
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


def tell_facts(settings: Settings) -> Outcome:
    numbers: dict[str, object] = {
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "commit": _said_by("git", "rev-parse", "HEAD"),
        "cuda_of_torch": torch.version.cuda,
    }
    if settings.device.type == "cuda":
        numbers |= _gpu(settings.device)
    numbers["nvcuvid"] = _video_decoder()
    numbers |= {name: _importable(module) for name, module in _ATTENTION.items()}
    numbers |= {f"version_{name}": _version(name) for name in _VERSIONS}
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
    said = _said_by("nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader")
    if said is not None:  # values carry their units
        facts |= dict(zip(_SMI_FIELDS.values(), said.split(", "), strict=False))
    return facts


def _said_by(*words: str) -> str | None:
    """What a program prints, or None where it is not there or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _video_decoder() -> str:
    """Whether NVIDIA's video decoder loads, as DALI will try it, and what lies beside the driver."""
    beside = (
        sorted(str(p) for p in _driver_folder().glob("libnvcuvid*")) if _driver_folder() else []
    )
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError as error:
        return f"does not load: {error}" + (f"; but there is {beside[0]}" if beside else "")
    return "loads"


def _driver_folder() -> Path | None:
    """The folder of the libcuda that this process has loaded."""
    maps = Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.is_file() else []
    paths = (line.split()[-1] for line in lines if "/libcuda.so" in line)
    return next((Path(path).parent for path in paths), None)


def _importable(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:  # a package that is there and broken raises all kinds
        return f"no: {type(error).__name__}: {error}".splitlines()[0]
    return "yes"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

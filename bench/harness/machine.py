"""Describe the machine, the package versions and the date of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.harness.outcome import Outcome, Settings
from cogfast.extensions.doctor.doctor import examine

_PACKAGES = ("torch", "triton", "diffusers", "peft", "deepspeed")
_PACKAGES += ("decord", "av", "nvidia-dali-cuda130")
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")  # these hide instructions from libraries
_SMI_FIELDS = "clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def describe_machine(device: torch.device) -> dict[str, object]:
    """Return the keys that every JSON file of results has: machine, cores, versions, time."""
    is_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "machine": torch.cuda.get_device_name(device) if is_gpu else cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def cpu_name() -> str:
    """Return the model of the CPU, its extensions for bfloat16, and what the environment takes away of them."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():  # not Linux
        return platform.processor() or platform.machine()
    text = path.read_text()
    found = dict(re.findall(r"^(model name|flags)\s*:\s*(.+)$", text, re.MULTILINE))
    name, present = found.get("model name", platform.machine()), found.get("flags", "").split()
    labels = {"avx512f": "AVX-512", "amx_bf16": "AMX"}
    extras = [label for flag, label in labels.items() if flag in present]
    extras = extras or ["AVX2"] * ("avx2" in present)
    extras += [f"{key}={os.environ[key]}" for key in _LIMITS if key in os.environ]
    return f"{name} ({', '.join(extras)})" if extras else name


def list_facts(settings: Settings) -> Outcome:
    """Return what `cogfast doctor` finds, the commit, and a GPU's sizes and clocks; the piece facts."""
    numbers: dict[str, object] = {f.what: f"{f.status}: {f.found}" for f in examine(Path())}
    numbers["commit"] = _output_of("git", "rev-parse", "HEAD")
    if settings.device.type == "cuda":
        properties = torch.cuda.get_device_properties(settings.device)
        numbers |= {
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": properties.total_memory / 2**30,
            "multiprocessors": properties.multi_processor_count,
            "l2_cache_mb": properties.L2_cache_size / 1e6,
            "cudnn": torch.backends.cudnn.version(),
            _SMI_FIELDS: _output_of(
                "nvidia-smi", "-i", "0", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader"
            ),
        }
    return Outcome(numbers)


def _output_of(*argv: str) -> str | None:
    """Return what a program prints, or None if it is missing or fails."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

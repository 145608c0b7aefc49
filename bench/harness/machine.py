"""Describe the machine, the package versions and the date of a measurement."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

_PACKAGES = ("torch", "triton", "diffusers", "peft", "deepspeed", "liger-kernel")
_PACKAGES += ("decord", "av", "nvidia-dali-cuda130")


def describe_machine(device: torch.device) -> dict[str, object]:
    """Return the keys that every JSON file of results has: machine, cores, versions, time."""
    is_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "machine": torch.cuda.get_device_name(device) if is_gpu else name_cpu(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES},
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_report(path: Path | None, piece: str, device: torch.device, **content: object) -> None:
    """Write the JSON file of a piece that runs alone; nothing if path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"piece": piece, **describe_machine(device), **content}
        path.write_text(json.dumps(report, indent=1) + "\n")


def name_cpu() -> str:
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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

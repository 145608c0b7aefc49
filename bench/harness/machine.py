"""Describe the machine, the package versions and the date of a measurement."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from datetime import UTC, datetime
from pathlib import Path

import torch

from cogfast.train.plan.measured import cpu_name

_PACKAGES = ("torch", "triton", "diffusers", "peft", "deepspeed")
_PACKAGES += ("decord", "av", "nvidia-dali-cuda130")


def describe_machine(device: torch.device) -> dict[str, object]:
    """Return the keys that every JSON file of results has: machine, cores, versions, time."""
    is_gpu = device.type == "cuda"
    return {
        "device": str(device),
        "machine": torch.cuda.get_device_name(device) if is_gpu else cpu_name(),
        "cpu_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in _PACKAGES},
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_report(path: Path | None, piece: str, device: torch.device, **content: object) -> None:
    """Write the JSON file of a piece that runs alone; nothing if path is None."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {"piece": piece, **describe_machine(device), **content}
        path.write_text(json.dumps(report, indent=1) + "\n")


def version_of(package: str) -> str | None:
    """Return the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

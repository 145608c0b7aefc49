"""Rates of GPUs: their makers' data sheets (dense bf16, without sparsity), and the shares that are reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from cogfast.config.values import nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of a data sheet's rates that work reaches: matrix products, attention forward and backward at a
    head width of 64, ops that are bound by memory, and transfers over links. On an H100 they give the measured
    steps of 2B and 5B LoRA to 2%; other GPUs have not been measured."""

    matmul: float = 0.65
    attention: float = 0.5
    attention_backward: float = 0.4
    memory: float = 0.85
    link: float = 0.8


@dataclass(frozen=True, slots=True)
class Gpu:
    """copy_tb_per_s: of the memory; matmul_tflop_per_s: of bf16 matrix products with float32 sums;
    link_gb_per_s: to the other GPUs of a machine, in one direction (NVLink, or PCIe for cards without
    it); words: all of them are in torch's name of the device; host_gb_per_s: to the host's memory, in one
    direction (PCIe: 64 for its fifth generation, 32 for the fourth)."""

    name: str
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    link_gb_per_s: float
    words: tuple[str, ...]
    least_gib: float = 0.0  # distinguishes cards of one name
    memory_gib: float = 0.0  # that torch reports, a little less than what is sold
    host_gb_per_s: float = 64
    shares: Shares = Shares()

    @property
    def memory(self) -> int:
        """Return the bytes of the device's memory."""
        return int(self.memory_gib * 2**30)


# The first entry that matches a device counts.
GPUS = (
    Gpu("b200", 8.0, 2250, 900, ("b200",), memory_gib=178.3),
    Gpu("h200", 4.8, 989, 450, ("h200",), memory_gib=139.8),
    Gpu("h100-pcie", 2.0, 756, 64, ("h100", "pcie"), memory_gib=79.1),
    Gpu("h100-nvl", 3.94, 835, 300, ("h100", "nvl"), memory_gib=93.0),
    Gpu("h100-80", 3.35, 989, 450, ("h100",), memory_gib=79.1),
    Gpu("h800", 3.35, 989, 200, ("h800",), memory_gib=79.1),
    Gpu("h20", 4.0, 148, 450, ("h20",), memory_gib=95.0),
    Gpu("a100-80", 2.04, 312, 300, ("a100",), least_gib=60, memory_gib=79.2, host_gb_per_s=32),
    Gpu("a100-40", 1.55, 312, 300, ("a100",), memory_gib=39.4, host_gb_per_s=32),
    Gpu("a800", 2.04, 312, 200, ("a800",), memory_gib=79.2, host_gb_per_s=32),
    Gpu("l40s", 0.864, 362, 32, ("l40s",), memory_gib=44.4, host_gb_per_s=32),
    Gpu("4090", 1.008, 165, 32, ("4090",), memory_gib=23.6, host_gb_per_s=32),
)


def parse_gpu(text: str) -> tuple[str, int, Gpu | None]:
    """Return name, bytes of memory and entry of a card: one of GPUS, or a number of GiB."""
    name = text.strip().lower()
    for gpu in GPUS:
        if gpu.name == name:
            return gpu.name, gpu.memory, gpu
    try:
        gib = float(name.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = math.nan
    # The bound is below the names of cards such as 3090. The condition is true for nan.
    if not 1 <= gib <= 1000:
        names = [gpu.name for gpu in GPUS]
        like = [each for each in names if name and each.startswith(name)]
        near = nearest(name, names) if math.isnan(gib) else ""  # 3090 is no misspelling of 4090
        hint = f"; did you mean {' or '.join(like)}?" if like else near
        if not hint:
            hint = f"; use {', '.join(names)}, or its memory in GiB, such as 80"
        raise ValueError(f"--gpu {text[:80]!r} is not known{hint}")
    return f"{gib:g} GiB", int(gib * 2**30), None


def find_gpu(device_name: str, memory_gib: float) -> Gpu | None:
    """Return the entry of a device by the name and memory that torch reports, or None."""
    name = device_name.lower()
    for gpu in GPUS:
        if all(word in name for word in gpu.words) and memory_gib >= gpu.least_gib:
            return gpu
    return None


def gpu_of(device: torch.device) -> Gpu | None:
    """Return the entry of a device of this machine; None for a CPU and a GPU that is not listed."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory / 2**30)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if it is unknown (such as a CPU's)."""
    gpu = gpu_of(device)
    return None if gpu is None else gpu.matmul_tflop_per_s * 1e12

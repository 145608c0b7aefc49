"""Rates of GPUs, from their makers' data sheets (dense bf16, without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """copy_tb_per_s: of the memory; matmul_tflop_per_s: of bf16 matrix products with float32 sums;
    link_gb_per_s: to the other GPUs of a machine, in one direction (NVLink, or PCIe for cards without
    it); words: all of them are in torch's name of the device."""

    name: str
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    link_gb_per_s: float
    words: tuple[str, ...]
    least_gib: float = 0.0  # distinguishes cards of one name


# The first entry that matches a device counts.
GPUS = (
    Gpu("b200", 8.0, 2250, 900, ("b200",)),
    Gpu("h200", 4.8, 989, 450, ("h200",)),
    Gpu("h100-pcie", 2.0, 756, 64, ("h100", "pcie")),
    Gpu("h100-nvl", 3.94, 835, 300, ("h100", "nvl")),
    Gpu("h100-80", 3.35, 989, 450, ("h100",)),
    Gpu("h800", 3.35, 989, 200, ("h800",)),
    Gpu("h20", 4.0, 148, 450, ("h20",)),
    Gpu("a100-80", 2.04, 312, 300, ("a100",), least_gib=60),
    Gpu("a100-40", 1.55, 312, 300, ("a100",)),
    Gpu("a800", 2.04, 312, 200, ("a800",)),
    Gpu("l40s", 0.864, 362, 32, ("l40s",)),
    Gpu("4090", 1.008, 165, 32, ("4090",)),
)


def find_gpu(device_name: str, memory_gib: float) -> Gpu | None:
    """Return the entry of a device by the name and memory that torch reports, or None."""
    name = device_name.lower()
    for gpu in GPUS:
        if all(word in name for word in gpu.words) and memory_gib >= gpu.least_gib:
            return gpu
    return None

"""Sizes and rates of GPUs, from their makers' data sheets (dense bf16, without sparsity)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """memory_gib: what torch reports as the device's total; copy_tb_per_s: of the memory;
    matmul_tflop_per_s: of bf16 matrix products with float32 sums; link_gb_per_s: to the other GPUs of
    a machine, in one direction (NVLink, or PCIe for cards without it)."""

    name: str
    memory_gib: float
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    link_gb_per_s: float
    pattern: tuple[str, ...]  # words that torch's name of the device contains
    least_gib: float = 0.0  # distinguishes cards of one name


# Where two entries match a device, the first counts.
GPUS = (
    Gpu(
        name="h200",
        memory_gib=139.8,
        copy_tb_per_s=4.8,
        matmul_tflop_per_s=989,
        link_gb_per_s=450,
        pattern=("h200",),
    ),
    Gpu(
        name="h100-80",
        memory_gib=79.1,
        copy_tb_per_s=3.35,
        matmul_tflop_per_s=989,
        link_gb_per_s=450,
        pattern=("h100", "80gb hbm3"),
    ),
    Gpu(
        name="h100-pcie",
        memory_gib=79.1,
        copy_tb_per_s=2.0,
        matmul_tflop_per_s=756,
        link_gb_per_s=64,
        pattern=("h100", "pcie"),
    ),
    Gpu(
        name="a100-80",
        memory_gib=79.2,
        copy_tb_per_s=2.04,
        matmul_tflop_per_s=312,
        link_gb_per_s=300,
        pattern=("a100",),
        least_gib=60,
    ),
    Gpu(
        name="a100-40",
        memory_gib=39.4,
        copy_tb_per_s=1.55,
        matmul_tflop_per_s=312,
        link_gb_per_s=300,
        pattern=("a100",),
    ),
    Gpu(
        name="l40s",
        memory_gib=44.4,
        copy_tb_per_s=0.864,
        matmul_tflop_per_s=362,
        link_gb_per_s=32,
        pattern=("l40s",),
    ),
    Gpu(
        name="4090",
        memory_gib=23.6,
        copy_tb_per_s=1.008,
        matmul_tflop_per_s=165,
        link_gb_per_s=32,
        pattern=("4090",),
    ),
)


def find_gpu(device_name: str, memory_gib: float) -> Gpu | None:
    """Return the entry of a device by the name and memory that torch reports, or None."""
    words = device_name.lower()
    for gpu in GPUS:
        if all(word in words for word in gpu.pattern) and memory_gib >= gpu.least_gib:
            return gpu
    return None

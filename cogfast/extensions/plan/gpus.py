"""Rates of GPUs: their makers' data sheets (dense, without sparsity), and the shares that are reached."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from cogfast.core.values import nearest

_ATTENTION = (0.5, 0.4)  # shares, forward and backward, where no backend's are known: an assumption
INSTALL_FLASH_ATTENTION = "pip install '.[fa4]'"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of a data sheet's rates that work reaches: matrix products, ops that are bound by memory,
    transfers over links, and attention by backend, forward and backward at a head width of 64. The defaults are
    an H100's, and assumed elsewhere."""

    matmul: float = 0.65
    memory: float = 0.85
    link: float = 0.8
    attention: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def attention_of(self, backend: str | None) -> tuple[float, float]:
        """Return the shares of a backend, or those that are assumed where they are not known."""
        return self.attention.get(backend or "", _ATTENTION)

    def fastest(self, backends: Iterable[str]) -> str | None:
        """Return the fastest of the backends whose shares are known, forward and backward together."""
        known = [name for name in backends if name in self.attention]
        # Two products of all scores, and five in the backward pass.
        time = lambda name: 2 / self.attention[name][0] + 5 / self.attention[name][1]
        return min(known, key=time, default=None)


# Products reach 0.65 on an H100, 0.81 of the best one that is published for it. Elsewhere 0.81 of the best published
# one is assumed. The clocks of RTX cards exceed those of their data sheets. An H100's attention was measured by
# bench.gpu_run. docs/diagnostics.md has the sources.
_HOPPER = Shares(
    attention={
        "fa4": (0.54, 0.55),
        "fa3": (0.50, 0.48),
        "cudnn": (0.43, 0.43),
        "flash": (0.31, 0.28),
        "efficient": (0.137, 0.103),
    }
)
# Backward is assumed to reach what forward does, as on an H100.
_B200 = Shares(
    matmul=0.63,
    memory=0.80,
    attention={"cudnn": (0.40, 0.40), "fa4": (0.39, 0.39), "flash": (0.17, 0.15)},
)
_B300 = Shares(matmul=0.64, memory=0.80, attention={"fa4": (0.54, 0.54), "cudnn": (0.51, 0.51)})
_A100 = Shares(matmul=0.70, attention={"flash": (0.56, 0.56)})


@dataclass(frozen=True, slots=True)
class Gpu:
    """Rates of NVIDIA's data sheet. copy_tb_per_s: of the memory; matmul_tflop_per_s: of bf16
    matrix products with float32 sums, half of fp8's; link_gb_per_s: to the other GPUs of a machine, in one
    direction (NVLink, or PCIe for cards without it); words: all of them are in torch's name of the device;
    memory_gib: that torch reports, a little less than what is sold; host_gb_per_s: to the host's memory, in
    one direction (PCIe 6: 128, 5: 64, 4: 32); least_gib: distinguishes cards of one name."""

    name: str
    copy_tb_per_s: float
    matmul_tflop_per_s: float
    link_gb_per_s: float
    words: tuple[str, ...]
    memory_gib: float = 0.0
    shares: Shares = Shares()
    host_gb_per_s: float = 64
    least_gib: float = 0.0


# The first entry that matches a device counts. Hopper chips but H20's are assumed to reach the same shares.
GPUS = (
    Gpu("b300", 8.0, 2250, 900, ("b300",), 267.7, _B300, 128),
    Gpu("b200", 8.0, 2250, 900, ("b200",), 178.3, _B200),
    Gpu("h200", 4.8, 989, 450, ("h200",), 139.8, _HOPPER),
    Gpu("h100-pcie", 2.0, 756, 64, ("h100", "pcie"), 79.1, _HOPPER),
    Gpu("h100-nvl", 3.94, 835, 300, ("h100", "nvl"), 93.0, _HOPPER),
    Gpu("h100-80", 3.35, 989, 450, ("h100",), 79.1, _HOPPER),
    Gpu("h800", 3.35, 989, 200, ("h800",), 79.1, _HOPPER),
    Gpu("h20", 4.0, 148, 450, ("h20",), 95.0),
    Gpu("a100-80", 2.04, 312, 300, ("a100",), 79.2, _A100, 32, 60),
    Gpu("a100-40", 1.55, 312, 300, ("a100",), 39.4, _A100, 32),
    Gpu("a800", 2.04, 312, 200, ("a800",), 79.2, _A100, 32),
    Gpu("l40s", 0.864, 362, 32, ("l40s",), 44.4, Shares(), 32),
    Gpu("rtx-pro-6000", 1.792, 503.8, 64, ("pro 6000",), 94.9, Shares(matmul=0.74)),
    Gpu("5090", 1.792, 209.5, 64, ("5090",), 31.3, Shares(matmul=0.98)),
    Gpu("4090", 1.008, 165, 32, ("4090",), 23.6, Shares(matmul=0.88), 32),
)


def cost_without_flash_attention(gpu: Gpu | None) -> str | None:
    """Return what a run loses without flash-attn 3 and 4 on a GPU that they support (None: not listed), or
    None where a kernel of PyTorch is as fast."""
    cost = "flash-attn 4 took 0.76 to 0.78 of cuDNN's time on an H100: 124 of the 889 ms of a step of 2B, "
    cost += "290 of the 1997 ms of one of 5B's LoRA"
    if gpu is None or "fa4" not in gpu.shares.attention:
        return f"{cost}; on this GPU it has not been timed"
    return cost if gpu.shares.fastest(gpu.shares.attention) in ("fa3", "fa4") else None


def without_flash_attention(device: torch.device) -> str | None:
    """Return what a run on a device loses without flash-attn 3 and 4, and how to install them, or None."""
    cost = cost_without_flash_attention(gpu_of(device))
    return f"{cost}: {INSTALL_FLASH_ATTENTION}" if cost else None


def parse_gpu(text: str) -> tuple[str, int, Gpu | None]:
    """Return name, bytes of memory and entry of a card: one of GPUS, or a number of GiB."""
    name, named = text.strip().lower(), {gpu.name: gpu for gpu in GPUS}
    if name in named:
        return name, int(named[name].memory_gib * 2**30), named[name]
    try:
        gib = float(name.removesuffix("gib").removesuffix("gb"))
    except ValueError:
        gib = math.nan
    # The bound is below the names of cards such as 3090. The condition is true for nan.
    if not 1 <= gib <= 1000:
        like = [each for each in named if name and each.startswith(name)]
        near = nearest(name, named) if math.isnan(gib) else ""  # 3090 is no misspelling of 4090
        hint = f"; did you mean {' or '.join(like)}?" if like else near
        if not hint:
            hint = f"; use {', '.join(named)}, or its memory in GiB, such as 80"
        raise ValueError(f"--gpu {text[:80]!r} is not known{hint}")
    return f"{gib:g} GiB", int(gib * 2**30), None


def find_gpu(device_name: str, memory_gib: float) -> Gpu | None:
    """Return the entry of a device by the name and memory that torch reports, or None."""
    name = device_name.lower()
    is_it = lambda gpu: all(word in name for word in gpu.words) and memory_gib >= gpu.least_gib
    return next(filter(is_it, GPUS), None)


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

"""How much work a training step is, and how much of it the device could do: model FLOPs and MFU."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from cogfast.model.config import TransformerConfig

# Dense bf16 peak, FLOP/s, from the makers' data sheets, by a part of the device's name.
PEAK_FLOPS = {
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165e12,
    "B200": 2250e12,
}


def forward_flops(config: TransformerConfig, num_tokens: int) -> tuple[float, float]:
    """FLOPs of one sample's forward pass: in the blocks' linears, and in attention.

    24 M^2 S per layer for QKV, output and the 4x MLP, 4 S^2 M for attention, S = num_tokens;
    embeddings and modulation are below a thousandth and left out.
    """
    width, layers = config.hidden_size, config.num_layers
    return 24.0 * width**2 * num_tokens * layers, 4.0 * num_tokens**2 * width * layers


def train_flops(config: TransformerConfig, num_tokens: int) -> float:
    """Model FLOPs of training on one sample; recomputed activations never count.

    Three forwards for full training. With LoRA the frozen linears need no weight gradient: two,
    plus three times the adapters' 2 S r (M + M) for each target, plus 3x attention.
    """
    linear, attention = forward_flops(config, num_tokens)
    if config.lora_rank is None:
        return 3 * (linear + attention)
    width = config.lora_rank * len(config.lora_targets)
    adapters = 4.0 * num_tokens * width * config.hidden_size * config.num_layers
    return 2 * linear + 3 * (adapters + attention)


def peak_flops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in FLOP/s, or None where it is not known (a CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def memory_gib(device: torch.device) -> dict[str, float]:
    """GPU: peak bytes allocated and reserved since the start; CPU: resident memory. In GiB."""
    if device.type == "cuda":
        return {
            "memory_allocated_gib": torch.cuda.max_memory_allocated(device) / 2**30,
            "memory_reserved_gib": torch.cuda.max_memory_reserved(device) / 2**30,
        }
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # not Linux: the peak, in bytes on a Mac
        return {"memory_rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30}
    return {"memory_rss_gib": pages * resource.getpagesize() / 2**30}

"""Model FLOPs of training, and a GPU's peak: what MFU is computed from."""

from __future__ import annotations

import torch

from cogfast.model.block import MLP_RATIO
from cogfast.model.config import TransformerConfig
from cogfast.train.plan.gpus import find_gpu


def forward_flops(config: TransformerConfig, num_tokens: int) -> tuple[float, float]:
    """Return the FLOPs of one sample's forward pass: in the blocks' linears, and in attention.

    24 M^2 S per layer for QKV, output and the 4x MLP, 4 S^2 M for attention, S = num_tokens;
    embeddings and modulation are below 0.1% and left out.
    """
    width, layers = config.hidden_size, config.num_layers
    return 24.0 * width**2 * num_tokens * layers, 4.0 * num_tokens**2 * width * layers


def train_flops(config: TransformerConfig, num_tokens: int) -> float:
    """Return the model FLOPs of training on one sample, without recomputed activations.

    Three forwards for full training. With LoRA the frozen linears need no weight gradient: two,
    plus three times the adapters' 2 S r (in + out) for each target, plus 3x attention.
    """
    linear, attention = forward_flops(config, num_tokens)
    if config.lora_rank is None:
        return 3 * (linear + attention)
    # in + out in multiples of M: 2, and for the MLP's linears 1 + 4.
    sides = sum(1 + MLP_RATIO if t.startswith("ff.") else 2 for t in config.lora_targets)
    width = config.lora_rank * sides * config.hidden_size
    adapters = 2.0 * num_tokens * width * config.num_layers
    return 2 * linear + 3 * (adapters + attention)


def peak_flops(device: torch.device) -> float | None:
    """Return the device's dense bf16 peak in FLOP/s; None if it is unknown (such as a CPU's)."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    gpu = find_gpu(properties.name, properties.total_memory / 2**30)
    return None if gpu is None else gpu.matmul_tflop_per_s * 1e12

"""Fits the quickstart's first stage, a wavelet, to its clips."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from cogfast.extensions.wavelet.wavelet_autoencoder import (
    FORMAT,
    NUM_BANDS,
    WaveletState,
    band_matrix,
    to_blocks,
)

# Exponent of the standard deviation. With 1 weak bands count as much in the loss as strong ones, and
# samples are noisy; with 0 a few bands dominate the loss. 0.5 gave the best samples.
_SPREAD_POWER = 0.5


def fit_wavelet(videos: Iterable[Tensor], num_bands: int) -> WaveletState:
    """Keep the `num_bands` bands with the most energy on `videos` [B, 3, F, H, W] in [-1, 1]."""
    matrix = band_matrix()
    count, total, energy = 0, torch.zeros(NUM_BANDS).double(), torch.zeros(NUM_BANDS).double()
    for video in videos:
        # float64: the variance below is a difference of two large sums.
        values = to_blocks(video.double()).flatten(0, 3) @ matrix.T  # [blocks, 768]
        count += values.shape[0]
        total += values.sum(dim=0)
        energy += values.square().sum(dim=0)
    # A stable sort, so that equal energies give the same bands on every machine.
    bands = torch.sort(energy, descending=True, stable=True).indices[:num_bands]
    mean = total[bands] / count
    std = (energy[bands] / count - mean.square()).clamp_min(0).sqrt()
    # A lower bound keeps bands without variance invertible.
    spread = std.clamp_min(std.mean() * 1e-3).clamp_min(1e-6) ** _SPREAD_POWER
    overall = (std / spread).square().mean().sqrt().clamp_min(1e-6)
    return WaveletState(bands, mean.float(), (spread * overall).float())


def save_wavelet(state: WaveletState, path: Path) -> None:
    """Write the file that first_stage_config.params.ckpt_path names."""
    tensors = {"bands": state.bands, "mean": state.mean, "scale": state.scale}
    # safetensors' save_file ignores the umask.
    path.write_bytes(save(tensors, {"format": FORMAT, "num_bands": str(NUM_BANDS)}))

"""The noise on the first frame of image-to-video training, which the network gets as a condition.

Source: CogVideoX, arXiv 2408.06072; CogVideo's sat/diffusion_video.py (`add_noise_to_first_frame`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom

LOG_STRENGTH_MEAN, LOG_STRENGTH_STD = -3.0, 0.5


def add_first_frame_noise(frame: Tensor, rng: SlotRandom) -> Tensor:
    """Add Gaussian noise of one log-normal strength per sample to frames [B, 3, 1, H, W] in [-1, 1]."""
    draw = rng.normal("image_noise_strength", (len(frame), 1, 1, 1, 1))
    sigma = torch.exp(LOG_STRENGTH_MEAN + LOG_STRENGTH_STD * draw)
    return frame + sigma * rng.normal("image_noise", frame.shape)

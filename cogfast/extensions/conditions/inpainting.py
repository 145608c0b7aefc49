"""The inputs of CogVideoX-Fun's inpainting models: a mask and a masked video.

A mask is 1 where the video is to be made. Source: VideoX-Fun's scripts/cogvideox_fun/train.py and
videox_fun/data/utils.py (`get_random_mask`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.diffusion.noise_schedule import LOG_STRENGTH_MEAN, LOG_STRENGTH_STD

MASKED = -1.0  # value of masked pixels
SAMPLING_STRENGTH = 0.0563  # of the noise on the masked video in VideoX-Fun's pipeline
_DROPPED = 0.9  # fraction of wholly masked samples whose channels are zeros
# Probabilities of the kinds of masks of clips, and of single frames
_OF_CLIPS = {
    "box": 0.05,
    "all": 0.2,
    "after the first frames": 0.2,
    "between the ends": 0.2,
    "box in a range of frames": 0.05,
    "noise": 0.05,
    "boxes in some frames": 0.05,
    "ellipse in the first frame": 0.1,
    "circle in the first frame": 0.05,
    "some frames": 0.05,
}
_OF_IMAGES = {
    "box": 0.2,
    "all": 0.7,
    "ellipse in the first frame": 0.05,
    "circle in the first frame": 0.05,
}


def random_masks(frames: int, height: int, width: int, rng: SlotRandom) -> Tensor:
    """Draw a mask for each sample, uint8 [B, 1, F, H, W] on rng's device, of VideoX-Fun's ten kinds."""
    shape = len(rng.slots), 1, frames, height, width
    masks = torch.zeros(shape, dtype=torch.uint8, device=rng.device)
    shares = _OF_CLIPS if frames > 1 else _OF_IMAGES
    for mask, slot, generator in zip(masks, rng.slots, rng.generators("mask"), strict=True):
        drawn = torch.multinomial(torch.tensor(list(shares.values())), 1, generator=generator)
        kind = list(shares)[int(drawn)]
        if kind == "noise":
            # Drawn on the device: a mask of a clip is too large to copy in each step.
            own = torch.Generator(rng.device)
            own.manual_seed(random_bits(rng.seed, rng.step, slot, "mask_noise"))
            mask.random_(0, 2, generator=own)
        else:
            _fill(mask[0], kind, generator)
    return masks


def _fill(mask: Tensor, kind: str, generator: torch.Generator) -> None:
    """Write ones into a mask of zeros [F, H, W]. generator: on the CPU."""
    # From low to high - 1; low if there is none
    draw = lambda low, high: int(torch.randint(low, max(high, low + 1), (), generator=generator))
    frames, height, width = mask.shape
    if kind == "all":
        mask.fill_(1)
    elif kind == "after the first frames":
        mask[draw(1, 5) :] = 1
    elif kind == "between the ends":
        kept = draw(1, 5)
        mask[kept:-kept] = 1
    elif kind in ("box", "box in a range of frames"):
        rows, columns = _box(height, draw), _box(width, draw)
        ends = (0, frames) if kind == "box" else (draw(0, frames // 2), draw(frames // 2, frames))
        mask[slice(*ends), rows, columns] = 1
    elif kind == "boxes in some frames":
        count = draw(1, max(frames // 2, 1) + 1)
        chosen = torch.randperm(frames, generator=generator)[:count]
        for i in chosen.tolist():  # sync: none, drawn on the CPU
            rows, columns = draw(1, height // 4 + 1), draw(1, width // 4 + 1)
            top, left = draw(0, height - rows + 1), draw(0, width - columns + 1)
            mask[i, top : top + rows, left : left + columns] = 1
    elif kind == "some frames":
        for frame in mask:
            frame.fill_(draw(0, 2))
    else:
        middle, side = (draw(0, height), draw(0, width)), min(height, width)
        radii = [draw(side // 8, side // 4)] * 2
        if kind.startswith("ellipse"):
            radii[1] = draw(side // 8, side // 4)
        away = lambda n, m, r: ((torch.arange(n, device=mask.device) - m) / max(r, 1)) ** 2
        down, across = map(away, (height, width), middle, radii)
        mask[0] = down[:, None] + across < 1


def _box(size: int, draw: Callable[[int, int], int]) -> slice:
    """Draw the rows or columns of a box: a quarter to three quarters of `size`, cut at the borders."""
    middle, half = draw(0, size), draw(size // 4, size // 4 * 3) // 2
    return slice(max(middle - half, 0), min(middle + half, size))


def masked_pixels(pixels: Tensor, masks: Tensor) -> Tensor:
    """Return clips [B, 3, F, H, W] in [-1, 1] with -1 where masks [B, 1, F, H, W] are 1."""
    return pixels.masked_fill(masks.bool(), MASKED)


def noised_masked_pixels(pixels: Tensor, rng: SlotRandom, strength: float | None = None) -> Tensor:
    """Add noise to a masked clip where it is not -1. strength: None draws one per sample, as training does."""
    noise, factor = rng.normal("masked_noise", pixels.shape), strength
    if factor is None:
        draw = rng.normal("masked_noise_strength", (len(pixels), 1, 1, 1, 1))
        factor = torch.exp(LOG_STRENGTH_MEAN + LOG_STRENGTH_STD * draw)
    return pixels + (noise * factor).masked_fill(pixels == MASKED, 0)


def mask_channel(masks: Tensor, frames: int, height: int, width: int) -> Tensor:
    """Return 1 - masks on the latent grid, float32 [B, 1, T, h, w]: the first frame apart, as in the latents."""
    known = 1 - masks.float()
    resized = lambda part, number: F.interpolate(part, (number, height, width), mode="trilinear")
    first = resized(known[:, :, :1], 1)
    return first if frames == 1 else torch.cat([first, resized(known[:, :, 1:], frames - 1)], dim=2)


def drop_wholly_masked(inputs: Tensor, masks: Tensor, rng: SlotRandom) -> Tensor:
    """Replace the channels of most samples whose clip is masked as a whole by zeros, as VideoX-Fun does.

    inputs: [B, C', T, h, w].
    """
    is_drawn = (rng.uniform("wholly_masked") < _DROPPED).to(masks.device, non_blocking=True)
    is_whole = masks.flatten(1).amin(dim=1) == 1
    return inputs.masked_fill((is_whole & is_drawn).view(-1, 1, 1, 1, 1), 0)

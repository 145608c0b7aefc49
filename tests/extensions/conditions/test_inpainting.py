"""The inputs of inpainting models against the rules of VideoX-Fun, written out by hand."""

import pytest
import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.conditions.inpainting import mask_channel, random_masks
from tests.support.refusals import assert_refused
from tests.train.test_encode import DEEP, FLAT, RNG, SCALE, clips, encoder, only, pooled

CONDITIONS = {"conditions": ("mask", "masked_video")}


def channel_by_hand(mask: Tensor) -> Tensor:
    """Resize 1 - mask [F, H, W] by 8 in rows and columns and 4 in time, but for the first frame.

    Linear interpolation at the middle of an even number of values is the mean of the two in the middle.
    """
    known = 1 - mask.double()
    rows = (known[:, 3::8] + known[:, 4::8]) / 2
    both = (rows[:, :, 3::8] + rows[:, :, 4::8]) / 2
    return torch.cat([both[:1], (both[2::4] + both[3::4]) / 2])


def test_the_channel_is_known_area_on_the_latent_grid() -> None:
    masks = (torch.rand(2, 1, 9, 16, 24, generator=torch.Generator().manual_seed(1)) > 0.4).byte()
    found = mask_channel(masks, 3, 2, 3)
    for mask, channel in zip(masks, found, strict=True):
        torch.testing.assert_close(channel[0].double(), channel_by_hand(mask[0]))
    assert mask_channel(masks[:, :, :1], 1, 2, 3).shape == (2, 1, 1, 2, 3)


@pytest.mark.parametrize("patch", [FLAT, DEEP], ids=["1.0", "1.5"])
def test_a_given_mask_and_video(patch) -> None:
    batch, built = clips(), encoder(std=None, patch=patch, **CONDITIONS)
    masks = torch.zeros(4, 9, 1, 16, 16, dtype=torch.uint8)
    for i in range(4):
        masks[i, i:, :, 4 * i :, :9] = 1
    found = built(batch | {"mask": masks}, RNG)[1].condition_latents
    assert found.shape[1] == 4
    pixels = batch["mp4"].where(masks == 0, torch.tensor(-1.0)).transpose(1, 2)
    expected = [
        SCALE * pooled(pixels),
        SCALE * torch.stack([channel_by_hand(m[:, 0]) for m in masks]),
    ]
    for channels, wanted in zip((found[:, 1:], found[:, 0]), expected, strict=True):
        if patch is DEEP:  # one frame more in front, as the clip has
            wanted = torch.cat([wanted[..., :1, :, :], wanted], dim=-3)
        torch.testing.assert_close(channels, wanted.float(), rtol=0, atol=1e-6)
    # Sampling takes the same, without draws.
    sampled = built.encode_masked(batch["mp4"].transpose(1, 2), masks.transpose(1, 2), RNG)
    assert torch.equal(sampled, found)


def test_noise_is_added_where_the_video_is_not_black() -> None:
    batch = clips()
    masks = torch.zeros(4, 9, 1, 16, 16, dtype=torch.uint8)
    masks[:, 3:] = 1
    batch["mask"] = masks
    plain = encoder(std=None, **CONDITIONS)(batch, RNG)[1].condition_latents
    noisy = encoder(std=None, masked_video_noise=True, **CONDITIONS)(batch, RNG)[
        1
    ].condition_latents
    assert torch.equal(noisy[:, 0], plain[:, 0])
    assert torch.equal(noisy[:, 1:, 1:], plain[:, 1:, 1:])  # masked frames
    draw = RNG.normal("masked_noise_strength", (4, 1, 1, 1, 1))
    noise = RNG.normal("masked_noise", (4, 3, 9, 16, 16)) * torch.exp(0.5 * draw - 3)
    expected = SCALE * pooled(noise[:, :, :1])
    torch.testing.assert_close(noisy[:, 1:, :1] - plain[:, 1:, :1], expected, rtol=0, atol=1e-6)


def test_most_wholly_masked_samples_have_zeros() -> None:
    built, batch = encoder(**CONDITIONS), clips(1, 1)
    batch["mask"] = torch.ones(1, 1, 1, 16, 16, dtype=torch.uint8)
    zeros = sum(
        bool((built(batch, SlotRandom(1, step, [0], 1))[1].condition_latents == 0).all())
        for step in range(400)
    )
    assert 340 <= zeros <= 380  # 0.9 of 400, three deviations


def test_kinds_of_masks_have_videox_funs_shares() -> None:
    rng = SlotRandom(7, 0, range(1500), 1500)
    masks = random_masks(9, 16, 16, rng)[:, 0]
    assert set(masks.unique().tolist()) <= {0, 1}
    whole = masks.flatten(2).float().mean(dim=2)  # [n, F]: the masked share of each frame
    is_frames = ((whole == 0) | (whole == 1)).all(dim=1)
    steps = (whole[:, 1:] - whole[:, :-1]).abs()
    counts = {
        "all": (whole == 1).all(dim=1),
        "after": is_frames & (whole[:, 0] == 0) & (whole[:, -1] == 1) & (steps.sum(dim=1) == 1),
        "between": is_frames & (whole[:, 0] == 0) & (whole[:, -1] == 0) & (steps.sum(dim=1) == 2),
        "first frame": (whole[:, 1:] == 0).all(dim=1) & ~is_frames,
        "box": (masks == masks[:, :1]).flatten(1).all(dim=1) & ~is_frames,
    }
    shares = {name: found.float().mean().item() for name, found in counts.items()}
    # An ellipse may be empty at this size, and the last of the ten kinds may look like another one.
    expected = {"all": 0.2, "after": 0.2, "between": 0.2, "first frame": 0.15, "box": 0.05}
    for name, share in expected.items():
        assert abs(shares[name] - share) < 0.035, (name, shares)
    still = random_masks(1, 16, 16, rng)[:, 0]
    assert abs((still == 1).flatten(1).all(dim=1).float().mean() - 0.7) < 0.04


def test_drawn_masks_depend_on_the_slot_alone() -> None:
    built, batch = encoder(**CONDITIONS), clips()
    together = built(batch, RNG)[1].condition_latents
    for i in range(4):
        alone = built(only(batch, i), SlotRandom(3, 5, [i], 4))[1].condition_latents
        assert torch.equal(alone[0], together[i])
    other = built(batch, SlotRandom(3, 6, [0, 1, 2, 3], 4))[1].condition_latents
    assert not torch.equal(other, together)


def test_latents_alone_are_refused() -> None:
    batch = {k: v for k, v in clips().items() if k != "mp4"} | {
        "encoded_videos": torch.zeros(4, 3, 3, 2, 2)
    }
    line = "has masked_video, but the batch has latents; use a data set"
    assert_refused(lambda: encoder(**CONDITIONS)(batch, RNG), line)

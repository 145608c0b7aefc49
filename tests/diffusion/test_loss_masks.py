"""Weights of the error by masks, against loops over pixels, and what they do to the loss."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cogfast.core.shapes import PatchSize
from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.loss import VideoDiffusionLoss, mask_weights
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.diffusion.timestep_sampling import DiscreteSampling

FLAT, DEEP = PatchSize(1, 2, 2), PatchSize(2, 2, 2)
OUTSIDE = 0.1


def loss(masked: float | None = OUTSIDE, **options) -> VideoDiffusionLoss:
    return VideoDiffusionLoss(
        DiscreteSampling(ZeroSNRDDPMDiscretization()), masked=masked, **options
    )


def masks(*shape: int) -> Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))
    mask = (drawn < 0.4).to(torch.uint8)
    mask[0] = 1  # the mask of a sample that has none
    return mask


@pytest.mark.parametrize("num_frames", [1, 9], ids=["picture", "clip"])
@pytest.mark.parametrize("patch", [FLAT, DEEP], ids=["1.0", "1.5"])
def test_weights_are_means_over_the_pixels_of_a_latent(patch: PatchSize, num_frames: int) -> None:
    mask = masks(2, num_frames, 1, 16, 24)
    frames = [range(0, 1), *(range(i, i + 4) for i in range(1, num_frames, 4))]
    expected = torch.zeros(2, 1, len(frames), 2, 3, dtype=torch.float64)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in expected.shape)).tolist():
        sample, _, t, row, column = place
        pixels = [
            OUTSIDE + (1 - OUTSIDE) * mask[sample, f, 0, 8 * row + i, 8 * column + j].item()
            for f in frames[t]
            for i in range(8)
            for j in range(8)
        ]
        expected[tuple(place)] = sum(pixels) / len(pixels)
    if patch.t == 2:  # the copy of the first frame that latents of CogVideoX 1.5 get, too
        expected = torch.cat([expected[:, :, :1], expected], dim=2)
    found = mask_weights(loss(), {"mask": mask}, patch)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)
    assert (found[0] == 1).all(), "bit for bit"
    assert torch.equal(found, mask_weights(loss(), {"mask": mask.bool()}, patch))


def test_weights_of_one_everywhere_change_no_bit() -> None:
    mask = masks(2, 9, 1, 16, 24)
    latents, estimate = torch.randn(2, 2, 8, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    plain = loss(None)
    noised = plain.add_noise(latents, SlotRandom(0, 0, [0, 1], 2))
    assert mask_weights(plain, {"mask": mask}, FLAT) is None
    ones = mask_weights(loss(1.0), {"mask": mask}, FLAT)
    found = loss(1.0).of(estimate, replace(noised, weights=ones))
    assert torch.equal(found, plain.of(estimate, noised))


@pytest.mark.parametrize("fixed_frames", [0, 1])
@pytest.mark.parametrize("kind", ["l2", "l1"])
def test_the_loss_is_the_mean_of_weighted_errors(kind: str, fixed_frames: int) -> None:
    mask = masks(2, 9, 1, 16, 24)
    latents, estimate = torch.randn(2, 2, 8, 3, 2, 3, generator=torch.Generator().manual_seed(0))
    made = loss(type=kind, fixed_frames=fixed_frames, prior_weight=0.25)
    noised = made.add_noise(latents, SlotRandom(0, 0, [0, 1], 2))
    weights = mask_weights(made, {"mask": mask}, FLAT)
    found = made.of(estimate, replace(noised, weights=weights))
    base = estimate.flip(0)
    of_prior = made.for_samples(noised, weights, base, torch.tensor([True, False]))
    without_mask = made.for_samples(noised, None, base, torch.tensor([True, False]))

    def by_hand(target: Tensor, weights: Tensor, factors: list[float]) -> Tensor:
        error = (estimate.double() - target).abs() ** (2 if kind == "l2" else 1)
        error = (error * weights.double())[:, :, fixed_frames:]
        level = 1 / (1 - noised.alpha_sqrt.double() ** 2)
        return level * error.flatten(1).mean(dim=1) * torch.tensor(factors).double()

    close = lambda a, b: torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=0)
    close(found, by_hand(latents, weights, [1, 1]))
    target = torch.stack([base[0], latents[1]])
    close(made.of(estimate, of_prior), by_hand(target, weights, [0.25, 1]))
    ones = torch.ones_like(weights)
    close(made.of(estimate, without_mask), by_hand(target, ones, [0.25, 1]))


def test_a_batch_without_masks_is_named() -> None:
    with pytest.raises(ValueError, match=r"masked=0.1, but the batch has no mask; use a data set"):
        mask_weights(loss(), {}, FLAT)

"""The condition `frames`: given frames in their places, against numbers written out by hand."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.conditions.given_frames import GivenFrames
from tests.train.test_encode import DEEP, FLAT, RNG, SCALE, STD, clips, encoder, only, pooled


def given(kind: str, batch: dict | None = None, rng: SlotRandom = RNG, **options) -> Tensor:
    built = encoder(conditions=("frames",), given_frames=kind, **options)
    return built(batch or clips(), rng)[1].condition_latents


def noised(frames: Tensor) -> Tensor:
    """The frames [B, 3, P, H, W] with the noise that the first frame of image-to-video gets."""
    strength = torch.exp(0.5 * RNG.normal("image_noise_strength", (4, 1, 1, 1, 1)) - 3)
    return frames + strength * RNG.normal("image_noise", frames.shape)


def scaled(mean: Tensor) -> Tensor:
    return SCALE * (mean + STD * RNG.normal("image_first_stage", mean.shape))


def test_the_first_frame_is_the_image_bit_for_bit() -> None:
    image = encoder(conditions=("image",))(clips(), RNG)[1].condition_latents
    assert torch.equal(given("first"), image)


@pytest.mark.parametrize(
    ("kind", "frames", "places"), [("last", [8], [2]), ("first_last", [0, 8], [0, 2])]
)
@pytest.mark.parametrize("patch", [FLAT, DEEP], ids=["1.0", "1.5"])
def test_frames_alone_are_in_their_places(kind: str, frames: list, places: list, patch) -> None:
    pixels = clips()["mp4"].transpose(1, 2)[:, :, frames]
    # Each is a clip of one frame for the first stage.
    each = [pooled(part) for part in noised(pixels).split(1, dim=2)]
    expected = torch.zeros(4, 3, 3, 2, 2)
    expected[:, :, places] = scaled(torch.cat(each, dim=2))
    if patch is DEEP:
        expected = torch.cat([expected[:, :, :1], expected], dim=2)
    torch.testing.assert_close(given(kind, patch=patch), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "number"), [("prefix:5", 5), ("all", 9)])
def test_a_prefix_is_a_clip(kind: str, number: int) -> None:
    mean = pooled(noised(clips()["mp4"].transpose(1, 2)[:, :, :number]))
    found = given(kind)
    torch.testing.assert_close(found[:, :, : mean.shape[2]], scaled(mean), rtol=0, atol=1e-6)
    assert (found[:, :, mean.shape[2] :] == 0).all()


def test_random_frames_are_some_of_all_and_draws_of_the_slot() -> None:
    pictures = noised(clips()["mp4"].transpose(1, 2)[:, :, ::4]).split(1, dim=2)
    every = scaled(torch.cat([pooled(picture) for picture in pictures], dim=2))
    counts = torch.zeros(4)
    for step in range(60):
        found = given("random", rng=SlotRandom(3, step, [0, 1, 2, 3], 4), std=None)
        is_there = (found != 0).any(dim=1).flatten(2).any(dim=2)  # [B, T]
        for number in is_there.sum(dim=1):
            counts[number] += 1
    assert counts[0] == 0 and (counts[1:] > 50).all()  # of 240, a third each
    found = given("random")
    is_there = (found != 0).any(dim=1, keepdim=True).flatten(3).any(dim=3)[..., None, None]
    torch.testing.assert_close(found, every * is_there, rtol=0, atol=1e-6)
    for i in range(4):
        alone = given("random", only(clips(), i), SlotRandom(3, 5, [i], 4))
        assert torch.equal(alone[0], found[i])


def test_cached_frames_give_the_same_condition() -> None:
    batch = clips()
    for kind in ("first_last", "prefix:5", "random"):
        frames = GivenFrames.parse(kind).pixel_frames(9)
        cached = {
            "txt": batch["txt"],
            "latent_mean": pooled(batch["mp4"].transpose(1, 2)),
            "given_frames": batch["mp4"][:, frames],
        }
        assert torch.equal(given(kind, cached), given(kind)), kind
    with pytest.raises(ValueError, match="has frames, but the batch has neither pixels nor"):
        given("first", {k: v for k, v in cached.items() if k != "given_frames"})


class Indexed(TorchDispatchMode):
    """Fails at an index by a tensor, which a GPU waits for if it comes from the CPU."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten.index.Tensor
        return op(*args, **(kwargs or {}))


def test_given_frames_are_taken_without_a_wait() -> None:
    for kind in ("first_last", "prefix:5", "random"):
        with Indexed():
            given(kind)

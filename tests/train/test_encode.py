"""The latents, text and image latents of a batch, against numbers written out by hand."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cogfast.core.shapes import PatchSize
from cogfast.core.slot_random import SlotRandom, random_bits
from cogfast.model.autoencoder import Moments
from cogfast.model.keys import ModelKeys
from cogfast.train.encode import Encoder

SCALE = 0.7
STD = 0.25
FLAT, DEEP = PatchSize(1, 2, 2), PatchSize(2, 2, 2)  # CogVideoX 1.0, 1.5
MODEL = ModelKeys(scale_factor=SCALE)
RNG = SlotRandom(seed=3, step=5, slots=[0, 1, 2, 3], num_slots=4)


class Pooling(nn.Module):
    """A first stage that averages: every fourth frame, blocks of 8x8 pixels."""

    def __init__(self, std: float | None = STD) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.std, self.calls = std, []

    def encode(self, video: Tensor) -> Moments:
        self.calls.append(video.shape[0])
        mean = pooled(video)
        if self.std is None:
            return Moments(mean, None)
        return Moments(mean, torch.full_like(mean, 2 * math.log(self.std), dtype=torch.float32))

    def decode(self, latents: Tensor) -> Tensor:
        self.calls.append(latents.shape[0])
        frames = latents.repeat_interleave(4, dim=2)[:, :, 3:]
        return F.interpolate(frames, scale_factor=(1, 8, 8))


def pooled(video: Tensor) -> Tensor:
    return video[:, :, ::4].unflatten(4, (-1, 8)).unflatten(3, (-1, 8)).mean(dim=(4, 6))


class Lengths(nn.Module):
    """A text encoder: [B, 2, 3] filled with the captions' lengths."""

    def forward(self, captions: list[str]) -> Tensor:
        return torch.tensor([len(c) for c in captions]).float().view(-1, 1, 1).expand(-1, 2, 3)


def encoder(std: float | None = STD, patch=FLAT, choose=lambda *_: None, text_dropout=0.0, **model):
    given = MODEL.changed(**model), patch
    shared = {"before_clips": choose, "text_dropout": text_dropout}
    return Encoder(lambda: Pooling(std), Lengths, *given, **shared)


def clips(num_frames: int = 9, num_clips: int = 4) -> dict:
    generator = torch.Generator().manual_seed(0)
    return {
        "mp4": torch.rand(num_clips, num_frames, 3, 16, 16, generator=generator) * 2 - 1,
        "txt": ["a" * (i + 1) for i in range(num_clips)],
    }


def only(batch: dict, i: int) -> dict:
    return {key: value[i : i + 1] for key, value in batch.items()}


def test_latents_are_the_scaled_sample() -> None:
    batch = clips()
    latents, conditioning = encoder()(batch, RNG)
    mean = pooled(batch["mp4"].transpose(1, 2))
    noise = RNG.normal("first_stage", mean.shape)
    torch.testing.assert_close(latents, SCALE * (mean + STD * noise), rtol=0, atol=1e-6)
    assert conditioning.text[:, 0, 0].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert conditioning.condition_latents is None


def test_first_stage_in_bf16_leaves_the_sample_in_float32() -> None:
    stage = Pooling().to(torch.bfloat16)
    built = Encoder(lambda: stage, Lengths, MODEL, FLAT)
    batch = clips()
    latents, _ = built(batch, RNG)
    mean = pooled(batch["mp4"].transpose(1, 2).bfloat16()).float()
    noise = RNG.normal("first_stage", mean.shape)
    torch.testing.assert_close(latents, SCALE * (mean + STD * noise), rtol=0, atol=1e-6)
    assert built.decode(latents, 9).dtype == torch.float32


@pytest.mark.parametrize("at_a_time", [None, 1, 3], ids=["all", "one", "three"])
def test_samples_at_a_time_change_no_number(at_a_time: int | None) -> None:
    whole = encoder(conditions=("image",))
    split = encoder(conditions=("image",), en_and_decode_n_samples_a_time=at_a_time)
    expected, found = whole(clips(), RNG), split(clips(), RNG)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1].condition_latents, expected[1].condition_latents)
    parts = {None: [4], 1: [1] * 4, 3: [3, 1]}[at_a_time]
    assert split.first_stage.calls == parts * 2  # the clips, the first frames
    assert torch.equal(split.decode(found[0], 9), whole.decode(found[0], 9))
    assert split.first_stage.calls == parts * 3


def test_draws_do_not_depend_on_the_batch() -> None:
    """Noise, image noise and both dropouts of a slot, alone and in a batch."""
    built = encoder(text_dropout=0.5, conditions=("image",), noised_image_dropout=0.5)
    batch = clips()
    latents, conditioning = built(batch, RNG)
    for i in range(4):
        alone = SlotRandom(seed=3, step=5, slots=[i], num_slots=4)
        one, given = built(only(batch, i), alone)
        assert torch.equal(one[0], latents[i])
        assert torch.equal(given.text[0], conditioning.text[i])
        assert torch.equal(given.condition_latents[0], conditioning.condition_latents[i])


def test_dropouts_follow_their_draws_and_evaluation_has_none() -> None:
    built = encoder(text_dropout=0.5, conditions=("image",), noised_image_dropout=0.5)
    _, conditioning = built(clips(), RNG)
    no_text, no_image = (RNG.uniform(f"{kind}_dropout") < 0.5 for kind in ("text", "image"))
    assert no_text.any() and not no_text.all()
    assert no_image.any() and not no_image.all()
    assert ((conditioning.text == 0).flatten(1).all(dim=1) == no_text).all()
    assert ((conditioning.condition_latents == 0).flatten(1).all(dim=1) == no_image).all()
    _, conditioning = built(clips(), RNG, has_dropout=False)
    assert (conditioning.text != 0).all()
    assert (conditioning.condition_latents[:, :, 0] != 0).all()


def test_a_dropped_caption_leaves_no_infinity_or_nan() -> None:
    """T5 may overflow on a caption; zero times infinity would be NaN."""
    built = encoder(text_dropout=1.0)
    batch = {**clips(), "prompt_embedding": torch.full((4, 2, 3), float("inf"))}
    assert torch.equal(built(batch, RNG)[1].text, torch.zeros(4, 2, 3))


@pytest.mark.parametrize("on_all_frames", [False, True])
def test_image_latents_are_the_noised_first_frame(on_all_frames: bool) -> None:
    batch = clips()
    built = encoder(conditions=("image",), noised_image_all_concat=on_all_frames)
    _, conditioning = built(batch, RNG)
    frame = batch["mp4"][:, :1].transpose(1, 2)
    sigma = (-3.0 + 0.5 * RNG.normal("image_noise_strength", (4, 1, 1, 1, 1))).exp()
    frame = frame + sigma * RNG.normal("image_noise", frame.shape)
    noise = RNG.normal("image_first_stage", (4, 3, 1, 2, 2))
    image = SCALE * (pooled(frame) + STD * noise)
    behind = image if on_all_frames else torch.zeros_like(image)
    wanted = torch.cat([image, behind, behind], dim=2)
    torch.testing.assert_close(conditioning.condition_latents, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["trainer", "pretrained", "pipeline"])
def test_every_source_of_image_latents_gets_their_scale(name: str) -> None:
    """Pixels, pictures, latents of the data and those of a latent cache; clips keep theirs."""
    sigma = (-3.0 + 0.5 * RNG.normal("image_noise_strength", (4, 1, 1, 1, 1))).exp()
    batch = clips()
    frame = batch["mp4"][:, :1].transpose(1, 2)
    frame = frame + sigma * RNG.normal("image_noise", frame.shape)
    z = pooled(frame) + STD * RNG.normal("image_first_stage", (4, 3, 1, 2, 2))
    encoded = {
        "encoded_videos": torch.randn(4, 3, 3, 2, 2),
        "prompt_embedding": torch.randn(4, 2, 3),
    }
    cached = {
        "noised_image_mean": pooled(frame)[:, None],  # as `encode_noised` keeps it: not scaled
        "noised_image_logvar": torch.full((4, 1, 3, 1, 2, 2), 2 * math.log(STD)),
    }
    scale = {"trainer": SCALE, "pretrained": 1.0, "pipeline": 1 / SCALE}[name]
    built = encoder(conditions=("image",), image_latent_scale=name)
    for given in (
        batch,
        encoded | {"images": batch["mp4"][:, 0]},
        encoded | {"image_latents": SCALE * z},
        encoded | cached,
    ):
        latents, conditioning = built(given, RNG)
        found = conditioning.condition_latents[:, :, :1]
        torch.testing.assert_close(found, scale * z, rtol=0, atol=1e-6)
        plain, _ = encoder(conditions=("image",))(given, RNG)
        assert torch.equal(latents, plain)


@pytest.mark.parametrize("name", ["image", "frames"])
def test_a_picture_is_not_its_own_condition(name: str) -> None:
    built = encoder(conditions=(name,), given_frames="first" if name == "frames" else None)
    for num_frames in (1, 9):
        latents, conditioning = built(clips(num_frames), RNG)
        assert bool(conditioning.condition_latents.any()) == (num_frames == 9)
        assert latents.any()


def noised_by_hand(image: Tensor, key: str, variant: int) -> Tensor:
    """The frame [3, 1, H, W] of a cache's variant, of its key and its number alone."""

    def normal(purpose: str, *shape: int) -> Tensor:
        slot = random_bits(key, variant)
        generator = torch.Generator().manual_seed(random_bits(0, 0, slot, purpose))
        return torch.empty(*shape).normal_(generator=generator)

    sigma = math.exp(-3.0 + 0.5 * normal("image_noise_strength", 1).item())
    frame = (image.float() / 127.5 - 1)[:, None]
    return frame + sigma * normal("image_noise", *frame.shape)


@pytest.mark.parametrize("std", [STD, None], ids=["posterior", "deterministic"])
def test_noised_images_are_those_of_their_keys(std: float | None) -> None:
    images = torch.randint(0, 256, (3, 3, 16, 16), dtype=torch.uint8)
    keys = ["one", "two", "one"]
    moments = encoder(std).encode_noised(images, keys, 4)
    pairs = zip(images, keys, strict=True)
    frames = [noised_by_hand(*pair, variant) for pair in pairs for variant in range(4)]
    wanted = pooled(torch.stack(frames)).unflatten(0, (3, 4))  # [B, N, C, 1, h, w]
    torch.testing.assert_close(moments.mean, wanted, rtol=0, atol=1e-6)
    assert (moments.logvar is None) == (std is None)
    assert std is None or moments.logvar.shape == moments.mean.shape
    # Alone, and fewer of them: the same.
    alone = encoder(std).encode_noised(images[1:2], keys[1:2], 2)
    assert torch.equal(alone.mean[0], moments.mean[1, :2])


@pytest.mark.parametrize("std", [STD, None], ids=["posterior", "deterministic"])
def test_each_step_draws_one_of_the_noised_images(std: float | None) -> None:
    """The slot alone decides; each image comes equally often, with new noise, and no first stage."""
    mean = torch.randn(4, 3, 2, 1, 6, 6)  # [B, N, C, 1, h, w]
    batch = {
        "encoded_videos": torch.zeros(4, 2, 3, 6, 6),
        "prompt_embedding": torch.zeros(4, 2, 3),
        "noised_image_mean": mean,
    }
    if std is not None:
        batch["noised_image_logvar"] = torch.full_like(mean, 2 * math.log(std))
    model = MODEL.changed(conditions=("image",), noised_image_dropout=0.2)
    built = Encoder(pytest.fail, pytest.fail, model, DEEP)
    counts, num_steps = torch.zeros(4, 3), 300
    for step in range(num_steps):
        rng = SlotRandom(3, step, [0, 1, 2, 3], 4)
        image = built(batch, rng)[1].condition_latents
        assert image.shape[2] == 4 and not image[:, :, 1:].any()  # padded for 1.5
        noise = rng.normal("image_first_stage", (4, 2, 1, 6, 6))
        wanted = SCALE * (mean + (std or 0) * noise[:, None])
        errors = (image[:, None, :, :1] - wanted).abs().flatten(2).amax(dim=2)
        is_drawn = errors < 1e-5  # [B, N]
        is_dropped = rng.uniform("image_dropout") < 0.2
        assert torch.equal(is_drawn.sum(dim=1) == 0, is_dropped)
        assert not image[is_dropped].any()
        counts += is_drawn
        if step < 5:
            for half in ([0, 1], [2, 3]):  # as two ranks have them
                own = {key: value[half] for key, value in batch.items()}
                found = built(own, SlotRandom(3, step, half, 4))[1].condition_latents
                assert torch.equal(found, image[half])
    # 80 of each are expected, give or take 8: five of these away is one in a million.
    assert (counts - num_steps * 0.8 / 3).abs().max() < 40
    _, conditioning = built(batch, RNG, has_dropout=False)
    assert (conditioning.condition_latents[:, :, 0] != 0).all()


def test_padding_of_1_5_copies_the_first_latent_frame() -> None:
    """17 frames are 5 latent ones; two to a token, 6 are needed: upstream puts the copy in front,
    the image stays beside the first."""
    batch = clips(num_frames=17)
    built = encoder(patch=DEEP, conditions=("image",))
    latents, conditioning = built(batch, RNG)
    plain, _ = encoder(patch=FLAT)(batch, RNG)
    assert latents.shape[2] == 6
    assert torch.equal(latents[:, :, 1:], plain)
    assert torch.equal(latents[:, :, 0], plain[:, :, 0])
    assert (conditioning.condition_latents[:, :, 0] != 0).all()
    assert (conditioning.condition_latents[:, :, 1:] == 0).all()


def test_decoding_drops_the_padding() -> None:
    """Latents 0..5, of which the first is padding, decode to 17 frames of 1, 2, 2, 2, 2, 3, ..."""
    latents = SCALE * torch.arange(6.0).view(1, 1, 6, 1, 1).expand(1, 3, 6, 2, 2)
    frames = encoder(patch=DEEP).decode(latents, 17)
    assert frames.shape == (1, 3, 17, 16, 16)
    shown = frames[0, 0, :, 0, 0]
    wanted = torch.tensor([1.0] + [n for n in (2.0, 3.0, 4.0, 5.0) for _ in range(4)])
    torch.testing.assert_close(shown, wanted)


def test_latent_input_is_scaled_and_brings_its_own_image() -> None:
    """SAT's latent_input: the batch's mp4 holds unscaled latents, frames first."""
    raw = torch.randn(4, 3, 2, 6, 6)
    built = encoder(latent_input=True)
    latents, _ = built({"mp4": raw, "txt": ["a"] * 4}, RNG)
    assert torch.equal(latents, SCALE * raw.transpose(1, 2))
    assert built.num_frames({"mp4": raw}) == 9

    built = encoder(latent_input=True, conditions=("image",))
    with pytest.raises(ValueError, match="neither pixels nor images nor image_latents"):
        built({"mp4": raw, "txt": ["a"] * 4}, RNG)
    image = torch.randn(4, 2, 1, 6, 6)
    _, conditioning = built({"mp4": raw, "txt": ["a"] * 4, "image_latents": image}, RNG)
    assert torch.equal(conditioning.condition_latents[:, :, :1], image)
    assert (conditioning.condition_latents[:, :, 1:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_encoded_batches_may_bring_images(dtype: torch.dtype) -> None:
    pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
    unit = pixels.float() / 127.5 - 1
    batch = {
        "encoded_videos": torch.randn(4, 3, 3, 2, 2),
        "prompt_embedding": torch.randn(4, 2, 3),
        "images": pixels if dtype == torch.uint8 else unit,
    }
    built = encoder(std=None, conditions=("image",))
    latents, conditioning = built(batch, RNG)
    assert torch.equal(latents, batch["encoded_videos"])
    assert torch.equal(conditioning.text, batch["prompt_embedding"])
    sigma = (-3.0 + 0.5 * RNG.normal("image_noise_strength", (4, 1, 1, 1, 1))).exp()
    frame = unit[:, :, None] + sigma * RNG.normal("image_noise", (4, 3, 1, 16, 16))
    torch.testing.assert_close(conditioning.condition_latents[:, :, :1], SCALE * pooled(frame))
    assert built.num_frames(batch) == 9


def test_an_encoder_that_a_batch_needs_and_the_config_lacks_is_named() -> None:
    built = Encoder(lambda: None, lambda: None, MODEL, FLAT)
    with pytest.raises(ValueError, match="model.first_stage_config has no autoencoder"):
        built({**clips(), "prompt_embedding": torch.zeros(4, 2, 3)}, RNG)
    latents = torch.zeros(1, 3, 3, 2, 2)
    with pytest.raises(ValueError, match="model.conditioner_config has no text encoder"):
        built({"encoded_videos": latents, "txt": ["a"]}, RNG)

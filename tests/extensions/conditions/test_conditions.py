"""Control videos: how they are read and encoded, what is refused, and the loss against diffusers' network."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from PIL import Image
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.data.bad_samples import BadSample
from cogfast.data.buckets import in_buckets, survey
from cogfast.data.datasets import CaptionedVideos, VideoList, VideoManifest, VideoShards
from cogfast.data.video.clip import Bucket
from cogfast.diffusion.denoiser import Conditioning
from cogfast.extensions.cache.command import encode_clips
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import assemble_transformer
from cogfast.model.weights.identify import identify
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.pipelines import SIZE, Pipelines, write_control_pipeline
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run, datasets_of, diffusion_of
from tests.support.tiny_run import ROOT
from tests.support.video_files import constant_rate, decode_all, write_clip
from tests.train.test_encode import DEEP, FLAT, RNG, SCALE, STD, clips, encoder, only, pooled

FILES = [ROOT / "configs" / f"{name}.yaml" for name in ("cogvideox_5b", "sft")]
CLIP = {"video_size": list(SIZE), "fps": 8, "max_num_frames": 9}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two clips of 9 frames with controls, listed in every layout."""
    names = {"videos": "clip", "controls": "control"}
    for i in range(2):
        write_clip(tmp_path / f"clip{i}.mp4", constant_rate(9, 8), size=SIZE)
        options = {"crf": "30", "g": "12"}  # other pixels than the clip's
        write_clip(tmp_path / f"control{i}.mp4", constant_rate(9, 8), size=SIZE, options=options)
    for name, stem in names.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{stem}{i}.mp4\n" for i in range(2)))
    (tmp_path / "prompts.txt").write_text("first\nsecond\n")
    rows, members = [], {}
    for i, text in enumerate(("first", "second")):
        row = {"file_path": f"clip{i}.mp4", "control_file_path": f"control{i}.mp4"}
        rows.append(row | {"text": text, "type": "video"})
        members[f"{i}.mp4"] = (tmp_path / f"clip{i}.mp4").read_bytes()
        members[f"{i}.control.mp4"] = (tmp_path / f"control{i}.mp4").read_bytes()
        members[f"{i}.txt"] = text.encode()
    (tmp_path / "metadata.json").write_text(json.dumps(rows))  # as VideoX-Fun writes it
    _tar(tmp_path / "shards" / "0.tar", members)
    return tmp_path


def test_videos_of_evaluations_are_read_on_the_readers_stream(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A control repeats its last frame."""
    entered = []
    reading = lambda backend: nullcontext(entered.append(backend))
    monkeypatch.setattr("cogfast.data.datasets.on_readers_device", reading)
    data = VideoList(str(folder), **CLIP)
    for name in ("video", "control"):
        data.read_video(name, 1, Bucket(5, 16, 16))
    assert entered == ["auto", "auto"]
    longer = data.read_video("control", 0, Bucket(17, *SIZE))
    assert torch.equal(longer[:9], data[0]["control"])
    assert (longer[9:] == longer[8]).all()


def test_every_layout_reads_the_control_as_the_clip(folder: Path) -> None:
    expected = torch.from_numpy(decode_all(folder / "control1.mp4")).permute(0, 3, 1, 2)
    for data in (
        VideoList(str(folder), **CLIP),
        VideoManifest(str(folder / "metadata.json"), **CLIP),
        VideoShards([str(folder / "shards")], **CLIP),
    ):
        sample = data[1]
        assert torch.equal(sample["control"], expected), type(data).__name__
        assert not torch.equal(sample["control"], sample["video"])
        assert sample["txt"] == "second"
        assert not survey(data).reasons
        # At the size of an evaluation
        assert data.read_video("control", 1, Bucket(5, 16, 16)).shape == (5, 3, 16, 16)


SAME_LENGTH = "the clip 9 frames at 8 fps; give one of the same length"


@pytest.mark.parametrize(
    ("frames", "rate", "size", "reason"),
    [
        (17, 8, SIZE, f"has 17 frames at 8 fps, {SAME_LENGTH}"),
        (9, 12, SIZE, "has 9 frames at 12 fps, the clip"),
        (9, 8, (48, 48), "is 48x48, the clip 32x48; give one of the same shape"),
        (None, 8, SIZE, "is the clip itself; give a video that is made of it"),
        (0, 8, SIZE, "the file is empty"),
    ],
    ids=["length", "rate", "shape", "equal", "empty"],
)
def test_a_control_that_does_not_fit_is_named(
    frames: int | None, rate: float, size: tuple[int, int], reason: str, folder: Path
) -> None:
    control = folder / "control1.mp4"
    if frames is None:
        control.write_bytes((folder / "clip1.mp4").read_bytes())
    elif frames == 0:
        control.write_bytes(b"")
    else:
        write_clip(control, constant_rate(frames, rate), size=size)
    data = VideoList(str(folder), **CLIP)
    found = survey(data)
    assert list(found.reasons) == [1]
    assert found.reasons[1].startswith(f"its control {control} ") and reason in found.reasons[1]
    with pytest.raises(BadSample):  # also where its frames can be read
        in_buckets(data, found)[1]


def test_a_mask_has_the_shape_of_its_clip(folder: Path) -> None:
    Image.new("L", (96, 64)).save(folder / "large.png")
    Image.new("L", (48, 48)).save(folder / "square.png")
    (folder / "masks.txt").write_text("large.png\nsquare.png\n")
    (reason,) = survey(VideoList(str(folder), **CLIP)).reasons.values()
    assert reason.endswith("square.png is 48x48, the clip 32x48; give one of the same shape")


def test_other_frames_are_a_bad_sample(folder: Path) -> None:
    """Headers may be wrong: what is read decides."""
    write_clip(folder / "control0.mp4", constant_rate(18, 16), size=SIZE)
    with pytest.raises(BadSample, match=r"control0.mp4 has other frames than the clip"):
        VideoList(str(folder), **CLIP)[0]


def control_batch() -> dict[str, Tensor]:
    batch = clips()
    return batch | {"control": batch["mp4"].flip(1).contiguous()}


@pytest.mark.parametrize("patch", [FLAT, DEEP], ids=["1.0", "1.5"])
def test_conditions_are_in_their_order(patch) -> None:
    batch, options = control_batch(), {"patch": patch}
    found = encoder(conditions=("image", "control"), **options)(batch, RNG)[1].condition_latents
    image = encoder(conditions=("image",), **options)(batch, RNG)[1].condition_latents
    turned = encoder(conditions=("control", "image"), **options)(batch, RNG)[1].condition_latents
    assert torch.equal(found[:, :3], image)
    assert torch.equal(turned, found.roll(3, dims=1))
    mean = pooled(batch["control"].transpose(1, 2))
    noise = RNG.normal("control_first_stage", mean.shape)
    expected = SCALE * (mean + STD * noise)
    if patch is DEEP:  # one frame more in front, as the clip has
        expected = torch.cat([expected[:, :, :1], expected], dim=2)
    torch.testing.assert_close(found[:, 3:], expected, rtol=0, atol=1e-6)


def test_a_control_is_the_same_from_every_source_and_layout() -> None:
    batch, built = control_batch(), encoder(conditions=("control",))
    expected = built(batch, RNG)[1].condition_latents
    encoded = built.encode_batch(batch, RNG)
    assert "control" not in encoded
    assert torch.equal(built(encoded, RNG)[1].condition_latents, expected)
    moments = built.encode_moments(batch["control"].transpose(1, 2))
    cached = {k: v for k, v in batch.items() if k != "control"}
    cached |= {"control_mean": moments.mean, "control_logvar": moments.logvar}
    assert torch.equal(built(cached, RNG)[1].condition_latents, expected)
    for i in range(4):
        alone = SlotRandom(3, 5, [i], 4)
        found = built(only(batch, i), alone)[1].condition_latents
        assert torch.equal(found[0], expected[i])
    with pytest.raises(ValueError, match="model.conditions has control, but the batch has neither"):
        built(clips(), RNG)


def test_each_condition_has_its_own_dropout() -> None:
    batch = control_batch()
    rates = {"noised_image_dropout": 0.5, "condition_dropout": 0.5}
    built = encoder(conditions=("image", "control"), **rates)
    kept = built(batch, RNG, has_dropout=False)[1].condition_latents
    for step in range(8):
        rng = SlotRandom(3, step, [0, 1, 2, 3], 4)
        found = built(batch, rng)[1].condition_latents
        for part, name in ((slice(0, 3), "image_dropout"), (slice(3, 6), "control_dropout")):
            is_dropped = rng.uniform(name) < 0.5
            assert ((found[:, part] == 0).flatten(1).all(dim=1) == is_dropped).all()
    assert (kept != 0).flatten(1).any(dim=1).all()


@pytest.mark.parametrize("channels", [16, 17, 32], ids=["control", "inpainting", "two"])
def test_loss_and_gradients_are_those_of_diffusers_network(
    run: Run, channels: int, pipelines: Pipelines, tmp_path: Path
) -> None:
    control_model = write_control_pipeline(pipelines, "5b", tmp_path / "5b", 16 + channels)
    theirs = CogVideoXTransformer3DModel.from_pretrained(control_model / "transformer").train()
    theirs.norm_out.norm.eps = 1e-6  # SAT's; the class has 1e-5
    config: TransformerConfig = identify(open_source(control_model))
    assert (config.in_channels, config.out_channels) == (16 + channels, 16)
    ours = assemble_transformer(config)
    load_transformer(ours, str(control_model))
    draw = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    latents, text = draw(2, 16, 3, 4, 6), draw(2, 226, 32)
    control = draw(2, channels, 3, 4, 6).flip(0)
    text = text[..., : config.text_hidden_size]
    control.requires_grad_(True)
    diffusion = diffusion_of(run.of_files(*FILES).config())
    idx, noise = torch.tensor([30, 700]), draw(2, 16, 3, 4, 6) * 0.5
    given = Conditioning(text=text, condition_latents=control)
    loss = diffusion.loss.at(ours, diffusion.denoiser, latents, given, idx, noise)
    wanted = [control, ours.patch_embedding.weight]
    found = torch.autograd.grad(loss.sum(), wanted)

    # An independent loop in upstream's terms: the error of v.
    alpha = diffusion.denoiser.table.values[idx].view(-1, 1, 1, 1, 1)
    noised = alpha * latents + (1 - alpha**2).sqrt() * noise
    rotary = get_3d_rotary_pos_embed(64, ((0, 0), (2, 3)), (2, 3), 3)
    joined = torch.cat([noised, control], dim=1).transpose(1, 2)
    v = theirs(joined, text, idx, image_rotary_emb=rotary, return_dict=False)[0].transpose(1, 2)
    error = v - (alpha * noise - (1 - alpha**2).sqrt() * latents)
    expected_loss = error.square().flatten(1).mean(dim=1)
    expected = torch.autograd.grad(expected_loss.sum(), [control, theirs.patch_embed.proj.weight])
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for ours_of, theirs_of in zip(found, expected, strict=True):
        assert (ours_of.flatten() - theirs_of.flatten()).norm() < 1e-5 * theirs_of.norm()


@pytest.mark.parametrize("family", ["5b", "1.5_5b"])
def test_new_channels_begin_as_the_model_that_has_none(family: str, pipelines: Pipelines) -> None:
    folder = pipelines.path(family)
    base = identify(open_source(folder))
    plain, wide = assemble_transformer(base), assemble_transformer(replace(base, in_channels=32))
    load_transformer(plain, folder)
    line = "in_channels 16<...> in_channels 32"
    assert_refused(lambda: load_transformer(wide, folder), line)
    load_transformer(wide, folder, new_channels=True)
    draw = torch.Generator().manual_seed(0)
    frames = base.patch_size.t + 2
    latents, control = torch.randn(2, 2, 16, frames, 4, 6, generator=draw)
    text = torch.randn(2, base.text_length, base.text_hidden_size, generator=draw)
    timesteps = torch.tensor([3, 800])
    found = wide(latents, timesteps, text, control)
    assert torch.equal(found, plain(latents, timesteps, text))
    (gradient,) = torch.autograd.grad(found.sum(), wide.patch_embedding.weight)
    # They are learned from the first step.
    assert (gradient[:, gradient.shape[1] // 2 :] != 0).any()


@refusals(Path(__file__).with_name("refusals.txt"))
def test_conditions_that_do_not_fit_the_network_are_refused(run: Run, refusal: Refusal) -> None:
    from cogfast.extensions.conditions.check import check_conditions

    config = run.of_files(*FILES[:1]).config(*refusal.words)
    network = {"in_channels": 32, "out_channels": 16}
    given = config.run.model
    assert_refused(lambda: check_conditions(given, network), refusal.line)


def test_a_model_without_control_reads_none(
    run: Run, folder: Path, log: pytest.LogCaptureFixture
) -> None:
    words = [f"args.train_data=[{folder}]", "data.target=cogfast.data.datasets.VideoList"]
    words += [f"data.params.{key}={value}" for key, value in CLIP.items()] + ["args.split='1'"]
    run = run.of_files(*FILES).with_words(*words)
    plain, taking = run.config(), run.config("model.conditions=[control]")
    found = datasets_of(plain, plain.run.args).train
    assert "control" not in found[0] and "control videos are not read" in log.text
    args = taking.run.args
    found = datasets_of(taking, args).train
    assert isinstance(found, CaptionedVideos) and "control" in found[0]
    (folder / "controls.txt").unlink()
    line = "2 of 2 samples have no control video, first <...>clip0.mp4"
    assert_refused(lambda: datasets_of(taking, args), line)


def test_an_identical_control_in_a_shard_is_named(folder: Path) -> None:
    clip = (folder / "clip0.mp4").read_bytes()
    _tar(folder / "same" / "0.tar", {"a.mp4": clip, "a.control.mp4": clip, "a.txt": b"first"})
    reasons = survey(VideoShards([str(folder / "same")], **CLIP)).reasons
    assert "is the clip itself" in reasons[0]


def test_no_first_frames_of_controls_are_kept(folder: Path) -> None:
    sample, found = VideoList(str(folder), **CLIP)[0], {}
    for is_clip in (True, False):
        built, rows = encoder(conditions=("image", "control")), [(sample, "k", is_clip)]
        (found[is_clip],) = encode_clips(rows, built, 2, torch.device("cpu"))
    assert {"noised_image_mean", "mean"} <= found[True].keys()
    assert not {"noised_image_mean", "first_frame"} & found[False].keys()
    assert torch.equal(found[True]["mean"], found[False]["mean"])


def test_a_rank_that_samples_alone_asks_no_other_how_to_encode() -> None:
    """The choice is collective, and other ranks may have no prompt."""
    asked: list[tuple[int, ...]] = []
    built = encoder(conditions=("control",), choose=lambda _, c: asked.append(tuple(c.shape)))
    control = control_batch()["control"].transpose(1, 2)
    with built.alone():
        inside = built.encode_control(control)
    assert not asked
    torch.testing.assert_close(inside, SCALE * pooled(control))
    built.choose_for(control)
    assert asked == [tuple(control.shape)]

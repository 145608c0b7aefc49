"""`cogfast cache` and training from what it made, against training from pixels."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config import Config, load_config
from cogfast.config.arguments import TrainArguments
from cogfast.core.slot_random import SlotRandom
from cogfast.data.cache.keys import hash_file, hash_text
from cogfast.data.video.clip import ClipSettings
from cogfast.distributed.process_groups import start_processes
from cogfast.distributed.stop_signals import Interrupted, StopSignals
from cogfast.model.autoencoder import Moments, VideoAutoencoder
from cogfast.train.assembly import Datasets, assemble_datasets
from cogfast.train.caching import cache_key
from cogfast.train.caching import command as cache_module
from cogfast.train.caching.cached_data import read_from_cache
from cogfast.train.caching.command import cache_latents
from cogfast.train.encode import Encoder
from cogfast.train.frozen_encoders import NO_OVERRIDES
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    CHANNELS,
    losses,
    read_run_weights,
    run,
    run_folder,
    write_clips,
    write_clips_with_vae,
    write_config,
)
from tests.train.test_encode import noised_by_hand

NUM_CLIPS = 10


class Recorder(Trainer):
    """Keeps what each micro-batch is encoded to, and the files that it was read from."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[list[Tensor]] = []
        self.paths: list[str] = []

    def compute_loss(self, batch: dict) -> Tensor:
        latents, conditioning = self.encoder(batch, self._random(batch))
        self.built = (self.encoder._first_stage, self.encoder._text_encoder)
        given = (latents, conditioning.text, conditioning.condition_latents)
        self.seen.append([x for x in given if x is not None])
        self.paths += batch["paths"]
        return super().compute_loss(batch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips_with_vae(tmp_path_factory.mktemp("data"), NUM_CLIPS, CHANNELS)


@pytest.fixture(scope="module")
def few(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four clips of 17 frames, and the VAE."""
    folder = write_clips(tmp_path_factory.mktemp("few"), 4)
    shutil.copytree(data / "vae", folder / "vae")
    return folder


def test_existing_caches_stay_valid(data: Path, tmp_path: Path) -> None:
    """Another entry of a spec would make all entries of users useless."""
    config = load_config([write_config(tmp_path / "base.yaml", data)])
    args = TrainArguments.from_config(config)
    settings = ClipSettings(video_size=(32, 48), fps=8.0, max_num_frames=9)
    for given in (settings, replace(settings, trust_index=True, keep_decoded_mib=9)):
        spec = cache_key.cache_specs(config, args, given, NO_OVERRIDES)["video"]
        del spec["VAE"]
        assert spec == {
            "precision": "fp32",
            "first frames kept": False,
            "data.params.video_size": [32, 48],
            "data.params.fps": 8,
            "data.params.max_num_frames": 9,
            "data.params.skip_frms_num": 0.0,
            "data.params.frame_selection": "timestamp",
            "data.params.short_clips": "skip",
            "data.params.resize": "crop",
            "data.params.video_backend": "pyav",
        }


def write_vae_config(path: Path, data: Path, family: str = "5b", **args: object) -> Path:
    """Write a config with the VAE in place of the wavelet, which has no variance."""
    config = OmegaConf.load(write_config(path, data, family, **args))
    config.model.first_stage_config = {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(data / "vae")},
    }
    OmegaConf.save(config, path)
    return path


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        pytest.param("1.5_5b_i2v", [], marks=pytest.mark.soak),
        ("5b", ["data.params.buckets=[[9, 16, 32], [9, 32, 16]]"]),
        ("control", [f"model.network_config.params.in_channels={3 * CHANNELS}"]),
    ],
    ids=["1.5_5b_i2v", "buckets", "control"],
)
def test_training_from_the_cache_is_training_from_pixels(
    family: str, arguments: list[str], data: Path, tmp_path: Path
) -> None:
    """Latents, embeddings and noised images bit for bit, over more than an epoch, the losses, and
    the videos sampled in an evaluation."""
    args = {"train_iters": 3, "split": "4,1,0", "num_workers": 1, "eval_interval": 3}
    is_control, has_condition = family == "control", family != "5b"
    base = write_vae_config(tmp_path / "base.yaml", data, "5b" if is_control else family, **args)
    if is_control:
        rows = [
            {
                "path": str(data / f"videos/{i}.mp4"),
                "caption": f"{i}",
                "control": str(data / f"videos/{j}.mp4"),
            }
            for i, j in enumerate([*range(1, NUM_CLIPS), 0])
        ]
        listed = tmp_path / "clips.jsonl"
        listed.write_text("".join(json.dumps(row) + "\n" for row in rows))
        # The control of a sample that is trained on is the clip of a held-out one.
        arguments = [*arguments, "model.conditions=[control, frames]"]
        arguments += ["model.given_frames=first_last", "model.condition_dropout=0.3"]
        arguments += [
            f"args.train_data=[{listed}]",
            "data.target=cogfast.data.datasets.VideoManifest",
        ]
    cache = f"args.latent_cache={tmp_path / 'latents'}"
    cache_latents(load_config([base], [*arguments, cache]))
    runs = {}
    for name, more in (("pixels", []), ("cache", [cache])):
        config = load_config([base], [*arguments, *more, f"args.save={tmp_path / name}"])
        runs[name] = Recorder(config)
        runs[name].train()
    assert runs["cache"].paths == runs["pixels"].paths
    assert len(set(runs["cache"].paths)) == 8 and len(runs["cache"].paths) == 12
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert len(found) == (3 if has_condition else 2)
        for tensor, other in zip(found, expected, strict=True):
            assert torch.equal(tensor, other)
    folders = [run_folder(tmp_path / name) for name in ("cache", "pixels")]
    found, expected = map(losses, folders)
    assert found == expected
    found, expected = (
        [line for line in (folder / "metrics.jsonl").read_text().splitlines() if "valid" in line]
        for folder in folders
    )
    assert found == expected and len(found) == 1
    found, expected = (
        [path.read_bytes() for path in (folder / "samples" / "step-00000003").glob("*.mp4")]
        for folder in folders
    )
    assert found == expected and len(found) == 1
    # Steps build the VAE for first and given frames alone, the text encoder never.
    assert (runs["cache"].built[0] is None) == (not has_condition)
    assert runs["cache"].encoder._text_encoder is None
    assert None not in runs["pixels"].built


def datasets_of(config: Config) -> Datasets:
    """The data sets of a run, read from the cache if it has one."""
    args = TrainArguments.from_config(config)
    videos = assemble_datasets(config, args)
    return read_from_cache(videos, config, args, start_processes(), NO_OVERRIDES)


def contents(folder: Path) -> dict[str, bytes]:
    """The entries of a cache, by their names."""
    files = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bad")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def videos_in(folder: Path) -> list[str]:
    return [name for name in contents(folder) if name.startswith("video-")]


def test_clips_are_encoded_in_the_way_that_fits_and_the_cache_remembers_it(
    few: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """8 frames at a time where whole clips do not fit: latents are diffusers' own, training from the
    cache and from pixels agree, a later run with more memory keeps the way of the cache, and a
    resumed run that of its checkpoint."""
    from diffusers import AutoencoderKLCogVideoX

    caplog.set_level("INFO", logger="cogfast")
    base = write_vae_config(tmp_path / "base.yaml", few, "1.5_5b", train_iters=1)
    vae = VideoAutoencoder(few / "vae")
    one = vae.limit_encode_memory(1 << 40, (1, 17, 32, 32)).num_bytes
    four = vae.limit_encode_memory(1 << 40, (4, 17, 32, 32)).num_bytes
    ways = {"frames": (one - 1, "8 frames at a time"), "whole": (four - 1, "whole, one by one")}
    for name, (num_bytes, way) in ways.items():
        limit = f"args.vae_memory_gib={num_bytes / 2**30!r}"
        cache_latents(load_config([base], [limit, f"args.latent_cache={tmp_path / name}"]))
        assert f"clips of 17x32x32 are encoded {way}" in caplog.text
        (file,) = (tmp_path / name).glob("video-*/spec.json")
        assert json.loads(file.read_text())["encode_chunks"] == name
    before, arguments = contents(tmp_path / "frames"), [f"args.latent_cache={tmp_path / 'frames'}"]

    little, runs = f"args.vae_memory_gib={ways['frames'][0] / 2**30!r}", {}
    for name, more in (("pixels", [little]), ("cache", arguments)):
        runs[name] = Recorder(load_config([base], [*more, f"args.save={tmp_path / name}"]))
        runs[name].train()
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    pixels = datasets_of(load_config([base])).train[0]["video"].float() / 127.5 - 1
    theirs = AutoencoderKLCogVideoX.from_pretrained(few / "vae")
    with torch.no_grad():
        expected = theirs.encode(pixels.transpose(0, 1)[None]).latent_dist.mean[0]
    found = datasets_of(load_config([base], arguments)).train[0]["latent_mean"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    # All entries are there: nothing is loaded, whatever fits now.
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(load_config([base], arguments))
    # Missing ones are encoded as the others were.
    (tmp_path / "frames" / videos_in(tmp_path / "frames")[-1]).unlink()
    cache_latents(load_config([base], arguments))
    assert contents(tmp_path / "frames") == before
    asked = ["model.first_stage_config.params.encode_chunks=tiles", *arguments]
    with pytest.raises(
        ValueError, match="cache made by encode_chunks frames, the config has tiles"
    ):
        datasets_of(load_config([base], asked))

    config = load_config(
        [base], ["args.train_iters=2", f"args.resume={run_folder(tmp_path / 'pixels')}"]
    )
    caplog.clear()
    Trainer(config).train()
    assert "clips of 17x32x32 are encoded 8 frames at a time" in caplog.text


def test_encoding_first_trains_as_from_a_cache_that_was_there(
    few: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One command leaves the cache and weights of two bit for bit, also if interrupted; nothing is built if the
    cache is complete."""
    base = write_config(tmp_path / "base.yaml", few, train_iters=2)

    def trained(name: str, cache: str, *more: str) -> tuple[Trainer, dict[str, Tensor]]:
        folders = f"args.latent_cache={tmp_path / cache}", f"args.save={tmp_path / name}"
        trainer = Trainer(load_config([base], [*folders, *more]))
        trainer.train()
        return trainer, read_run_weights(trainer.folder / "checkpoints" / "00000002")

    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'before'}"]))
    _, expected = trained("two commands", "before")

    def interrupt(*args: object) -> None:
        raise Interrupted

    # The captions are encoded, the clips are not.
    with StopSignals(lambda reason: reason, kept="; nothing") as signals:
        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(cache_module, "encode_clips", interrupt)
            trained("interrupted", "first", "args.encode_first=true")
        assert signals.kept.startswith("; the entries that are complete are kept in")
        signals.kept = "; nothing"
        assert len(contents(tmp_path / "first")) == 4 and not videos_in(tmp_path / "first")
        trainer, found = trained("one command", "first", "args.encode_first=true")
        assert signals.kept == "; nothing"
    assert contents(tmp_path / "first") == contents(tmp_path / "before")
    assert trainer.encoder._first_stage is None and trainer.encoder._text_encoder is None
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        Trainer(
            load_config(
                [base], [f"args.latent_cache={tmp_path / 'first'}", "args.encode_first=true"]
            )
        )
    with pytest.raises(
        ValueError, match=r"args.encode_first=true applies to a latent cache, but .* is not set"
    ):
        Trainer(load_config([base], ["args.encode_first=true"]))


def test_a_folder_that_cannot_be_created_is_refused_before_clips_are_encoded(
    few: Path, tmp_path: Path
) -> None:
    """In /proc, root may write by its permissions, and only mkdir shows that no user can."""
    base = write_config(tmp_path / "base.yaml", few, train_iters=1)
    first = [f"args.latent_cache={tmp_path / 'first'}", "args.encode_first=true"]
    for key in ("run_folder", "save"):
        text = f"args.{key}=/proc/none/out: cannot be created .*; set it to another folder"
        with pytest.raises(ValueError, match=text):
            Trainer(load_config([base], [*first, f"args.{key}=/proc/none/out"]))
    assert not (tmp_path / "first").exists()


@pytest.mark.slow
def test_ranks_that_share_samples_encode_first(few: Path, tmp_path: Path) -> None:
    """Each encodes clips of its own, though they train on the same ones."""
    base = write_config(tmp_path / "base.yaml", few, train_iters=1)
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'before'}"]))
    words = [
        f"args.latent_cache={tmp_path / 'first'}",
        "args.encode_first=true",
        "args.context_parallel_size=2",
    ]
    done = run(["train", "--base", str(base), *words], 2, timeout=120)
    assert done.returncode == 0, done.stdout
    assert contents(tmp_path / "first") == contents(tmp_path / "before")


def test_noised_images_of_the_cache_are_the_encoders(data: Path, tmp_path: Path) -> None:
    """Latents of the VAE itself for the same noise; neither training nor the held-out loss builds
    it, and the videos of an evaluation begin with the frame without noise."""
    from diffusers import AutoencoderKLCogVideoX

    args = {"train_iters": 3, "split": "4,1,0", "eval_interval": 3, "eval_num_samples": 0}
    base = write_vae_config(tmp_path / "base.yaml", data, "1.5_5b_i2v", **args)
    arguments = ["model.noised_image_dropout=0", f"args.latent_cache={tmp_path / 'cache'}"]
    config = load_config([base], [*arguments, "args.cached_noised_images=3"])
    cache_latents(config)
    with patch.object(VideoAutoencoder, "__init__", side_effect=AssertionError):
        run = Recorder(config)
        run.train()
    assert run.built == (None, None)
    assert '"valid_loss"' in (run.folder / "metrics.jsonl").read_text()

    videos = datasets_of(load_config([base]))
    frames = {
        name: item["video"][0] for name, item in zip(videos.train.paths, videos.train, strict=True)
    }
    vae, num_drawn = AutoencoderKLCogVideoX.from_pretrained(data / "vae"), Counter()
    for step, (_, _, image) in enumerate(run.seen):
        rng = SlotRandom(config.args.seed, step, range(4), 4)
        noise = rng.normal("image_first_stage", (4, CHANNELS, 1, 4, 4))
        for slot, path in enumerate(run.paths[4 * step : 4 * step + 4]):
            key = hash_text(json.dumps([hash_file(path), {}]))
            noised = [noised_by_hand(frames[path], key, i) for i in range(3)]
            posterior = vae.encode(torch.stack(noised)).latent_dist
            wanted = 0.7 * (posterior.mean + posterior.std * noise[slot])
            errors = (image[slot, :, :1] - wanted).abs().flatten(1).amax(dim=1)
            assert errors.min() < 1e-5 and errors.max() > 1e-3
            num_drawn[int(errors.argmin())] += 1
    assert set(num_drawn) == {0, 1, 2}

    run.evaluator.args = replace(run.args, eval_num_samples=2)
    shown = [prompt.image for prompt in run.evaluator._prompts(run.size.latents, "")]
    unit = [video["video"][0] / 127.5 - 1 for video in (videos.valid[0], videos.valid[1])]
    torch.testing.assert_close(shown, unit, rtol=0, atol=1e-6)

    before, plain = contents(tmp_path / "cache"), load_config([base], arguments)
    match = (
        r"cache made by first frames kept False, the config has True; cache made by "
        r"args.cached_noised_images 3, the config has none: 0 of 10 usable; run `cogfast cache`"
    )
    with pytest.raises(ValueError, match=match):
        datasets_of(plain)
    cache_latents(plain)
    assert before.items() <= contents(tmp_path / "cache").items()
    for both in (config, plain):
        datasets_of(both)


def test_only_changed_clips_are_encoded_again(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    base = write_vae_config(tmp_path / "base.yaml", clips)
    arguments = [f"args.latent_cache={cache}"]
    config = load_config([base], arguments)
    cache_latents(config)
    before = contents(cache)
    shutil.copy(clips / "videos" / "1.mp4", clips / "videos" / "0.mp4")  # both are the same now
    shutil.copy(data / "videos" / "2.mp4", clips / "videos" / "other.mp4")
    (clips / "videos" / "2.mp4").write_bytes((data / "videos" / "2.mp4").read_bytes() + b"\0" * 8)
    (clips / "videos" / "3.mp4").touch()
    for name in ("2", "other"):
        (clips / "labels" / f"{name}.txt").write_text("another caption")
    with pytest.raises(
        ValueError, match=r"videos changed or moved since caching: 7 of 11 usable; run `cog"
    ):
        Trainer(config)
    caplog.clear()
    cache_latents(config)
    # 0 and 1 are the same now, and so are 2's caption and that of the copy of the old 2.
    assert f"{cache}: encoding 1 of 10 clips and 1 of 10 captions" in caplog.text
    assert f"{cache}: 11 samples, 0 bad" in caplog.text
    after = contents(cache)
    assert before.items() <= after.items() and len(after) == len(before) + 2
    # If nothing is missing, no frozen part is built.
    config.model.first_stage_config.params.use_slicing = True  # changes no number
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(config)
    assert contents(cache) == after


def test_weights_are_hashed_once(data: Path, tmp_path: Path, monkeypatch) -> None:
    """The weights of T5 have 10 GB. A file that changes is read again."""
    read: list[str] = []
    monkeypatch.setattr(cache_key, "hash_file", lambda path: read.append(path) or hash_file(path))
    weights = tmp_path / "model.safetensors"
    for content in (b"weights", b"others"):
        weights.write_bytes(content)
        found = {cache_key._described("VAE", str(weights)) for _ in range(2)}
        assert found == {hash_file(str(weights))}
    assert read == [str(weights)] * 2


def test_another_vae_or_text_encoder_is_refused_with_counts(data: Path, tmp_path: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data)
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    cache_latents(load_config([base], [cache]))
    others = {
        "VAE": write_vae_config(tmp_path / "vae.yaml", data),
        "text encoder": write_config(tmp_path / "text.yaml", data),
        "data.params.fps": write_config(tmp_path / "fps.yaml", data),
    }
    text = OmegaConf.load(others["text encoder"])
    text.model.conditioner_config.params.emb_models[0].params.seed = 1
    OmegaConf.save(text, others["text encoder"])
    for what, file in others.items():
        arguments = [cache, "data.params.fps=4"] if what == "data.params.fps" else [cache]
        match = (
            rf"cache made by {what} \w+, the config has \w+: 0 of 10 usable; run `cogfast cache`"
        )
        with pytest.raises(ValueError, match=match):
            Trainer(load_config([file], arguments))


def test_bad_samples_are_listed_and_passed_over(data: Path, tmp_path: Path) -> None:
    """Samples with non-finite latents of the clip or its image, and a video that ends early."""
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    torn = clips / "videos" / "5.mp4"
    torn.write_bytes(torn.read_bytes()[:600])
    args = {"max_bad_fraction": 0.4, "train_iters": 5, "cached_noised_images": 1}
    base = write_config(tmp_path / "base.yaml", clips, "5b_i2v", **args)
    config = load_config([base], [f"args.latent_cache={cache}"])
    encode_moments, num_calls = Encoder.encode_moments, 0

    def spoil(encoder: Encoder, pixels: Tensor) -> Moments:
        nonlocal num_calls
        num_calls += 1
        moments = encode_moments(encoder, pixels)
        if num_calls in (2, 3):  # the images of four clips, the next four clips
            moments.mean[0, 0, 0, 0, 0] = float("inf")
        return moments

    with patch.object(Encoder, "encode_moments", spoil):
        cache_latents(config)
    bad = sorted(cache.rglob("*.bad"))
    reasons = sorted(path.read_text() for path in bad)
    assert reasons[0].startswith("its latents are not finite") and len(reasons) == 3
    assert reasons[2].startswith("not a readable video")
    before = contents(cache)
    cache_latents(config)
    assert contents(cache) == before
    trainer = Recorder(config)
    trainer.train()
    assert len(set(trainer.paths)) == NUM_CLIPS - 3 and str(torn) not in trainer.paths
    listed = (trainer.folder / "bad_samples.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["reason"] for line in listed) == reasons
    # One that is deleted is tried again, and is still bad.
    next(path for path in bad if "readable" in path.read_text()).unlink()
    cache_latents(config)
    assert contents(cache) == before
    config.args.max_bad_fraction = 0.2
    with pytest.raises(ValueError, match=r"3/10 videos unreadable \(>20%\), args.max_bad_fraction"):
        cache_latents(config)


def test_a_real_full_disk_costs_no_entry(data: Path, tmp_path: Path, file_limit) -> None:
    """The disk fills at the captions and at the clips; what is written stays."""
    cache, straight = tmp_path / "cache", tmp_path / "straight"
    base = write_config(tmp_path / "base.yaml", data, latent_cache=str(cache))
    cache_latents(load_config([base], [f"args.latent_cache={straight}"]))
    cache.mkdir()
    shutil.copy(straight / "sources.jsonl", cache)  # larger than an entry of this model
    for limit, kind, number in ((600, "text", 0), (1_400, "video", NUM_CLIPS)):
        expected = rf"^args.latent_cache: .*/{kind}-\S* cannot be written \(File too large\); what "
        with file_limit(limit), pytest.raises(RuntimeError, match=expected):
            cache_latents(load_config([base]))
        assert len(contents(cache)) == number
        assert not list(cache.rglob("*.incomplete"))
    cache_latents(load_config([base]))
    assert contents(cache) == contents(straight)
    done = run(["cache", "--base", str(base), f"args.latent_cache={base}"])
    assert done.returncode == 2
    expected = f"{base}/write_test cannot be written (File exists); use another folder or free disk"
    assert done.stdout.splitlines()[-1].startswith(f"cogfast: args.latent_cache: {expected}")

"""`cogfast cache` and training from what it made, against training from pixels."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config import Config, load_config
from cogfast.core.slot_random import SlotRandom
from cogfast.data.cache import source_hashes
from cogfast.data.cache.shards import CacheIndex
from cogfast.data.cache.source_hashes import Sources, hash_file
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.video.settings import ClipSettings
from cogfast.model.autoencoder import Moments, VideoAutoencoder
from cogfast.schema.arguments import TrainArguments
from cogfast.train.assembly import Datasets, assemble_datasets
from cogfast.train.caching import command as cache_module
from cogfast.train.caching.cache_key import cache_specs
from cogfast.train.caching.command import cache_latents
from cogfast.train.encode import Encoder
from cogfast.train.run.stop_signals import Interrupted, StopSignals
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    CHANNELS,
    losses,
    read_run_weights,
    run,
    run_folder,
    start,
    wait_for,
    write_clips,
    write_clips_with_vae,
    write_config,
)
from tests.train.test_encode import noised_by_hand

NUM_CLIPS = 20  # three shards


class Recorder(Trainer):
    """Keeps what each micro-batch is encoded to, and the files that it was read from."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.seen: list[list[Tensor]] = []
        self.paths: list[str] = []

    def compute_loss(self, batch: dict) -> Tensor:
        latents, conditioning = self.encoder(batch, self._random(batch))
        self.built = (self.encoder._first_stage, self.encoder._text_encoder)
        given = (latents, conditioning.text, conditioning.image_latents)
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
        ("5b", []),
        ("1.5_5b_i2v", []),
        ("5b", ["data.params.buckets=[[9, 16, 32], [9, 32, 16]]"]),
    ],
    ids=["5b", "1.5_5b_i2v", "buckets"],
)
def test_training_from_the_cache_is_training_from_pixels(
    family: str, arguments: list[str], data: Path, tmp_path: Path
) -> None:
    """Latents, embeddings and noised images bit for bit, over more than an epoch, the losses, and
    the videos sampled in an evaluation."""
    args = {"train_iters": 6, "split": "4,1,0", "num_workers": 1, "eval_interval": 6}
    base = write_vae_config(tmp_path / "base.yaml", data, family, **args)
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    cache_latents(load_config([base], [*arguments, cache]))
    runs = {}
    for name, more in (("pixels", []), ("cache", [cache])):
        config = load_config([base], [*arguments, *more, f"args.save={tmp_path / name}"])
        runs[name] = Recorder(config)
        runs[name].train()
    assert runs["cache"].paths == runs["pixels"].paths
    assert len(set(runs["cache"].paths)) == 16 and len(runs["cache"].paths) == 24
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert len(found) == (3 if family.endswith("i2v") else 2)
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
        [path.read_bytes() for path in (folder / "samples" / "step-00000006").glob("*.mp4")]
        for folder in folders
    )
    assert found == expected and len(found) == 1
    # Steps build the VAE for the first frames of image-to-video alone, the text encoder never.
    assert (runs["cache"].built[0] is None) == (not family.endswith("i2v"))
    assert runs["cache"].encoder._text_encoder is None
    assert None not in runs["pixels"].built


def datasets_of(base: Path, arguments: list[str]) -> Datasets:
    config = load_config([base], arguments)
    return assemble_datasets(config, TrainArguments.from_config(config))


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
        index = CacheIndex.read(tmp_path / name)
        made = index.specs[index.shards[-1].spec]
        assert made.get("encode_chunks", "whole") == name
    before, arguments = contents(tmp_path / "frames"), [f"args.latent_cache={tmp_path / 'frames'}"]

    little, runs = f"args.vae_memory_gib={ways['frames'][0] / 2**30!r}", {}
    for name, more in (("pixels", [little]), ("cache", arguments)):
        runs[name] = Recorder(load_config([base], [*more, f"args.save={tmp_path / name}"]))
        runs[name].train()
    for found, expected in zip(runs["cache"].seen, runs["pixels"].seen, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    pixels = datasets_of(base, []).train[0]["video"].float() / 127.5 - 1
    theirs = AutoencoderKLCogVideoX.from_pretrained(few / "vae")
    with torch.no_grad():
        expected = theirs.encode(pixels.transpose(0, 1)[None]).latent_dist.mean[0]
    found = datasets_of(base, arguments).train[0]["latent_mean"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)

    # All entries are there: nothing is loaded, whatever fits now.
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(load_config([base], arguments))
    # Missing ones are encoded as the others were.
    (tmp_path / "frames" / index.shards[-1].file).unlink()
    cache_latents(load_config([base], arguments))
    assert contents(tmp_path / "frames") == before
    asked = ["model.first_stage_config.params.encode_chunks=tiles", *arguments]
    with pytest.raises(
        ValueError, match="cache made by encode_chunks frames, the config has tiles"
    ):
        datasets_of(base, asked)

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
            patched.setattr(cache_module, "encode_samples", interrupt)
            trained("interrupted", "first", "args.encode_first=true")
        assert signals.kept.startswith("; the shards that are complete are kept in")
        signals.kept = "; nothing"
        assert [p.name for p in (tmp_path / "first").glob("*-0*")] == ["text-00000.safetensors"]
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
        ValueError, match=r"args.encode_first=true fills a latent cache, but .*set it"
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
@pytest.mark.parametrize("layout", ["model_parallel_size", "context_parallel_size"])
def test_ranks_that_share_samples_encode_first(few: Path, tmp_path: Path, layout: str) -> None:
    """Each encodes clips of its own, though they train on the same ones."""
    base = write_config(tmp_path / "base.yaml", few, train_iters=1)
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'before'}"]))
    words = [
        f"args.latent_cache={tmp_path / 'first'}",
        "args.encode_first=true",
        f"args.{layout}=2",
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

    pixels = load_config([base])
    videos = assemble_datasets(pixels, TrainArguments.from_config(pixels))
    frames = {
        name: item["video"][0] for name, item in zip(videos.train.paths, videos.train, strict=True)
    }
    vae, num_drawn = AutoencoderKLCogVideoX.from_pretrained(data / "vae"), Counter()
    for step, (_, _, image) in enumerate(run.seen):
        rng = SlotRandom(config.args.seed, step, range(4), 4)
        noise = rng.normal("image_first_stage", (4, CHANNELS, 1, 4, 4))
        for slot, path in enumerate(run.paths[4 * step : 4 * step + 4]):
            noised = [noised_by_hand(frames[path], hash_file(path), i) for i in range(3)]
            posterior = vae.encode(torch.stack(noised)).latent_dist
            wanted = 0.7 * (posterior.mean + posterior.std * noise[slot])
            errors = (image[slot, :, :1] - wanted).abs().flatten(1).amax(dim=1)
            assert errors.min() < 1e-5 and errors.max() > 1e-3
            num_drawn[int(errors.argmin())] += 1
    assert set(num_drawn) == {0, 1, 2}

    run.evaluator.args = replace(run.args, eval_num_samples=2)
    shown = [prompt.image for prompt in run.evaluator._prompts(run.latent_size, "")]
    unit = [video["video"][0] / 127.5 - 1 for video in (videos.valid[0], videos.valid[2])]
    torch.testing.assert_close(shown, unit, rtol=0, atol=1e-6)

    before, plain = contents(tmp_path / "cache"), load_config([base], arguments)
    match = (
        r"cache made by first frames kept False, the config has True; cache made by "
        r"args.cached_noised_images 3, the config has none: 0 of 4 usable; run `cogfast cache`"
    )
    with pytest.raises(ValueError, match=match):
        assemble_datasets(plain, TrainArguments.from_config(plain))
    cache_latents(plain)
    after = contents(tmp_path / "cache")
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    for both in (config, plain):
        assemble_datasets(both, TrainArguments.from_config(both))


def test_resize_is_part_of_the_key_unless_it_is_the_default(tmp_path: Path) -> None:
    """Caches of versions without data.params.resize stay valid."""
    config = load_config([str(write_config(tmp_path / "c.yaml", tmp_path))])
    args = TrainArguments.from_config(config)
    size = {"video_size": (32, 32), "fps": 8, "max_num_frames": 9}
    videos = [
        cache_specs(config, args, ClipSettings(**size, **resize), None, Sources(tmp_path))["video"]
        for resize in ({}, {"resize": "crop"}, {"resize": "stretch"})
    ]
    assert videos[0] == videos[1] and "data.params.resize" not in videos[0]
    assert videos[2] == videos[0] | {"data.params.resize": "stretch"}


@pytest.mark.parametrize("global_batch", [1, 6])
def test_the_order_of_encoding_is_that_of_training(global_batch: int) -> None:
    """The clips of each bucket have one order at any step size; a shard has clips of one size."""
    size = {"video_size": (32, 32), "fps": 8, "max_num_frames": 9}
    buckets = np.array([0, 1, 1, -1, 2] * 16)
    clips = ClipList(
        files=PackedStrings(f"{i}.mp4" for i in range(80)),
        captions=PackedStrings("" for _ in range(80)),
        buckets=buckets,
    )
    settings = ClipSettings(**size, buckets=[[9, 32, 32], [9, 16, 32], [1, 32, 32]])
    videos = CaptionedVideos(clips, settings)
    found = [clip.index for clip in cache_module._in_order(videos, seed=5)]
    order = videos.order(5, global_batch)
    steps = range(order.num_steps(1))
    read = dict.fromkeys(order.index(s, slot) for s in steps for slot in range(global_batch))
    assert sorted(found) == sorted(read) and len(found) == 64
    for bucket in range(3):
        of_bucket = [i for i in found if buckets[i] == bucket]
        assert of_bucket == [i for i in read if buckets[i] == bucket]
    shards = [{buckets[i] for i in found[start : start + 8]} for start in range(0, 64, 8)]
    assert all(len(shard) == 1 for shard in shards)
    assert len({bucket for shard in shards[:5] for bucket in shard}) == 3  # they take turns


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_again_and_again(
    base: Path, cache: Path, delays: list[float], num_processes: int
) -> dict[str, bytes]:
    """The cache after kills, each some seconds after the index was there, and a run to the end on
    several ranks."""
    arguments = ["cache", "--base", str(base), f"args.latent_cache={cache}"]
    for delay in delays:
        process = start(arguments)
        wait_for((cache / "index.jsonl").exists, process)
        # A start that finds little left to do may end between two looks.
        is_over = lambda p=process: p.poll() is not None
        wait_for(lambda over=is_over: over() or (cache / "writer").exists(), process)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = run(arguments, num_processes)
    assert done.returncode == 0, done.stdout
    return contents(cache)


@pytest.mark.slow
def test_kills_and_ranks_leave_no_trace(data: Path, tmp_path: Path) -> None:
    base = write_vae_config(tmp_path / "base.yaml", data, "5b_i2v", cached_noised_images=2)
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'straight'}"]))
    expected = contents(tmp_path / "straight")
    assert len(expected) == 2 + 1 + 3  # index, sources; captions; clips
    assert killed_again_and_again(base, tmp_path / "killed", [0.1], 2) == expected


def test_videos_that_were_read_before_a_kill_are_not_read_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_HASHED_AT_ONCE", 6)
    monkeypatch.setattr(cache_module, "_SECONDS_PER_WRITE", 0.0)
    config = load_config(
        [write_config(tmp_path / "base.yaml", data)],
        [f"args.latent_cache={tmp_path / 'cache'}"],
    )
    read: list[str] = []

    def hash_some(path: str, *part: int) -> str:
        if path.endswith(".mp4"):
            read.append(path)
            if len(read) == 14:
                raise KeyboardInterrupt
        return hash_file(path, *part)

    monkeypatch.setattr(source_hashes, "hash_file", hash_some)
    with pytest.raises(KeyboardInterrupt):
        cache_latents(config)
    again = read[:12]
    read.clear()
    read += [""] * 14
    cache_latents(config)
    assert len(read) - 14 == NUM_CLIPS - 12 and set(read).isdisjoint(again)
    monkeypatch.undo()
    cache_latents(
        load_config([tmp_path / "base.yaml"], [f"args.latent_cache={tmp_path / 'straight'}"])
    )
    assert contents(tmp_path / "cache") == contents(tmp_path / "straight")


@pytest.mark.soak
def test_ten_kills_leave_no_trace(data: Path, tmp_path: Path) -> None:
    base = write_vae_config(tmp_path / "base.yaml", data, "5b_i2v")
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'straight'}"]))
    draw = random.Random(0)
    for i, num_processes in enumerate((1, 2)):
        delays = [draw.uniform(0, 1.5) for _ in range(5)]
        found = killed_again_and_again(base, tmp_path / f"killed {i}", delays, num_processes)
        assert found == contents(tmp_path / "straight")


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
    index = CacheIndex.read(cache)
    shutil.copy(clips / "videos" / "1.mp4", clips / "videos" / "0.mp4")  # both are the same now
    shutil.copy(data / "videos" / "2.mp4", clips / "videos" / "other.mp4")
    (clips / "videos" / "2.mp4").write_bytes((data / "videos" / "2.mp4").read_bytes() + b"\0" * 8)
    (clips / "videos" / "3.mp4").touch()
    for name in ("2", "other"):
        (clips / "labels" / f"{name}.txt").write_text("another caption")
    with pytest.raises(
        ValueError, match=r"videos changed or moved since caching: 17 of 21 usable; run `cog"
    ):
        Trainer(config)
    caplog.clear()
    cache_latents(config)
    assert "encoding 2 videos again, whose content changed since caching" in caplog.text
    after = contents(cache)
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    new = CacheIndex.read(cache).shards[len(index.shards) :]
    assert [(shard.kind, len(shard.keys)) for shard in new] == [("text", 1), ("video", 1)]
    # If nothing is missing, no frozen part is built.
    config.model.first_stage_config.params.use_slicing = True  # changes no number
    with patch.object(cache_module, "assemble_encoder", side_effect=AssertionError):
        cache_latents(config)
    assert contents(cache) == after


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
            rf"cache made by {what} \w+, the config has \w+: 0 of 20 usable; run `cogfast cache`"
        )
        with pytest.raises(ValueError, match=match):
            Trainer(load_config([file], arguments))


def test_bad_samples_are_listed_and_passed_over(data: Path, tmp_path: Path) -> None:
    """Samples with non-finite latents of the clip or its image, and a video that ends early."""
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    torn = clips / "videos" / "5.mp4"
    torn.write_bytes(torn.read_bytes()[:600])
    args = {"max_bad_fraction": 0.2, "train_iters": 10, "cached_noised_images": 1}
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
    listed = (cache / "bad_samples.jsonl").read_bytes()
    reasons = {x["path"]: x["reason"] for x in map(json.loads, listed.splitlines())}
    assert reasons.pop(str(torn)).startswith("not a readable video")
    assert list(reasons.values()) == ["its latents are not finite"] * 2
    cache_latents(config)
    assert (cache / "bad_samples.jsonl").read_bytes() == listed
    trainer = Recorder(config)
    trainer.train()
    assert len(set(trainer.paths)) == NUM_CLIPS - 3 and set(trainer.paths).isdisjoint(
        [*reasons, str(torn)]
    )
    config.args.max_bad_fraction = 0.1
    with pytest.raises(ValueError, match=r"3/20 videos unreadable \(>10%\), args.max_bad_fraction"):
        cache_latents(config)


@pytest.mark.slow
def test_training_waits_for_a_cache_that_is_being_made(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    base, cache = write_vae_config(tmp_path / "base.yaml", data, num_workers=2), tmp_path / "cache"
    process = start(["cache", "--base", str(base), f"args.latent_cache={cache}"])
    wait_for((cache / "index.jsonl").exists, process, pause=0.001)
    os.killpg(process.pid, signal.SIGSTOP)
    assert not list(cache.glob("video-*"))
    threading.Timer(7, os.killpg, (process.pid, signal.SIGCONT)).start()
    arguments = [f"args.latent_cache={cache}"]
    Trainer(load_config([base], [*arguments, f"args.save={tmp_path / 'waited'}"])).train()
    assert process.wait(60) == 0
    assert "still being encoded: 20 of 20 samples" in caplog.text
    assert "waiting for `cogfast cache` since " in caplog.text
    Trainer(load_config([base], [*arguments, f"args.save={tmp_path / 'after'}"])).train()
    assert losses(run_folder(tmp_path / "waited")) == losses(run_folder(tmp_path / "after"))


def test_a_full_disk_ends_in_one_line_and_leaves_what_is_written(
    data: Path, tmp_path: Path
) -> None:
    base, cache = write_config(tmp_path / "base.yaml", data), tmp_path / "cache"
    config = load_config([base], [f"args.latent_cache={cache}"])
    write_bytes = Path.write_bytes

    def fill(path: Path, content: bytes) -> int:
        if path.name.startswith("video-00001"):
            write_bytes(path, content[:100])
            raise OSError(28, "No space left on device")
        return write_bytes(path, content)

    with (
        patch.object(Path, "write_bytes", fill),
        pytest.raises(RuntimeError, match=r"video-00001.safetensors cannot be written .*No space"),
    ):
        cache_latents(config)
    half = contents(cache)
    assert set(half) == {
        "index.jsonl",
        "sources.json",
        "text-00000.safetensors",
        "video-00000.safetensors",
    }
    cache_latents(config)
    assert half.items() <= contents(cache).items()
    arguments = ["cache", "--base", str(base), f"args.latent_cache={base}"]
    done = run(arguments)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith(f"cogfast: args.latent_cache={base}: cannot be")


def test_a_real_full_disk_costs_no_entry(data: Path, tmp_path: Path, file_limit) -> None:
    """The disk fills at the hashes, at the captions and at the clips; what is written stays."""
    cache = tmp_path / "cache"
    base = write_config(tmp_path / "base.yaml", data, latent_cache=str(cache))
    before = {}
    for limit, name in ((500, "sources.json"), (8_000, "text-00000"), (13_200, "video-00000")):
        expected = rf"^args.latent_cache: .*/{name}\S* cannot be written \(File too large\); what "
        with file_limit(limit), pytest.raises(RuntimeError, match=expected):
            cache_latents(load_config([base]))
        assert before.items() <= contents(cache).items()
        assert not list(cache.glob("*.incomplete"))
        before = contents(cache)
    assert set(before) == {"index.jsonl", "sources.json", "text-00000.safetensors"}
    cache_latents(load_config([base]))
    assert before.items() <= contents(cache).items()

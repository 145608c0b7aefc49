"""`cogfast cache` and training from what it made, against training from pixels."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from cogfast.config import Config, load_config
from cogfast.data.latent_cache import CacheIndex
from cogfast.model.autoencoder import Moments
from cogfast.train import cache as cache_module
from cogfast.train.cache import cache_latents
from cogfast.train.encode import Encoder
from cogfast.train.trainer import Trainer
from tests.tiny_run import (
    CHANNELS,
    losses,
    run,
    run_folder,
    start,
    wait_for,
    write_clips,
    write_config,
)

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
    """Clips, and a small VAE with random weights in vae/."""
    from diffusers import AutoencoderKLCogVideoX

    folder = write_clips(tmp_path_factory.mktemp("data"), NUM_CLIPS)
    torch.manual_seed(0)
    AutoencoderKLCogVideoX(
        block_out_channels=(32, 32, 32, 32), layers_per_block=1, latent_channels=CHANNELS
    ).save_pretrained(folder / "vae")
    return folder


def write_vae_config(path: Path, data: Path, family: str = "5b", **args: object) -> Path:
    """With the VAE in place of the wavelet, which has no variance."""
    config = OmegaConf.load(write_config(path, data, family, **args))
    config.model.first_stage_config = {
        "target": "cogfast.model.autoencoder.VideoAutoencoder",
        "params": {"path": str(data / "vae")},
    }
    OmegaConf.save(config, path)
    return path


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("5b", []),
        ("1.5_5b_i2v", []),
        ("5b", ["data.params.buckets=[[9, 16, 32], [9, 32, 16]]"]),
    ],
    ids=["5b", "1.5_5b_i2v", "buckets"],
)
def test_training_from_the_cache_is_training_from_pixels(
    family: str, words: list[str], data: Path, tmp_path: Path
) -> None:
    """Latents, embeddings and noised images bit for bit, over more than an epoch, the losses, and
    the videos sampled in an evaluation."""
    args = {"train_iters": 6, "split": "4,1,0", "num_workers": 1, "eval_interval": 6}
    base = write_vae_config(tmp_path / "base.yaml", data, family, **args)
    cache = f"args.latent_cache={tmp_path / 'cache'}"
    cache_latents(load_config([base], [*words, cache]))
    runs = {}
    for name, more in (("pixels", []), ("cache", [cache])):
        config = load_config([base], [*words, *more, f"args.save={tmp_path / name}"])
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


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def killed_again_and_again(
    base: Path, cache: Path, delays: list[float], num_processes: int
) -> dict[str, bytes]:
    """The cache after kills, each some seconds after the index was there, and a run to the end on
    several ranks."""
    words = ["cache", "--base", str(base), f"args.latent_cache={cache}"]
    for delay in delays:
        process = start(words)
        wait_for((cache / "index.jsonl").exists, process)
        wait_for((cache / "writer").exists, process)
        time.sleep(delay)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    done = run(words, num_processes)
    assert done.returncode == 0, done.stdout
    return contents(cache)


@pytest.mark.slow
def test_kills_and_ranks_leave_no_trace(data: Path, tmp_path: Path) -> None:
    base = write_vae_config(tmp_path / "base.yaml", data)
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'straight'}"]))
    expected = contents(tmp_path / "straight")
    assert len(expected) == 2 + 1 + 3  # index, sources; captions; clips
    assert killed_again_and_again(base, tmp_path / "killed", [0.1], 2) == expected


@pytest.mark.soak
def test_ten_kills_leave_no_trace(data: Path, tmp_path: Path) -> None:
    base = write_vae_config(tmp_path / "base.yaml", data, "5b_i2v")
    cache_latents(load_config([base], [f"args.latent_cache={tmp_path / 'straight'}"]))
    draw = random.Random(0)
    for i, num_processes in enumerate((1, 2)):
        delays = [draw.uniform(0, 1.5) for _ in range(5)]
        found = killed_again_and_again(base, tmp_path / f"killed {i}", delays, num_processes)
        assert found == contents(tmp_path / "straight")


def test_what_changed_is_encoded_again_and_nothing_else(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    base = write_vae_config(tmp_path / "base.yaml", clips)
    words = [f"args.latent_cache={cache}"]
    config = load_config([base], words)
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
        ValueError, match=r"videos changed since caching: 17 of 21 usable; run `cog"
    ):
        Trainer(config)
    caplog.clear()
    cache_latents(config)
    assert "2 sources changed since caching; re-encoding 2" in caplog.text
    after = contents(cache)
    assert all(after[name] == before[name] for name in before if name.endswith(".safetensors"))
    new = CacheIndex.read(cache).shards[len(index.shards) :]
    assert [(shard.kind, len(shard.keys)) for shard in new] == [("text", 1), ("video", 1)]
    # Where nothing is missing no frozen part is built.
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
        words = [cache, "data.params.fps=4"] if what == "data.params.fps" else [cache]
        match = (
            rf"cache made by {what} \w+, the config has \w+: 0 of 20 usable; run `cogfast cache`"
        )
        with pytest.raises(ValueError, match=match):
            Trainer(load_config([file], words))


def test_bad_samples_are_listed_and_passed_over(data: Path, tmp_path: Path) -> None:
    """One whose latents are not finite, and one that ends early."""
    clips, cache = tmp_path / "clips", tmp_path / "cache"
    shutil.copytree(data, clips)
    torn = clips / "videos" / "5.mp4"
    torn.write_bytes(torn.read_bytes()[:600])
    base = write_config(tmp_path / "base.yaml", clips, max_bad_fraction=0.1, train_iters=10)
    config = load_config([base], [f"args.latent_cache={cache}"])
    encode_moments, num_calls = Encoder.encode_moments, 0

    def spoil(encoder: Encoder, pixels: Tensor) -> Moments:
        nonlocal num_calls
        num_calls += 1
        moments = encode_moments(encoder, pixels)
        if num_calls == 2:
            moments.mean[0, 0, 0, 0, 0] = float("inf")
        return moments

    with patch.object(Encoder, "encode_moments", spoil):
        cache_latents(config)
    listed = (cache / "bad_samples.jsonl").read_bytes()
    reasons = {x["path"]: x["reason"] for x in map(json.loads, listed.splitlines())}
    assert reasons.pop(str(torn)).startswith("not a readable video")
    assert list(reasons.values()) == ["its latents are not finite"]
    cache_latents(config)
    assert (cache / "bad_samples.jsonl").read_bytes() == listed
    trainer = Recorder(config)
    trainer.train()
    assert len(set(trainer.paths)) == NUM_CLIPS - 2 and set(trainer.paths).isdisjoint(
        [*reasons, str(torn)]
    )
    config.args.max_bad_fraction = 0.05
    with pytest.raises(ValueError, match=r"2/20 videos unreadable \(>5%\), args.max_bad_fraction"):
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
    words = [f"args.latent_cache={cache}"]
    Trainer(load_config([base], [*words, f"args.save={tmp_path / 'waited'}"])).train()
    assert process.wait(60) == 0
    assert "20 of 20 samples are still being encoded" in caplog.text
    assert "waiting for `cogfast cache`: " in caplog.text
    Trainer(load_config([base], [*words, f"args.save={tmp_path / 'after'}"])).train()
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
        *("index.jsonl", "sources.json"),
        *("text-00000.safetensors", "video-00000.safetensors"),
    }
    cache_latents(config)
    assert half.items() <= contents(cache).items()
    words = ["cache", "--base", str(base), f"args.latent_cache={base}"]
    done = run(words)
    assert done.returncode == 2
    assert done.stdout.splitlines()[-1].startswith(f"cogfast: args.latent_cache={base}: cannot be")

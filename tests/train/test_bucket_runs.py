"""Whole runs on manifests, weights and buckets: a resume repeats the losses, and figures are right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.plan.trace import train_flops
from cogfast.train.caching.command import cache_latents
from cogfast.train.caching.encode_choice import largest_clips
from cogfast.train.preflight.check import check_train
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import CHANNELS, losses, run_folder, write_clips, write_config
from tests.support.video_files import constant_rate, write_clip

BUCKETS = [[9, 32, 32], [9, 16, 32], [1, 32, 32]]
TOKENS = [3 * 4 + 8, 3 * 2 + 8, 1 * 4 + 8]  # latent frames x rows x columns of patches, plus text


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 6 clips of 17 x 32 x 32, 5 with half the rows, 3 of one frame, a broken one, and a manifest."""
    folder = write_clips(tmp_path_factory.mktemp("data"))
    rows = [{"path": f"videos/{i}.mp4", "caption": f"bar {i}"} for i in range(6)]
    for i in range(6, 14):
        frames, size = (9, (16, 32)) if i < 11 else (1, (32, 32))
        write_clip(folder / f"others/{i}.mp4", constant_rate(frames, 8), size=size)
        rows.append({"path": f"others/{i}.mp4", "caption": f"clip {i}", "weight": 1.5})
    (folder / "others/broken.mp4").write_bytes(b"no video")
    rows.append({"path": "others/broken.mp4", "caption": "broken"})
    rows += [{**row, "split": "valid"} for row in (*rows[4:8], rows[-1])]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def _section(**params: object) -> dict:
    size = {"video_size": [32, 32], "fps": 8, "max_num_frames": 9}
    return {"target": "cogfast.data.datasets.VideoManifest", "params": {**size, **params}}


def make(
    folder: Path,
    data: Path,
    *overrides: str,
    family: str = "5b",
    trainer: type[Trainer] = Trainer,
    **args: object,
) -> Any:
    base = write_config(
        folder / "base.yaml", data, family, dataset=_section(buckets=BUCKETS), **args
    )
    manifest = f"args.train_data=[{data / 'data.jsonl'}]"
    return trainer(load_config([base], [manifest, "args.max_bad_fraction=0.1", *overrides]))


def test_the_batch_of_most_pixels_decides_how_clips_are_encoded(tmp_path: Path, data: Path) -> None:
    section = _section(buckets=BUCKETS, bucket_batch=[1, 6, 50])
    config = load_config([write_config(tmp_path / "base.yaml", data, dataset=section)])
    # Six times as many clips of half the rows; pictures are encoded one by one.
    expected = (6 // 2 * 4, *BUCKETS[0])
    assert largest_clips(config, TrainArguments.from_config(config)) == expected


def test_a_prefix_is_shorter_than_the_clips_of_each_bucket(tmp_path: Path, data: Path) -> None:
    network = "model.network_config.params"
    words = ["model.conditions=[frames]", "model.given_frames=prefix:9", f"{network}.num_frames=17"]
    words += [f"{network}.in_channels={2 * CHANNELS}", "data.params.max_num_frames=17"]
    whole = r"given_frames=prefix:9 is the whole clip of data.params.buckets\[1\]=9; give fewer"
    with pytest.raises(ValueError, match=whole):
        make(tmp_path, data, *words, "data.params.buckets=[[17,32,32],[9,32,32],[1,32,32]]")


def test_a_run_on_buckets_resumes_exactly(tmp_path: Path, data: Path, caplog) -> None:
    caplog.set_level("INFO")
    straight = make(tmp_path / "a", data, "args.train_iters=9")
    straight.train()
    assert (
        "9x32x32                  6" in caplog.text and "left out                 1" in caplog.text
    )
    pattern = r"cannot use 1 of 5 held-out videos, first: .*broken.mp4: not a readable video"
    assert re.search(pattern, caplog.text)
    folder = run_folder(tmp_path / "a/runs")
    (line,) = (folder / "bad_samples.jsonl").read_text().splitlines()
    assert json.loads(line)["path"].endswith("broken.mp4")

    make(tmp_path / "b", data, "args.train_iters=9", "args.exit_interval=4").train()
    part = run_folder(tmp_path / "b/runs")
    make(tmp_path / "b", data, "args.train_iters=9", f"args.resume={part}").train()
    assert losses(part) == losses(folder) and len(losses(part)) == 9
    assert "the data set has changed" not in caplog.text

    # Tokens and FLOPs of a line are those of the bucket of its step.
    order, model = straight.order, straight.engine.transformer.config
    lines = [json.loads(t) for t in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len({order.bucket(step) for step in range(9)}) == 3
    for line in lines:
        tokens = TOKENS[order.bucket(line["step"] - 1)]
        per_sample = line["tokens_per_s"] / line["samples_per_s"]
        assert per_sample == pytest.approx(tokens, rel=1e-6)
        flops = line["model_tflops"] * 1e12 / line["samples_per_s"]
        assert flops == pytest.approx(train_flops(model, tokens), rel=1e-6)
    assert straight.size.latents.num_frames == 9 and straight.size.latents.height == 4
    setup = straight.parts.memory.setup
    assert setup is not None and setup.size.num_tokens(model) == max(TOKENS)

    make(tmp_path / "b", data, "args.train_iters=9", f"args.resume={part}",
         "args.train_data_weights=[2]", "args.accept_changes=true")  # fmt: skip
    assert (
        "17 samples, with different weights" in caplog.text
        or "different weights or buckets" in caplog.text
    )


def test_buckets_and_weights_from_a_cache(tmp_path: Path, data: Path) -> None:
    """Training from a cache has the losses of training from pixels."""
    overrides = ("args.train_iters=6", f"args.latent_cache={tmp_path / 'cache'}",
             "args.train_data_weights=[0.7]")  # fmt: skip
    make(tmp_path / "pixels", data, overrides[0], overrides[2]).train()
    base = tmp_path / "pixels/base.yaml"
    more = [f"args.train_data=[{data / 'data.jsonl'}]", "args.max_bad_fraction=0.1", *overrides]
    cache_latents(load_config([base], more))
    make(tmp_path / "cached", data, *overrides).train()
    pixels, cached = (losses(run_folder(tmp_path / n / "runs")) for n in ("pixels", "cached"))
    assert pixels == cached and len(cached) == 6
    entries = sorted((tmp_path / "cache").rglob("*.safetensors"))
    other = [*more, "data.params.video_size=[32,16]", "data.params.max_num_frames=5"]
    cache_latents(
        load_config([base], other)
    )  # changed sampling in evaluations encodes nothing again
    assert sorted((tmp_path / "cache").rglob("*.safetensors")) == entries


def test_epochs_count_weights_and_buckets(tmp_path: Path, data: Path) -> None:
    trainer = make(
        tmp_path, data, "args.epochs=2", "args.train_iters=null", "args.train_data_weights=[0.5]"
    )
    # 6 x 0.5, 5 x 0.75 and 3 x 0.75, rounded, twice, in steps of 4
    assert trainer.order.epoch_size == 3 + 4 + 2 and trainer.num_steps == 2 + 2 + 1
    assert len(trainer.datasets.train) == 15 and len(trainer.datasets.valid) == 5


def test_an_image_to_video_run_samples_one_size(tmp_path: Path, data: Path) -> None:
    """Held-out images of a different bucket are resized to the sampled size."""
    overrides = ("args.train_iters=2", "args.eval_interval=2", "args.eval_sampling_steps=2",
             "args.eval_num_samples=4", "data.params.max_num_frames=17",
             "data.params.buckets=[[17,32,32],[9,16,32],[1,32,32]]")  # fmt: skip
    make(tmp_path, data, *overrides, family="1.5_5b_i2v").train()
    samples = run_folder(tmp_path / "runs") / "samples" / "step-00000002"
    assert len(list(samples.glob("*.mp4"))) == 4


def test_too_many_bad_videos_end_the_run_at_its_start(tmp_path: Path, data: Path) -> None:
    with pytest.raises(ValueError, match=r"4/15 videos unreadable \(>10%\).*first: .*1 frame at"):
        make(tmp_path, data, f"data.params.buckets={json.dumps(BUCKETS[:2])}")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "bucket, message",
    [
        ([10, 32, 32], r"data.params.buckets\[1\]=10: CogVideoX 1.0 supports 8N\+1 frames"),
        ([9, 32], r"buckets\[1\]=\[9, 32\] must be \[frames, rows, columns\]"),
    ],
)
def test_every_bucket_must_fit_the_model_family(
    tmp_path: Path, data: Path, bucket, message
) -> None:
    section = _section(buckets=[[9, 32, 32], bucket])
    base = write_config(tmp_path / "base.yaml", data, dataset=section)
    with pytest.raises(ValueError, match=message):
        check_train(load_config([base], [f"args.train_data=[{data / 'data.jsonl'}]"]))


@pytest.mark.soak
def test_compiled_blocks_work_for_all_buckets(tmp_path: Path, data: Path) -> None:
    """Losses are equal, and there are only the graphs of the first shape and of dynamic shapes."""
    make(tmp_path / "plain", data, "args.train_iters=9").train()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make(tmp_path / "compiled", data, "args.train_iters=9", "args.compile=true").train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    plain, compiled = (losses(run_folder(tmp_path / n / "runs")) for n in ("plain", "compiled"))
    assert compiled == pytest.approx(plain, rel=1e-6)

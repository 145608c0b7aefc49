"""Whole runs on manifests, weights and buckets: a resume repeats the losses, and figures are right."""

import json
import re
from pathlib import Path

import pytest
import torch

from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.plan.memory import setup_of
from cogfast.train.preflight.check import check_train
from cogfast.train.preflight.encode_choice import largest_clips
from cogfast.train.watchers.model_flops import train_flops
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run
from tests.support.tiny_run import write_clips
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


@pytest.fixture
def run(run: Run) -> Run:
    """A run on buckets of the manifest that lies beside the clips."""
    return run.with_manifest(run.data / "data.jsonl", buckets=BUCKETS).with_args(
        max_bad_fraction=0.1
    )


def test_the_batch_of_most_pixels_decides_how_clips_are_encoded(run: Run) -> None:
    made = run.config("data.params.bucket_batch=[1, 6, 50]").run
    # Six times as many clips of half the rows; pictures are encoded one by one.
    expected = (6 // 2 * 4, *BUCKETS[0])
    assert largest_clips(made.args, made.data_arguments, made.network.config, None) == expected


def test_a_run_on_buckets_resumes_exactly(run: Run, tmp_path: Path, log) -> None:
    run = run.with_words("args.train_iters=9")
    whole = run.into(tmp_path / "a").train()
    straight = whole.last
    assert "9x32x32                  6" in log.text and "left out                 1" in log.text
    pattern = r"cannot use 1 of 5 held-out videos, first: .*broken.mp4: not a readable video"
    assert re.search(pattern, log.text)
    (line,) = (whole.path / "bad_samples.jsonl").read_text().splitlines()
    assert json.loads(line)["path"].endswith("broken.mp4")

    run.train("args.exit_interval=4")
    part = run.resume()
    assert part.losses == whole.losses and len(part.losses) == 9
    assert "the data set has changed" not in log.text

    # Tokens and FLOPs of a line are those of the bucket of its step.
    order, model = straight.parts.data.order, straight.engine.transformer.config
    assert len({order.bucket(step) for step in range(9)}) == 3
    for line in whole.lines:
        tokens = TOKENS[order.bucket(line["step"] - 1)]
        per_sample = line["tokens_per_s"] / line["samples_per_s"]
        assert per_sample == pytest.approx(tokens, rel=1e-6)
        flops = line["model_tflops"] * 1e12 / line["samples_per_s"]
        assert flops == pytest.approx(train_flops(model, tokens), rel=1e-6)
    assert straight.parts.size.latents.num_frames == 9 and straight.parts.size.latents.height == 4
    setup = setup_of(straight.parts.launch.run, 1)
    assert setup.size.num_tokens(model) == max(TOKENS)

    weighted = run.with_words(f"args.resume={part.path}", "args.train_data_weights=[2]")
    weighted.trainer("args.accept_changes=true")
    assert re.search("17 samples, with different weights|different weights or buckets", log.text)


def test_buckets_and_weights_from_a_cache(run: Run, tmp_path: Path) -> None:
    """Training from a cache has the losses of training from pixels."""
    run = run.with_args(train_iters=6, train_data_weights=[0.7])
    cached = run.cached_in(tmp_path / "cache")
    cache_latents(cached.config().run)
    pixels = run.into(tmp_path / "pixels").train()
    found = cached.into(tmp_path / "cached").train()
    assert pixels.losses == found.losses and len(found.losses) == 6
    entries = sorted((tmp_path / "cache").rglob("*.safetensors"))
    # Changed sampling in evaluations encodes nothing again.
    cache_latents(
        cached.config("data.params.video_size=[32,16]", "data.params.max_num_frames=5").run
    )
    assert sorted((tmp_path / "cache").rglob("*.safetensors")) == entries


def test_epochs_count_weights_and_buckets(run: Run) -> None:
    trainer = run.with_args(epochs=2, train_iters=None, train_data_weights=[0.5]).trainer()
    # 6 x 0.5, 5 x 0.75 and 3 x 0.75, rounded, twice, in steps of 4
    assert trainer.parts.data.order.epoch_size == 3 + 4 + 2 and trainer.num_steps == 2 + 2 + 1
    assert len(trainer.datasets.train) == 15 and len(trainer.datasets.valid) == 5


def test_an_image_to_video_run_samples_one_size(run: Run) -> None:
    """Held-out images of a different bucket are resized to the sampled size."""
    run = run.of("1.5_5b_i2v").with_words("data.params.buckets=[[17,32,32],[9,16,32],[1,32,32]]")
    run = run.with_args(train_iters=2, eval_interval=2, eval_sampling_steps=2, eval_num_samples=4)
    samples = run.train("data.params.max_num_frames=17").path / "samples" / "step-00000002"
    assert len(list(samples.glob("*.mp4"))) == 4


def test_too_many_bad_videos_end_the_run_at_its_start(run: Run, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"3 of 15 clips are shorter than 9 frames.*1 other clip unusable"
    ):
        run.trainer(f"data.params.buckets={BUCKETS[:2]}")
    assert not (tmp_path / "runs").exists()


@refusals(Path(__file__).with_name("refusals_buckets.txt"))
def test_every_bucket_must_fit_the_model(run: Run, refusal: Refusal) -> None:
    assert_refused(lambda: check_train(run.config(*refusal.words).run), refusal.line)


@pytest.mark.soak
def test_compiled_blocks_work_for_all_buckets(run: Run, tmp_path: Path) -> None:
    """Losses are equal, and there are only the graphs of the first shape and of dynamic shapes."""
    plain = run.into(tmp_path / "plain").train(steps=9)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = run.into(tmp_path / "compiled").train("args.compile=true", steps=9)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)

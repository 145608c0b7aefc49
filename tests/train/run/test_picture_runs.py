"""Whole runs on clips and pictures: losses, resumes, ranks, the latent cache, and what is logged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cogfast.config import load_config
from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import Noised
from cogfast.train.caching.command import cache_latents
from cogfast.train.run.page.page import page_of
from cogfast.train.run.page.record import read_run
from cogfast.train.trainer import Trainer
from tests.support.layouts import assert_equal_training, launch
from tests.support.tiny_run import losses, run_folder, write_clips
from tests.train.test_bucket_runs import make

BUCKETS = [[9, 32, 32], [1, 32, 32]]
BOTH = (f"data.params.buckets={json.dumps(BUCKETS)}", "data.params.bucket_batch=[1,3]",
        "args.train_iters=6")  # fmt: skip


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 6 clips, 12 pictures and a manifest."""
    folder = write_clips(tmp_path_factory.mktemp("both"))
    rows = [{"path": f"videos/{i}.mp4", "caption": f"bar {i}"} for i in range(6)]
    for i in range(12):
        values = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{i}.png")
        rows.append({"path": f"{i}.png", "caption": f"picture {i}", "type": "image"})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


class Noted(Trainer):
    """Notes the step, the batch, what the network gets and the losses of each micro-batch."""

    def losses(self, batch: dict, noised: Noised, conditioning: Conditioning) -> Tensor:
        losses = super().losses(batch, noised, conditioning)
        self.noted = [
            *getattr(self, "noted", []),
            (self.step, batch, noised, conditioning, losses.detach()),
        ]
        return losses


@pytest.mark.parametrize("family", ["5b", "1.5_5b_i2v"])
def test_the_loss_of_pictures_is_that_of_clips_of_one_frame(
    tmp_path: Path, both: Path, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    words = [*BOTH, "args.lr=0"]
    if family != "5b":
        words[0] = words[0].replace("[9,", "[17,")
    trainer = make(tmp_path, both, *words, family=family, trainer=Noted)
    network = trainer.engine.transformer
    trainer.train()
    pictures = [each for each in trainer.noted if each[1]["mp4"].shape[1] == 1]
    # Steps of 4 clips and of 12 pictures: 2 of 6 clips and 1 of 12 pictures are an epoch.
    assert len(pictures) == 2 and "pictures: 40.0% of the steps, at most 12 sam" in caplog.text
    for _, batch, noised, conditioning, found in pictures:
        assert sorted(Path(p).stem for p in batch["paths"]) == sorted(map(str, range(12)))
        files = [np.array(Image.open(path)) for path in batch["paths"]]
        values = torch.from_numpy(np.stack(files)).permute(0, 3, 1, 2)[:, :, None] / 127.5 - 1
        clean = trainer.encoder.first_stage.encode(values).mean * trainer.encoder.scale_factor
        if family != "5b":
            clean = clean.repeat(1, 1, 2, 1, 1)  # a token covers two latent frames
            assert not conditioning.condition_latents.any()
        assert torch.allclose(noised.clean, clean, atol=1e-5)
        # Timesteps are spread over all slots of the step.
        assert torch.equal((noised.timesteps * 12 // 1000).sort().values, torch.arange(12))
        a = noised.alpha_sqrt.view(-1, 1, 1, 1, 1)
        v = a * noised.noise - (1 - a**2).sqrt() * clean
        with torch.no_grad():
            text = trainer.encoder.text_encoder(batch["txt"])
            text = conditioning.text if trainer.encoder.text_dropout else text
            x = a * clean + (1 - a**2).sqrt() * noised.noise
            inputs = None if family == "5b" else torch.zeros_like(x)
            output = network(x, noised.timesteps, text, condition_latents=inputs)
        expected = (output - v).square().flatten(1).mean(1)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    # The means by kind, and what is counted.
    folder = run_folder(tmp_path / "runs")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {step: (batch, found) for step, batch, _, _, found in trainer.noted}
    for line in lines:
        batch, found = by_step[line["step"] - 1]
        kinds = "loss_image", "loss_video"
        own, other = kinds if batch["mp4"].shape[1] == 1 else kinds[::-1]
        assert line[own] == pytest.approx(found.mean().item(), rel=1e-6) == line["loss"]
        assert line[other] is None
        per_step = line["samples_per_s"] * line["step_ms"] / 1000
        assert per_step == pytest.approx(len(found), rel=1e-6)
    page = page_of([read_run(folder, lines)], folder / "index.html")
    assert all(text in page for text in ("Training loss by kind", '"clips"', '"pictures"'))


def test_clips_and_pictures_resume_and_come_from_a_cache(tmp_path: Path, both: Path) -> None:
    straight = make(tmp_path / "a", both, *BOTH, "args.num_workers=2")
    straight.train()
    expected = losses(run_folder(tmp_path / "a/runs"))
    buckets = [straight.order.bucket(step) for step in range(6)]
    assert len(set(buckets[:3])) == len(set(buckets[3:])) == 2
    make(tmp_path / "b", both, *BOTH, "args.exit_interval=3").train()
    part = run_folder(tmp_path / "b/runs")
    make(tmp_path / "b", both, *BOTH, f"args.resume={part}").train()
    assert losses(part) == expected and len(expected) == 6

    base, cache = tmp_path / "a/base.yaml", f"args.latent_cache={tmp_path / 'cache'}"
    cache_latents(load_config([base], [f"args.train_data=[{both / 'data.jsonl'}]", *BOTH, cache]))
    make(tmp_path / "cached", both, *BOTH, cache).train()
    assert losses(run_folder(tmp_path / "cached/runs")) == pytest.approx(expected, rel=1e-6)


def test_two_ranks_train_on_the_same_kind_in_a_step(tmp_path: Path, both: Path) -> None:
    """They have the losses of one rank, with accumulation too, and resume them bit for bit. Each
    reads a part of the headers."""
    make(tmp_path / "one", both, *BOTH).train()
    base, run = str(tmp_path / "one/base.yaml"), tmp_path / "resumed/run"
    words = [f"args.train_data=[{both / 'data.jsonl'}]", *BOTH, "args.save_interval=4"]
    (both / ".cogfast-index").unlink()
    words += ["deepspeed.train_micro_batch_size_per_gpu=1", "args.gradient_accumulation_steps=2"]
    straight = str(tmp_path / "two")
    launch(
        2,
        [
            [base, *words, f"args.save={straight}"],
            ["copy", straight, "00000004", str(run)],
            [base, *words, f"args.save={run.parent}", f"args.resume={run}"],
        ],
    )
    assert_equal_training(run_folder(tmp_path / "two"), run_folder(tmp_path / "one/runs"))
    assert losses(run) == losses(run_folder(tmp_path / "two"))[4:]
    rows = [json.loads(line) for line in (both / ".cogfast-index").read_text().split("\n") if line]
    assert len({name for name, *_ in rows}) == len(rows) == 18


def test_a_run_on_pictures_alone_warns(
    tmp_path: Path, both: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("args.max_bad_fraction=0.4", "data.params.buckets=[[9,32,32],[1,32,32]]")
    rows = (both / "data.jsonl").read_text().splitlines()[6:]
    (both / "alone.jsonl").write_text("\n".join(rows))
    make(tmp_path, both, *words, f"args.train_data=[{both / 'alone.jsonl'}]")
    assert "only pictures are trained, from which the model learns no motion" in caplog.text


def test_bucket_batch_has_a_number_for_each_bucket(tmp_path: Path, both: Path) -> None:
    with pytest.raises(
        ValueError, match=r"bucket_batch=\[1, 3, 2\] must have one number for each ent"
    ):
        make(tmp_path, both, *BOTH, "data.params.bucket_batch=[1,3,2]")

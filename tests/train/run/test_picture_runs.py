"""Whole runs on clips and pictures: losses, resumes, ranks, the latent cache, and what is logged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import Noised
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.page.page import page_of
from cogfast.extensions.page.record import read_run
from cogfast.train.trainer import Trainer
from tests.support.layouts import assert_equal_training, launch
from tests.support.runs import Run
from tests.support.tiny_run import write_clips

BUCKETS = [[9, 32, 32], [1, 32, 32]]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 6 clips, 12 pictures and a manifest."""
    folder = write_clips(tmp_path_factory.mktemp("both"))
    rows = [{"path": f"videos/{i}.mp4", "caption": f"bar {i}"} for i in range(6)]
    for i in range(12):
        values = np.random.default_rng(i).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(values).save(folder / f"{i}.png")
        rows.append({"path": f"{i}.png", "caption": f"picture {i}", "type": "image"})
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(run: Run, data: Path) -> Run:
    run = run.with_manifest(data / "data.jsonl", buckets=BUCKETS, bucket_batch=[1, 3])
    return run.with_args(train_iters=6)


class Noted(Trainer):
    """Notes the step, the batch, what the network gets and the losses of each micro-batch."""

    def losses(self, batch: dict, noised: Noised, conditioning: Conditioning) -> Tensor:
        losses = super().losses(batch, noised, conditioning)
        one = (self.step, batch, noised, conditioning, losses.detach())
        self.noted = [*getattr(self, "noted", []), one]
        return losses


@pytest.mark.parametrize("family", ["5b", "1.5_5b_i2v"])
def test_the_loss_of_pictures_is_that_of_clips_of_one_frame(
    run: Run, family: str, log: pytest.LogCaptureFixture
) -> None:
    run = run.of(family).by(Noted).with_words("args.lr=0")
    if family != "5b":
        run = run.with_words("data.params.buckets=[[17, 32, 32], [1, 32, 32]]")
    trainer = run.trainer()
    network = trainer.engine.transformer
    trainer.train()
    pictures = [each for each in trainer.noted if each[1]["mp4"].shape[1] == 1]
    # Steps of 4 clips and of 12 pictures: 2 of 6 clips and 1 of 12 pictures are an epoch.
    assert len(pictures) == 2 and "pictures: 40.0% of the steps, at most 12 sam" in log.text
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
            text = conditioning.text if trainer.encoder.dropouts["text"] else text
            x = a * clean + (1 - a**2).sqrt() * noised.noise
            inputs = None if family == "5b" else torch.zeros_like(x)
            output = network(x, noised.timesteps, text, condition_latents=inputs)
        expected = (output - v).square().flatten(1).mean(1)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
    # The means by kind, and what is counted.
    folder, lines = trainer.folder, run.lines
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


def test_clips_and_pictures_resume_and_come_from_a_cache(run: Run, tmp_path: Path) -> None:
    whole = run.into(tmp_path / "a").train("args.num_workers=2")
    buckets = [whole.last.parts.data.order.bucket(step) for step in range(6)]
    assert len(set(buckets[:3])) == len(set(buckets[3:])) == 2
    run.train("args.exit_interval=3")
    assert run.resume().losses == whole.losses and len(whole.losses) == 6

    cached = run.cached_in(tmp_path / "cache")
    cache_latents(cached.config().run)
    found = cached.into(tmp_path / "cached").train()
    assert found.losses == pytest.approx(whole.losses, rel=1e-6)


def test_two_ranks_train_on_the_same_kind_in_a_step(run: Run, tmp_path: Path, data: Path) -> None:
    """They have the losses of one rank, with accumulation too, and resume them bit for bit. Each
    reads a part of the headers."""
    one, copied = run.train(), tmp_path / "resumed/run"
    (data / ".cogfast-index").unlink()
    words = ("deepspeed.train_micro_batch_size_per_gpu=1", "args.gradient_accumulation_steps=2")
    run = run.with_words("args.save_interval=4", *words)
    straight = run.into(tmp_path / "two")
    resumed = run.into(copied.parent).with_words(f"args.resume={copied}")
    launch(2, [straight, ["copy", str(tmp_path / "two"), "00000004", str(copied)], resumed])
    assert_equal_training(straight.path, one.path)
    assert resumed.losses == straight.losses[4:]
    rows = [json.loads(line) for line in (data / ".cogfast-index").read_text().split("\n") if line]
    assert len({name for name, *_ in rows}) == len(rows) == 18


def test_a_run_on_pictures_alone_warns(
    run: Run, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = (data / "data.jsonl").read_text().splitlines()[6:]
    (data / "alone.jsonl").write_text("\n".join(rows))
    run = run.with_args(max_bad_fraction=0.4, train_data=[str(data / "alone.jsonl")])
    run.trainer("data.params.bucket_batch=null")
    assert "only pictures are trained, from which the model learns no motion" in caplog.text

"""Runs whose loss has masks, and samples with the base model as target, against losses by hand."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import Noised
from cogfast.extensions.cache.command import cache_latents
from cogfast.extensions.sample.writer import write_video
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.train.trainer import Trainer
from tests.support.layouts import assert_equal_training, launch
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import SIDE, assert_same, model_section, write_clips
from tests.train.run.test_lora_runs import lora_run

LOSS = "model.loss_fn_config.params"
LORA = "model.network_config.params.modules.lora_config.params"
PRIOR = (True, False, False, True, False, False)
STEPS = 4


@dataclass
class Seen:
    """One micro-batch of a recorded run."""

    prior: list[bool]
    mask: Tensor
    noised: Noised
    conditioning: Conditioning
    estimate: Tensor
    losses: Tensor
    is_training: bool


class Recorded(Trainer):
    def losses(self, batch, noised, conditioning):
        estimate = self.predict(noised.latents, noised.timesteps, conditioning)
        found = self.loss.of(estimate, noised)
        prior = batch.get("prior", [False] * len(found))
        given = prior, batch.get("mask"), noised, conditioning
        is_training = self.engine.transformer.training
        one = Seen(*given, estimate.detach(), found.detach(), is_training)
        self.seen = [*getattr(self, "seen", []), one]
        return found


def write_masks(folder: Path) -> list[str | None]:
    """Half of the picture is white: in a picture for all frames, or in a video from its fifth frame on."""
    half = np.zeros((SIDE, SIDE, 3), np.uint8)
    half[:, : SIDE // 2] = 255
    Image.fromarray(half).save(folder / "half.png")
    late = np.stack([half * (t >= 5) for t in range(17)])
    write_video(folder / "late.mp4", late, fps=8)
    return ["half.png", "late.mp4", None, "half.png", None, "late.mp4"]


def write_manifest(folder: Path, name: str, masks: Sequence, prior: Sequence) -> Path:
    rows = [
        {"path": f"videos/{i}.mp4", "caption": f"bar number {i} moves"}
        | ({} if mask is None else {"mask": mask})
        | ({} if is_prior is None else {"prior": is_prior})
        for i, (mask, is_prior) in enumerate(zip(masks, prior, strict=True))
    ]
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / name


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Clips, and manifests of them with masks, with samples of the base model, with both, and plain."""
    data = write_clips(tmp_path_factory.mktemp("masks"))
    masks = write_masks(data)
    write_manifest(data, "both.jsonl", masks, PRIOR)
    write_manifest(data, "masks.jsonl", masks, [None] * 6)
    write_manifest(data, "prior.jsonl", [None] * 6, PRIOR)
    write_manifest(data, "plain.jsonl", [None] * 6, [None] * 6)
    return data


@pytest.fixture(scope="module")
def lora(shared_run: Run, data: Path) -> Run:
    """A LoRA run on random weights, whose manifest has masks and samples of the base model."""
    run = lora_run(shared_run, 4).by(Recorded).with_manifest(data / "both.jsonl")
    return run.with_args(train_iters=STEPS, save_interval=2, keep_last=0)


def on(run: Run, manifest: str, key: str = "train_data") -> Run:
    return run.with_words(f"args.{key}=[{run.data / manifest}.jsonl]")


def held_out(run: Run, manifest: str, interval: int) -> Run:
    words = (f"args.eval_interval={interval}", "args.eval_num_samples=0", "args.strict_eval=true")
    return on(run, manifest, "valid_data").with_words(*words)


BOTH = (f"{LOSS}.masked=0.1", f"{LOSS}.prior_weight=0.5", "args.lr=0.05")


@pytest.fixture(scope="module")
def one(lora: Run) -> Run:
    return held_out(lora, "both", STEPS).train(*BOTH)


def base_estimate(one: Run, seen: Seen) -> Tensor:
    """The estimate of a model without adapters that is built and loaded apart."""
    base = build_transformer(model_section("5b", one.data))
    load_transformer(base, one.options["load"])
    with torch.no_grad():
        v = base(seen.noised.latents, seen.noised.timesteps, seen.conditioning.text)
    a = seen.noised.alpha_sqrt.view(-1, 1, 1, 1, 1)
    return a * seen.noised.latents - (1 - a**2).sqrt() * v


def test_targets_are_those_of_a_base_that_is_loaded_apart(one: Run) -> None:
    """The steps have changed the adapters."""
    assert any(any(seen.prior) and not all(seen.prior) for seen in one.last.seen[1:])
    for step, seen in enumerate(one.last.seen):
        target, base = seen.noised.target, base_estimate(one, seen)
        for i, is_prior in enumerate(seen.prior):
            if not is_prior:
                assert torch.equal(target[i], seen.noised.clean[i])
                continue
            assert (target[i] - base[i]).abs().max() < 1e-5
            assert torch.equal(target[i], seen.estimate[i]) == (step == 0)


def test_losses_are_weighted_errors(one: Run) -> None:
    by_step = []
    for seen in one.last.seen:
        clean = seen.noised.clean
        pixels = seen.mask.double().mul(0.9).add(0.1).movedim(2, 1)  # [B, 1, F, H, W]
        latents = [pixels[:, :, :1], pixels[:, :, 1:5], pixels[:, :, 5:9]]
        tiles = [t.unfold(3, 8, 8).unfold(4, 8, 8).mean(dim=(2, 5, 6)) for t in latents]
        error = seen.estimate.double() - torch.where(
            torch.tensor(seen.prior).view(-1, 1, 1, 1, 1), base_estimate(one, seen), clean
        )
        error = (error.square() * torch.stack(tiles, dim=2)).flatten(1).mean(dim=1)
        expected = error / (1 - seen.noised.alpha_sqrt.double() ** 2)
        expected *= 1 - 0.5 * torch.tensor(seen.prior)
        by_step.append((expected, torch.tensor(seen.prior)))
        torch.testing.assert_close(seen.losses.double(), expected, rtol=1e-4, atol=1e-6)
    found = one.lines
    for line, (expected, is_prior) in zip(found, by_step, strict=False):
        assert line["loss"] == pytest.approx(expected.mean().item(), rel=1e-4)
        if is_prior.any():
            mean = expected[is_prior].mean().item()
            assert line["loss_prior"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert any(line.get("loss_prior") for line in found)


def test_the_first_step_has_no_prior_loss_and_the_others_as_they_were(
    lora: Run, tmp_path: Path
) -> None:
    """Adapters begin at zero. Drop-out and recomputation do not reach the base's pass."""
    run = lora.with_words(f"{LORA}.lora_dropout=0.3", "args.activation_checkpointing=full")
    (prior,) = on(run, "prior").into(tmp_path / "prior").train(steps=1).last.seen
    (plain,) = on(run, "plain").into(tmp_path / "plain").train(steps=1).last.seen
    assert any(prior.prior) and not all(prior.prior)
    assert prior.is_training and plain.is_training
    for i, is_prior in enumerate(prior.prior):
        assert prior.losses[i] == (0 if is_prior else plain.losses[i])
        assert plain.losses[i] > 0


def test_a_weight_of_one_is_the_run_without_masks(lora: Run, tmp_path: Path) -> None:
    masks = on(lora, "masks")
    one = masks.into(tmp_path / "one").train(f"{LOSS}.masked=1")
    plain = on(lora, "plain").into(tmp_path / "plain").train()
    unread = masks.into(tmp_path / "unread").train()
    assert one.losses == plain.losses == unread.losses
    assert unread.last.seen[0].mask is None and one.last.seen[0].mask is not None


def test_a_latent_cache_has_the_losses_of_clips(lora: Run, tmp_path: Path, one: Run) -> None:
    cached = lora.cached_in(tmp_path / "cache").into(tmp_path / "runs")
    found = cached.train(*BOTH, "args.encode_first=true")
    assert found.losses == pytest.approx(one.losses, rel=1e-5)


def test_a_resumed_run_repeats_every_bit(lora: Run, tmp_path: Path, one: Run) -> None:
    run = lora.into(tmp_path / "first").with_words(*BOTH)
    run.train(steps=2)
    resumed = run.resume()
    assert resumed.losses == one.losses
    assert_same(resumed.weights(), one.weights())


MICRO = "deepspeed.train_micro_batch_size_per_gpu"
LAYOUTS = {
    # One rank may need no pass of the base where the other one does.
    "dp 2": [f"{MICRO}=1", "deepspeed.gradient_accumulation_steps=2"],
    "tp 2": ["args.model_parallel_size=2", "args.sequence_parallel=true"],
    "ZeRO-3": [f"{MICRO}=2", "deepspeed.zero_optimization.stage=3",
               "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"],
}  # fmt: skip


@pytest.mark.soak
def test_two_ranks_have_the_losses_of_one(lora: Run, tmp_path: Path, one: Run) -> None:
    run = held_out(lora, "both", STEPS).with_words(*BOTH)
    runs = [run.into(tmp_path / name).with_words(*words) for name, words in LAYOUTS.items()]
    launch(2, runs)
    for found in runs:
        assert_equal_training(found.path, one.path)
        for key in ("valid_loss", "loss_prior"):
            assert found.logged(key) == pytest.approx(one.logged(key), rel=1e-4, abs=1e-6)


def test_held_out_losses_are_masked(lora: Run, tmp_path: Path, one: Run) -> None:
    """The held-out loss is linear in the weight outside, and prior samples are compared with their clips."""
    trained = on(lora, "masks").with_words(f"args.load_lora={one.checkpoint}", "args.lr=0")

    def evaluate(masked: float, manifest: str) -> float:
        run = held_out(trained, manifest, 1).into(tmp_path / f"{masked}{manifest}")
        (loss,) = run.train(f"{LOSS}.masked={masked}", steps=1).logged("valid_loss")
        return loss

    full, half, none = (evaluate(masked, "both") for masked in (1, 0.5, 0))
    assert none < half < full and half == pytest.approx((full + none) / 2, rel=1e-5)
    assert evaluate(1, "plain") == pytest.approx(full, rel=1e-6)
    assert evaluate(0.5, "plain") == pytest.approx(full, rel=1e-6), "held-out data without masks"


def test_what_does_not_fit_is_refused(
    lora: Run, run: Run, data: Path, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    write_manifest(data, "all.jsonl", [None] * 6, [True] * 6)
    cases = {
        ("prior", *BOTH): "args.train_data: no sample has a mask, but <...>masked is set",
        ("plain", f"{LOSS}.prior_weight=0.5"): (
            "no sample has prior: true, but loss_fn_config.params.prior_"
        ),
        ("all",): "all samples have prior: true, so that nothing is learned",
    }
    for (manifest, *words), line in cases.items():
        wrong = on(lora, manifest).into(tmp_path / "runs").with_words(*words)
        assert_refused(wrong.train, line)
    full = run.with_manifest(data / "both.jsonl")
    with pytest.raises(ValueError) as error:
        full.trainer()
    assert str(error.value) == (
        "args.train_data: 2 samples have prior: true, whose target is the model without its adapters, but "
        "this run trains other weights than LoRA's; set args.lora_rank=64 (or another rank), or remove "
        "column prior"
    )
    text = "masks are not read; model.conditions: [mask, masked_video] or loss_fn_config"
    assert text in log.text


def test_masks_are_no_part_of_a_latent_cache(
    lora: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is repaired makes no bad sample any more; one that does not fit its clip does."""
    Image.new("L", (SIDE, SIDE)).save(data / "own.png")
    write_manifest(data, "own.jsonl", ["own.png", "own.mp4", *[None] * 4], [None] * 6)
    (data / "own.mp4").write_bytes((data / "late.mp4").read_bytes())
    run = on(lora, "own").cached_in(tmp_path / "cache").with_words(f"{LOSS}.masked=0.1")
    cache_latents(run.config().run)
    Image.open(data / "half.png").save(data / "own.png")
    frames = np.stack([np.asarray(Image.open(data / "half.png"))] * 40)
    write_video(data / "own.mp4", frames, fps=24)
    readers = []
    monkeypatch.setattr("cogfast.data.video.clip.device_reader", readers.append)
    found = run.into(tmp_path / "runs").train()
    assert set(readers) == {"pyav"}  # threads read, whose current device is not that of the process
    (line,) = (found.path / "bad_samples.jsonl").read_text().splitlines()
    assert "own.mp4 has 40 frames at 24 fps, the clip 17 frames at 8 fps" in line

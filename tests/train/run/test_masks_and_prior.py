"""Runs whose loss has masks, and samples with the base model as target, against losses by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from cogfast.config import load_config
from cogfast.data.video.writer import write_video
from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.loss import Noised
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint
from cogfast.model.weights.load import load_transformer
from cogfast.train.caching.command import cache_latents
from cogfast.train.trainer import Trainer
from tests.support.layouts import assert_equal_training, launch, numbers
from tests.support.tiny_run import (
    SIDE,
    losses,
    model_section,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)
from tests.train.run.test_lora_runs import write_lora_config

LOSS = "model.loss_fn_config.params"
LORA = "model.network_config.params.modules.lora_config.params"
TABLE = {
    "target": "cogfast.data.datasets.VideoManifest",
    "params": {"video_size": [SIDE, SIDE], "fps": 8, "max_num_frames": 9},
}
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


class Recorded(Trainer):
    def losses(self, batch, noised, conditioning):
        estimate = self.predict(noised.latents, noised.timesteps, conditioning)
        found = self.loss.of(estimate, noised)
        prior = batch.get("prior", [False] * len(found))
        one = Seen(
            prior, batch.get("mask"), noised, conditioning, estimate.detach(), found.detach()
        )
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
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA run on random weights, whose manifest has masks and samples of the base model."""
    folder = tmp_path_factory.mktemp("masks")
    data = write_clips(folder / "data")
    masks = write_masks(data)
    write_manifest(data, "both.jsonl", masks, PRIOR)
    write_manifest(data, "masks.jsonl", masks, [None] * 6)
    write_manifest(data, "prior.jsonl", [None] * 6, PRIOR)
    write_manifest(data, "plain.jsonl", [None] * 6, [None] * 6)
    return write_lora_config(
        folder,
        4,
        dataset=TABLE,
        train_data=[str(data / "both.jsonl")],
        train_iters=STEPS,
        save_interval=2,
        keep_last=0,
    )


def train(base: Path, folder: Path, *words: str, manifest: str = "both") -> Recorded:
    data = base.parent / "data" / f"{manifest}.jsonl"
    words = (f"args.save={folder}", f"args.train_data=[{data}]", *words)
    trainer = Recorded(load_config([base], words))
    trainer.train()
    return trainer


BOTH = (f"{LOSS}.masked=0.1", f"{LOSS}.prior_weight=0.5", "args.lr=0.05")


@pytest.fixture(scope="module")
def one(lora: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("one") / "runs"
    return train(lora, folder, *BOTH, f"args.valid_data=[{lora.parent}/data/both.jsonl]",
                 f"args.eval_interval={STEPS}", "args.eval_num_samples=0", "args.strict_eval=true")  # fmt: skip


def base_estimate(one: Recorded, seen: Seen) -> Tensor:
    """The estimate of a model without adapters that is built and loaded apart."""
    base = build_transformer(model_section("5b", one.folder))
    load_transformer(base, str(one.args.load))
    with torch.no_grad():
        v = base(seen.noised.latents, seen.noised.timesteps, seen.conditioning.text)
    a = seen.noised.alpha_sqrt.view(-1, 1, 1, 1, 1)
    return a * seen.noised.latents - (1 - a**2).sqrt() * v


def test_targets_are_those_of_a_base_that_is_loaded_apart(one: Recorded) -> None:
    """The steps have changed the adapters."""
    assert any(any(seen.prior) and not all(seen.prior) for seen in one.seen[1:])
    for step, seen in enumerate(one.seen):
        target, base = seen.noised.target, base_estimate(one, seen)
        for i, is_prior in enumerate(seen.prior):
            if not is_prior:
                assert torch.equal(target[i], seen.noised.clean[i])
                continue
            assert (target[i] - base[i]).abs().max() < 1e-5
            assert torch.equal(target[i], seen.estimate[i]) == (step == 0)


def test_losses_are_weighted_errors(one: Recorded) -> None:
    by_step = []
    for seen in one.seen:
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
    found = [json.loads(line) for line in (one.folder / "metrics.jsonl").read_text().splitlines()]
    for line, (expected, is_prior) in zip(found, by_step, strict=False):
        assert line["loss"] == pytest.approx(expected.mean().item(), rel=1e-4)
        if is_prior.any():
            mean = expected[is_prior].mean().item()
            assert line["loss_prior"] == pytest.approx(mean, rel=1e-4, abs=1e-6)
    assert any(line.get("loss_prior") for line in found)


def test_the_first_step_has_no_prior_loss_and_the_others_as_they_were(
    lora: Path, tmp_path: Path
) -> None:
    """Adapters begin at zero. Drop-out and recomputation do not reach the base's pass."""
    words = [f"{LORA}.lora_dropout=0.3", "args.activation_checkpointing=full", "args.train_iters=1"]
    (prior,) = train(lora, tmp_path / "prior", *words, manifest="prior").seen
    (plain,) = train(lora, tmp_path / "plain", *words, manifest="plain").seen
    assert any(prior.prior) and not all(prior.prior)
    for i, is_prior in enumerate(prior.prior):
        assert prior.losses[i] == (0 if is_prior else plain.losses[i])
        assert plain.losses[i] > 0


def test_a_weight_of_one_is_the_run_without_masks(lora: Path, tmp_path: Path) -> None:
    runs = {
        name: train(lora, tmp_path / name, *words, manifest=manifest)
        for name, manifest, words in (
            ("one", "masks", [f"{LOSS}.masked=1"]),
            ("plain", "plain", []),
            ("unread", "masks", []),
        )
    }
    assert len({tuple(losses(run.folder)) for run in runs.values()}) == 1
    assert runs["unread"].seen[0].mask is None and runs["one"].seen[0].mask is not None


def test_a_latent_cache_has_the_losses_of_clips(lora: Path, tmp_path: Path, one: Recorded) -> None:
    words = [f"args.latent_cache={tmp_path / 'cache'}", "args.encode_first=true"]
    found = train(lora, tmp_path / "runs", *BOTH, *words)
    assert losses(found.folder) == pytest.approx(losses(one.folder), rel=1e-5)


def test_a_resumed_run_repeats_every_bit(lora: Path, tmp_path: Path, one: Recorded) -> None:
    train(lora, tmp_path / "first", *BOTH, "args.train_iters=2")
    first = run_folder(tmp_path / "first")
    train(lora, tmp_path / "first", *BOTH, f"args.resume={first}")
    assert losses(first) == losses(one.folder)
    found, expected = (read_run_weights(newest_checkpoint(r)) for r in (first, one.folder))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


MICRO = "deepspeed.train_micro_batch_size_per_gpu"
LAYOUTS = {
    # One rank may need no pass of the base where the other one does.
    "dp 2": [f"{MICRO}=1", "deepspeed.gradient_accumulation_steps=2"],
    "tp 2": ["args.model_parallel_size=2", "args.sequence_parallel=true"],
    "ZeRO-3": [f"{MICRO}=2", "deepspeed.zero_optimization.stage=3",
               "deepspeed.zero_optimization.stage3_param_persistence_threshold=0"],
}  # fmt: skip


@pytest.mark.slow
def test_two_ranks_have_the_losses_of_one(lora: Path, tmp_path: Path, one: Recorded) -> None:
    held_out = ["args.valid_data=[{}/data/both.jsonl]", f"args.eval_interval={STEPS}"]
    held_out = [word.format(lora.parent) for word in held_out] + ["args.eval_num_samples=0"]
    held_out += ["args.strict_eval=true"]
    every = [
        [str(lora), f"args.save={tmp_path / name}", *BOTH, *held_out, *words]
        for name, words in LAYOUTS.items()
    ]
    launch(2, every)
    for name in LAYOUTS:
        found = run_folder(tmp_path / name)
        assert_equal_training(found, one.folder)
        for key in ("valid_loss", "loss_prior"):
            expected = numbers(one.folder, key)
            torch.testing.assert_close(numbers(found, key), expected, rtol=1e-4, atol=1e-6)


def test_held_out_losses_are_masked(lora: Path, tmp_path: Path, one: Recorded) -> None:
    """The held-out loss is linear in the weight outside, and prior samples are compared with their clips."""
    words = [f"args.load_lora={newest_checkpoint(one.folder)}"]
    evaluate = lambda masked, manifest: numbers(
        train(lora, tmp_path / f"{masked}{manifest}", *words, "args.train_iters=1", "args.lr=0",
              f"{LOSS}.masked={masked}", f"args.valid_data=[{lora.parent}/data/{manifest}.jsonl]",
              "args.eval_interval=1", "args.eval_num_samples=0", manifest="masks").folder,
        "valid_loss",
    ).item()  # fmt: skip
    full, half, none = (evaluate(masked, "both") for masked in (1, 0.5, 0))
    assert none < half < full and half == pytest.approx((full + none) / 2, rel=1e-5)
    assert evaluate(1, "plain") == pytest.approx(full, rel=1e-6)
    assert evaluate(0.5, "plain") == pytest.approx(full, rel=1e-6), "held-out data without masks"


def test_what_does_not_fit_is_refused(
    lora: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        ValueError, match="args.train_data: no sample has a mask, but .*masked is set"
    ):
        train(lora, tmp_path / "runs", *BOTH, manifest="prior")
    with pytest.raises(
        ValueError, match="no sample has prior: true, but loss_fn_config.params.prior_"
    ):
        train(lora, tmp_path / "runs", f"{LOSS}.prior_weight=0.5", manifest="plain")
    write_manifest(lora.parent / "data", "all.jsonl", [None] * 6, [True] * 6)
    with pytest.raises(
        ValueError, match="all samples have prior: true, so that nothing is learned"
    ):
        train(lora, tmp_path / "runs", manifest="all")
    caplog.set_level("INFO", "cogfast")
    data = lora.parent / "data"
    words = {"dataset": TABLE, "train_data": [str(data / "both.jsonl")]}
    full = write_config(tmp_path / "full.yaml", data, **words)
    with pytest.raises(ValueError) as error:
        Trainer(load_config([full]))
    assert str(error.value) == (
        "args.train_data: 2 samples have prior: true, whose target is the model without its adapters, but "
        "this run trains other weights than LoRA's; set args.lora_rank=64 (or another rank), or remove "
        "column prior"
    )
    assert (
        "masks are not read; model.conditions: [mask, masked_video] or loss_fn_config"
        in caplog.text
    )


def test_masks_are_no_part_of_a_latent_cache(
    lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is repaired makes no bad sample any more; one that does not fit its clip does."""
    data = lora.parent / "data"
    Image.new("L", (SIDE, SIDE)).save(data / "own.png")
    manifest = write_manifest(data, "own.jsonl", ["own.png", "own.mp4", *[None] * 4], [None] * 6)
    (data / "own.mp4").write_bytes((data / "late.mp4").read_bytes())
    words = [f"args.latent_cache={tmp_path / 'cache'}", f"{LOSS}.masked=0.1"]
    cache_latents(load_config([lora], [*words, f"args.train_data=[{manifest}]"]))
    Image.open(data / "half.png").save(data / "own.png")
    frames = np.stack([np.asarray(Image.open(data / "half.png"))] * 40)
    write_video(data / "own.mp4", frames, fps=24)
    readers = []
    monkeypatch.setattr("cogfast.data.video.clip.dali_of_this_process", readers.append)
    found = train(lora, tmp_path / "runs", *words, manifest="own")
    assert set(readers) == {"pyav"}  # threads read, whose current device is not that of the process
    (line,) = (found.folder / "bad_samples.jsonl").read_text().splitlines()
    assert "own.mp4 has 40 frames at 24 fps, the clip 17 frames at 8 fps" in line

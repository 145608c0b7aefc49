"""The training loop on one process: every family, what is trained, EMA, bad steps, encoded batches."""

from __future__ import annotations

import json
import math
import re
import shlex
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from cogfast.__main__ import main
from cogfast.cli.options import parse_sample
from cogfast.config import load_config
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import to_device
from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint
from cogfast.train.assembly import assemble_batches
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    CHANNELS,
    losses,
    read_run_weights,
    run_folder,
    write_config,
)

ENCODED = "tests.train.test_trainer.EncodedSamples"


class EncodedSamples(Dataset):
    """Latents and embeddings made elsewhere; sample `bad_sample` has a NaN in it."""

    def __init__(self, data_dir: list[str], bad_sample: int = -1, num_bad: int = 1) -> None:
        self.bad = range(bad_sample, bad_sample + num_bad) if bad_sample >= 0 else ()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator().manual_seed(index)
        latents = torch.randn(CHANNELS, 3, 4, 4, generator=generator)
        if index in self.bad:
            latents[0, 0, 0, 0] = float("nan")
        return {
            "encoded_videos": latents,
            "prompt_embedding": torch.randn(8, 16, generator=generator),
        }


def make(base: Path, *overrides: str) -> Trainer:
    return Trainer(load_config([base], overrides, allow_import=["tests"]))


def loss_of_first_step(trainer: Trainer, folder: Path) -> float:
    """The loss of the current weights on the batch and draws of step 0."""
    trainer.step = 0
    batches = assemble_batches(trainer.datasets.train, trainer.args, trainer.groups, folder, 0)
    with torch.no_grad(), batches:
        return trainer.compute_loss(to_device(next(batches), "cpu")).item()


# 5b and 1.5_5b train in tests of most other files.
@pytest.mark.parametrize("family", ["2b", "5b_i2v", "1.5_5b_i2v"])
def test_every_family_learns_full_and_lora(tmp_path: Path, data: Path, family: str) -> None:
    """mp4s in, checkpoint out, a LoRA on top of it; each time the loss at fixed draws falls, and
    what is frozen stays as it is."""
    base = write_config(tmp_path / "full" / "base.yaml", data, family, train_iters=12)
    check_learning(make(base, "deepspeed.optimizer.params.lr=0.01"), tmp_path, least=0.02)
    full = run_folder(tmp_path / "full" / "runs")

    base = write_config(tmp_path / "lora" / "base.yaml", data, family, 4, train_iters=12)
    trainer = make(base, "deepspeed.optimizer.params.lr=0.1", f"args.load={full}")
    loaded = read_run_weights(newest_checkpoint(full))
    qkv = trainer.engine.transformer.blocks[0].attention.qkv.original.weight
    assert torch.equal(qkv, loaded["blocks.0.attention.qkv.weight"])
    changed = check_learning(trainer, tmp_path, least=5e-5)
    assert len(changed) == 2 * 8  # layers x (3 + 1 pairs of A and B)
    assert all("matrix_" in name for name in changed)
    saved = read_run_weights(newest_checkpoint(run_folder(tmp_path / "lora" / "runs")))
    assert saved.keys() == changed  # megabytes, not the base again


def test_start_and_end_are_a_fact_a_line(tmp_path: Path, data: Path, caplog) -> None:
    """The commands at the end are ones that run: the model is converted, and training resumes."""
    caplog.set_level("INFO", logger="cogfast")
    base = write_config(tmp_path / "base.yaml", data, train_iters=1, eval_at_end=True)
    valid = [f"args.valid_data=[{data}]", "args.eval_sampling_steps=1"]
    make(base, *valid).train()
    lines = [record.getMessage() for record in caplog.records]
    run = run_folder(tmp_path / "runs")
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in lines if re.search(r"\w  +", line))
    assert facts["run folder"] == str(run)
    assert facts["trained on"] == "1 process (dp 1 x tp 1), ZeRO-2, fp32"
    assert facts["global batch"] == "4 = dp 1 x batch 4 x accumulation 1"
    assert (facts["data"], facts["steps"]) == ("6 samples", "0 to 1")
    start = next(i for i, line in enumerate(lines) if line.startswith("run folder"))
    assert all(len(line.replace(str(run), "")) <= 100 for line in lines[start : start + 7])

    end = next(i for i, line in enumerate(lines) if line.startswith("finished at step 1; "))
    assert lines[end].endswith(f"checkpoint: {run}/checkpoints/00000001")
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss, held_out = found[0]["loss"], found[-1]["valid_loss"]
    assert lines[end + 1] == (
        f"loss {loss:.4f}, mean {loss:.4f}, held-out loss {held_out:.4f} (step 1), "
        f"videos: {run}/samples/step-00000001"
    )
    commands = [shlex.split(facts[name]) for name in ("to sample", "to convert", "to train on")]
    assert commands[1][-1] == "--ema", "the videos are of the averaged weights"
    assert parse_sample(commands[0][2:]).weights == str(run)
    out = str(tmp_path / "converted")
    assert main([out if word == "DIR" else word for word in commands[1][1:]]) == 0
    assert (tmp_path / "converted" / "config.json").is_file()
    assert commands[2][:-2] == ["the", "same", "command", "with", "--resume"]
    resumed = make(base, f"args.resume={commands[2][-2]}", commands[2][-1])
    assert (resumed.step, resumed.num_steps) == (1, 2)


def check_learning(trainer: Trainer, folder: Path, least: float) -> set[str]:
    """Train; the loss must fall by the share `least`. Returns the names of what changed."""
    parameters = dict(trainer.engine.transformer.named_parameters())
    before = {n: p.detach().clone() for n, p in parameters.items()}
    first = loss_of_first_step(trainer, folder)
    trainer.train()
    assert loss_of_first_step(trainer, folder) < (1 - least) * first
    changed = {n for n, p in parameters.items() if not torch.equal(p, before[n])}
    assert changed == {n for n, p in parameters.items() if p.requires_grad}
    return changed


def test_loss_is_the_formula(tmp_path: Path, data: Path) -> None:
    """compute_loss against the formulas written out here, on the draws of its slots."""
    trainer = make(write_config(tmp_path / "base.yaml", data, "5b_i2v"))
    batch = next(
        assemble_batches(trainer.datasets.train, trainer.args, trainer.groups, tmp_path, 0)
    )
    batch = to_device(batch, "cpu")
    rng = SlotRandom(trainer.args.seed, 0, [0, 1, 2, 3], 4)
    encoder, loss_fn = trainer.encoder, trainer.diffusion.loss

    pixels = batch["mp4"].transpose(1, 2)
    latents = 0.7 * encoder.first_stage.encode(pixels).mean
    sigma = torch.exp(-3.0 + 0.5 * rng.normal("image_noise_strength", (4, 1, 1, 1, 1)))
    frame = pixels[:, :, :1] + sigma * rng.normal("image_noise", (4, 3, 1, 32, 32))
    image = torch.zeros_like(latents)
    image[:, :, :1] = 0.7 * encoder.first_stage.encode(frame).mean
    image[rng.uniform("image_dropout") < 0.3] = 0
    text = encoder.text_encoder(batch["txt"])
    text[rng.uniform("text_dropout") < 0.1] = 0

    idx = loss_fn.sigma_sampler.sample(rng)
    a = loss_fn.sigma_sampler.alpha_sqrt(idx).double().view(-1, 1, 1, 1, 1)
    noised = a * latents.double() + (1 - a**2).sqrt() * rng.normal("noise", latents.shape).double()
    with torch.no_grad():
        v = trainer.engine.transformer(noised.float(), idx, text, condition_latents=image).double()
        wanted = ((a * noised - (1 - a**2).sqrt() * v - latents.double()) ** 2).flatten(1).mean(1)
        wanted = (wanted / (1 - a.flatten() ** 2)).mean()
        found = trainer.compute_loss(batch)
    assert math.isclose(found.item(), wanted.item(), rel_tol=1e-5)


def test_ema_is_the_average_of_the_weights(tmp_path: Path, data: Path) -> None:
    """The shadow in the last of five checkpoints against the recursion over all five."""
    base = write_config(tmp_path / "base.yaml", data, train_iters=5, save_interval=1, keep_last=0)
    trainer = make(base)
    shadow = {
        n: p.detach().double().clone()
        for n, p in trainer.engine.transformer.named_parameters()
        if p.requires_grad
    }
    trainer.train()
    folder = run_folder(tmp_path / "runs") / "checkpoints"
    for step in range(1, 6):
        decay = min(0.9999, (1 + step) / (10 + step))
        for name, value in read_run_weights(folder / f"{step:08d}").items():
            if name in shadow:
                shadow[name] = decay * shadow[name] + (1 - decay) * value.double()
    for name, value in read_run_weights(newest_checkpoint(folder.parent), ema=True).items():
        if name in shadow:
            torch.testing.assert_close(value.double(), shadow[name], rtol=1e-5, atol=1e-7)


def test_encoded_batches_load_no_encoder(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Threads that earlier tests left may start others meanwhile.
    started = [threading.main_thread()]
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if threading.current_thread() in started:
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    trainer = make(
        write_config(tmp_path / "base.yaml", data, dataset={"target": ENCODED}, train_iters=3)
    )
    trainer.config.model.first_stage_config.params.ckpt_path = "nowhere"
    trainer.train()
    assert len(losses(run_folder(tmp_path / "runs"))) == 3
    assert trainer.encoder._first_stage is None
    assert trainer.encoder._text_encoder is None
    assert len(started) > 1
    for thread in started[1:]:
        thread.join(60)  # the one that waits for signals ends a moment later
    assert not any(thread.is_alive() for thread in started[1:])


NON_FINITE = (  # every pair of values, and what trains by default
    ("sat.ops.FusedEmaAdam", 2, "bf16"),
    ("sat.ops.FusedEmaAdam", 3, "fp32"),
    ("AdamW", 2, "fp32"),
    ("AdamW", 3, "bf16"),
    ("torch.optim.RMSprop", 2, "bf16"),
    ("torch.optim.RMSprop", 3, "fp32"),
)


@pytest.mark.parametrize(
    ("optimizer", "stage", "precision"),
    NON_FINITE,
)
def test_non_finite_step_changes_nothing(
    tmp_path: Path, data: Path, optimizer: str, stage: int, precision: str
) -> None:
    """A NaN in one sample: the steps that see it are skipped whole, the others happen."""
    base = write_config(
        tmp_path / "base.yaml",
        data,
        dataset={"target": ENCODED, "params": {"bad_sample": 0}},
        optimizer=optimizer,
        train_iters=4,
        save_interval=1,
        keep_last=0,
    )
    trainer = make(
        base,
        f"deepspeed.bf16={{enabled: {str(precision == 'bf16').lower()}}}",
        f"deepspeed.zero_optimization.stage={stage}",
    )
    trainer.train()
    run = run_folder(tmp_path / "runs")
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped_in_a_row"] > 0 for line in lines]
    assert sum(skipped) == 2  # two epochs of 8 samples in 4 steps of 4
    steps = [read_run_weights(run / "checkpoints" / f"{i:08d}") for i in (1, 2, 3, 4)]
    for step in (2, 3, 4):
        same = all(
            torch.equal(steps[step - 1][n], steps[step - 2][n]) for n in steps[0] if "blocks" in n
        )
        assert same == skipped[step - 1], f"step {step}"
    assert all(torch.isfinite(value).all() for value in steps[-1].values())


def test_too_many_non_finite_steps_end_the_run(tmp_path: Path, data: Path) -> None:
    all_bad = {"target": ENCODED, "params": {"bad_sample": 0, "num_bad": 8}}
    trainer = make(write_config(tmp_path / "base.yaml", data, dataset=all_bad, train_iters=21))
    with pytest.raises(RuntimeError, match="20 steps in a row had non-finite gradients.*resume"):
        trainer.train()


def test_a_tensor_without_gradient_is_named(tmp_path: Path, data: Path) -> None:
    make(write_config(tmp_path / "base.yaml", data, train_iters=1)).train()
    base = write_config(tmp_path / "lora.yaml", data, lora_rank=2)
    # After one step the modulation is still zero, which is refused unless training is forced.
    trainer = make(base, f"args.load={run_folder(tmp_path / 'runs')}", "args.force_train=true")
    trainer.parts.gradient_check.waiting.add("blocks.9.attention.qkv.matrix_A.0")
    trainer.parts.gradient_check.num_trainable += 1
    with pytest.raises(
        RuntimeError, match=r"no gradient in step 1 for 1 of 17 LoRA tensors.*blocks\.9"
    ):
        trainer.train()


def test_nothing_trainable_is_refused(tmp_path: Path, data: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data)
    with pytest.raises(ValueError, match="args.load is missing: LoRA adapts trained weights"):
        make(write_config(tmp_path / "lora.yaml", data, lora_rank=2))
    with pytest.raises(ValueError, match="nothing is trainable: model.not_trainable_prefixes"):
        make(base, "model.not_trainable_prefixes=[all]")


def test_epochs_count_steps(tmp_path: Path, data: Path) -> None:
    base = write_config(tmp_path / "base.yaml", data, train_iters=None, epochs=2)
    make(base).train()  # 6 clips, 4 per step
    assert len(losses(run_folder(tmp_path / "runs"))) == 3

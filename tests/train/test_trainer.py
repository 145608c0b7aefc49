"""The training loop on one process: every family, what is trained, EMA, bad steps, encoded batches."""

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
from cogfast.core.slot_random import SlotRandom
from cogfast.data.batches import to_device
from cogfast.train.assembly import assemble_batches
from cogfast.train.trainer import Trainer
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, read_run_weights, write_clips_with_vae

ENCODED = "tests.train.test_trainer.EncodedSamples"
MIXED = "tests.train.test_trainer.MixedPixels"


class EncodedSamples(Dataset):
    """Latents, embeddings and image latents made elsewhere; sample `bad_sample` has a NaN in it."""

    def __init__(self, data_dir, bad_sample=-1, num_bad=1, num_samples=8, num_frames=3) -> None:
        self.bad = range(bad_sample, bad_sample + num_bad) if bad_sample >= 0 else ()
        self.num_samples, self.num_frames = num_samples, num_frames

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(index)
        latents = torch.randn(CHANNELS, self.num_frames, 4, 4, generator=draw)
        if index in self.bad:
            latents[0, 0, 0, 0] = float("nan")
        return {
            "encoded_videos": latents,
            "prompt_embedding": torch.randn(8, 16, generator=draw),
            "image_latents": torch.randn(CHANNELS, 1, 4, 4, generator=draw),
        }


class MixedPixels(Dataset):
    """A clip and a picture."""

    def __init__(self, data_dir) -> None:
        self.num_frames = (9, 1)

    def __len__(self) -> int:
        return len(self.num_frames)

    def __getitem__(self, index: int) -> dict:
        draw = torch.Generator().manual_seed(index)
        size = (self.num_frames[index], 3, 32, 32)
        pixels = torch.randint(256, size, generator=draw, dtype=torch.uint8)
        return {"mp4": pixels, "txt": f"sample {index}"}


def test_ranks_with_a_clip_and_ranks_with_a_picture_choose_together(tmp_path: Path) -> None:
    """How clips are encoded, in training and in evaluations. Each step has one of both."""
    data = write_clips_with_vae(tmp_path / "data", 1, CHANNELS)
    run = Run(data, tmp_path).with_vae().with_args(dataset={"target": MIXED, "params": {}})
    words = ["deepspeed.train_micro_batch_size_per_gpu=1", "args.collective_timeout=20"]
    words += [f"args.valid_data=[{data}]", "args.eval_interval=2", "args.eval_iters=1"]
    run = run.with_words(*words, "args.only_log_video_latents=true").by(Trainer, "tests")
    shown = run.launch(2, "args.train_iters=2")
    assert shown.count("clips of 9x32x32 are encoded whole") == 1, shown
    assert len(run.losses) == 2 and len(run.logged("valid_loss")) == 1


@pytest.fixture
def run(run: Run) -> Run:
    return run.by(Trainer, "tests")


def loss_of_first_step(trainer: Trainer, folder: Path) -> float:
    """The loss of the current weights on the batch and draws of step 0."""
    trainer.step = 0
    batches = assemble_batches(trainer.datasets.train, trainer.args, trainer.groups, folder, 0)
    with torch.no_grad(), batches:
        return trainer.compute_loss(to_device(next(batches), "cpu")).item()


# 5b and 1.5_5b train in tests of most other files.
@pytest.mark.parametrize("family", ["2b", "5b_i2v", "1.5_5b_i2v"])
def test_every_family_learns_full_and_lora(run: Run, tmp_path: Path, family: str) -> None:
    """mp4s in, checkpoint out, a LoRA on top of it; each time the loss at fixed draws falls, and
    what is frozen stays as it is."""
    run, rate = run.of(family).with_args(train_iters=12), "deepspeed.optimizer.params.lr"
    full, lora = run.into(tmp_path / "full"), run.with_lora(4).into(tmp_path / "lora")
    check_learning(full.trainer(f"{rate}=0.01"), tmp_path, least=0.02)

    trainer = lora.trainer(f"{rate}=0.1", f"args.load={full.path}")
    qkv = trainer.engine.transformer.blocks[0].attention.qkv.original.weight
    assert torch.equal(qkv, full.weights()["blocks.0.attention.qkv.weight"])
    changed = check_learning(trainer, tmp_path, least=5e-5)
    assert len(changed) == 2 * 8  # layers x (3 + 1 pairs of A and B)
    assert all("matrix_" in name for name in changed)
    assert lora.weights().keys() == changed  # megabytes, not the base again


def test_start_and_end_are_a_fact_a_line(run: Run, tmp_path: Path, data: Path, log) -> None:
    """The commands at the end are ones that run: the model is converted, and training resumes."""
    tiny = run.with_args(train_iters=1, eval_at_end=True)
    done = tiny.train(f"args.valid_data=[{data}]", "args.eval_sampling_steps=1")
    lines = [record.getMessage() for record in log.records]
    run = done.path
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in lines if re.search(r"\w  +", line))
    assert facts["run folder"] == str(run)
    assert facts["trained on"] == "1 process (dp 1 x tp 1), ZeRO-2, fp32"
    assert facts["global batch"] == "4 = dp 1 x batch 4 x accumulation 1"
    assert (facts["data"], facts["steps"]) == ("6 samples", "0 to 1")
    start = next(i for i, line in enumerate(lines) if line.startswith("run folder"))
    assert all(len(line.replace(str(run), "")) <= 100 for line in lines[start : start + 7])

    end = next(i for i, line in enumerate(lines) if line.startswith("finished at step 1; "))
    assert lines[end].endswith(f"checkpoint: {run}/checkpoints/00000001")
    loss, held_out = done.losses[0], done.logged("valid_loss")[-1]
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
    resumed = tiny.trainer(f"args.resume={commands[2][-2]}", commands[2][-1])
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


def test_loss_is_the_formula(run: Run, tmp_path: Path) -> None:
    """compute_loss against the formulas written out here, on the draws of its slots."""
    trainer = run.of("5b_i2v").trainer()
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


def test_ema_is_the_average_of_the_weights(run: Run) -> None:
    """The shadow in the last of five checkpoints against the recursion over all five."""
    run = run.with_args(train_iters=5, save_interval=1, keep_last=0)
    trainer = run.trainer()
    shadow = {
        n: p.detach().double().clone()
        for n, p in trainer.engine.transformer.named_parameters()
        if p.requires_grad
    }
    trainer.train()
    folder = run.path / "checkpoints"
    for step in range(1, 6):
        decay = min(0.9999, (1 + step) / (10 + step))
        for name, value in read_run_weights(folder / f"{step:08d}").items():
            if name in shadow:
                shadow[name] = decay * shadow[name] + (1 - decay) * value.double()
    for name, value in run.weights(ema=True).items():
        if name in shadow:
            torch.testing.assert_close(value.double(), shadow[name], rtol=1e-5, atol=1e-7)


def test_encoded_batches_load_no_encoder(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    # Threads that earlier tests left may start others meanwhile.
    started = [threading.main_thread()]
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        if threading.current_thread() in started:
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    run = run.with_args(dataset={"target": ENCODED}, train_iters=3)
    trainer = run.trainer()
    trainer.config.model.first_stage_config.params.ckpt_path = "nowhere"
    trainer.train()
    assert len(run.losses) == 3
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


@pytest.mark.parametrize(("optimizer", "stage", "precision"), NON_FINITE)
def test_non_finite_step_changes_nothing(
    run: Run, optimizer: str, stage: int, precision: str
) -> None:
    """A NaN in one sample: the steps that see it are skipped whole, the others happen."""
    dataset = {"target": ENCODED, "params": {"bad_sample": 0}}
    run = run.with_args(dataset=dataset, optimizer=optimizer, save_interval=1, keep_last=0)
    bf16 = f"deepspeed.bf16={{enabled: {str(precision == 'bf16').lower()}}}"
    run = run.train(bf16, f"deepspeed.zero_optimization.stage={stage}", steps=4)
    skipped = [number > 0 for number in run.logged("skipped_in_a_row")]
    assert sum(skipped) == 2  # two epochs of 8 samples in 4 steps of 4
    steps = [read_run_weights(run.path / f"checkpoints/{i:08d}") for i in (1, 2, 3, 4)]
    for step in (2, 3, 4):
        same = all(
            torch.equal(steps[step - 1][n], steps[step - 2][n]) for n in steps[0] if "blocks" in n
        )
        assert same == skipped[step - 1], f"step {step}"
    assert all(torch.isfinite(value).all() for value in steps[-1].values())


@pytest.mark.parametrize("log_interval", [1, 7, 200])
def test_too_many_non_finite_steps_end_the_run(run: Run, log_interval: int) -> None:
    all_bad = {"target": ENCODED, "params": {"bad_sample": 0, "num_bad": 8}}
    line = "20 steps in a row had non-finite gradients at step 20;<...>resume"
    bad = run.with_args(dataset=all_bad, log_interval=log_interval)
    assert_refused(lambda: bad.train(steps=40), line, RuntimeError)


def test_a_tensor_without_gradient_is_named(run: Run) -> None:
    run.train(steps=1)
    # After one step the modulation is still zero, which is refused unless training is forced.
    trainer = run.with_lora(2).trainer(f"args.load={run.path}", "args.force_train=true")
    trainer.parts.model.gradient_check.waiting.add("blocks.9.attention.qkv.matrix_A.0")
    trainer.parts.model.gradient_check.num_trainable += 1
    line = "no gradient in step 1 for 1 of 17 LoRA tensors<...>blocks.9"
    assert_refused(trainer.train, line, RuntimeError)


def test_nothing_trainable_is_refused(run: Run) -> None:
    line = "args.load is missing: LoRA adapts trained weights"
    assert_refused(run.with_lora(2).trainer, line)
    frozen = run.with_words("model.not_trainable_prefixes=[all]")
    assert_refused(frozen.trainer, "freezes random weights, which no checkpoint has; set args.load")
    frozen = frozen.with_words(f"args.load={run.train(steps=1).path}")
    assert_refused(frozen.trainer, "nothing is trainable: model.not_trainable_prefixes")


def test_epochs_count_steps(run: Run) -> None:
    assert len(run.with_args(train_iters=None, epochs=2).train().losses) == 3  # 6 clips, 4 per step

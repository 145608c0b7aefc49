"""Loss by band of timesteps, size of updates, hints, and the picture of the losses."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from cogfast.config import load_config
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.model.transformer import build_transformer
from cogfast.schema.arguments import TrainArguments
from cogfast.train.optimizer import sat_learning_rate
from cogfast.train.run.health.learning import LearningHints, student_point, trend
from cogfast.train.run.health.loss_curve import loss_figure
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    model_section,
    read_run_weights,
    run,
    run_folder,
    write_clips,
    write_config,
)

BANDS = 3  # the first of 333 timesteps, the others of 333 and 334
DRAWN = "args.eval_timestep_bands=3"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data"), num_clips=4)


def lines(folder: Path) -> list[dict]:
    text = (run_folder(folder / "runs") / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Recorded(VideoDiffusionLoss):
    """Notes timesteps and losses as they are used."""

    def at(self, network, denoiser, latents, conditioning, idx, *noise) -> Tensor:
        losses = super().at(network, denoiser, latents, conditioning, idx, *noise)
        self.noted += zip(idx.tolist(), losses.double().tolist(), strict=True)
        return losses


def train(folder: Path, data: Path, **args) -> list[tuple[int, float]]:
    """Train and return (timestep, loss) of each sample."""
    args = {"save_interval": 1, "keep_last": 0, "train_iters": 4, "log_interval": 2, **args}
    base = write_config(folder / "base.yaml", data, **args)
    trainer = Trainer(load_config([base], [DRAWN]))
    loss = trainer.diffusion.loss
    assert loss is not None
    loss.__class__, noted = Recorded, []
    loss.noted = noted
    trainer.train()
    return noted


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    folder = tmp_path_factory.mktemp("alone")
    return folder, train(folder, data)


def check_updates(folder: Path) -> None:
    """Compare the ratio with float64 from the weights of two checkpoints."""
    frozen = build_transformer(model_section("5b", folder)).unused_parameter_names()
    for line in lines(folder):
        saved = run_folder(folder / "runs") / "checkpoints"
        after, before = (read_run_weights(saved / f"{line['step'] - i:08d}") for i in (0, 1))
        trained = [name for name in after if name not in frozen]
        changes = sum((after[n].double() - before[n].double()).square().sum() for n in trained)
        weights = sum(after[name].double().square().sum() for name in trained)
        # float32 weights round the change.
        assert line["update_ratio"] == pytest.approx(math.sqrt(changes / weights), rel=1e-4)


def test_bands_are_means_of_the_samples_in_them(alone: tuple[Path, list]) -> None:
    folder, noted = alone
    found = lines(folder)
    assert len(noted) == 4 * 4 and len(found) == 2
    for i, line in enumerate(found):
        expected = defaultdict(list)
        for idx, loss in noted[8 * i : 8 * i + 8]:  # two steps of four samples
            expected[next(b for b in range(BANDS) if idx < (b + 1) * 1000 / BANDS)].append(loss)
        for band in range(BANDS):
            value = line[f"train_loss_band_{band}"]
            assert value == pytest.approx(np.mean(expected[band]), rel=1e-5)


def test_a_band_without_samples_is_null(tmp_path: Path, data: Path) -> None:
    """Four samples, of which the one with the least noise is at timestep 0."""
    base = write_config(tmp_path / "base.yaml", data, train_iters=1)
    Trainer(load_config([base], ["args.eval_timestep_bands=1000"])).train()
    (line,) = lines(tmp_path)
    bands = [value for key, value in line.items() if key.startswith("train_loss_band_")]
    assert len(bands) == 1000 and sum(band is not None for band in bands) == 4
    assert np.mean([b for b in bands if b is not None]) == pytest.approx(line["loss"], rel=1e-5)


def test_update_ratio_is_that_of_two_checkpoints(alone: tuple[Path, list]) -> None:
    check_updates(alone[0])


def test_update_ratio_of_torchs_adamw(tmp_path: Path, data: Path) -> None:
    train(tmp_path, data, optimizer="torch.optim.AdamW", train_iters=2)
    check_updates(tmp_path)


OPTIMIZERS = {
    "decoupled": [],
    "L2": ["deepspeed.optimizer.params.adam_w_mode=false"],
    "not corrected": ["deepspeed.optimizer.params.bias_correction=false"],
    "8bit": ["args.optimizer_moments=8bit"],
    "torch": ["deepspeed.optimizer.type=torch.optim.AdamW"],
}


@pytest.mark.parametrize("words", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_the_kernel_sums_what_pytorch_does(tmp_path: Path, data: Path, words: list[str]) -> None:
    base = write_config(tmp_path / "base.yaml", data, train_iters=2)
    trainer = Trainer(load_config([base], ["deepspeed.optimizer.params.weight_decay=0.5", *words]))
    trainer.train()
    ratio = trainer.learning.update_ratio
    ratio.tables = ratio.kernel_tables()
    expected, found = torch.zeros(2), torch.zeros(2)
    with torch.no_grad():
        for part in ratio.ranges:
            ratio.add_in_chunks(expected, part)
            ratio.add_with_triton(found, part)
    assert expected.min() > 0
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


LAYOUTS = {
    "weights split": ["deepspeed.zero_optimization.stage=3", "args.model_parallel_size=1"],
    "model split": ["args.model_parallel_size=2"],
    "rows split": ["args.context_parallel_size=2"],
}


@pytest.mark.parametrize(
    "layout", [pytest.param("weights split", marks=pytest.mark.soak), "model split", "rows split"]
)
def test_two_ranks_have_the_numbers_of_one(
    tmp_path: Path, data: Path, alone: tuple[Path, list], layout: str
) -> None:
    """Under ZeRO-3 with half of the samples each, and with halves of one model or of the rows."""
    args = {"save_interval": 1, "keep_last": 0, "train_iters": 2, "log_interval": 2}
    base = write_config(tmp_path / "base.yaml", data, **args)
    batch = 2 if layout == "weights split" else 4
    words = [*LAYOUTS[layout], DRAWN, f"deepspeed.train_micro_batch_size_per_gpu={batch}"]
    done = run(["train", "--base", str(base), *words], 2)
    assert done.returncode == 0, done.stdout
    check_updates(tmp_path)
    (line,), (expected, _) = lines(tmp_path), lines(alone[0])
    keys = [f"train_loss_band_{band}" for band in range(BANDS)]
    for key in ("loss", "update_ratio", *keys):
        assert line[key] == pytest.approx(expected[key], rel=1e-4)


def series(losses: np.ndarray, interval: int = 20, **more: float) -> list[dict]:
    steps = range(interval, interval * len(losses) + 1, interval)
    return [
        {"step": step, "loss": float(loss), "grad_norm": 0.3, **more}
        for step, loss in zip(steps, losses, strict=True)
    ]


def hints(found: list[dict], caplog, num_steps: int = 100_000, **args) -> list[str]:
    """Return what is logged along a series of lines."""
    caplog.clear()
    caplog.set_level("INFO", logger="cogfast")
    rate = lambda step: 1e-4 * min(1.0, (step + 1) / 100)
    arguments = TrainArguments(lr=1e-4, lr_schedule="cosine", **args)
    watch = LearningHints(arguments, rate, num_steps, num_trained=1_000_000)
    watch.start(0)
    for i, line in enumerate(found):
        watch.after_line(line["step"], found[: i + 1])
    return [record.getMessage() for record in caplog.records]


def test_a_flat_loss_is_named_once(caplog) -> None:
    rng = np.random.default_rng(0)
    flat = 0.15 * (1 + 0.01 * rng.normal(size=200))
    (text,) = hints(series(flat), caplog)
    assert text.startswith("the loss is flat within its noise from step 60 to ")
    # The first 50 steps are warm-up, and 200 later steps are needed: the test is at step 260.
    assert hints(series(flat[:12]), caplog) == []
    assert hints(series(flat[:13]), caplog) == [text]


def test_a_loss_that_falls_or_says_nothing_gets_no_hint(caplog) -> None:
    rng = np.random.default_rng(0)
    steps = np.arange(200)
    learning = (0.15 + 0.5 * np.exp(-steps / 20)) * (1 + 0.03 * rng.normal(size=200))
    assert hints(series(learning), caplog) == []
    # Noise in which a fall of a third would not show.
    assert hints(series(0.15 * (1 + 0.5 * rng.normal(size=12))), caplog) == []


def test_false_alarms_are_as_rare_as_documented(caplog) -> None:
    """A fall of 5% over the 200 tested steps: called flat in at most 1% of the runs."""
    count = 0
    for seed in range(200):
        rng = np.random.default_rng(seed)
        fall = 1 - 0.05 * np.arange(-3, 10) / 9
        noise = 0.01 * (1 + seed % 5)
        count += len(hints(series(0.2 * fall * (1 + noise * rng.normal(size=13))), caplog)) > 0
    assert count <= 2 + 3 * math.sqrt(2)  # 2 expected, and three times their deviation


def test_bands_take_out_which_timesteps_were_drawn(caplog) -> None:
    """The mean loss swings with the share of each band; the losses of the bands are flat."""
    rng = np.random.default_rng(0)
    lines = series(0.2 * (1 + 0.4 * rng.normal(size=13)))
    assert hints(lines, caplog) == []
    for line in lines:
        line |= {f"train_loss_band_{i}": 0.1 * (i + 1) + 1e-4 * rng.normal() for i in range(4)}
    assert len(hints(lines, caplog)) == 1


def test_the_trend_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    steps, losses = np.arange(20, 420, 20), 0.3 + 0.01 * rng.normal(size=20)
    found, line = trend(steps.tolist(), losses.tolist()), stats.linregress(steps, losses)
    scale = 380 / losses.mean()
    assert found.change == pytest.approx(line.slope * scale)
    assert found.error == pytest.approx(line.stderr * scale)
    for freedom in (8, 12, 30, 500):
        assert student_point(freedom) == pytest.approx(stats.t.ppf(0.99, freedom), rel=0.01)


def test_vanished_gradients_are_named_once(caplog) -> None:
    falling = np.linspace(1, 0.5, 12)
    (text,) = hints(series(falling, grad_norm=9e-6), caplog)  # 1e6 weights: below 1e-5
    assert text.startswith("gradients have vanished: norm 9e-06 at step 60, less than 1e-08 per")
    assert hints(series(falling, grad_norm=2e-5), caplog) == []
    assert hints(series(falling, grad_norm=None), caplog) == []


def test_sats_warmup_says_until_which_step(caplog) -> None:
    caplog.set_level("INFO", logger="cogfast")
    rate = sat_learning_rate(lr=1e-3, num_iters=1000, warmup_iters=10)
    watch = LearningHints(TrainArguments(lr=1e-3), rate, 1000, 10)
    watch.start(0)
    rest = "args.lr=0.001 until step 100; then it is 0.00091"
    assert caplog.messages == [f"SAT's warm-up keeps the learning rate below 10% of {rest}"]
    assert watch.warm_step == 100
    watch.start(99)  # a run that resumes has the rate in the next step
    short = LearningHints(TrainArguments(lr=1e-3), rate, 50, 10)
    short.start(0)
    assert caplog.messages[1:] == [
        "SAT's warm-up keeps the learning rate below 10% of args.lr=0.001 to the end of the run"
    ]


def test_the_axis_of_losses_is_chosen_by_the_data() -> None:
    steps = np.arange(100)
    flat = series(0.172 - 0.001 * steps / 100)
    falling = series(0.2 + 0.7 * np.exp(-steps / 20))
    for found in (flat, falling):
        for line in found:
            line |= {"loss_running": line["loss"], "valid_loss": line["loss"]}
            line |= {f"train_loss_band_{i}": line["loss"] + i for i in range(4)}
    for found, from_zero in ((flat, False), (falling, True)):
        whole, held_out, *bands = loss_figure(found, "run").axes
        losses = [line["loss"] for line in found]
        for axes in (whole, held_out):
            low, high = axes.get_ylim()
            assert high >= max(losses) and (low == 0) == from_zero
            assert from_zero or high - low < 1.3 * (max(losses) - min(losses))
        assert [axes.get_title()[:6] for axes in bands] == [f"band {i}" for i in range(4)]
        assert bands[3].get_ylim()[0] > 3


def test_a_loss_that_is_not_finite_is_drawn_around() -> None:
    lines = [{"step": 1, "loss": None, "loss_running": None}, *series(np.full(3, 0.2))[1:]]
    (axes,) = loss_figure(lines, "run").axes
    assert axes.get_ylim()[0] < 0.2 < axes.get_ylim()[1]


def test_a_users_loss_has_no_bands(tmp_path: Path, data: Path) -> None:
    class Own(Trainer):
        def compute_loss(self, batch: dict) -> Tensor:
            latents, text = torch.randn(4, 8, 3, 4, 4), torch.zeros(4, 8, 16)
            return self.engine(latents, torch.arange(4), text).square().mean()

    base = write_config(tmp_path / "base.yaml", data, train_iters=1)
    Own(load_config([base], [DRAWN])).train()
    (line,) = lines(tmp_path)
    assert [line[f"train_loss_band_{band}"] for band in range(BANDS)] == [None] * 3
    assert line["update_ratio"] > 0

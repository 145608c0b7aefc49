"""Loss by band of timesteps, and the picture of the losses."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from cogfast.config import load_config
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.train.run.loss_curve import loss_figure
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
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
    (line,), (expected, _) = lines(tmp_path), lines(alone[0])
    keys = [f"train_loss_band_{band}" for band in range(BANDS)]
    for key in ("loss", *keys):
        assert line[key] == pytest.approx(expected[key], rel=1e-4)


def series(losses: np.ndarray, interval: int = 20, **more: float) -> list[dict]:
    steps = range(interval, interval * len(losses) + 1, interval)
    return [
        {"step": step, "loss": float(loss), "grad_norm": 0.3, **more}
        for step, loss in zip(steps, losses, strict=True)
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

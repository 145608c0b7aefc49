"""Loss by band of timesteps."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from cogfast.config import load_config
from cogfast.diffusion.loss import Noised, VideoDiffusionLoss
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    run,
    run_folder,
    write_clips,
    write_config,
)

BANDS = 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_clips(tmp_path_factory.mktemp("data"), num_clips=4)


def lines(folder: Path) -> list[dict]:
    text = (run_folder(folder / "runs") / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


class Recorded(VideoDiffusionLoss):
    """Notes timesteps and losses as they are used."""

    def of(self, denoised: Tensor, noised: Noised) -> Tensor:
        losses = super().of(denoised, noised)
        self.noted += zip(noised.timesteps.tolist(), losses.double().tolist(), strict=True)
        return losses


def train(folder: Path, data: Path, **args) -> list[tuple[int, float]]:
    """Train and return (timestep, loss) of each sample."""
    args = {"save_interval": 1, "keep_last": 0, "train_iters": 4, "log_interval": 2, **args}
    base = write_config(folder / "base.yaml", data, **args)
    trainer = Trainer(load_config([base]))
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
    """Two samples, whose timesteps are in different bands."""
    base = write_config(tmp_path / "base.yaml", data, train_iters=1)
    words = ["deepspeed.train_micro_batch_size_per_gpu=2"]
    Trainer(load_config([base], words)).train()
    (line,) = lines(tmp_path)
    bands = [value for key, value in line.items() if key.startswith("train_loss_band_")]
    assert len(bands) == BANDS and sum(band is not None for band in bands) == 2
    assert np.mean([b for b in bands if b is not None]) == pytest.approx(line["loss"], rel=1e-5)


LAYOUTS = {
    "samples": "deepspeed.train_micro_batch_size_per_gpu=2",
    "model": "args.model_parallel_size=2",
}


@pytest.mark.parametrize("split", LAYOUTS)
def test_two_ranks_have_the_numbers_of_one(
    tmp_path: Path, data: Path, alone: tuple[Path, list], split: str
) -> None:
    args = {"save_interval": 1, "keep_last": 0, "train_iters": 2, "log_interval": 2}
    base = write_config(tmp_path / "base.yaml", data, **args)
    done = run(["train", "--base", str(base), LAYOUTS[split]], 2)
    assert done.returncode == 0, done.stdout
    (line,), (expected, _) = lines(tmp_path), lines(alone[0])
    keys = [f"train_loss_band_{band}" for band in range(BANDS)]
    for key in ("loss", *keys):
        assert line[key] == pytest.approx(expected[key], rel=1e-4)

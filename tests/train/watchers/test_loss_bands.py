"""Loss by band of timesteps."""

from collections import defaultdict

import numpy as np
import pytest
from torch import Tensor

from cogfast.diffusion.loss import Noised, VideoDiffusionLoss
from cogfast.train.trainer import Trainer
from tests.support.runs import Run

BANDS = 4


class Recorded(VideoDiffusionLoss):
    """Notes timesteps and losses as they are used."""

    def of(self, denoised: Tensor, noised: Noised) -> Tensor:
        losses = super().of(denoised, noised)
        self.noted += zip(noised.timesteps.tolist(), losses.double().tolist(), strict=True)
        return losses


@pytest.fixture(scope="module")
def alone(shared_run: Run) -> tuple[Run, list[tuple[int, float]]]:
    """A trained run, and (timestep, loss) of each sample."""
    run = shared_run.with_args(log_interval=2)
    trainer = run.trainer()
    loss = trainer.diffusion.loss
    assert loss is not None
    loss.__class__, noted = Recorded, []
    loss.noted = noted
    trainer.train()
    return run, noted


def test_bands_are_means_of_the_samples_in_them(alone: tuple[Run, list]) -> None:
    run, noted = alone
    found = run.lines
    assert len(noted) == 4 * 4 and len(found) == 2
    for i, line in enumerate(found):
        expected = defaultdict(list)
        for idx, loss in noted[8 * i : 8 * i + 8]:  # two steps of four samples
            expected[next(b for b in range(BANDS) if idx < (b + 1) * 1000 / BANDS)].append(loss)
        for band in range(BANDS):
            value = line[f"train_loss_band_{band}"]
            assert value == pytest.approx(np.mean(expected[band]), rel=1e-5)


def test_a_band_without_samples_is_null(run: Run) -> None:
    """Two samples, whose timesteps are in different bands."""
    (line,) = run.train(LAYOUTS["samples"], steps=1).lines
    bands = [value for key, value in line.items() if key.startswith("train_loss_band_")]
    assert len(bands) == BANDS and sum(band is not None for band in bands) == 2
    assert np.mean([b for b in bands if b is not None]) == pytest.approx(line["loss"], rel=1e-5)


LAYOUTS = {
    "samples": "deepspeed.train_micro_batch_size_per_gpu=2",
    "model": "args.model_parallel_size=2",
}


@pytest.mark.parametrize("split", LAYOUTS)
def test_two_ranks_have_the_numbers_of_one(run: Run, alone: tuple[Run, list], split: str) -> None:
    run = run.with_args(train_iters=2, log_interval=2)
    run.launch(2, LAYOUTS[split])
    (line,), (expected, _) = run.lines, alone[0].lines
    keys = [f"train_loss_band_{band}" for band in range(BANDS)]
    for key in ("loss", *keys):
        assert line[key] == pytest.approx(expected[key], rel=1e-4)


class CleanSteps(Trainer):
    """Draws timesteps of its own, all of them in the first band."""

    def add_noise(self, batch, latents, rng):
        steps = (rng.uniform("my timesteps") * 250).long()
        return self.loss._noised_at(latents, steps, rng.normal("noise", latents.shape), None)


def test_bands_are_of_the_timesteps_that_add_noise_drew(run: Run) -> None:
    lines = run.by(CleanSteps).train(steps=2).lines
    for line in lines:
        assert line["train_loss_band_0"] == pytest.approx(line["loss"], rel=1e-5)
        assert all(line[f"train_loss_band_{band}"] is None for band in (1, 2, 3))

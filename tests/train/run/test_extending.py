"""The examples of docs/extending.md: a loss by timestep, in pixels, and on features, against losses by hand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.config import load_config
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import ROOT, losses, run_folder, write_config

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
)


def example(name: str) -> type[Trainer]:
    (code,) = (text for text in EXAMPLES if f"class {name}(" in text)
    found: dict = {"__name__": "example"}
    exec(code, found)
    return found[name]


def run(kind: type[Trainer], folder: Path, data: Path, *words: str) -> Trainer:
    base = write_config(folder / "base.yaml", data, train_iters=2)
    trainer = kind(load_config([base], words))
    trainer.train()
    return trainer


class Recorded(Trainer):
    """Keeps what each step of cogfast's own loss draws and gives."""

    def losses(self, batch, noised, conditioning):
        estimate = self.predict(noised.latents, noised.timesteps, conditioning)
        found = self.loss.of(estimate, noised)
        self.seen = [*getattr(self, "seen", []), (noised, estimate.detach(), found.detach())]
        return found


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    trainer = run(Recorded, tmp_path_factory.mktemp("plain"), data)
    assert isinstance(trainer, Recorded)
    return trainer


def first_loss(trainer: Trainer) -> float:
    return losses(trainer.folder)[0]


def test_an_overridden_loss_of_the_same_numbers_is_the_same_run(
    plain: Recorded, data: Path, tmp_path: Path
) -> None:
    assert losses(run(Trainer, tmp_path, data).folder) == losses(plain.folder)
    noised, estimate, found = plain.seen[0]
    a = noised.alpha_sqrt.double().view(-1, 1, 1, 1, 1)
    mixed = a * noised.clean + (1 - a**2).sqrt() * noised.noise
    assert (mixed - noised.latents).abs().max() < 1e-6
    error = (estimate.double() - noised.clean).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(found.double(), error / (1 - a.flatten() ** 2), rtol=1e-5, atol=0)


def test_a_weight_by_timestep(plain: Recorded, data: Path, tmp_path: Path) -> None:
    noised, _, found = plain.seen[0]
    expected = (found * (1 + (noised.timesteps >= 500).float())).mean().item()
    trainer = run(example("WeightByTimestep"), tmp_path, data)
    assert first_loss(trainer) == pytest.approx(expected, rel=1e-6)
    assert first_loss(trainer) > first_loss(plain)


def test_a_loss_in_pixels(plain: Recorded, data: Path, tmp_path: Path) -> None:
    noised, estimate, found = plain.seen[0]
    stage, scale = plain.encoder.first_stage, plain.encoder.scale_factor
    difference = stage.decode(estimate / scale) - stage.decode(noised.clean / scale)
    by_hand = found + 0.1 * difference.square().flatten(1).mean(dim=1) * (noised.timesteps < 300)
    trainer = run(example("PixelLoss"), tmp_path, data)
    assert (noised.timesteps < 300).any()
    assert first_loss(trainer) == pytest.approx(by_hand.mean().item(), rel=1e-6)
    # The decoder passes gradients on.
    latents = torch.randn(1, 8, 3, 4, 4, requires_grad=True)
    stage.decode(latents).sum().backward()
    assert latents.grad is not None and latents.grad.abs().max() > 0


@pytest.mark.parametrize("policy", ["none", "full"])
def test_features_of_a_block(policy: str, plain: Recorded, data: Path, tmp_path: Path) -> None:
    """Activation checkpointing calls a block twice."""
    words = [f"args.activation_checkpointing={policy}"]
    trainer = run(example("FeatureLoss"), tmp_path, data, *words)
    noised, _, found = plain.seen[0]
    fresh = plain_hidden(data, tmp_path)
    wanted = trainer.teacher(noised.clean.mean(dim=(2, 3, 4)))
    by_hand = found + 0.5 * (1 - F.cosine_similarity(fresh, wanted, dim=1))
    assert first_loss(trainer) == pytest.approx(by_hand.mean().item(), rel=1e-5)
    # The gradient reaches the block: the second step's weights are others.
    assert losses(trainer.folder)[1] != losses(plain.folder)[1]


def plain_hidden(data: Path, folder: Path) -> Tensor:
    """The mean video row behind the first block at the first step, by hand."""
    kept: list[Tensor] = []

    class Probe(Trainer):
        def losses(self, batch, noised, conditioning):
            num_text = conditioning.text.shape[1]
            handle = self.engine.transformer.blocks[0].register_forward_hook(
                lambda block, given, out: kept.append(out[:, num_text:].detach().mean(dim=1))
            )
            found = super().losses(batch, noised, conditioning)
            handle.remove()
            return found

    run(Probe, folder / "probe", data, "args.activation_checkpointing=none")
    return kept[0]


def test_one_loss_for_each_sample(data: Path, tmp_path: Path) -> None:
    class Mean(Trainer):
        def losses(self, batch, noised, conditioning):
            return super().losses(batch, noised, conditioning).mean()

    with pytest.raises(
        ValueError, match=r"losses returned the shape \[\] for 4 samples; return one"
    ):
        run(Mean, tmp_path, data)


def test_a_script_takes_the_words_of_train(plain: Recorded, data: Path, tmp_path: Path) -> None:
    script = tmp_path / "my_trainer.py"
    script.write_text(next(text for text in EXAMPLES if "main(trainer=" in text))
    base = write_config(tmp_path / "base.yaml", data, train_iters=2)
    words = [sys.executable, script, "--base", base, f"args.save={tmp_path / 'runs'}"]
    done = subprocess.run([*map(str, words)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    noised, _, found = plain.seen[0]
    expected = (found * (1 + (noised.timesteps >= 500).float())).mean().item()
    assert losses(run_folder(tmp_path / "runs"))[0] == pytest.approx(expected, rel=1e-6)
    done = subprocess.run(
        [*map(str, words), "args.lr=high"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("cogfast: ")


def test_a_method_that_looks_misspelt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    type("Mine", (Trainer,), {"losse": None, "weigh": None})
    assert "does not call Mine.losse; did you mean losses?" in caplog.text
    assert "weigh" not in caplog.text

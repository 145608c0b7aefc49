"""The examples of docs/extending.md: a loss by timestep, in pixels, and on features, against losses by hand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.train.trainer import Trainer
from tests.support.ranks.forked import run_forked
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL
)


def example(name: str) -> type[Trainer]:
    (code,) = (text for text in EXAMPLES if f"class {name}(" in text)
    found: dict = {"__name__": "example"}
    exec(code, found)
    return found[name]


@pytest.fixture
def run(run: Run) -> Run:
    return run.with_args(train_iters=2)


class Recorded(Trainer):
    """Keeps what each step of cogfast's own loss draws and gives."""

    def losses(self, batch, noised, conditioning):
        estimate = self.predict(noised.latents, noised.timesteps, conditioning)
        found = self.loss.of(estimate, noised)
        self.seen = [*getattr(self, "seen", []), (noised, estimate.detach(), found.detach())]
        return found


@pytest.fixture(scope="module")
def recorded(shared_run: Run) -> Run:
    return shared_run.by(Recorded).train(steps=2)


@pytest.fixture
def plain(recorded: Run) -> Recorded:
    return recorded.last


def test_an_overridden_loss_of_the_same_numbers_is_the_same_run(
    plain: Recorded, recorded: Run, run: Run
) -> None:
    assert run.train().losses == recorded.losses
    noised, estimate, found = plain.seen[0]
    a = noised.alpha_sqrt.double().view(-1, 1, 1, 1, 1)
    mixed = a * noised.clean + (1 - a**2).sqrt() * noised.noise
    assert (mixed - noised.latents).abs().max() < 1e-6
    error = (estimate.double() - noised.clean).square().flatten(1).mean(dim=1)
    torch.testing.assert_close(found.double(), error / (1 - a.flatten() ** 2), rtol=1e-5, atol=0)


def test_a_weight_by_timestep(plain: Recorded, recorded: Run, run: Run) -> None:
    noised, _, found = plain.seen[0]
    expected = (found * (1 + (noised.timesteps >= 500).float())).mean().item()
    loss = run.by(example("WeightByTimestep")).train().losses[0]
    assert loss == pytest.approx(expected, rel=1e-6)
    assert loss > recorded.losses[0]


def test_a_loss_in_pixels(plain: Recorded, run: Run) -> None:
    noised, estimate, found = plain.seen[0]
    stage, scale = plain.encoder.first_stage, plain.encoder.scale_factor
    difference = stage.decode(estimate / scale) - stage.decode(noised.clean / scale)
    by_hand = found + 0.1 * difference.square().flatten(1).mean(dim=1) * (noised.timesteps < 300)
    loss = run.by(example("PixelLoss")).train().losses[0]
    assert (noised.timesteps < 300).any()
    assert loss == pytest.approx(by_hand.mean().item(), rel=1e-6)
    # The decoder passes gradients on.
    latents = torch.randn(1, 8, 3, 4, 4, requires_grad=True)
    stage.decode(latents).sum().backward()
    assert latents.grad is not None and latents.grad.abs().max() > 0


@pytest.mark.parametrize("policy", ["none", "full"])
def test_features_of_a_block(policy: str, plain: Recorded, recorded: Run, run: Run) -> None:
    """Activation checkpointing calls a block twice."""
    done = run.by(example("FeatureLoss")).train(f"args.activation_checkpointing={policy}")
    noised, _, found = plain.seen[0]
    fresh = plain_hidden(run)
    wanted = done.last.teacher(noised.clean.mean(dim=(2, 3, 4)))
    by_hand = found + 0.5 * (1 - F.cosine_similarity(fresh, wanted, dim=1))
    assert done.losses[0] == pytest.approx(by_hand.mean().item(), rel=1e-5)
    # The gradient reaches the block: the second step's weights are others.
    assert done.losses[1] != recorded.losses[1]


def plain_hidden(run: Run) -> Tensor:
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

    run.by(Probe).train("args.activation_checkpointing=none")
    return kept[0]


def test_one_loss_for_each_sample(run: Run) -> None:
    class Mean(Trainer):
        def losses(self, batch, noised, conditioning):
            return super().losses(batch, noised, conditioning).mean()

    line = "losses returned the shape [] for 4 samples; return one"
    assert_refused(run.by(Mean).train, line)


def test_a_script_takes_the_words_of_train(plain: Recorded, run: Run, tmp_path: Path) -> None:
    script = tmp_path / "my_trainer.py"
    script.write_text(next(text for text in EXAMPLES if "main(trainer=" in text))
    words = [str(script), *run.command()[1:]]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    noised, _, found = plain.seen[0]
    expected = (found * (1 + (noised.timesteps >= 500).float())).mean().item()
    assert run.losses[0] == pytest.approx(expected, rel=1e-6)
    done = run_forked([*words, "args.lr=high"])
    assert done.returncode == 2 and done.stdout.startswith("cogfast: ")
    # An error of the script's own has its place, also a ValueError.
    script.write_text(script.read_text().replace("        weight = ", "        weight, _ = "))
    done = run_forked(words)
    assert done.returncode == 1 and f'{script}", line ' in done.stdout


def test_methods_that_nothing_calls_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Mine(Trainer):
        losse = weigh = None

        def on_save(self):
            self.helps(lambda: self.used_inside())

        def helps(self, call): ...
        def used_inside(self): ...
        def learning_rate(self, step): ...
        def _private(self): ...

    assert caplog.messages == [
        "cogfast does not call Mine.learning_rate; it calls losses, add_noise, compute_loss, predict",
        "cogfast does not call Mine.losse; did you mean losses?",
        "cogfast does not call Mine.on_save; it calls losses, add_noise, compute_loss, predict",
    ]
    caplog.clear()
    example("FeatureLoss")
    assert not caplog.messages  # a method that it registers itself

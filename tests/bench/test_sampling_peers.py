"""Sampling of cogfast and of diffusers' pipeline gives the same latents before it is timed."""

from __future__ import annotations

import pytest
import torch

from bench.steps import sampling_peers
from bench.steps.sampling_peers import measure
from bench.steps.step_models import MODELS, Variant

CPU = torch.device("cpu")


@pytest.mark.parametrize("model", ["2b-smallest", "5b-smallest", "1.5-5b-smallest"])
def test_both_sides_sample_the_same_latents(model: str) -> None:
    outcome = measure(Variant(MODELS[model][0], 1, torch.float32, CPU), model, 3, rounds=2)
    (row,) = outcome.rows
    assert not outcome.problems
    assert 0 < row["difference"] < 1e-4
    assert row["ours num_samples"] == row["diffusers num_samples"] == 2


def test_sides_that_differ_are_not_timed(monkeypatch) -> None:
    real = sampling_peers.make_ours
    monkeypatch.setattr(sampling_peers, "make_ours", lambda *a: lambda: real(*a)() + 0.01)
    variant = Variant(MODELS["5b-smallest"][0], 1, torch.float32, CPU)
    outcome = measure(variant, "5b-smallest", 2, rounds=2)
    assert "the latents differ" in outcome.problems[0]
    assert "speed-up" not in outcome.rows[0]


def test_a_model_of_images_is_refused_before_anything_is_built(capsys) -> None:
    with pytest.raises(SystemExit):
        sampling_peers.main(["--model", "1.5-5b-i2v"])
    assert "invalid choice: '1.5-5b-i2v'" in capsys.readouterr().err

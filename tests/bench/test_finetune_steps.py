"""The benches against CogVideo's diffusers trainer: both sides compute the same."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bench.steps import finetune_steps
from bench.steps.step_models import Variant

MODEL = "5b-smallest"
Prepared = tuple[Path, Variant]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    folder = tmp_path_factory.mktemp("finetune")
    return folder, finetune_steps.prepare(folder, MODEL)


# tests/finetune/test_runs.py compares 20 steps of LoRA.
@pytest.mark.parametrize("mode", ["sft", pytest.param("lora", marks=pytest.mark.soak)])
def test_both_trainers_take_the_same_steps(prepared: Prepared, mode: str) -> None:
    """The losses of three steps, which depend on the updates before them; then the times of two."""
    folder, variant = prepared
    row, problems = finetune_steps.measure(folder, MODEL, variant, mode, False, pairs=2)
    assert problems == []
    assert 0 < row["largest_difference"] < 1e-5  # two implementations in float32
    for side in ("ours", "theirs"):
        assert row[f"{side}_num_samples"] == 2
        assert 0 < row[f"{side}_p10_ms"] <= row[f"{side}_median_ms"] <= row[f"{side}_p90_ms"]
    assert row["ratio"] > 0


def test_a_case_that_disagrees_is_not_timed(prepared: Prepared, monkeypatch) -> None:
    monkeypatch.setattr(finetune_steps, "compare", lambda *given: [(1.0, 1.0), (1.0, math.nan)])
    folder, variant = prepared
    row, problems = finetune_steps.measure(folder, MODEL, variant, "lora", False, pairs=2)
    assert row["not_timed"] == "the two sides disagree" and "ratio" not in row
    assert len(problems) == 1

"""The bench against CogVideo's diffusers trainer times both sides."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.steps import finetune_steps

MODEL = "5b-smallest"


@pytest.mark.parametrize("mode", ["sft", pytest.param("lora", marks=pytest.mark.soak)])
def test_steps_of_both_trainers_take_turns(tmp_path: Path, mode: str) -> None:
    variant = finetune_steps.prepare(tmp_path, MODEL)
    row = finetune_steps.measure(tmp_path, MODEL, variant, mode, False, pairs=2)
    for side in ("ours", "theirs"):
        assert row[f"{side}_num_samples"] == 2
        assert 0 < row[f"{side}_p10_ms"] <= row[f"{side}_median_ms"] <= row[f"{side}_p90_ms"]
    assert row["ratio"] > 0

"""The bench against CogVideo's diffusers trainer times both sides."""

import ast

import pytest

from bench.steps import finetune_steps


@pytest.mark.parametrize("mode", ["sft", pytest.param("lora", marks=pytest.mark.soak)])
def test_steps_of_both_trainers_take_turns(
    mode: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(finetune_steps, "TRAINERS", {mode: finetune_steps.TRAINERS[mode]})
    assert finetune_steps.main(["--model", "5b-smallest", "--pairs", "2", "--threads", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [ast.literal_eval(line) for line in lines if line.startswith("{")]
    assert [(row["mode"], row["gradient_checkpointing"]) for row in rows] == [
        (mode, False),
        (mode, True),
    ]
    for row in rows:
        for side in ("ours", "theirs"):
            assert row[f"{side}_num_samples"] == 2
            assert 0 < row[f"{side}_p10_ms"] <= row[f"{side}_median_ms"] <= row[f"{side}_p90_ms"]
        assert row["ratio"] > 0

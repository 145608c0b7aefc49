"""The benches against CogVideo's diffusers trainer: both sides compute the same."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bench.clips import finetune_cache
from bench.clips.finetune_data import latent_file, options, samples_of, text_file
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


def test_both_caches_hold_the_same(tmp_path: Path) -> None:
    """CogVideo's trainer keeps one sample of the distribution whose moments cogfast keeps."""
    size = (32, 64)  # decord pads rows of other lengths
    rows = finetune_cache.measure(tmp_path, num_clips=2, rounds=2, size=size, model=MODEL)
    assert [row["side"] for row in rows] == ["cogfast", "CogVideo"]
    assert all(row["clips_per_s"] == 2 / row["median_s"] > 0 for row in rows)
    assert rows[0]["ratio"] > 0

    args = options(tmp_path / "pipeline", tmp_path / "data", tmp_path / "out", size)
    index = [json.loads(line) for line in (tmp_path / "ours" / "index.jsonl").open()][1:]
    ours = {line["file"][:4]: load_file(tmp_path / "ours" / line["file"]) for line in index}
    with safe_open(tmp_path / "ours" / "text-00000.safetensors", "pt") as file:
        captions = [row["caption"] for row in json.loads(file.metadata()["rows"])]
    theirs = []
    for video, caption in samples_of(args):
        embedding = load_file(text_file(args, caption))["prompt_embedding"]
        found = ours["text"][f"{captions.index(caption)}.embedding"]
        torch.testing.assert_close(found, embedding, rtol=1e-5, atol=1e-5)
        theirs.append(load_file(latent_file(args, video))["encoded_video"] / 0.7)
    # cogfast's order of the clips is that of training.
    for number in range(2):
        mean, logvar = (ours["vide"][f"{number}.{name}"] for name in ("mean", "logvar"))
        draws = [(sample - mean) / (logvar / 2).exp() for sample in theirs]
        assert min(draw.abs().max() for draw in draws) < 6  # standard deviations
        assert min(abs(draw.std() - 1) for draw in draws) < 0.1

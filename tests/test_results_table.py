"""The README's benchmark section holds what the committed results say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import results_table
from bench.results_table import (
    END,
    START,
    all_folders,
    read_results,
    replace_section,
    write_section,
)
from tests.tiny_run import ROOT

MACHINE = {
    "device": "cuda",
    "machine": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1", "peft": None},
    "started_utc": "2026-11-21T08:00:00+00:00",
    "is_tiny": False,
}
STEP = {
    "model": "5b",
    "what": "step",
    "mode": "sft",
    "checkpointing": "full",
    "engine": "eager",
    "num_layers": 20,
    "num_layers_of_model": 42,
    "dtype": "bfloat16",
}


def side(name: str, ms: float) -> dict:
    figures = {"median_ms": ms, "p10_ms": ms - 1, "p90_ms": ms + 1, "model_tflop_per_s": 1e5 / ms}
    figures |= {"mfu": 100 / ms, "peak_memory_gib": 70.25, "attention_kernels": ["fmha_fprop"]}
    return {f"{name}_{key}": value for key, value in figures.items()}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    rows = [
        {**STEP, **side("ours", 250.0), **side("diffusers", 300.0), "ratio": 250 / 300},
        {
            **STEP,
            "checkpointing": "none",
            **side("ours", 240.0),
            "diffusers_does_not_fit": "20 GiB",
        },
        {**STEP, "mode": "lora", "num_layers": 42, "not_timed": "the two sides disagree"},
    ]
    best = {**{k: v for k, v in STEP.items() if k != "engine"}, "against": "eager"}
    best |= {"ours_policy": "checkpointing none, eager", "ours_median_ms": 240.0}
    best |= {"diffusers_policy": "checkpointing full, eager", "diffusers_median_ms": 300.0}
    numbers = {"best": [{**best, "ratio": 0.8}], "skipped": []}
    write(tmp_path, "5b", {"rows": rows, "numbers": numbers})
    op = {"op": "gelu", "way": "forward", "model": "5b", "status": "ok", "median_ms": 0.2034}
    op |= {"gb_per_s": 3784.0, "percent_of_copy": 88.4, "goal_percent": 88}
    peers = {"vs Liger": 1.0, "vs torch eager": 3.456}
    failed = {**op, "way": "backward", "status": "FAILED"}
    write(tmp_path, "op_times", {"rows": [op | peers, failed], "numbers": {}})
    (tmp_path / "2b.json").write_text('{"piece": "2b", "skipped": "0 s left"}')
    return tmp_path


def write(folder: Path, piece: str, answer: dict) -> None:
    (folder / f"{piece}.json").write_text(json.dumps({"piece": piece, **MACHINE, **answer}))


def test_the_readme_holds_what_the_results_give() -> None:
    section = write_section([read_results(folder) for folder in all_folders()])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert replace_section(readme, section) == readme, (
        "run: python -m bench.results_table --readme README.md"
    )


def test_a_section_of_results(results: Path) -> None:
    lines = write_section([read_results(results)]).splitlines()
    assert "**NVIDIA H200**, torch 2.11.0, triton 3.6.0, diffusers 0.42.1, 2026-11-21" in lines
    of = lambda start: next(line for line in lines if line.startswith(f"| {start}"))
    cells = lambda start: of(start).strip("| ").split(" | ")
    equal = cells("5B with 20 of 42 layers step, all weights, bfloat16, eager, checkpointing full")
    assert equal[1:4] == ["1.20x", "250 / 300", "249 to 251"]
    assert equal[4:] == ["400 / 333", "40.0% / 33.3%", "70.2", "`fmha_fprop`"]
    none = cells("5B with 20 of 42 layers step, all weights, bfloat16, eager, checkpointing none")
    assert none[1:3] == ["diffusers: does not fit", "240 / –"]
    assert cells("5B step, LoRA")[1] == "the two sides disagree"
    best = cells("5B with 20 of 42 layers step, all weights, bfloat16, against eager")
    assert best[1:4] == ["1.25x", "checkpointing none, eager", "checkpointing full, eager"]
    # the same policy comes before each side's best
    assert lines.index(of("same policy")) < lines.index(of("each side's best policy"))

    assert cells("op | ms")[5:] == ["speed-up vs torch eager", "speed-up vs Liger"]
    assert cells("gelu forward, 5b")[1:] == ["0.203", "3784", "88%", "88%", "3.46x", "1.00x"]
    assert cells("gelu backward, 5b")[1] == "wrong: not timed"
    assert of("2B: block and step").endswith("| not measured |")
    assert of("attention backends").endswith("| not measured |")
    assert of("a tiny model's step").endswith("| not measured |")
    assert not any(line.startswith("| 5B: block") for line in lines)


def test_all_of_it_is_not_measured_without_results() -> None:
    section = write_section([])
    assert section.count("| not measured |") == 7 and "x |" not in section


def test_the_command_writes_between_the_comments(results: Path, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    assert results_table.main([str(results), "--readme", str(readme)]) == 0
    text = readme.read_text()
    assert text.startswith(f"before\n{START}\n") and text.endswith(f"{END}\nafter\n")
    assert "old" not in text and "NVIDIA H200" in text
    results_table.main([str(results), "--readme", str(readme)])
    assert readme.read_text() == text


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: write(folder, "2b", {"rows": [], "is_tiny": True}), "made with --tiny"),
        (lambda folder: [p.unlink() for p in folder.glob("*.json")], "no results of bench.gpu_run"),
        (lambda folder: (folder / "README.md").write_text(f"{END}{START}"), "must hold the lines"),
    ],
    ids=["tiny", "empty", "comments"],
)
def test_bad_input(break_it, message: str, results: Path, capsys) -> None:
    readme = results / "README.md"
    readme.write_text(f"{START}{END}")
    break_it(results)
    with pytest.raises(SystemExit):
        results_table.main([str(results), "--readme", str(readme)])
    assert message in capsys.readouterr().err

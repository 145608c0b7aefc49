"""Benchmark tables: the committed pages agree with the committed results."""

import json
from pathlib import Path

import pytest
from PIL import Image

from bench import results_plot, results_table
from bench.results_table import (
    END,
    START,
    all_folders,
    read_results,
    replace_section,
    write_compact,
    write_section,
)
from tests.support.tiny_run import ROOT

MACHINE = {
    "device": "cuda",
    "machine": "NVIDIA H200",
    "versions": {"torch": "2.11.0", "triton": "3.6.0", "diffusers": "0.42.1", "peft": None},
    "started_utc": "2026-11-21T08:00:00+00:00",
    "is_tiny": False,
}
NULL_RUNTIME = {"rows": [], "machine": "NVIDIA H100 80GB HBM3 (null runtime)"}
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


def row(ours: float, theirs: float | None = None, **changes: object) -> dict:
    found = {**STEP, **changes, **side("ours", ours)}
    return found if theirs is None else found | side("diffusers", theirs) | {"ratio": ours / theirs}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    lacks = "checkpointing is one of none, full"
    rows = [
        row(250.0, 300.0),
        row(240.0, checkpointing="none", diffusers_does_not_fit="20 GiB"),
        row(245.0, checkpointing="attention_kept", diffusers_lacks_policy=lacks),
        row(200.0, 300.0, mode="lora", num_layers=42, disagrees="1 of the compared tensors"),
    ]
    write(tmp_path, "5b", {"rows": rows, "numbers": {}})
    op = {"op": "gelu", "way": "forward", "model": "5b", "status": "ok", "median_ms": 0.2034}
    op |= {"gb_per_s": 3784.0, "percent_of_copy": 88.4, "goal_percent": 88}
    peers = {"vs Liger": 1.0, "vs torch eager": 3.456}
    failed = {**op, "way": "backward", "status": "WRONG"}
    write(tmp_path, "op_times", {"rows": [op | peers, failed], "numbers": {}})
    (tmp_path / "2b.json").write_text('{"piece": "2b", "skipped": "0 s left"}')
    return tmp_path


def write(folder: Path, piece: str, answer: dict) -> None:
    (folder / f"{piece}.json").write_text(json.dumps({"piece": piece, **MACHINE, **answer}))


def test_committed_pages_hold_what_the_results_give() -> None:
    results = [read_results(folder) for folder in all_folders()]
    page = ROOT / "docs" / "benchmarks.md"
    sections = {page: write_section(results), ROOT / "README.md": write_compact(results)}
    for path, section in sections.items():
        text = path.read_text(encoding="utf-8")
        assert replace_section(text, section) == text, (
            "run: python -m bench.results_table --into docs/benchmarks.md --readme README.md"
        )


def test_a_section_of_results(results: Path) -> None:
    lines = write_section([read_results(results)]).splitlines()
    assert "### NVIDIA H200" in lines
    assert "torch 2.11.0, triton 3.6.0, diffusers 0.42.1; 2026-11-21" in lines
    of = lambda start: [line for line in lines if line.startswith(f"| {start}")]
    cells = lambda start, nth=0: of(start)[nth].strip("| ").split(" | ")
    case = "5B with 20 of 42 layers, all weights, bfloat16, eager, checkpointing full"
    assert cells(case)[1:] == ["1.20x", "250", "300", "249 to 251"]
    assert cells(case, 1)[1:] == ["400 / 333", "40.0% / 33.3%", "70.2"]
    none = cells("5B with 20 of 42 layers, all weights, bfloat16, eager, checkpointing none")
    assert none[1:4] == ["diffusers: does not fit", "240", "–"]
    kept = cells(case.replace("full", "attention_kept"))
    assert kept[1:4] == ["diffusers: has no such checkpointing", "245", "–"]
    assert cells("5B, LoRA")[1:4] == ["1.50x (the sides disagree)", "200", "300"]
    assert cells("gelu forward, 5b")[1:] == ["0.203", "3784", "88%", "88%"]
    assert cells("gelu backward, 5b (its results are wrong)")[1:3] == ["0.203", "3784"]
    title = lines.index("**gelu: speed-up over**")
    assert lines[title + 2] == "|  | torch eager | Liger |"
    assert cells("forward, 5b")[1:] == ["3.46x", "1.00x"]
    assert of("2B: training")[0].endswith("| not measured |")
    assert of("attention backends")[0].endswith("| not measured |")
    assert not of("5B: training")


def test_products_of_8_bits_are_shown_beside_bf16(results: Path) -> None:
    row = {"width": 3072, "linear": "qkv", "product": "dgrad", "kind": "bf16", "median_ms": 1.6}
    of = lambda kind, ms: {**row, "kind": kind, "median_ms": ms, "vs bf16": 1.6 / ms}
    rows = [{**row, "vs bf16": 1.0}, of("int8", 2.0), of("fp8", 1.0)]
    write(results, "products", {"rows": rows})
    shown = write_section([read_results(results)])
    assert "| product | bf16, ms | int8 weight | fp8 |" in shown
    assert "| qkv dgrad, width 3072 | 1.6 | 0.80x | 1.60x |" in shown
    write(results, "products", {"rows": rows[:2]})  # a GPU without fp8
    assert "| qkv dgrad, width 3072 | 1.6 | 0.80x |" in write_section([read_results(results)])


def test_the_plot_has_a_bar_for_each_speed_up(results: Path) -> None:
    figure = results_plot.plot([read_results(results)])
    (axes,) = figure.axes
    widths = [bar.get_width() for bar in axes.patches]
    assert widths == pytest.approx([300 / 250, 300 / 200])


def test_the_command_draws_the_committed_results(tmp_path: Path) -> None:
    path = tmp_path / "plot.png"
    assert results_plot.main(["--out", str(path)]) == 0
    width, height = Image.open(path).size
    assert width == 11 * 110
    assert height == Image.open(ROOT / "docs" / "images" / "benchmarks.png").size[1]


def test_no_table_is_wide(results: Path) -> None:
    folders = [read_results(results), *(read_results(folder) for folder in all_folders())]
    for text in (write_section(folders), write_compact(folders)):
        assert all(line.count(" | ") < 6 for line in text.splitlines() if line.startswith("|"))


def test_the_compact_table_has_a_row_for_each_result(results: Path) -> None:
    lines = write_compact([read_results(results)]).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 1
    (step,) = (line for line in lines if line.startswith("| 5B training step"))
    assert step == (
        "| 5B training step, speed-up over diffusers | 1.50x (not all agree) | NVIDIA H200 | 2026-11-21 |"
    )
    assert lines[-1].startswith("Not measured: 2B training step, speed-up over diffusers (GPU); ")
    assert lines[-1].endswith("share of a step that waits for data (CPU).")


def test_a_speed_up_of_some_layers_says_so(tmp_path: Path) -> None:
    compiled = row(200.0, 210.0, engine="compiled", num_layers=42)
    rows = [row(250.0, 300.0), row(200.0, 300.0), row(100.0, 110.0, engine="compiled"), compiled]
    write(tmp_path, "5b", {"rows": rows, "numbers": {}})
    text = "| 1.20x to 1.50x with 20 of 42 layers (1.05x with both compiled) |"
    assert text in write_compact([read_results(tmp_path)])


def test_nothing_is_measured_without_results() -> None:
    assert write_section([]).count("| not measured |") == 12 and "x |" not in write_section([])
    assert write_compact([]).count("; ") == 7 and "|" not in write_compact([])


def test_the_command_writes_between_the_comments(results: Path, tmp_path: Path) -> None:
    paths = {"--into": tmp_path / "page.md", "--readme": tmp_path / "README.md"}
    for path in paths.values():
        path.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    argv = [str(results), *(str(part) for pair in paths.items() for part in pair)]
    assert results_table.main(argv) == 0
    written = {path: path.read_text() for path in paths.values()}
    for text in written.values():
        assert text.startswith(f"before\n{START}\n") and text.endswith(f"{END}\nafter\n")
        assert "old" not in text and "NVIDIA H200" in text
    assert "### NVIDIA H200" in written[paths["--into"]]
    assert "###" not in written[paths["--readme"]]
    results_table.main(argv)
    assert written == {path: path.read_text() for path in paths.values()}


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: write(folder, "2b", {"rows": [], "is_tiny": True}), "made with --tiny"),
        (lambda folder: write(folder, "2b", NULL_RUNTIME), "made on the null runtime"),
        (lambda folder: [p.unlink() for p in folder.glob("*.json")], "no results of bench.gpu_run"),
        (lambda folder: (folder / "README.md").write_text(f"{END}{START}"), "must hold the lines"),
    ],
    ids=["tiny", "null runtime", "empty", "comments"],
)
def test_bad_input(break_it, message: str, results: Path, capsys) -> None:
    readme = results / "README.md"
    readme.write_text(f"{START}{END}")
    break_it(results)
    with pytest.raises(SystemExit):
        results_table.main([str(results), "--readme", str(readme)])
    assert message in capsys.readouterr().err

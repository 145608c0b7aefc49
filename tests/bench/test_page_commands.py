"""Every command that docs/benchmarks.md names is run at its smallest case by a test of `make test`; words that
commands refuse."""

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

from bench.gpu_run import PIECES
from tests.support.refusals import Refusal, refusals
from tests.support.tiny_run import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
# {module of bench: the test that calls its main}
TESTS = {
    "bench.data": "test_bench_data.test_report",
    "bench.clips.data_runs": "test_bench_data.test_whole_commands",
    "bench.steps.finetune_steps": "test_finetune_steps.test_steps_of_both_trainers_take_turns",
    "bench.steps.diffusers_kernels": "test_cpu_peers.test_the_command",
    "bench.steps.cpu_peers": "test_cpu_peers.test_the_command",
    "bench.results_table": "test_results_table.test_the_command_writes_between_the_comments",
    "bench.results_plot": "test_results_table.test_the_command_draws_the_committed_results",
    "bench.gpu_run": "test_gpu_run.test_the_pieces_of_short_are_measured",
}
# {target of make: its file of tests}
TARGETS = {
    "test": "",  # this test is a part of it
    "bench": "tests/bench/test_bench_step.py",
    "quickstart": "tests/cli/test_quickstart.py",
    "test-cuda": "tests/cuda/test_gpu_run.py",
}


def named(text: str) -> tuple[set[str], set[str]]:
    """Return the modules of bench and the targets of make that the code of a page names."""
    code = re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", text, re.MULTILINE | re.DOTALL)
    lines = [line for pair in code for line in "".join(pair).splitlines()]
    found: tuple[set[str], set[str]] = (set(), set())
    for line in lines:
        if match := re.match(r"(?:python -m )?(bench\.[a-z_.]+)", line):
            found[0].add(match[1])
        elif match := re.match(r"make ([a-z-]+)", line):
            found[1].add(match[1])
    return found


def test_every_command_of_the_page_has_a_test() -> None:
    modules, targets = named(PAGE.read_text(encoding="utf-8"))
    assert modules == TESTS.keys() and targets == TARGETS.keys()
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^bench: .*\n\t\$\(BIN\)/python -m bench\.step$", makefile, re.MULTILINE)
    assert all((ROOT / path).exists() for path in TARGETS.values())
    pieces = re.findall(r"^\| ([^|]+) \| [^|]+ \| [^|]+ \|$", PAGE.read_text(), re.MULTILINE)
    assert {name for cell in pieces for name in cell.split(", ")} >= PIECES.keys()


@pytest.mark.parametrize("module", TESTS)
def test_that_test_runs_the_command(module: str) -> None:
    file, _, name = TESTS[module].partition(".")
    test = getattr(importlib.import_module(f"tests.bench.{file}"), name)
    assert "soak" not in {mark.name for mark in getattr(test, "pytestmark", [])}
    assert re.search(r"main\(|short: Path", inspect.getsource(test))


@refusals(Path(__file__).with_name("refusals.txt"))
def test_bad_arguments(refusal: Refusal, here: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        importlib.import_module(refusal.base).main(refusal.words)
    assert refusal.line in capsys.readouterr().err
    assert not any(here.iterdir())

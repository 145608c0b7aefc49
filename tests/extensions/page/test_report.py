"""`cogfast report`: the page of one run, the comparison of several, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cogfast.__main__ import main
from tests.extensions.page.run_folders import Page
from tests.support.refusals import assert_command_refused


def write_metrics(run: Path, seed: int = 1) -> Path:
    run.mkdir(parents=True)
    lines = [{"step": i, "loss": 1 / (i + seed)} for i in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


def test_one_run_gets_its_page(tmp_path: Path, answer) -> None:
    run = write_metrics(tmp_path / "run")
    checkpoint = run / "checkpoints" / "00000005"
    checkpoint.mkdir(parents=True)
    # It stands for its run.
    assert answer("report", checkpoint) == f"{run / 'index.html'}\n"
    first = (run / "index.html").read_text()
    assert Page(first).plots() == {"Loss": ["training"]}
    # A page is replaced by the next one.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss": 0.1, "lr": 0.5}\n')
    answer("report", run)
    assert "Learning rate" in Page((run / "index.html").read_text()).plots()


def test_several_runs_get_one_page(here: Path, answer) -> None:
    runs = [write_metrics(here / "a" / "run"), write_metrics(here / "b" / "run", 2)]
    assert answer("report", *runs) == "report.html\n"
    page = Page((here / "report.html").read_text())
    (loss,) = page.data["plots"]
    # Two runs have the same name, so their paths tell them apart.
    assert [line["label"] for line in loss["lines"]] == [str(run) for run in runs]
    values = [list(page.values(i).values()) for i in (0, 1)]
    assert values == [
        pytest.approx([1 / (i + seed) for i in range(1, 6)], rel=1e-5) for seed in (1, 2)
    ]
    assert not any((run / "index.html").exists() for run in runs)


def test_out_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_metrics(tmp_path / "run")
    out = tmp_path / "elsewhere.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert out.is_file() and not (run / "index.html").exists()
    mine = tmp_path / "mine.html"
    mine.write_text("my own")
    for out, line in (
        (tmp_path, "is a folder; give the path of a file"),
        (tmp_path / "missing" / "a.html", "does not exist; create it"),
        (mine, "is no page of cogfast"),
    ):
        assert_command_refused(capsys, ["report", run, "--out", out], line)
    assert mine.read_text() == "my own"


def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_metrics(tmp_path / "a" / "run")
    for words, line in (
        ([tmp_path], "is not the folder of a run, since it has neither metrics.jsonl nor"),
        ([tmp_path / "missing"], "no such folder; give the folder of a run"),
        ([run, tmp_path / "a" / "run" / "."], "the same run is given twice"),
        ([], "RUN"),
        ([run, "--output", "x"], "has no option --output"),
    ):
        assert_command_refused(capsys, ["report", *words], line)


def test_the_command_needs_no_torch(tmp_path: Path) -> None:
    run = write_metrics(tmp_path / "run")
    code = (
        "import sys; from cogfast.__main__ import main; status = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(run)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

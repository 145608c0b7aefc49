"""Long tests, run by `make soak`: many kills, and the quickstart's quality."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.interrupted.kills import assert_same_run, draw_kills, run_with_kills
from tests.support.runs import Run
from tests.support.tiny_run import ROOT
from tests.support.tiny_run import run as launch

pytestmark = pytest.mark.soak

STEPS = 800
NUM_KILLS = 10
LAYOUTS = {
    "dp 2": ["deepspeed.train_micro_batch_size_per_gpu=2"],
    "tp 2": ["args.model_parallel_size=2"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_many_kills_change_nothing(run: Run, tmp_path: Path, layout: str) -> None:
    """kill -9 at random moments, starts and saves included, of all, of a rank or of torchrun: the
    rest ends by itself, and the last checkpoint is the uninterrupted run's, bit for bit."""
    run = run.with_args(train_iters=STEPS, save_interval=3, num_workers=1)
    run = run.with_words(*LAYOUTS[layout])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(run.into(whole).command(), 2, timeout=1200).returncode == 0
    # Ranks continue for some steps without their torchrun: the second half leaves steps for that.
    kills = draw_kills(seed=list(LAYOUTS).index(layout), count=NUM_KILLS, last_step=STEPS // 2)
    assert {kill.when for kill in kills} == {"start", "step", "save"}
    was_in_save = run_with_kills(run.into(cut).command(), cut, kills)
    assert sum(was_in_save) >= 2, "hardly any kill met a save"
    assert_same_run(whole, cut, STEPS)


def test_quickstart_learns(tmp_path: Path) -> None:
    """The gate that separates learned from not, over the 48 captions, from a fresh data set."""
    tree = tmp_path / "cogfast"
    skipped = shutil.ignore_patterns(".git", ".venv", "quickstart", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skipped)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    done = subprocess.run(
        ["scripts/quickstart.sh"],
        cwd=tree,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"SEED": "1"},
        capture_output=True,
        text=True,
        timeout=7200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    untrained, trained = re.findall(
        r"(?:untrained|videos): colour ([\d.]+)  shape ([\d.]+)  motion ([\d.]+)", done.stdout
    )
    colour, shape, motion = map(float, trained)
    assert colour >= 0.9
    assert shape >= 0.6
    assert motion >= 0.8
    assert float(untrained[0]) < 0.2

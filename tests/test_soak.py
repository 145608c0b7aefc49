"""What takes long: many kills, and the quickstart's quality over seeds. `make soak` runs it."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest
import torch

from cogfast.model.weights.run import read_run_weights
from cogfast.train.checkpoint import newest_checkpoint
from tests.kills import KILLS, kill
from tests.tiny_run import (
    ROOT,
    losses,
    run,
    run_folder,
    start,
    wait_for,
    write_clips,
    write_config,
)

pytestmark = pytest.mark.soak

STEPS = 2000
NUM_KILLS = 20


def test_many_kills_change_nothing(tmp_path: Path) -> None:
    """kill -9 at random moments, saves included, of all, of a rank or of torchrun: the rest ends by
    itself, and the last weights are the uninterrupted run's."""
    base = write_config(
        tmp_path / "base.yaml", write_clips(tmp_path / "data"), train_iters=STEPS, save_interval=3
    )
    words = ["train", "--base", str(base), "deepspeed.train_micro_batch_size_per_gpu=2"]
    assert run([*words, f"args.save={tmp_path}/whole"], 2, timeout=1200).returncode == 0

    rng = random.Random(0)
    cut = tmp_path / "cut"

    def num_logged() -> int:
        return sum(path.stat().st_size for path in cut.glob("*/metrics.jsonl"))

    for _ in range(NUM_KILLS):
        before = num_logged()
        process = start([*words, f"args.save={cut}", "--resume", "auto"], 2)
        wait_for(lambda: num_logged() != before, process)  # noqa: B023
        time.sleep(rng.uniform(0, 2))
        assert process.poll() is None, "the run was over before all kills; raise STEPS"
        kill(process, rng.choice(KILLS))
    done = run([*words, f"args.save={cut}", "--resume", "auto"], 2, timeout=1200)
    assert done.returncode == 0, done.stdout
    # A kill before the first checkpoint leaves a run of its own behind; the last one is complete.
    resumed = max(path for path in cut.iterdir() if newest_checkpoint(path))
    whole = run_folder(tmp_path / "whole")
    one = dict(read_run_weights(newest_checkpoint(whole)))
    other = dict(read_run_weights(newest_checkpoint(resumed)))
    assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert losses(whole) == losses(resumed)


@pytest.mark.parametrize("seed", [1, 2])
def test_quickstart_learns(tmp_path: Path, seed: int) -> None:
    """The gate that separates learned from not, over the 48 captions, from a fresh data set."""
    tree = tmp_path / "cogfast"
    skipped = shutil.ignore_patterns(".git", ".venv", "quickstart", "__pycache__")
    shutil.copytree(ROOT, tree, ignore=skipped)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    done = subprocess.run(
        ["scripts/quickstart.sh"],
        cwd=tree,
        env={k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"} | {"SEED": str(seed)},
        capture_output=True,
        text=True,
        timeout=1800,
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

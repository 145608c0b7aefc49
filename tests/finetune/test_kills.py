"""Runs of `cogfast finetune` that are killed at random moments, while they encode, train and save."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.finetune.test_runs import data, options  # noqa: F401
from tests.support.kills import assert_same_run, draw_kills, run_with_kills
from tests.support.tiny_run import run

STEPS = 150
NUM_KILLS = 20


@pytest.mark.soak
def test_many_kills_of_a_finetune_change_nothing(options: Callable[..., dict], tmp_path: Path):  # noqa: F811
    """kill -9 of all, of a rank or of torchrun: the rest ends by itself, and the last checkpoint is the
    uninterrupted run's, bit for bit."""
    given = options("5b", train_steps=STEPS, checkpointing_steps=1, lr_warmup_steps=0, rank=4)
    overrides = given.pop("overrides")
    whole, cut = tmp_path / "whole", tmp_path / "cut"

    def words(save: Path) -> list[str]:
        places = {"output_dir": save / "out", "latent_cache": tmp_path / f"{save.name} cache"}
        pairs = [(f"--{name}", str(value)) for name, value in (given | places).items()]
        return ["finetune", *(word for pair in pairs for word in pair), *overrides]

    done = run(words(whole), 2, timeout=1200)
    assert done.returncode == 0, done.stdout
    # Ranks continue for some steps without their torchrun, for more on a busy machine: the rest of the
    # run leaves steps for that.
    kills = draw_kills(seed=2, count=NUM_KILLS, last_step=STEPS // 5)
    was_in_save = run_with_kills(words(cut), cut, kills, ["--resume_from_checkpoint", "auto"])
    assert sum(was_in_save) >= 3, "hardly any kill met a save"
    assert_same_run(whole, cut, STEPS)

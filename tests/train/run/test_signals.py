"""Signals at random moments: a run saves, ends by itself, and resumes bit for bit."""

import signal
from pathlib import Path

import pytest

from tests.support.interrupted.kills import assert_same_run, newest_step
from tests.support.interrupted.stops import Stop, draw_stops, run_with_stops
from tests.support.runs import Run
from tests.support.tiny_run import run as launch
from tests.support.tiny_run import write_clips

LAYOUTS = {1: [], 2: ["deepspeed.train_micro_batch_size_per_gpu=2"]}


def check(folder: Path, processes: int, stops: list[Stop]) -> dict[str, int]:
    """A run that is stopped again and again is, some steps after the last stop, the one that is not:
    weights, moments, EMA and losses."""
    clips = write_clips(folder / "data")
    run = Run(clips, folder).with_words(*LAYOUTS[processes])
    run = run.with_args(save_interval=10, num_workers=1, valid_data=[str(clips)], eval_interval=15)
    run = run.with_args(eval_iters=1, eval_num_samples=2, eval_sampling_steps=2)
    whole, cut = folder / "whole", folder / "cut"
    endless = run.into(cut).command("args.train_iters=1000000")
    counts = run_with_stops(endless, cut, stops, processes)
    steps = newest_step(cut) + 5
    for save in (cut, whole):
        words = run.into(save).command(f"args.train_iters={steps}", "--resume", "auto")
        done = launch(words, processes, timeout=1200)
        assert done.returncode == 0, done.stdout
        assert f"finished at step {steps}; checkpoint: " in done.stdout
    assert_same_run(whole, cut, steps)
    return counts


@pytest.mark.slow
def test_ctrl_c_saves(tmp_path: Path) -> None:
    """A Ctrl-C of a terminal reaches every process of the run."""
    stops = [Stop(signal.SIGINT, "step", 0.2, to_all=True)]
    assert check(tmp_path, 1, stops) == {"before training": 0, "saved": 1}


@pytest.mark.soak
def test_signals_at_many_moments_change_nothing(tmp_path: Path) -> None:
    counts = check(tmp_path, 2, draw_stops(seed=2, count=20))
    assert counts["saved"] >= 16, counts

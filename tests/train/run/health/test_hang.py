"""HangWatch: the rank that others wait for is named with its stack, and no process is left."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset

from cogfast.train.run.health.hang import State, blame, innermost
from tests.support.tiny_run import CHANNELS, run_folder, run_program, write_clips, write_config

LIMIT, TICK = 60.0, 2.0
AWAY = 3  # the step in which rank 1 reads its batch and hangs


class HangingReads(Dataset):
    """Latents and embeddings. Rank 1 sleeps, or stops its process, in the first read of a step."""

    def __init__(self, data_dir: list[str], how: str, pids: str) -> None:
        self.how, self.pids, self.num_reads = how, Path(pids), 0

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict:
        self.num_reads += 1
        if os.environ.get("RANK") == "1" and self.num_reads > 2 * AWAY:
            self.pids.write_text(json.dumps([os.getpid(), os.getppid()]))
            hang_here(self.how)
        return {
            "encoded_videos": torch.ones(CHANNELS, 3, 4, 4),
            "prompt_embedding": torch.ones(8, 16),
        }


def hang_here(how: str) -> None:
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def state(moves: int, age: float, is_limited: bool = True) -> State:
    return State(7, "backward", moves, age, is_limited)


FRESH = [0.5, 1.0, 0.0]
BLAMED = {
    "all move": ([state(9, 1), state(9, 2), state(8, 1)], FRESH, []),
    "one is behind": ([state(9, 61), state(7, 62), state(9, 61)], FRESH, [1]),
    "it is behind, but not for long": ([state(9, 61), state(8, 30), state(9, 61)], FRESH, []),
    "it evaluates": ([state(9, 90), state(8, 90, False), state(9, 90)], FRESH, []),
    "all hang in one phase": ([state(9, 61), state(9, 62), state(9, 63)], FRESH, [0, 1, 2]),
    "one is silent": ([state(9, 61), state(9, 1), state(9, 61)], [0.5, 60.5, 0.5], [1]),
    "it may be silent in an evaluation": ([state(9, 61), state(9, 1, False)], [0.5, 61], [1]),
    "silent, but not for long": ([state(9, 61), state(9, 1), state(9, 61)], [0.5, 55, 0.5], []),
}


@pytest.mark.parametrize("case", BLAMED)
def test_who_is_to_blame(case: str) -> None:
    states, silent, wanted = BLAMED[case]
    assert blame(states, silent, LIMIT, TICK) == wanted


def test_the_innermost_frames_are_those_of_the_main_thread(tmp_path: Path) -> None:
    with (tmp_path / "stack.txt").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        frames = innermost(file.read()).split(" < ")
    assert frames[0].startswith("test_hang.py:")
    assert frames[0].endswith("test_the_innermost_frames_are_those_of_the_main_thread")
    assert len(frames) == 3


@pytest.mark.slow
@pytest.mark.parametrize("how", ["stops", pytest.param("sleeps", marks=pytest.mark.soak)])
def test_a_rank_that_hangs_is_named_and_no_process_is_left(tmp_path: Path, how: str) -> None:
    """Stopped by SIGSTOP, which also stops its heartbeat, or asleep while it reads."""
    pids = tmp_path / "pids.json"
    name = "tests.train.run.health.test_hang.HangingReads"
    dataset = {"target": name, "params": {"how": how, "pids": str(pids)}}
    data = write_clips(tmp_path / "data", num_clips=1)
    args = {"dataset": dataset, "train_iters": 50, "hang_minutes": 0.15, "decode_timeout": 0}
    base = write_config(tmp_path / "base.yaml", data, check_videos=False, **args)
    words = ["deepspeed.train_micro_batch_size_per_gpu=2", "--allow-import", "tests"]
    done = run_program(["-m", "cogfast", "train", "--base", str(base), *words], 2)
    assert done.returncode == 1, done.stdout
    (line,) = {
        line.partition(" ends: ")[2] for line in done.stdout.splitlines() if "rank 0 ends: " in line
    }
    assert line.startswith(
        f"no progress for args.hang_minutes=0.15: rank 1 (step {AWAY + 1}, data: "
    )
    assert " hang_here < test_hang.py:" in line
    folder = run_folder(tmp_path / "runs") / "hang"
    assert line.endswith(f"stacks are in {folder}")
    assert "in hang_here" in (folder / "rank-1.txt").read_text()
    for pid in json.loads(pids.read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_process_names_itself(tmp_path: Path) -> None:
    """No torchrun and no store: its own thread ends it."""
    program = tmp_path / "program.py"
    program.write_text(f"""
import sys, time
from pathlib import Path
from cogfast.train.distributed.process_groups import start_processes
from cogfast.train.run.health.hang import HangWatch
from cogfast.train.run.health.progress import Progress
progress = Progress()
with HangWatch(progress, start_processes(), Path({str(tmp_path)!r}), 0.02):
    for progress.step in (1, 2):
        progress.enter("forward")
        time.sleep(0.3)
    progress.enter("evaluation")
    time.sleep(3)
print("is there", flush=True)
assert not Path({str(tmp_path)!r}, "hang").exists()
with HangWatch(progress, start_processes(), Path({str(tmp_path)!r}), 0.02):
    progress.step = 5
    progress.enter("forward")
    time.sleep(60)
""")
    done = run_program([str(program)])
    assert done.returncode == 1, done.stdout
    assert "is there" in done.stdout
    assert (
        "rank 0 ends: no progress for args.hang_minutes=0.02: rank 0 (step 6, forward: "
        in done.stdout
    )
    assert "program.py:" in done.stdout

"""A rank that hangs: collective_timeout ends the run, whose last line has the rank's stack. A rank that
stops ends it sooner."""

import faulthandler
import json
import os
import signal
import time
from pathlib import Path

import pytest

from cogfast.distributed.lost_ranks import OTHER_RANK
from cogfast.train.trainer import Trainer
from cogfast.train.watchers.hang import HangStacks, frames_of_main, hanging
from tests.support.runs import Run
from tests.support.tiny_run import run_program
from tests.train.test_trainer import EncodedSamples

AWAY = 3  # the step in which rank 1 reads its batch and hangs


class HangingReads(EncodedSamples):
    """Rank 1 sleeps, or stops its process, in the first read of a step."""

    def __init__(self, data_dir: list[str], how: str, pids: str) -> None:
        super().__init__(data_dir, num_samples=64)
        self.how, self.pids, self.num_reads = how, Path(pids), 0

    def __getitem__(self, index: int) -> dict:
        self.num_reads += 1
        if os.environ.get("RANK") == "1" and self.num_reads > 2 * AWAY:
            self.pids.write_text(json.dumps([os.getpid(), os.getppid()]))
            hang_here(self.how)
        return super().__getitem__(index)


def hang_here(how: str) -> None:
    if how == "stops":
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def test_frames_are_those_of_the_main_thread(tmp_path: Path) -> None:
    with (tmp_path / "rank-0.txt").open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        path, _, name = frames_of_main(file.read())[0]
    assert (path, name) == (__file__, "test_frames_are_those_of_the_main_thread")


def test_a_rank_that_waits_for_others_is_not_named(tmp_path: Path) -> None:
    for rank in range(4):
        (tmp_path / f"rank-{rank}.txt").write_text("")
    assert not list(hanging(tmp_path))
    wait = 'File "/x/torch/distributed/distributed_c10d.py", line 9 in all_reduce'
    read = 'File "/x/reader.py", line 8 in read\n  File "/x/batches.py", line 7 in __next__'
    held = 'File "/x/torch/_ops.py", line 8 in __call__\n  File "/x/tensor_parallel.py", line 7 in wait_for'
    for rank, innermost in ((0, wait), (2, read), (3, held)):
        text = f"Timeout!\nThread 0x1:\n  {wait}\n\nThread 0x2 (most recent call first):\n  {innermost}\n"
        (tmp_path / f"rank-{rank}.txt").write_text(text)
    assert list(hanging(tmp_path)) == [
        "rank 1 (no stack)",
        "rank 2 (reader.py:8 read < batches.py:7 __next__)",
    ]


def test_a_rank_that_continues_leaves_no_file(tmp_path: Path) -> None:
    stacks = HangStacks(tmp_path, 0, 0.2)
    stacks.after_step(1)
    while not stacks.path.stat().st_size:
        time.sleep(0.01)
    stacks.seconds = 1000  # the next dump must not come before the file is looked at
    stacks.after_step(2)
    assert not stacks.path.stat().st_size
    stacks.seconds = 0.1
    stacks.after_step(3)
    while not stacks.path.stat().st_size:
        time.sleep(0.01)
    assert stacks.path.read_text().startswith("Timeout")
    stacks.close(None)
    assert not list(tmp_path.iterdir())


def test_stacks_of_an_earlier_start_are_not_named(run: Run) -> None:
    """It had more ranks."""
    hang = run.train(steps=1).path / "hang"
    hang.mkdir()
    (hang / "rank-7.txt").write_text("Timeout!")
    run.resume(steps=2)
    assert not hang.exists()


# torchrun waits 30 s before it kills.
@pytest.mark.soak
@pytest.mark.parametrize("how", ["sleeps", "stops"])
def test_a_rank_that_hangs_is_named_and_no_process_is_left(
    run: Run, tmp_path: Path, how: str
) -> None:
    """Asleep while it reads, or stopped by SIGSTOP."""
    pids = tmp_path / "pids.json"
    name = "tests.train.watchers.test_hang.HangingReads"
    dataset = {"target": name, "params": {"how": how, "pids": str(pids)}}
    run = run.by(Trainer, "tests").with_args(dataset=dataset, train_iters=50, decode_timeout=0)
    if how == "sleeps":
        run = run.with_args(collective_timeout=10)
    command = run.command("deepspeed.train_micro_batch_size_per_gpu=2")
    done = run_program(["-m", "cogfast", *command], 2)
    assert done.returncode == 1, done.stdout
    line, *others = [line for line in done.stdout.splitlines() if line.startswith("cogfast: ")]
    # The rank that hangs may end by itself before torchrun kills it.
    assert all(other == f"cogfast: rank 1 ends: {OTHER_RANK}" for other in others)
    if how == "stops":  # at the default collective_timeout
        text = "rank 1 has stopped: no sign of it for 60 s"
        assert line == f"cogfast: rank 0 ends: {text}"
        assert text in done.stdout.rpartition("Root Cause")[2]
    else:
        folder = run.path / "hang"
        assert "no progress: rank 1 (test_hang.py:" in line
        assert line.count("rank 1 (") == 1 and "; stacks are in hang/" in line
        assert "in hang_here" in (folder / "rank-1.txt").read_text()
    for pid in json.loads(pids.read_text()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

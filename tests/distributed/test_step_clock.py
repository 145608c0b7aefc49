"""The clock of a step: its parts by the wall clock, and by the events of a GPU that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from cogfast.distributed.step_clock import StepClock, StepSplit
from tests.support.runs import Run
from tests.support.tiny_run import launch_ranks

CPU = torch.device("cpu")


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def wall() -> Clock:
    return Clock()


def play(clock: StepClock, wall: Clock, *parts: tuple[str, float, float]) -> None:
    """Run parts, given as (name, seconds of work, seconds of waits after it)."""
    for name, work, wait in parts:
        clock.enter(name)
        wall.seconds += work
        with clock.waiting(), clock.waiting():  # the inner one is not counted again
            wall.seconds += wait


STEP = (("data", 1.0, 0.0), ("encode", 2.0, 0.0), ("forward", 3.0, 0.5), ("backward", 6.0, 1.5))
STEP += (("optimizer", 4.0, 2.0), ("log", 9.0, 3.0))
SPLIT = StepSplit(2000.0, 9000.0, 4000.0, 4000.0, 4 / 20)


def test_parts_are_averages_without_the_waits_inside_them(wall: Clock) -> None:
    clock = StepClock(wall)
    for _ in range(2):  # the log line of the second step belongs to neither pair
        for scale, parts in ((0.5, STEP[:-1]), (1.5, STEP)):
            clock.begin_step(0, CPU, is_logged=False)
            play(clock, wall, *((name, scale * work, scale * wait) for name, work, wait in parts))
        assert clock.take() == SPLIT


def test_pauses_end_with_a_restart(wall: Clock) -> None:
    clock = StepClock(wall)
    for pause, seconds in (("save", 2.0), ("evaluation", 5.0), ("save", 1.0)):
        play(clock, wall, ("data", 9.0, 0.0), (pause, seconds, 0.0))
        clock.restart()
        clock.restart()
    assert (clock.paused["save"], clock.paused["evaluation"]) == (3.0, 5.0)


def test_waits_outside_of_steps_are_not_counted(wall: Clock) -> None:
    clock = StepClock(wall)
    play(clock, wall, ("forward", 3.0, 1.0))  # no step has begun
    assert clock.take() == StepSplit()
    clock.begin_step(0, CPU, is_logged=True)
    play(clock, wall, *STEP[:3])
    clock.restart()  # an evaluation
    with clock.waiting():
        wall.seconds += 7
    clock.begin_step(0, CPU, is_logged=True)
    play(clock, wall, *STEP)
    assert clock.take() == SPLIT


def test_unseen_waits_are_not_reported_as_none(wall: Clock) -> None:
    clock = StepClock(wall)
    clock.is_complete = False
    clock.begin_step(0, CPU, is_logged=True)
    play(clock, wall, *STEP)
    split = clock.take()
    assert split.communication_ms is split.exposed_communication is None
    assert split.encode_ms == 2000


def test_a_gpu_is_timed_by_events_in_logged_steps_alone(
    wall: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits on the stream of DeepSpeed's reductions hide behind the computation."""
    events = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            events.append(self)

        def record(self) -> None:
            self.at = wall.seconds

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    streams = SimpleNamespace(current="main")
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams.current)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "main")
    clock = StepClock(wall)
    clock.begin_step(0, torch.device("cuda"), is_logged=False)
    play(clock, wall, *STEP)
    assert not events
    clock.begin_step(0, torch.device("cuda"), is_logged=True)
    play(clock, wall, *STEP[:4])
    streams.current = "reductions"
    with clock.waiting():
        pass
    streams.current = "main"
    play(clock, wall, *STEP[4:])
    assert len(events) == len(STEP) * 3  # one where a part begins, two around its wait
    assert clock.take() == SPLIT


HELD = 0.05  # seconds
RUN = """
import logging, mmap, sys, time
from contextlib import contextmanager
from cogfast.distributed.process_groups import start_processes
from cogfast.distributed.step_clock import CLOCK
from cogfast.train.trainer import Trainer
from tests.support.runs import run_of

held, shared, *bases = sys.argv[1:]
with open(shared, "r+b") as file:
    number = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")  # of rank 0's wait; 0: it does not wait

class Uneven(Trainer):
    def compute_loss(self, batch):
        if self.groups.rank == 1:
            # Until one wait of rank 0 has lasted that long, however fast either rank is.
            seen = 0
            while not seen or number[0] != seen:
                seen = number[0]
                time.sleep(float(held))
        return super().compute_loss(batch)

logging.basicConfig(level="INFO", format="%(message)s")
groups = start_processes()  # all runs share them
waiting, count = CLOCK.waiting, 0

@contextmanager
def shown():
    global count
    count += 1
    with waiting():
        before, number[0] = number[0], count
        yield
        number[0] = before  # of the wait around this one

if groups.is_main:
    CLOCK.waiting = shown
for base in bases:
    run_of(base).by(Uneven).train()
groups.close()
"""


WAYS = {
    "zero-2": {},
    "tensor": {"model_parallel_size": 2},
    "stock": {"optimizer": "AdamW"},
    "stage 3": {"optimizer": "AdamW"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("zero-2", "tensor"), id="own"),
        pytest.param(("stock", "stage 3"), id="of DeepSpeed", marks=pytest.mark.soak),
    ],
)
def test_the_fast_rank_waits_for_the_slow_one(
    data: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Rank 1 of two is held back in each step until rank 0 has waited, however gradients are exchanged."""
    runs = {
        name: Run(data, tmp_path / name).with_args(train_iters=3, log_interval=3, **WAYS[name])
        for name in names
    }
    bases = [run.base for run in runs.values()]
    if names[-1] == "stage 3":
        bases[-1].write_text(bases[-1].read_text().replace("stage: 2", "stage: 3"))
    (tmp_path / "number").write_bytes(bytes(8))
    output = launch_ranks(2, "-c", RUN, str(HELD), str(tmp_path / "number"), *map(str, bases))
    for name, run in runs.items():
        last = run.lines[-1]
        assert 1000 * HELD <= last["communication_ms"] < last["step_ms"], name
        # The parts of a step are within it.
        found = last["communication_ms"] / last["step_ms"]
        assert found < 1.001 * last["exposed_communication"] < 1, name
        assert f"data, {100 * last['exposed_communication']:.0f}% communication)" in output, name
    shown = [line for line in output.splitlines() if "ms/step" in line]
    assert max(map(len, shown)) <= 170

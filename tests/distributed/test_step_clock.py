"""The clock of a step: its parts by the wall clock, and by the events of a GPU that is not there."""

from __future__ import annotations

import pytest
import torch

from cogfast.distributed.step_clock import StepClock

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


def play(clock: StepClock, wall: Clock, *parts: tuple[str, float]) -> None:
    """Run parts, given as (name, seconds)."""
    for name, seconds in parts:
        clock.enter(name)
        wall.seconds += seconds


STEP = (("data", 1.0), ("encode", 2.0), ("forward", 3.5), ("backward", 7.5), ("optimizer", 6.0))
STEP += (("log", 12.0),)
SPLIT = {"encode_ms": 2000.0, "forward_backward_ms": 11000.0, "optimizer_ms": 6000.0}


def test_parts_are_averages(wall: Clock) -> None:
    clock = StepClock(wall)
    for _ in range(2):  # the log line of the second step belongs to neither pair
        for scale, parts in ((0.5, STEP[:-1]), (1.5, STEP)):
            clock.begin_step(0, CPU, is_logged=False)
            play(clock, wall, *((name, scale * seconds) for name, seconds in parts))
        assert clock.take() == SPLIT


def test_pauses_end_with_a_restart(wall: Clock) -> None:
    clock = StepClock(wall)
    for pause, seconds in (("save", 2.0), ("evaluation", 5.0), ("save", 1.0)):
        play(clock, wall, ("data", 9.0), (pause, seconds))
        clock.restart()
        clock.restart()
    assert (clock.paused["save"], clock.paused["evaluation"]) == (3.0, 5.0)


def test_parts_outside_of_steps_are_not_counted(wall: Clock) -> None:
    clock = StepClock(wall)
    play(clock, wall, *STEP)  # no step has begun
    assert clock.take() == dict.fromkeys(SPLIT)
    clock.begin_step(0, CPU, is_logged=True)
    play(clock, wall, *STEP[:3])
    clock.restart()  # an evaluation
    clock.begin_step(0, CPU, is_logged=True)
    play(clock, wall, *STEP)
    assert clock.take() == SPLIT


def test_a_gpu_is_timed_by_events_in_logged_steps_alone(
    wall: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            events.append(self)

        def record(self) -> None:
            self.at = wall.seconds

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(wall)
    clock.begin_step(0, torch.device("cuda"), is_logged=False)
    play(clock, wall, *STEP)
    assert not events
    clock.begin_step(0, torch.device("cuda"), is_logged=True)
    play(clock, wall, *STEP)
    assert len(events) == len(STEP)  # one where a part begins
    assert clock.take() == SPLIT

"""Clock of this rank's steps: the time of their parts.

On a CPU every step is timed, by the wall clock. On a GPU events are recorded in the steps that are
logged, and read where the log line waits for the device anyway.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_NO_RANGE = nullcontext()


class StepClock:
    """Times the parts of a step that `enter` and `part` begin. One thread at a time uses it.

    now: the clock of a CPU, in seconds.

    step, phase: completed optimizer steps, and the part of the step or of the run, for messages.
    started, num_steps, data_seconds: time, steps and waits for batches since `restart`. open_range:
    set while a profile is captured; returns the range of a part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._is_on_gpu = self._is_measuring = False
        self.step, self.phase, self._entered = 0, "start", now()
        # Seconds by phase, until they are cleared
        self.paused: dict[str, float] = defaultdict(float)
        self.open_range: Callable[[str], AbstractContextManager] = lambda name: _NO_RANGE
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: evaluations and saves, which end here, do not count as training time."""
        self.started, self.num_steps, self.data_seconds = self._now(), 0, 0.0
        self.paused[self.phase] += self.started - self._entered
        self._entered = self.started
        self._part: str | None = None
        self._since: Any = 0.0
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._num_measured = 0  # steps
        self._seconds: dict[str, float] = defaultdict(float)  # by part
        self._spans: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    def part(self, name: str) -> AbstractContextManager:
        """Begin a part of the step; return its range for nsys (NVTX) and for PyTorch's trace."""
        self.enter(name)
        return self.open_range(name)

    def begin_step(self, step: int, device: torch.device, is_logged: bool) -> None:
        self.step = step
        self._is_on_gpu = device.type == "cuda"
        self._is_measuring = is_logged or not self._is_on_gpu
        if self._is_measuring:
            if self._is_on_gpu:  # one step is measured; events of one that was not logged are old
                self._part = None
                self._forget_parts()
            self._num_measured += 1

    def enter(self, part: str) -> None:
        """Begin a part of the step or of the run; the one before it ends."""
        entered = self._now()
        if self.phase == "data":
            self.data_seconds += entered - self._entered
        self.phase, self._entered = part, entered
        if not self._is_measuring:
            return
        now = self._mark()
        if self._part is not None and self._is_on_gpu:
            self._spans.append((self._part, self._since, now))
        elif self._part is not None:
            self._seconds[self._part] += now - self._since
        self._part, self._since = part, now

    def take(self) -> dict[str, float | None]:
        """Return the mean milliseconds of the parts of the steps since the last call; None: not measured.

        On a GPU the device must have finished them; the part that runs is left out.
        """
        for part, start, end in self._spans:
            self._seconds[part] += start.elapsed_time(end) / 1000
        number, seconds = self._num_measured, self._seconds
        self._part = None
        self._forget_parts()
        if not number or not any(seconds.values()):
            return dict.fromkeys(("encode_ms", "forward_backward_ms", "optimizer_ms"))
        per_step = 1000 / number
        return {
            "encode_ms": per_step * seconds["encode"],
            "forward_backward_ms": per_step * (seconds["forward"] + seconds["backward"]),
            "optimizer_ms": per_step * seconds["optimizer"],
        }

    def _mark(self) -> Any:
        """Return the time; on a GPU an event."""
        if not self._is_on_gpu:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

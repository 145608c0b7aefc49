"""Clock of this rank's steps: the time of their parts, and the time in which they wait for other ranks.

`time_collectives` lets it see the collectives of torch.distributed, cogfast's and DeepSpeed's, and
`wait_for` the functional ones of tensor and context parallelism.

On a CPU every step is timed, by the wall clock. On a GPU events are recorded in the steps that are
logged, and read where the log line waits for the device anyway: between two events around a wait the
GPU does nothing but wait, so their distance is the communication that computation does not hide.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# Not the collectives of objects: the thread that writes checkpoints calls them, too.
_COLLECTIVES = ("all_reduce", "reduce", "reduce_scatter_tensor", "all_gather", "broadcast")
_COLLECTIVES += ("all_gather_into_tensor",)
_Mark = float | torch.cuda.Event
_NO_RANGE = nullcontext()


@dataclass(frozen=True, slots=True)
class StepSplit:
    """Mean milliseconds of a step. The first three are without the waits inside them.

    exposed_communication: fraction of the step. None: not measured.
    """

    encode_ms: float | None = None
    forward_backward_ms: float | None = None
    optimizer_ms: float | None = None
    communication_ms: float | None = None
    exposed_communication: float | None = None


class StepClock:
    """Times the parts of a step that `enter` and `part` begin. One thread at a time uses it.

    now: the clock of a CPU, in seconds.

    step, phase: completed optimizer steps, and the part of the step or of the run, for messages.
    started, num_steps, data_seconds: time, steps and waits for batches since `restart`. open_range:
    set while a profile is captured; returns the range of a part.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._is_on_gpu = self._is_measuring = self._is_waiting = False
        # Whether every wait is seen. Those inside of compiled blocks are not.
        self.is_complete = True
        self.has_others = True  # whether there is a rank to wait for
        self.step, self.phase, self._entered = 0, "start", now()
        self.paused: dict[str, float] = defaultdict(
            float
        )  # seconds by phase, until they are cleared
        self.open_range: Callable[[str], AbstractContextManager] = lambda name: _NO_RANGE
        self.restart()

    def restart(self) -> None:
        """Forget what was measured: evaluations and saves, which end here, do not count as training time."""
        self.started, self.num_steps, self.data_seconds = self._now(), 0, 0.0
        self.paused[self.phase] += self.started - self._entered
        self._entered = self.started
        self._part: str | None = None
        self._since: _Mark = 0.0
        self._forget_parts()

    def _forget_parts(self) -> None:
        self._num_measured = 0  # steps
        # {(part, whether it waits): seconds}
        self._seconds: dict[tuple[str, bool], float] = defaultdict(float)
        self._spans: list[tuple[str, bool, torch.cuda.Event, torch.cuda.Event]] = []

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
        if self._part is not None:
            self._add(self._part, False, self._since, now)
        self._part, self._since = part, now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time a wait for other ranks, or the exchange of data with them."""
        # Outside of a step, within another wait, or on a stream beside the computation.
        part = self._part
        is_counted = self.has_others and self._is_measuring and not self._is_waiting
        if part is None or not is_counted or self._is_on_side_stream():
            yield
            return
        self._is_waiting, start = True, self._mark()
        try:
            yield
        finally:
            self._add(part, True, start, self._mark())
            self._is_waiting = False

    def take(self) -> StepSplit:
        """Return the split of the steps since the last call. On a GPU the device must have finished
        them; the part that runs is left out."""
        for part, is_wait, start, end in self._spans:
            self._seconds[part, is_wait] += start.elapsed_time(end) / 1000
        number, seconds = self._num_measured, self._seconds
        if self._part is not None:
            seconds.pop((self._part, True), None)
        self._part = None
        self._forget_parts()
        whole = sum(s for (_, is_wait), s in seconds.items() if not is_wait)
        if not number or not whole:
            return StepSplit()
        waits = sum(s for (_, is_wait), s in seconds.items() if is_wait)
        alone = lambda *parts: sum(seconds[p, False] - seconds[p, True] for p in parts)
        per_step = 1000 / number
        return StepSplit(
            encode_ms=per_step * alone("encode"),
            forward_backward_ms=per_step * alone("forward", "backward"),
            optimizer_ms=per_step * alone("optimizer"),
            communication_ms=per_step * waits if self.is_complete else None,
            exposed_communication=waits / whole if self.is_complete else None,
        )

    def _mark(self) -> _Mark:
        if not self._is_on_gpu:
            return self._now()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, part: str, is_wait: bool, start: _Mark, end: _Mark) -> None:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            self._spans.append((part, is_wait, start, end))
        elif isinstance(start, float) and isinstance(end, float):
            self._seconds[part, is_wait] += end - start

    def _is_on_side_stream(self) -> bool:
        return self._is_on_gpu and torch.cuda.current_stream() != torch.cuda.default_stream()


# A process trains one model at a time. Its collectives are called where no run is known.
CLOCK = StepClock()


def wait_for(started: Tensor) -> Tensor:
    """Wait for the result of a functional collective."""
    wait = torch.ops._c10d_functional.wait_tensor
    if torch.compiler.is_compiling():  # the clock would break the graph
        return wait(started)
    with CLOCK.waiting():
        return wait(started)


class _TimedWork:
    """A collective that was started."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work

    def wait(self, *args: Any) -> object:
        with CLOCK.waiting():
            return self.work.wait(*args)

    def is_completed(self) -> bool:
        return self.work.is_completed()


def timed(run: Callable) -> Callable:
    """Let the clock see a collective, or another wait for one."""

    @functools.wraps(run)
    def call(*args: object, **named: object) -> object:
        with CLOCK.waiting():
            work = run(*args, **named)
        return None if work is None else _TimedWork(work)

    return call


@functools.cache  # once per process
def time_collectives() -> None:
    """Time the collectives of torch.distributed. Call it before DeepSpeed looks them up."""
    for name in _COLLECTIVES:
        setattr(dist, name, timed(getattr(dist, name)))

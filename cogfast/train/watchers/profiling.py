"""A profile of a few steps, with named ranges.

Under nsys (scripts/profile_nsys.sh) nsys captures the steps. Otherwise PyTorch's profiler writes
`profile/rank0-trace.json.gz`, for ui.perfetto.dev or chrome://tracing, and `profile/top_ops.txt`.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.cuda import profiler as cuda_profiler
from torch.profiler import ProfilerActivity, profile, record_function

from cogfast.core.addresses import name_of
from cogfast.core.files import UNFINISHED, WriteError, write_text, write_whole
from cogfast.core.values import counted
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import StepClock
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

NUM_STEPS = 3  # that are profiled
_TOP = 30  # rows in the table of ops
_NAME_WIDTH = 72  # characters; longer names, such as those of generated kernels, are cut
_BOOKKEEPING = "autograd::engine::"
# nsys sets one of these variables, depending on its version, in the processes that it traces.
_NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


class Profiler(Watcher):
    """Captures NUM_STEPS steps, after `first` completed ones, with the ranges that `clock` opens."""

    def __init__(self, folder: Path, groups: ProcessGroups, first: int, clock: StepClock) -> None:
        self.folder, self.groups, self.first, self.clock = folder, groups, first, clock
        self.is_on_gpu = groups.device.type == "cuda"
        self.num_steps = 0  # that are captured
        self.is_capturing = False
        self.trace: profile | None = None
        self.step_range = ExitStack()
        self.range_before = self.clock.open_range

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        of_nsys = torch.cuda.nvtx.range(name) if self.is_on_gpu else nullcontext()
        with record_function(name), of_nsys:
            yield

    def before_step(self, step: int) -> None:
        if step == self.first:
            self._start()
        if self.is_capturing:
            self.step_range.enter_context(self._named(f"step {step}"))

    def after_step(self, step: int) -> None:
        if not self.is_capturing:
            return
        self.num_steps += 1
        self.step_range.close()
        if self.num_steps == NUM_STEPS:
            self._stop()
            self.clock.restart()  # writing a profile is no training time

    def close(self, error: BaseException | None) -> None:
        """Write the profile of a run that was stopped within the capture, unless it failed."""
        if self.is_capturing and error is None:
            self._stop()
        elif self.is_capturing:
            self._restore()
        elif not self.is_done and error is None:
            logger.warning("args.profiling=%d: this run did not reach that step", self.first)

    def _start(self) -> None:
        self.is_capturing = True
        self.clock.open_range = self._named
        # Run backward on this thread: a kernel belongs to the ranges of the thread that launches it.
        torch.autograd.grad_mode.set_multithreading_enabled(False)
        nsys = next((name for name in _NSYS if name in os.environ), None)
        activities = [ProfilerActivity.CPU]
        if self.is_on_gpu:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # sync: keep kernels of earlier steps out of the profile
            if self.groups.local_rank == 0:  # nsys captures all processes of a machine together
                cuda_profiler.start()
        if nsys is not None:  # only one profiler can trace a GPU
            logger.info("args.profiling: %s is set, so nsys captures the profile", nsys)
        elif self.groups.is_main:
            self.trace = profile(activities=activities)
            self.trace.start()

    def _stop(self) -> None:
        if self.is_on_gpu:
            torch.cuda.synchronize()  # sync: include all kernels of the last step
            if self.groups.local_rank == 0:
                cuda_profiler.stop()
        if (trace := self._restore()) is not None:
            self._write(trace)

    def _restore(self) -> profile | None:
        """End the capture, and return PyTorch's profile of it if there is one."""
        self.is_capturing, self.is_done = False, True
        self.step_range.close()
        torch.autograd.grad_mode.set_multithreading_enabled(True)
        self.clock.open_range = self.range_before
        trace, self.trace = self.trace, None
        if trace is not None:
            trace.stop()
        return trace

    def _write(self, trace: profile) -> None:
        text = tables(trace.key_averages(), self.num_steps)
        try:
            self.folder.mkdir(exist_ok=True)
            with TemporaryDirectory(dir=self.folder, suffix=UNFINISHED) as scratch:
                plain = Path(scratch) / "trace.json"
                trace.export_chrome_trace(str(plain))
                write_whole(self.folder / "rank0-trace.json.gz", partial(_pack, plain))
            write_text(self.folder / "top_ops.txt", text)
        except (OSError, WriteError) as error:
            logger.warning("profile: %s; training continues", error)
        else:
            end = self.first + self.num_steps
            logger.info("profile of steps %d to %d in %s", self.first, end, name_of(self.folder))
        logger.info(text)


def _pack(plain: Path, packed: Path) -> None:
    """Compress a trace. OSError if it is not whole: PyTorch ignores errors while it writes one."""
    try:
        json.loads(plain.read_bytes())
    except (FileNotFoundError, ValueError):
        raise OSError("PyTorch could not write its trace") from None
    with open(plain, "rb") as source, gzip.open(packed, "wb", compresslevel=5) as target:
        shutil.copyfileobj(source, target)


def tables(averages: Sequence[FunctionEventAvg], num_steps: int) -> str:
    """Format the time spent in `num_steps` steps, by range and then by op (on a GPU: by kernel)."""
    # Shares are of all events, so the first table gets all of them and is cut after the ranges. On a
    # GPU a range occurs twice: on the host, and from its first to its last kernel.
    place = lambda e: (not e.is_user_annotation, -e.cpu_time_total, -e.device_time_total)
    ranges = EventList(sorted(averages, key=place))
    # Leave out autograd's own events: they are no ops.
    ops = [e for e in averages if not (e.is_user_annotation or str(e.key).startswith(_BOOKKEEPING))]
    kernels = [e for e in ops if e.device_type != DeviceType.CPU]
    shown, order = (kernels, "self_device_time_total") if kernels else (ops, "self_cpu_time_total")
    form = {"max_name_column_width": _NAME_WIDTH, "time_unit": "ms"}
    of_ranges = ranges.table(row_limit=sum(e.is_user_annotation for e in averages), **form)
    of_ops = EventList(shown).table(sort_by=order, row_limit=_TOP, **form)
    return f"times are totals over {counted(num_steps, 'step')}\n{of_ranges}\n{of_ops}"

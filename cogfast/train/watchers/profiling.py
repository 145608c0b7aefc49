"""Profiling: named ranges within a step, and a profile of a few steps.

Under nsys (scripts/profile_nsys.sh) nsys captures the steps. Otherwise PyTorch's profiler writes
`profile/rank0-trace.json.gz`, for ui.perfetto.dev or chrome://tracing, and `profile/top_ops.txt`.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from cogfast.config.arguments import TrainArguments
from cogfast.config.values import counted
from cogfast.core.files import UNFINISHED, WriteError, write_text, write_whole
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import CLOCK
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

_TOP = 30  # rows in the table of ops
_NAME_WIDTH = 72  # characters; longer names, such as those of generated kernels, are cut
_BOOKKEEPING = "autograd::engine::"
_BACKWARD_LINE = 2**31 - 1  # thread id for the trace's extra line; no thread has this number
# nsys sets one of these variables, depending on its version, in the processes that it traces.
_NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


class Profiler(Watcher):
    """Named ranges, and the capture of args.profiling_steps steps from step args.profiling on.

    Outside of the captured steps a range of the clock is one shared object that does nothing.
    """

    def __init__(
        self,
        folder: Path,
        groups: ProcessGroups,
        blocks: nn.ModuleList,
        args: TrainArguments,
        num_steps: int,
    ) -> None:
        """num_steps: last step of the run."""
        self.folder, self.groups = folder, groups
        CLOCK.has_others = groups.world_size > 1
        CLOCK.is_complete = not (args.compile and groups.tensor_size > 1)
        self.first: int | None = None  # None: no capture
        self.end = 0
        if args.profiling is not None and args.profiling >= 0:
            self.first = args.profiling
            # A run that ends within the capture still writes what it has.
            self.end = min(self.first + args.profiling_steps, num_steps)
        self.blocks = _BlockRanges(blocks, self._named) if args.profiling_blocks else None
        self.is_capturing = self.has_captured = False
        self.range_before = CLOCK.open_range
        self.step = 0  # completed steps
        self.trace: profile | None = None
        self.step_range = ExitStack()

    def close(self, error: BaseException | None) -> None:
        """Write the profile of a run that was stopped within the capture, unless it failed."""
        if error is not None:
            self._restore()
            if self.trace is not None:
                self.trace.stop()
        elif self.is_capturing:
            self._stop()
        elif self.first is not None and not self.has_captured:
            logger.warning("args.profiling=%d: this run did not reach that step", self.first)

    @contextmanager
    def _named(self, name: str) -> Iterator[None]:
        is_on_gpu = self.groups.device.type == "cuda"
        with record_function(name):
            if is_on_gpu:
                torch.cuda.nvtx.range_push(name)
            try:
                yield
            finally:
                if is_on_gpu:
                    torch.cuda.nvtx.range_pop()

    def before_step(self, step: int) -> None:
        """Start the capture if it is due."""
        self.step = step
        if step == self.first:
            self._start()
        if self.is_capturing:
            self.step_range.enter_context(self._named(f"step {step}"))

    def after_backward(self, loss: Tensor) -> None:
        if self.is_capturing and self.blocks is not None:
            self.blocks.end_backward()

    def after_step(self, step: int) -> None:
        """Stop the capture if it is due."""
        if not self.is_capturing:
            return
        self.step = step
        self.step_range.close()
        if step == self.end:
            self._stop()
            CLOCK.restart()  # writing a profile is no training time

    def _start(self) -> None:
        self.is_capturing = self.has_captured = True
        CLOCK.open_range = self._named
        # Run backward on this thread: a kernel belongs to the ranges of the thread that launches it.
        torch.autograd.grad_mode.set_multithreading_enabled(False)
        if self.blocks is not None:
            self.blocks.install()
        nsys = next((name for name in _NSYS if name in os.environ), None)
        activities = [ProfilerActivity.CPU]
        if self.groups.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # sync: keep kernels of earlier steps out of the profile
            if self.groups.local_rank == 0:  # nsys captures all processes of a machine together
                runtime: Any = torch.cuda.cudart()
                runtime.cudaProfilerStart()
        if nsys is not None:  # only one profiler can trace a GPU
            logger.info("args.profiling: %s is set, so nsys captures the profile", nsys)
        elif self.groups.is_main:
            self.trace = profile(activities=activities)
            self.trace.start()

    def _stop(self) -> None:
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()  # sync: include all kernels of the last step
            if self.groups.local_rank == 0:
                runtime: Any = torch.cuda.cudart()
                runtime.cudaProfilerStop()
        self._restore()
        if self.trace is not None:
            self.trace.stop()
            self._write(self.trace)
            self.trace = None  # frees thousands of events

    def _restore(self) -> None:
        self.step_range.close()
        if self.is_capturing:
            torch.autograd.grad_mode.set_multithreading_enabled(True)
            if self.blocks is not None:
                self.blocks.remove()
            CLOCK.open_range = self.range_before
        self.is_capturing = False

    def _write(self, trace: profile) -> None:
        assert self.first is not None, "a capture began at a step"
        text = tables(trace.key_averages(), self.step - self.first)
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
            logger.info("profile from step %d to step %d in %s", self.first, self.step, self.folder)
        logger.info(text)


class _BlockRanges:
    """Ranges around every block: forward, recompute and backward.

    A block's backward range begins when the gradient of its output arrives and ends when the gradient
    of its input is complete.
    """

    def __init__(
        self, blocks: nn.ModuleList, make_range: Callable[[str], AbstractContextManager]
    ) -> None:
        self.blocks, self.range = blocks, make_range
        self.open = ExitStack()  # the backward range of one block
        self.is_backward = False
        self.calls_before: list[Callable | None] = []

    def install(self) -> None:
        # nn.Module.compile sets _compiled_call_impl, and every call of the block uses it. Wrapping it
        # puts the range outside of the compiled graph, which a range would break, and inside of
        # activation checkpointing.
        self.calls_before = [block._compiled_call_impl for block in self.blocks]
        for i, block in enumerate(self.blocks):
            # Whichever of the two nn.Module would call itself.
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._call, i, call)

    def remove(self) -> None:
        for block, call in zip(self.blocks, self.calls_before, strict=True):
            block._compiled_call_impl = call

    def _call(self, i: int, call: Callable[..., Any], hidden: Tensor, *others: object) -> Tensor:
        if self.is_backward:
            with self.range(f"block {i} recompute"):
                return call(hidden, *others)
        with self.range(f"block {i} forward"):
            out = call(hidden, *others)
        if out.requires_grad:
            out.register_hook(partial(self._begin_backward, i))
        # The first block has no block before it whose hook would end its backward range.
        if i == 0 and hidden.requires_grad:
            hidden.register_hook(self._end_block)
        return out

    def _begin_backward(self, i: int, gradient: Tensor) -> None:
        self.is_backward = True
        self.open.close()
        self.open.enter_context(self.range(f"block {i} backward"))

    def _end_block(self, gradient: Tensor) -> None:
        self.open.close()

    def end_backward(self) -> None:
        self.open.close()
        self.is_backward = False


def _pack(plain: Path, packed: Path) -> None:
    """Compress a trace, and move the backward ranges of blocks to a separate line in it.

    They begin within one autograd node and end within another; viewers drop overlapping ranges.
    """
    try:
        trace = json.loads(plain.read_bytes())
    except (FileNotFoundError, ValueError):  # PyTorch ignores errors while it writes a trace
        raise OSError("PyTorch could not write its trace") from None
    events = trace["traceEvents"]
    moved = [e for e in events if re.fullmatch(r"block \d+ backward", e.get("name", ""))]
    moved = [e for e in moved if e.get("cat") == "user_annotation"]
    for event in moved:
        event["tid"] = _BACKWARD_LINE
    for pid in {event["pid"] for event in moved}:
        # A record of type M names the line in the viewer.
        name = {"name": "thread_name", "ph": "M", "args": {"name": "backward by block"}}
        events.append({**name, "pid": pid, "tid": _BACKWARD_LINE})
    with gzip.open(packed, "wt", compresslevel=5) as file:
        json.dump(trace, file)


def tables(averages: Sequence[FunctionEventAvg], num_steps: int) -> str:
    """Format the time spent in `num_steps` steps, by range and then by op (on a GPU: by kernel)."""
    # Shares are of all events, so the first table gets all of them and is cut after the ranges. On a
    # GPU a range occurs twice: on the host, and from its first to its last kernel.
    place = lambda e: (not e.is_user_annotation, -e.cpu_time_total, -e.device_time_total)
    ranges = EventList(sorted(averages, key=place))
    # Leave out autograd's own events: they are no ops, and they overlap with the blocks' ranges.
    ops = [e for e in averages if not (e.is_user_annotation or str(e.key).startswith(_BOOKKEEPING))]
    kernels = [e for e in ops if e.device_type != DeviceType.CPU]
    shown, order = (kernels, "self_device_time_total") if kernels else (ops, "self_cpu_time_total")
    form = {"max_name_column_width": _NAME_WIDTH, "time_unit": "ms"}
    title = f"times are totals over {counted(num_steps, 'step')}"
    return "\n".join(
        [
            title,
            ranges.table(row_limit=sum(e.is_user_annotation for e in averages), **form),
            EventList(shown).table(sort_by=order, row_limit=_TOP, **form),
        ]
    )

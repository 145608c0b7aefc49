"""Where a step's time goes: named ranges, and a profile of a few steps.

Under nsys the capture is nsys's (scripts/profile_nsys.sh); without it PyTorch's own profiler writes
`profile/rank0-trace.json.gz`, for ui.perfetto.dev or chrome://tracing, and `profile/top_ops.txt`.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEventAvg
from torch.profiler import ProfilerActivity, profile, record_function

from cogfast.schema.arguments import TrainArguments
from cogfast.train.distributed.process_groups import ProcessGroups

logger = logging.getLogger(__name__)

_NO_RANGE = nullcontext()
_TOP = 30  # rows of the table of ops
_NAME_WIDTH = 72  # characters; names of generated kernels are longer
_BOOKKEEPING = "autograd::engine::"
_BACKWARD_LINE = 2**31 - 1  # a thread's number in the trace that no thread has
# nsys sets one of them, by version, in the processes that it traces.
_NSYS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH", "CUDA_INJECTION64_PATH")


class Profiler:
    """The ranges of a step, and the capture of steps args.profiling up to args.profiling_steps
    later. Outside of the capture a range is one shared object that does nothing."""

    def __init__(
        self,
        folder: Path,
        groups: ProcessGroups,
        blocks: nn.ModuleList,
        args: TrainArguments,
        num_steps: int,
    ) -> None:
        """num_steps: after which the run ends."""
        self.folder, self.groups = folder, groups
        is_on = args.profiling is not None and args.profiling >= 0
        self.first = args.profiling if is_on else None
        self.end = min(self.first + args.profiling_steps, num_steps) if is_on else None
        self.blocks = _BlockRanges(blocks, self.range) if args.profiling_blocks else None
        self.is_capturing = self.has_captured = False
        self.step = 0  # that have been done
        self.trace: profile | None = None
        self.step_range = ExitStack()

    def __enter__(self) -> Profiler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """A run that is stopped within the capture still has its profile; one that fails has not."""
        if error is not None:
            self._restore()
            if self.trace is not None:
                self.trace.stop()
        elif self.is_capturing:
            self._stop()
        elif self.first is not None and not self.has_captured:
            logger.warning("args.profiling=%d: this run did not do that step", self.first)

    def range(self, name: str) -> AbstractContextManager:
        """Around a part of the step: NVTX's for nsys, and PyTorch's for its own trace."""
        return self._named(name) if self.is_capturing else _NO_RANGE

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

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The range of the backward pass, in which blocks open their own."""
        with self.range("backward"):
            yield
            if self.blocks is not None:
                self.blocks.end_backward()

    def begin_step(self, step: int) -> None:
        """Before the step that follows `step` done ones."""
        self.step = step
        if step == self.first:
            self._start()
        if self.is_capturing:
            self.step_range.enter_context(self.range(f"step {step}"))

    def end_step(self, step: int) -> bool:
        """When `step` are done; whether it took the time to write a profile."""
        if not self.is_capturing:
            return False
        self.step = step
        self.step_range.close()
        if step < self.end:
            return False
        self._stop()
        return True

    def _start(self) -> None:
        self.is_capturing = self.has_captured = True
        # Backward on this thread: ranges are those of the thread that opens them, and a kernel lies
        # in the ranges of the thread that launches it.
        torch.autograd.grad_mode.set_multithreading_enabled(False)
        if self.blocks is not None:
            self.blocks.install()
        nsys = next((name for name in _NSYS if name in os.environ), None)
        activities = [ProfilerActivity.CPU]
        if self.groups.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()  # sync: kernels of the steps before stay out of the profile
            if self.groups.local_rank == 0:  # nsys captures all processes of a machine at once
                torch.cuda.cudart().cudaProfilerStart()
        if nsys is not None:  # the two cannot trace one GPU
            logger.info("args.profiling: %s is set, so nsys has the profile", nsys)
        elif self.groups.is_main:
            self.trace = profile(activities=activities)
            self.trace.start()

    def _stop(self) -> None:
        if self.groups.device.type == "cuda":
            torch.cuda.synchronize()  # sync: the last step's kernels belong to it
            if self.groups.local_rank == 0:
                torch.cuda.cudart().cudaProfilerStop()
        self._restore()
        if self.trace is not None:
            self.trace.stop()
            self._write(self.trace)
            self.trace = None  # thousands of events

    def _restore(self) -> None:
        self.step_range.close()
        if self.is_capturing:
            torch.autograd.grad_mode.set_multithreading_enabled(True)
            if self.blocks is not None:
                self.blocks.remove()
        self.is_capturing = False

    def _write(self, trace: profile) -> None:
        text = tables(trace.key_averages(), self.step - self.first)
        try:
            self.folder.mkdir(exist_ok=True)
            path = self.folder / "rank0-trace.json.gz"
            trace.export_chrome_trace(str(path))
            if self.blocks is not None:
                _separate_backward_blocks(path)
            (self.folder / "top_ops.txt").write_text(text)
        except OSError as error:
            logger.warning("%s cannot be written (%s); training continues", self.folder, error)
        logger.info("profile from step %d to step %d in %s", self.first, self.step, self.folder)
        logger.info(text)


class _BlockRanges:
    """Ranges around every block: forward, recomputed, and backward.

    A block's backward range begins where the gradient of its output arrives and ends where the
    gradient of the block before it does.
    """

    def __init__(
        self, blocks: nn.ModuleList, make_range: Callable[[str], AbstractContextManager]
    ) -> None:
        self.blocks, self.range = blocks, make_range
        self.open = ExitStack()  # the backward range of one block
        self.is_backward = False
        self.calls_before: list[Callable | None] = []

    def install(self) -> None:
        # What nn.Module.compile sets, and what a call of the block goes through: outside of the
        # compiled code, which a range would break in two, and inside of activation checkpointing.
        self.calls_before = [block._compiled_call_impl for block in self.blocks]
        for i, block in enumerate(self.blocks):
            call = block._compiled_call_impl or block._call_impl
            block._compiled_call_impl = partial(self._call, i, call)

    def remove(self) -> None:
        for block, call in zip(self.blocks, self.calls_before, strict=True):
            block._compiled_call_impl = call

    def _call(self, i: int, call: Callable[..., Tensor], hidden: Tensor, *others: object) -> Tensor:
        if self.is_backward:
            with self.range(f"block {i} recompute"):
                return call(hidden, *others)
        with self.range(f"block {i} forward"):
            out = call(hidden, *others)
        if out.requires_grad:
            out.register_hook(partial(self._begin_backward, i))
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


def _separate_backward_blocks(path: Path) -> None:
    """Give the backward ranges of blocks a line of their own in the trace: one begins within a node
    of autograd and ends within another, and viewers drop what overlaps on a line."""
    with gzip.open(path, "rt") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    moved = [e for e in events if re.fullmatch(r"block \d+ backward", e.get("name", ""))]
    moved = [e for e in moved if e.get("cat") == "user_annotation"]
    for event in moved:
        event["tid"] = _BACKWARD_LINE
    for pid in {event["pid"] for event in moved}:
        name = {"name": "thread_name", "ph": "M", "args": {"name": "backward by block"}}
        events.append({**name, "pid": pid, "tid": _BACKWARD_LINE})
    with gzip.open(path, "wt", compresslevel=5) as file:
        json.dump(trace, file)


def tables(averages: Sequence[FunctionEventAvg], num_steps: int) -> str:
    """Where the time of `num_steps` steps went: by range, then by op (on a GPU: by kernel)."""
    ranges = [e for e in averages if e.is_user_annotation]
    on_device = {e.key: e.device_time_total for e in ranges if e.device_type != DeviceType.CPU}
    hosts = sorted(
        (e for e in ranges if e.device_type == DeviceType.CPU),
        key=lambda e: e.cpu_time_total,
        reverse=True,
    )
    # autograd's bookkeeping around its nodes is no op, and ranges of blocks overlap with it
    ops = [e for e in averages if not (e.is_user_annotation or e.key.startswith(_BOOKKEEPING))]
    kernels = [e for e in ops if e.device_type != DeviceType.CPU]
    what, spent = "op", lambda e: e.self_cpu_time_total
    if kernels:
        ops, what, spent = kernels, "kernel", lambda e: e.self_device_time_total
    total = sum(map(spent, ops)) or 1
    lines = [f"{'range':{_NAME_WIDTH}} {'host ms':>10} {'GPU ms':>10} {'count':>8}"]
    for e in hosts:
        gpu = f"{on_device[e.key] / 1e3:10.3f}" if e.key in on_device else f"{'-':>10}"
        lines.append(f"{_short(e.key)} {e.cpu_time_total / 1e3:10.3f} {gpu} {e.count:8}")
    lines += ["", f"{what:{_NAME_WIDTH}} {'self ms':>10} {'share':>10} {'count':>8}"]
    for e in sorted(ops, key=spent, reverse=True)[:_TOP]:
        share = 100 * spent(e) / total
        lines.append(f"{_short(e.key)} {spent(e) / 1e3:10.3f} {share:9.2f}% {e.count:8}")
    lines += [
        f"{'all':{_NAME_WIDTH}} {total / 1e3:10.3f} {100:9.2f}% {sum(e.count for e in ops):8}"
    ]
    return "\n".join([f"{num_steps} steps; times are sums over them", "", *lines, ""])


def _short(name: str) -> str:
    return f"{name[:_NAME_WIDTH]:{_NAME_WIDTH}}"

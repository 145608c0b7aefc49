"""Do in a capture what CUDA allows and what it refuses, one after another, and print what happened.

test_runtime.py runs it: python -m tests.cuda.planted_captures
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch

from tests.cuda.null_device import Counters

_SIZE = 1 << 20


def capture(run: Callable[[], object], mode: str = "global") -> tuple[torch.cuda.CUDAGraph, str]:
    """Return the graph of what `run` launches, and the first error, "" if there is none."""
    graph, stream, errors = torch.cuda.CUDAGraph(), torch.cuda.Stream(), []
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode=mode)
        for step in (run, graph.capture_end):
            try:
                step()
            except RuntimeError as error:
                errors.append(f"{step.__name__}: {error}".splitlines()[0])
    return graph, " / ".join(errors)


def main() -> None:
    counters, runtime = Counters(), ctypes.CDLL(None)
    x = torch.zeros(_SIZE, device="cuda")
    y, pinned = torch.zeros_like(x), torch.zeros(_SIZE).pin_memory()
    outside, other = torch.cuda.Event(), torch.cuda.Stream()
    x.add(1)  # loads its kernel
    other.record_event(outside)
    found: dict[str, object] = {}

    def add(name: str, run: Callable[[], object], mode: str = "global") -> None:
        counters.take()
        _, error = capture(run, mode)
        found[name] = {"error": error, "counts": counters.take()}

    def work_and_copy() -> None:
        y.copy_(x + 1)

    graph, error = capture(work_and_copy)
    counters.take()
    for _ in range(3):
        graph.replay()
    found["replays"] = {"error": error, "counts": counters.take()}

    def record() -> Any:
        return torch.cuda.current_stream().record_event()

    def forked(joins: bool, works: bool = True) -> None:
        side = torch.cuda.Stream()
        side.wait_event(record())
        with torch.cuda.stream(side):
            if works:
                y.add_(1)
        if joins:
            torch.cuda.current_stream().wait_stream(side)

    def beside() -> None:
        with torch.cuda.stream(other):
            y.add_(1)

    def call(name: str, *arguments: object) -> Callable[[], None]:
        def run() -> None:
            code = getattr(runtime, name)(*arguments)
            if code:
                raise RuntimeError(f"{name} returned {code}")

        return run

    y.add_(1)
    memory = ctypes.c_void_p()
    place, number = ctypes.byref(memory), ctypes.c_size_t(2 << 20)
    add("work", lambda: x + 1)
    add("item", lambda: x[0].item())
    add("synchronize", torch.cuda.synchronize)
    add("stream", lambda: torch.cuda.current_stream().synchronize())
    add("stream query", lambda: torch.cuda.current_stream().query())
    add("event query", lambda: record().query())
    add("event wait", lambda: record().synchronize())
    add("another event's query", outside.query)
    add("another event's query, relaxed", outside.query, "relaxed")
    add("cudaMalloc", call("cudaMalloc", place, number))
    add("cudaMalloc, thread_local", call("cudaMalloc", place, number), "thread_local")
    add("cudaMalloc, relaxed", call("cudaMalloc", place, number), "relaxed")
    add("cudaFree", call("cudaFree", memory))
    add("PyTorch's allocation", lambda: torch.empty(100 << 20, device="cuda"))
    add("pageable", lambda: x.copy_(torch.zeros(_SIZE), non_blocking=True))
    add("pinned", lambda: x.copy_(pinned, non_blocking=True))
    add("joined", lambda: forked(joins=True))
    add("unjoined", lambda: forked(joins=False))
    add("unjoined without work", lambda: forked(joins=False, works=False))
    add("event from outside", lambda: torch.cuda.current_stream().wait_event(outside))
    add("default stream", lambda: torch.cuda.default_stream().wait_event(record()))
    add("beside", beside)
    add("first", lambda: x.cos())
    # A capture that failed leaves nothing behind.
    add("work after all", lambda: x + 1)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

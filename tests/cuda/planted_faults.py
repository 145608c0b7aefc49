"""Do what the runtime and the stream check must report, one fault after another, and print what they saw.

test_runtime.py runs it: python -m tests.cuda.planted_faults
"""

import ctypes
import io
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from cogfast.core.device_memory import host_buffer
from cogfast.kernels.gpu.launch import jit
from tests.cuda.null_device import Counters
from tests.cuda.stream_check import StreamCheck

_SIZE = 1 << 20


@jit
def _kernel(x_ptr, N: tl.constexpr):
    tl.store(x_ptr + tl.program_id(0), N)


def side_use(x: Tensor, side: torch.cuda.Stream) -> None:
    """Read x on a side stream that waits for it."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.sum()


def forgotten(side: torch.cuda.Stream) -> None:
    x = torch.zeros(_SIZE, device="cuda")
    side_use(x, side)


def recorded(side: torch.cuda.Stream) -> None:
    x = torch.zeros(_SIZE, device="cuda")
    side_use(x, side)
    x.record_stream(side)


def waited_for(side: torch.cuda.Stream) -> None:
    x = torch.zeros(_SIZE, device="cuda")
    side_use(x, side)
    torch.cuda.current_stream().wait_stream(side)


def waited_too_early(side: torch.cuda.Stream) -> None:
    x = torch.zeros(_SIZE, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    side_use(x, side)


def shared_page() -> None:
    """Let host buffers take memory that malloc would have them share a page of."""
    torch.empty(30 << 20, dtype=torch.uint8)  # freed: from now on malloc keeps memory of this size
    buffers = [host_buffer(torch.empty(_SIZE + 8, dtype=torch.uint8, device="cuda")) for _ in "12"]
    assert all(buffer.is_pinned() for buffer in buffers)


def refused_pinning(is_ours: bool) -> None:
    """Launch a kernel after memory could not be pinned."""
    x = torch.zeros(_SIZE, device="cuda")
    os.environ["NULLCUDA_REGISTER_MAX"] = "0"
    try:
        if is_ours:
            assert not host_buffer(x).is_pinned()
        else:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostRegister(torch.empty(_SIZE).data_ptr(), _SIZE, 0)
    finally:
        del os.environ["NULLCUDA_REGISTER_MAX"]
    x + 1


def main() -> None:
    counters, x = Counters(), torch.zeros(_SIZE, device="cuda")
    waits: list[str] = []
    log = io.StringIO()
    logging.getLogger("cogfast").addHandler(logging.StreamHandler(log))
    counters.observe_syncs(lambda name: waits.append(name.decode()))
    found: dict[str, object] = {"start": counters.take()}

    def add(name: str, run: Callable[[], object]) -> None:
        waits.clear()
        error = None
        try:
            run()
        except (RuntimeError, AssertionError) as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
        found[name] = {"counts": counters.take(), "waits": [*waits], "error": error}

    add("addition", lambda: x + 1)
    add("item", lambda: x[0].item())
    add("large pageable copy", lambda: torch.zeros(_SIZE).to("cuda", non_blocking=True))
    add("small pageable copy", lambda: torch.zeros(8).to("cuda", non_blocking=True))
    add("pinned copy", lambda: torch.zeros(_SIZE).pin_memory().to("cuda", non_blocking=True))
    add("kernel", lambda: _kernel[(4,)](x, N=4))
    add("grid", lambda: _kernel[(1, 70_000)](x, N=4))
    runtime, memory = ctypes.CDLL(None), ctypes.c_void_p()
    runtime.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(2 << 20))
    for name, offset in (("last bytes", 16), ("beyond the end", 8)):
        place = ctypes.c_void_p((memory.value or 0) + (2 << 20) - offset)
        add(name, partial(runtime.cudaMemsetAsync, place, 0, ctypes.c_size_t(16), None))
    add("out of memory", lambda: torch.empty(1 << 40, device="cuda"))
    add("buffers on a page", shared_page)
    for name, is_ours in (("refused pinning, raw", False), ("refused pinning", True)):
        add(name, partial(refused_pinning, is_ours))
    check = StreamCheck()
    side = torch.cuda.Stream()
    streams = {}
    with check:
        for run in (forgotten, recorded, waited_for, waited_too_early):
            run(side)
            streams[run.__name__] = sorted(check.problems)
            check.problems.clear()
            torch.cuda.synchronize()
    found |= {"streams": streams, "stream_uses": check.num_uses, "log": log.getvalue()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()

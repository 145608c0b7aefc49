"""Rates of this machine: copies, matrix products, attention, reductions between its GPUs.

`cogfast doctor --bench` compares them with the data sheet of the GPU; `bench.gpu_run` reports them.
"""

from __future__ import annotations

import os
import tempfile
import time
from datetime import timedelta
from typing import Any

import torch
import torch.nn.functional as F

from cogfast.diagnostics.doctor import Finding
from cogfast.diagnostics.timing import num_buffer_sets, spread, time_calls, wait_for
from cogfast.train.plan.gpus import Gpu, find_gpu

# Shares of a data sheet's rate, below which something is wrong: clocks, power, another process.
_LEAST_COPY, _LEAST_MATMUL, _LEAST_ATTENTION, _LEAST_REDUCE = 0.75, 0.5, 0.35, 0.5
_HEADS, _HEAD_WIDTH = 24, 64
_REDUCE_CALLS = 10


def copy_rate(device: torch.device, seconds: float, num_bytes: int) -> dict[str, float]:
    """Time the copy of a buffer; the rate in GB/s counts the bytes read and the bytes written."""
    make = lambda: torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
    pairs = [(make().normal_(), make()) for _ in range(2)]
    calls = [lambda source=s, target=t: target.copy_(source) for s, t in pairs]
    times = spread(time_calls(calls, device, seconds))
    rate = 2 * num_bytes / times["median_ms"] / 1e6
    return {"buffer_bytes": num_bytes, "gb_per_s": rate, **times}


def matmul_rate(
    device: torch.device, seconds: float, n: int, dtype: torch.dtype = torch.bfloat16
) -> dict[str, float]:
    """Time the product of two n x n matrices; the rate is in TFLOP/s."""
    # Zeros would draw less power, which lets a GPU clock higher.
    make = lambda: torch.randn(n, n, dtype=dtype, device=device)
    pairs = [(make(), make()) for _ in range(num_buffer_sets(4 * n * n, device))]
    calls = [lambda a=a, b=b: a @ b for a, b in pairs]
    times = spread(time_calls(calls, device, seconds))
    return {"size": n, "tflop_per_s": 2 * n**3 / times["median_ms"] / 1e9, **times}


def attention_rate(
    device: torch.device, seconds: float, num_tokens: int, dtype: torch.dtype
) -> dict[str, float]:
    """Time PyTorch's attention of one sample, forward; the rate is in TFLOP/s."""
    make = lambda: torch.randn(1, _HEADS, num_tokens, _HEAD_WIDTH, dtype=dtype, device=device)
    sets = [(make(), make(), make()) for _ in range(2)]
    calls = [lambda x=x: F.scaled_dot_product_attention(*x) for x in sets]
    times = spread(time_calls(calls, device, seconds))
    work = 4 * _HEADS * _HEAD_WIDTH * num_tokens**2
    return {"size": num_tokens, "tflop_per_s": work / times["median_ms"] / 1e9, **times}


def all_reduce_rate(num_ranks: int, num_bytes: int, on_gpus: bool) -> float:
    """Time all-reduces between processes of this machine; return GB/s, as NCCL's tests count them.

    The rate is that of each rank's link: 2 (n - 1) / n times the buffer's bytes by the time.
    """
    # A forked process could not use CUDA, which this one has initialized.
    context: Any = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        queue = context.SimpleQueue()
        ranks = [
            context.Process(
                target=_reduce, args=(rank, num_ranks, num_bytes, on_gpus, store, queue)
            )
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        failed = [process.exitcode for process in ranks if process.exitcode]
        if failed:
            raise RuntimeError(f"all-reduce between {num_ranks} ranks: one ended with {failed[0]}")
        # An all-reduce is over when its slowest rank has finished.
        seconds = max(queue.get() for _ in ranks)
    return 2 * (num_ranks - 1) / num_ranks * num_bytes / seconds / 1e9


def _reduce(
    rank: int, num_ranks: int, num_bytes: int, on_gpus: bool, store: str, queue: Any
) -> None:
    """Put the seconds of one all-reduce into the queue."""
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    torch.distributed.init_process_group(
        "nccl" if on_gpus else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=60),
    )
    buffer = torch.ones(num_bytes // 4, device=device)
    torch.distributed.all_reduce(buffer)  # creates the communicator
    # All ranks start together, or the first would count the wait for the last.
    torch.distributed.barrier()
    wait_for(device)
    started = time.perf_counter()
    for _ in range(_REDUCE_CALLS):
        torch.distributed.all_reduce(buffer)
    wait_for(device)
    queue.put((time.perf_counter() - started) / _REDUCE_CALLS)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(seconds: float = 2.0) -> list[Finding]:
    """Measure this machine for about 10 seconds. A rate far below its data sheet's becomes a note."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    gpu = _gpu_of(device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    copy = copy_rate(device, seconds, 2_000_000_000 if on_gpu else 128_000_000)
    product = matmul_rate(device, seconds, 8192 if on_gpu else 1024, dtype)
    attention = attention_rate(device, seconds, 17776 if on_gpu else 1664, dtype)
    kind = str(dtype).removeprefix("torch.")
    sheet = None if gpu is None else 1000 * gpu.copy_tb_per_s
    flops = None if gpu is None else gpu.matmul_tflop_per_s
    findings = [
        _judge("copy", copy["gb_per_s"], "GB/s", sheet, _LEAST_COPY),
        _judge(
            f"matmul {product['size']}, {kind}",
            product["tflop_per_s"],
            "TFLOP/s",
            flops,
            _LEAST_MATMUL,
        ),
        _judge(
            f"attention {attention['size']}, {kind}",
            attention["tflop_per_s"],
            "TFLOP/s",
            flops,
            _LEAST_ATTENTION,
        ),
    ]
    num_ranks = torch.cuda.device_count() if on_gpu else 2
    if num_ranks > 1:
        rate = all_reduce_rate(num_ranks, 512_000_000 if on_gpu else 32_000_000, on_gpu)
        sheet = None if gpu is None else gpu.link_gb_per_s
        findings.append(_judge(f"all-reduce of {num_ranks}", rate, "GB/s", sheet, _LEAST_REDUCE))
    return findings


def _gpu_of(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return find_gpu(properties.name, properties.total_memory / 2**30)


def _judge(what: str, rate: float, unit: str, sheet: float | None, least: float) -> Finding:
    # Processors and GPUs that gpus.py does not list.
    if sheet is None:
        return Finding(what=what, status="ok", found=f"{rate:.4g} {unit}; no data sheet to compare")
    found = f"{rate:.4g} {unit}, {rate / sheet:.0%} of the data sheet's {sheet:.4g}"
    if rate >= least * sheet:
        return Finding(what=what, status="ok", found=found)
    return Finding(
        what=what,
        status="note",
        found=found,
        cost=f"at least {least:.0%} is expected: every step takes longer",
        fix="nvidia-smi -q -d CLOCK,POWER,PERFORMANCE shows what slows the GPU down",
    )

"""Rates of this machine: copies and matrix products.

`cogfast doctor --bench` compares them with the data sheet of the GPU; `bench.gpu_run` reports them.
"""

from __future__ import annotations

import torch

from cogfast.cli.doctor import Finding, judge
from cogfast.core.timing import num_buffer_sets, spread, time_calls
from cogfast.plan.gpus import gpu_of

# Shares of a data sheet's rate, below which something is wrong: clocks, power, another process.
_LEAST_COPY, _LEAST_MATMUL = 0.75, 0.5


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


def measure(seconds: float = 2.0) -> list[Finding]:
    """Measure this machine for about 5 seconds. A rate far below its data sheet's becomes a note."""
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    gpu = gpu_of(device)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    copy = copy_rate(device, seconds, 2_000_000_000 if on_gpu else 128_000_000)
    product = matmul_rate(device, seconds, 8192 if on_gpu else 1024, dtype)
    sheet = None if gpu is None else 1000 * gpu.copy_tb_per_s
    flops = None if gpu is None else gpu.matmul_tflop_per_s
    name = f"matmul {product['size']}, {str(dtype).removeprefix('torch.')}"
    return [
        _judge("copy", copy["gb_per_s"], "GB/s", sheet, _LEAST_COPY),
        _judge(name, product["tflop_per_s"], "TFLOP/s", flops, _LEAST_MATMUL),
    ]


def _judge(what: str, rate: float, unit: str, sheet: float | None, least: float) -> Finding:
    # Processors and GPUs that gpus.py does not list.
    if sheet is None:
        return Finding(what, "ok", f"{rate:.4g} {unit}; no data sheet to compare")
    found = f"{rate:.4g} {unit}, {rate / sheet:.0%} of the data sheet's {sheet:.4g}"
    cost = f"at least {least:.0%} is expected: every step takes longer"
    fix = "nvidia-smi -q -d CLOCK,POWER,PERFORMANCE shows what slows the GPU down"
    return judge(what, rate >= least * sheet, found, cost, fix)

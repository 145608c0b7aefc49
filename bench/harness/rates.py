"""The rates of a copy and of a large matrix product, which other figures are compared with."""

from __future__ import annotations

import torch

from bench.harness.outcome import Outcome, Settings
from bench.harness.timing import num_buffer_sets, spread, time_calls


def copy_rate(settings: Settings) -> dict[str, float]:
    """Time the copy of a buffer; the rate in GB/s counts the bytes read and the bytes written."""
    # The full size is far larger than any L2 cache.
    num_bytes = 8_000_000 if settings.is_tiny else 4_000_000_000
    device = settings.device
    make = lambda: torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
    pairs = [(make().normal_(), make()) for _ in range(2)]
    calls = [lambda source=s, target=t: target.copy_(source) for s, t in pairs]
    times = spread(time_calls(calls, device, settings.seconds))
    rate = 2 * num_bytes / times["median_ms"] / 1e6
    return {"buffer_bytes": num_bytes, "gb_per_s": rate, **times}


def matmul_rate(settings: Settings) -> dict[str, float]:
    """Time the product of two n x n matrices in bf16; the rate is in TFLOP/s."""
    n, device = 256 if settings.is_tiny else 8192, settings.device
    # Zeros would draw less power, which lets a GPU clock higher.
    make = lambda: torch.randn(n, n, dtype=torch.bfloat16, device=device)
    pairs = [(make(), make()) for _ in range(num_buffer_sets(4 * n * n, device))]
    calls = [lambda a=a, b=b: a @ b for a, b in pairs]
    times = spread(time_calls(calls, device, settings.seconds))
    return {"size": n, "tflop_per_s": 2 * n**3 / times["median_ms"] / 1e9, **times}


def measure_rates(settings: Settings) -> Outcome:
    """Measure both rates: one row each."""
    product = matmul_rate(settings)
    rows = [{"what": "copy", **copy_rate(settings)}, {"what": "matrix product", **product}]
    shown = ("what", "buffer_bytes", "size", "gb_per_s", "tflop_per_s", "median_ms", "p10_ms")
    return Outcome(rows=rows, shown=(*shown, "p90_ms", "num_samples"))

"""The rates of a copy and of a large matrix product, which other figures are compared with."""

from __future__ import annotations

from bench.harness.outcome import Outcome, Settings
from cogfast.diagnostics import rates

# The full size is far larger than any L2 cache.
_COPY_BYTES, _TINY_COPY_BYTES = 4_000_000_000, 8_000_000
_MATMUL_SIZE, _TINY_MATMUL_SIZE = 8192, 256


def copy_rate(settings: Settings) -> dict[str, float]:
    """Time the copy of a buffer; the rate in GB/s counts the bytes read and the bytes written."""
    num_bytes = _TINY_COPY_BYTES if settings.is_tiny else _COPY_BYTES
    return rates.copy_rate(settings.device, settings.seconds, num_bytes)


def matmul_rate(settings: Settings) -> dict[str, float]:
    """Time a square bf16 matrix product; the rate is in TFLOP/s."""
    n = _TINY_MATMUL_SIZE if settings.is_tiny else _MATMUL_SIZE
    return rates.matmul_rate(settings.device, settings.seconds, n)


def measure_rates(settings: Settings) -> Outcome:
    """Measure both rates: one row each."""
    rows = [
        {"what": "copy", **copy_rate(settings)},
        {"what": "matrix product", **matmul_rate(settings)},
    ]
    shown = ("what", "buffer_bytes", "size", "gb_per_s", "tflop_per_s", "median_ms", "p10_ms")
    return Outcome(rows=rows, shown=(*shown, "p90_ms", "num_samples"))

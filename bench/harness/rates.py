"""The rates of a copy and of a large matrix product, which other figures are compared with."""

from __future__ import annotations

from bench.harness.outcome import Outcome, Settings
from cogfast.cli import rates


def copy_rate(settings: Settings) -> dict[str, float]:
    """Time the copy of a buffer; the rate in GB/s counts the bytes read and the bytes written."""
    # The full size is far larger than any L2 cache.
    num_bytes = 8_000_000 if settings.is_tiny else 4_000_000_000
    return rates.copy_rate(settings.device, settings.seconds, num_bytes)


def measure_rates(settings: Settings) -> Outcome:
    """Measure both rates: one row each."""
    n = 256 if settings.is_tiny else 8192
    product = rates.matmul_rate(settings.device, settings.seconds, n)
    rows = [{"what": "copy", **copy_rate(settings)}, {"what": "matrix product", **product}]
    shown = ("what", "buffer_bytes", "size", "gb_per_s", "tflop_per_s", "median_ms", "p10_ms")
    return Outcome(rows=rows, shown=(*shown, "p90_ms", "num_samples"))

"""How long a call takes on a device: many samples, after a warm-up, on data that no cache holds."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_WARM_UP_SECONDS = 0.2  # an idle GPU needs some of it to raise its clocks
_MIN_SAMPLES, _MAX_SAMPLES = 5, 200
# Few enough calls that the GPU's queue of about a thousand launches holds most of them.
_BURST = 10
_MARK_SECONDS = 20e-6  # the host's time for the two marks of a call
_MOST_HOST = 5e-3  # a call that takes the host longer waits for the GPU by itself
_GPU_CYCLES_PER_SECOND = 2e9
_CACHES = 3  # the buffers that take turns hold so many times the L2 cache


def num_buffer_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many sets of buffers must take turns so that none is still in the GPU's L2 cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, math.ceil(_CACHES * cache / bytes_per_set))


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> list[float]:
    """Milliseconds of single calls; `calls` do the same work on buffers of their own, in turns.

    seconds: how long to sample, about; a warm-up comes before.
    """
    _run_round(calls, device)  # compiles and makes handles
    started, num_rounds = time.perf_counter(), 0
    while num_rounds == 0 or time.perf_counter() - started < min(_WARM_UP_SECONDS, seconds):
        _run_round(calls, device)
        num_rounds += 1
    one = (time.perf_counter() - started) / (num_rounds * len(calls))
    num_samples = min(_MAX_SAMPLES, max(_MIN_SAMPLES, int(seconds / one)))
    return (_time_on_gpu if device.type == "cuda" else _time_on_cpu)(calls, num_samples)


def _run_round(calls: Sequence[Callable[[], object]], device: torch.device) -> None:
    for call in calls:
        call()
    wait_for(device)


def _time_on_gpu(calls: Sequence[Callable[[], object]], num_samples: int) -> list[float]:
    """The GPU first sleeps for as long as the host takes to queue a burst: it then has the work of a
    call in front of it, and no time of the host's is counted."""
    started = time.perf_counter()
    for call in calls:
        call()
    host_seconds = min((time.perf_counter() - started) / len(calls) + _MARK_SECONDS, _MOST_HOST)
    torch.cuda.synchronize()
    sleep_cycles = int(2 * _BURST * host_seconds * _GPU_CYCLES_PER_SECOND)
    times: list[float] = []
    while len(times) < num_samples:
        marks = []
        torch.cuda._sleep(sleep_cycles)
        for i in range(len(times), min(num_samples, len(times) + _BURST)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[i % len(calls)]()
            end.record()
            marks.append((start, end))
        torch.cuda.synchronize()
        times += [start.elapsed_time(end) for start, end in marks]
    return times


def _time_on_cpu(calls: Sequence[Callable[[], object]], num_samples: int) -> list[float]:
    times = []
    for i in range(num_samples):
        start = time.perf_counter()
        calls[i % len(calls)]()
        times.append((time.perf_counter() - start) * 1e3)
    return times


def wait_for(device: torch.device) -> None:
    """Until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(times_ms: Sequence[float]) -> dict[str, float]:
    """Median, 10th and 90th percentile, and number of samples, as keys of a JSON file."""
    deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
    return {
        "median_ms": statistics.median(times_ms),
        "p10_ms": deciles[0],
        "p90_ms": deciles[-1],
        "num_samples": len(times_ms),
    }

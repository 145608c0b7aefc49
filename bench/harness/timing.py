"""Time calls on a device: many samples after a warm-up, on data that is not in the L2 cache."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

_WARM_UP_SECONDS = 0.2  # an idle GPU needs some of it to raise its clocks
_MIN_SAMPLES, _MAX_SAMPLES = 5, 200
# Few enough that the GPU's queue, about a thousand launches, holds the kernels of all calls.
_BURST = 10
_MARK_SECONDS = 20e-6  # host time to record the two events of a call
# A call with more host time than this waits for the GPU by itself, so a longer sleep is no use.
_MOST_HOST = 5e-3
_GPU_CYCLES_PER_SECOND = 2e9
_CACHES = 3  # total size of the buffers, in L2 caches


def num_buffer_sets(bytes_per_set: int, device: torch.device) -> int:
    """Return how many buffer sets to cycle through so that none is still in the L2 cache."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, math.ceil(_CACHES * cache / bytes_per_set))


def time_calls(
    calls: Sequence[Callable[[], object]], device: torch.device, seconds: float
) -> list[float]:
    """Return the milliseconds of single calls. `calls` do the same work on different buffers, in turn.

    seconds: approximate time of sampling, without the warm-up.
    """
    _run_round(calls, device)  # compiles kernels and creates library handles
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
    """Time bursts of calls by CUDA events.

    The GPU first sleeps for as long as the host needs to queue a burst. So the GPU never waits for
    the host within a burst, and the times contain no host time.
    """
    started = time.perf_counter()
    for call in calls:
        call()
    host_seconds = min((time.perf_counter() - started) / len(calls) + _MARK_SECONDS, _MOST_HOST)
    torch.cuda.synchronize()
    # Twice the estimate: a sleep that is too short would count host time.
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
    """Block until the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def spread(times_ms: Sequence[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile and number of samples, under the keys of a result."""
    deciles = statistics.quantiles(times_ms, n=10, method="inclusive")
    return {
        "median_ms": statistics.median(times_ms),
        "p10_ms": deciles[0],
        "p90_ms": deciles[-1],
        "num_samples": len(times_ms),
    }

"""Parts that the files with Triton kernels share: what decides a launch's size.

None of these files has `from __future__ import annotations`: Triton's interpreter looks for the object
`tl.constexpr` in a kernel's annotations, not for its name. All are imported on first use, since some
platforms have no Triton.
"""

from functools import cache
from typing import Any

import torch
import triton

from cogfast.kernels import torch_library

# Any: a checker knows neither `kernel[grid](...)` nor what Triton's types do inside a kernel.
jit: Any = triton.jit
# Values for CPU tensors, which are launched only by Triton's interpreter: a few programs, so that
# tests cover programs that take several tiles, and the shared memory of a small GPU.
_INTERPRETED_PROGRAMS, _INTERPRETED_SHARED_BYTES = 5, 99 * 1024


def cdiv(a: int, b: int) -> int:
    return -(-a // b)  # rounded up; triton.cdiv wraps its arguments first


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, or a small number for a CPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


def num_backward_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors that the programs of a backward kernel fill."""
    number = num_multiprocessors(device)
    return number - min(torch_library.LEFT_MULTIPROCESSORS, number // 4)


@cache
def shared_bytes_per_multiprocessor(device: torch.device) -> int:
    """Shared memory that the programs on one multiprocessor may use together.

    227 KB on an H100, 163 KB on an A100, 99 KB on an RTX 4090.
    """
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    # CUDA reserves 1 KB for itself.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024

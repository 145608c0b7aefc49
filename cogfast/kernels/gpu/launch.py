"""Triton if it is installed, its kernels with a quick launch, and what decides a launch's size.

Files with Triton kernels import `jit` and `tl` from here, so that they can be imported without
Triton. None of them has `from __future__ import annotations`: Triton's interpreter looks for the
object `tl.constexpr` in a kernel's annotations, not for its name.
"""

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl

    triton: Any = None  # its cdiv and next_power_of_2 are annotated as compile-time constants
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # no wheel for this platform: only the CPU versions run

        class tl:
            constexpr = staticmethod(lambda value: value)

        triton = None

HAS_TRITON = triton is not None


_JITFunction: Any = object if triton is None else triton.JITFunction


class Kernel(_JITFunction):
    """A Triton kernel that finds its compiled form with one look into a dict.

    JITFunction first binds the arguments to names and describes each of them. Here launches give
    the arguments in the kernel's order, then its constants and options by name.
    """

    def __init__(self, kernel: Callable) -> None:
        super().__init__(kernel)
        self._compiled: dict[tuple, Any] = {}

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **named: Any) -> Any:
        runtime = triton.knobs.runtime
        if warmup or runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:
            return super().run(*args, grid=grid, warmup=warmup, **named)
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        # Triton compiles for the dtype of a tensor and for addresses that are multiples of 16, for
        # the type of a float, and for integers that are 1, multiples of 16 or above 32 bits, all of
        # which an integer's own value decides.
        key, values = [device, *named], [*args, *named.values()]
        for i, value in enumerate(values):
            if isinstance(value, torch.Tensor):
                address = values[i] = value.data_ptr()
                key += value.dtype, address % 16
            else:
                key.append(float if isinstance(value, float) else value)
        compiled = self._compiled.get(key := tuple(key))
        if compiled is None:
            names = [*self.arg_names[: len(args)], *named]
            runtime_names = [p.name for p in self.params if not p.is_constexpr]
            assert names[: len(runtime_names)] == runtime_names, "give arguments in this order"
            assert not any(isinstance(v, float) for v in values[len(runtime_names) :])
            compiled = super().run(*args, grid=grid, warmup=False, **named)
            # On other GPUs Triton also compiles for the size of a tensor.
            if driver.get_current_target().backend == "cuda":
                self._compiled[key] = compiled
            return compiled
        x, y, z = (*grid, 1, 1)[:3]
        compiled.run(
            x,
            y,
            z,
            driver.get_current_stream(device),
            compiled.function,
            compiled.packed_metadata,
            None,  # metadata and hooks of profilers
            None,
            None,
            *values[: len(self.params)],  # without the options, which Triton 3.6 refuses
        )
        return compiled


# Values for CPU tensors, which are launched only by Triton's interpreter: a few programs, so that
# tests cover programs that take several tiles, and the shared memory of a small GPU.
_INTERPRETED_PROGRAMS, _INTERPRETED_SHARED_BYTES = 5, 99 * 1024


def jit(kernel: Callable) -> Any:
    """Return a kernel for `kernel[grid](...)`, or the function itself without Triton."""
    # Any: a checker knows neither `kernel[grid](...)` nor what Triton's types do inside a kernel.
    if triton is None:
        return kernel
    return triton.jit(kernel) if triton.knobs.runtime.interpret else Kernel(kernel)


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)  # triton.cdiv wraps its arguments first


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU, or a small number for a CPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes_per_multiprocessor(device: torch.device) -> int:
    """Shared memory that the programs on one multiprocessor may use together.

    227 KB on an H100, 163 KB on an A100, 99 KB on an RTX 4090.
    """
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    # CUDA reserves 1 KB for itself.
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024

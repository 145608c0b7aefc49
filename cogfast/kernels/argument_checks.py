"""What the kernels share: Triton where it is installed, checks of arguments, launch sizes, and the
cases that bench/compile_report.py compiles without a GPU.

A file with kernels takes `jit` and `tl` from here. It has no `from __future__ import annotations`:
Triton's interpreter looks for `tl.constexpr` itself in a kernel's annotations, not for its name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no wheel for this platform; the references run

    class tl:
        constexpr = staticmethod(lambda value: value)

    triton = None

HAS_TRITON = triton is not None
GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What stands for a GPU where the interpreter runs.
_INTERPRETED_PROGRAMS, _INTERPRETED_SHARED_BYTES = 5, 99 * 1024


def jit(kernel: Callable) -> Callable:
    """triton.jit; without Triton the kernel stays a function that nobody calls."""
    return kernel if triton is None else triton.jit(kernel)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a GPU; a small number for a CPU, where only Triton's interpreter asks."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes_per_multiprocessor(device: torch.device) -> int:
    """What programs may share out among them: of H100 227 KB, A100 163 KB, RTX 4090 99 KB."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor - 1024


def refuse(op: str, argument: str, value: object, rule: str) -> None:
    """Raise the one line that names op, argument, value and rule."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = f"{list(value.shape)} {dtype} on {value.device}, strides {list(value.stride())}"
    raise ValueError(f"{op}: {argument} is {value}; {rule}")


def check_tensor(
    op: str,
    argument: str,
    tensor: Tensor,
    shape: Sequence[int],
    like: Tensor | None = None,
    any_dtype: bool = False,
) -> None:
    """Refuse a tensor of another shape, whose last dim is not dense, or that is not on the device
    (and, unless any_dtype, of the dtype) of `like`; without `like`, one of a dtype or device that
    no kernel takes. A CPU takes every floating dtype."""
    if tensor.shape != torch.Size(shape):
        refuse(op, argument, tensor, f"its shape must be {list(shape)}")
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        refuse(op, argument, tensor, "its last dim must be dense: pass x.contiguous()")
    if like is not None:
        if tensor.device != like.device:
            refuse(op, argument, tensor, f"it must be on {like.device}")
        if not any_dtype and tensor.dtype != like.dtype:
            refuse(op, argument, tensor, f"its dtype must be {like.dtype}")
    if tensor.device.type == "cpu":
        is_taken = tensor.is_floating_point()
    else:
        is_taken = tensor.dtype in GPU_DTYPES
    if not is_taken:
        refuse(op, argument, tensor, "its dtype must be bfloat16, float16 or float32")
    if tensor.device.type not in ("cuda", "cpu", "meta"):
        refuse(op, argument, tensor, "it must be on a CUDA GPU or a CPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileCase:
    """A kernel at a shape that counts, and the limits that its machine code must keep (sm_90).

    arguments: by the kernel's names, Triton's types ("*bf16", "*fp32", "i64", "fp32"). constants:
    the tl.constexpr ones. divisible: integer arguments known to be multiples of 16 at this shape
    (pointers are). Spills are never allowed.
    """

    name: str
    kernel: Callable
    arguments: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int
    num_stages: int = 2
    divisible: Sequence[str] = field(default=())
    max_registers: int  # per thread, for the occupancy that the kernel's notes ask for
    max_shared_bytes: int = 0  # static and dynamic, of one program
    narrow_loads: int | None = None  # most global loads of less than 16 bytes; None: not held
    narrow_stores: int | None = None

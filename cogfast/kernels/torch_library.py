"""Registration of the kernels as PyTorch ops: Triton launches for CUDA tensors, C++ for CPU tensors.

The C++ library of cpu/ is compiled when the package is installed (setup.py). Its CPU kernels take
float32 and bfloat16. Without it, and for other dtypes, CPU tensors take the references in plain
PyTorch. The ops have no gradients of their own: autograd.Functions call them, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Counts changes of the ops' signatures: a library that was compiled for others is not loaded.
_OPS = 2
_LIBRARY = torch.library.Library("cogfast", "FRAGMENT")


def _load_cpu_kernels() -> bool:
    """Load the C++ library that was compiled for this version of PyTorch; return whether it is there."""
    # setup.py writes both into the name. PyTorch's C++ interface changes between versions.
    version = torch.__version__.partition("+")[0]
    path = Path(__file__).parent / "cpu" / f"_kernels-{_OPS}-torch{version}.so"
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not has_vectors or not path.exists():
        return False
    torch.ops.load_library(path)
    return True


HAS_CPU_KERNELS = _load_cpu_kernels()
CPU_DTYPES = (torch.float32, torch.bfloat16) if HAS_CPU_KERNELS else ()


def has_kernel(x: Tensor) -> bool:
    """Return whether the ops take x: a CUDA tensor, or a CPU tensor of one of CPU_DTYPES."""
    return x.device.type != "cpu" or x.dtype in CPU_DTYPES


def register_op(
    schema: str, fake: Callable, gpu: Callable | None = None, cpu: Callable | None = None
) -> Any:
    """Define an op and return it.

    Args:
        schema: name and signature.
        fake: returns empty outputs, for torch.compile.
        gpu: implementation for CUDA tensors; None for an op of CPU tensors alone.
        cpu: implementation for CPU tensors; None if the C++ library registers one under this name.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, implementation in (("CUDA", gpu), ("CPU", cpu)):
        if implementation is not None:
            _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"cogfast::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.cogfast, name).default

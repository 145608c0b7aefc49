"""Registration of the kernels as PyTorch ops: Triton launches for CUDA tensors, C++ for CPU tensors.

The C++ library of cpu/ is compiled when the package is installed (setup.py). Its CPU kernels take
float32 and bfloat16. Without it, and for other dtypes, CPU tensors take the references in plain
PyTorch. The ops have no gradients of their own: autograd.Functions call them, forward and backward.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Counts changes of the ops' signatures: a library that was compiled for others is not loaded.
_OPS = 2
_LIBRARY = torch.library.Library("cogfast", "FRAGMENT")
_Reference = TypeVar("_Reference", bound=Callable)


def _load_cpu_kernels() -> bool:
    """Load the C++ library that was compiled for this version of PyTorch; return whether it is there."""
    has_vectors = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    if not has_vectors or not _LIBRARY_FILE.exists():
        return False
    try:
        torch.ops.load_library(_LIBRARY_FILE)
    except OSError as error:
        logger.warning(
            "the C++ kernels cannot be loaded, so that training on a CPU runs PyTorch's ops, which take "
            "longer; install cogfast again (%s)",
            error,
        )
        return False
    return True


# setup.py writes both into the name. PyTorch's C++ interface changes between versions.
_VERSION = torch.__version__.partition("+")[0]
_LIBRARY_FILE = Path(__file__).parent / "cpu" / f"_kernels-{_OPS}-torch{_VERSION}.so"
HAS_CPU_KERNELS = _load_cpu_kernels()
CPU_DTYPES = (torch.float32, torch.bfloat16) if HAS_CPU_KERNELS else ()


def has_kernel(x: Tensor) -> bool:
    """Return whether the ops take x: a CUDA tensor, or a CPU tensor of one of CPU_DTYPES."""
    return x.device.type != "cpu" or x.dtype in CPU_DTYPES


def float32_on_cpu(reference: _Reference) -> _Reference:
    """Decorate a reference, so that 16-bit rows on a CPU are computed in float32 and rounded once.

    There PyTorch's LayerNorm adds up the gradients of 16-bit weights in 16 bits: at 32,000 rows those
    of a bias are 68% off. On a GPU it adds in float32.
    """

    @functools.wraps(reference)
    def compute(hidden: Tensor, *inputs: Any, **named: Any) -> Any:
        if hidden.device.type != "cpu" or hidden.dtype.itemsize > 2:
            return reference(hidden, *inputs, **named)
        widen = lambda x: x.float() if isinstance(x, Tensor) else x
        wide = {name: widen(x) for name, x in named.items()}
        outputs = reference(hidden.float(), *map(widen, inputs), **wide)
        if isinstance(outputs, Tensor):
            return outputs.to(hidden.dtype)
        return tuple(x.to(hidden.dtype) for x in outputs)

    return cast(_Reference, compute)


def from_gpu(file: str, name: str) -> Callable:
    """Return function `name` of gpu/`file`.py, which its first call imports: Triton takes a tenth of a
    start to import."""

    def call(*inputs: Any, **options: Any) -> Any:
        module = importlib.import_module(f"cogfast.kernels.gpu.{file}")
        return getattr(module, name)(*inputs, **options)

    return call


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

"""Registration of the kernels as PyTorch ops: Triton launches for CUDA tensors, C++ for CPU tensors.

The C++ library of cpu/ is loaded if it is in the user's cache (cpu/library.py); a command that runs on a
CPU compiles it there. Its kernels take float32 and bfloat16. Without it, and for other dtypes, CPU tensors
take the references in plain PyTorch. The functions of this package call the ops in autograd.Functions,
whose gradients `register_gradient` also gives to the ops themselves.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cogfast.kernels.cpu.library import compile_library, library_file

logger = logging.getLogger(__name__)

_LIBRARY = torch.library.Library("cogfast", "FRAGMENT")
_Reference = TypeVar("_Reference", bound=Callable)
# {op: FLOPs of its products, by the shapes of the arguments}
FLOPS: dict[Any, Callable[..., int]] = {}


CPU_DTYPES = (torch.float32, torch.bfloat16)  # of the C++ kernels
HAS_CPU_KERNELS = False  # whether CPU tensors take them, which must be loaded; else PyTorch's ops
# Multiprocessors of a GPU, at most a quarter of all, which backward kernels that fill it leave to NCCL's
# reductions. ZeroEngine sets it.
LEFT_MULTIPROCESSORS = 0


def compile_cpu_kernels() -> str:
    """Compile and load the C++ library, unless it is loaded. Return why this is not possible, or ""."""
    global HAS_CPU_KERNELS
    if HAS_CPU_KERNELS:
        return ""
    try:
        torch.ops.load_library(compile_library())
    except (OSError, RuntimeError) as error:
        return str(error)
    HAS_CPU_KERNELS = True
    return ""


def _load_cpu_kernels() -> None:
    """Load the C++ library if it has been compiled for this machine."""
    global HAS_CPU_KERNELS
    try:
        file = library_file()
    except RuntimeError:  # this machine has no kernels
        return
    try:
        if file.exists():
            torch.ops.load_library(file)
            HAS_CPU_KERNELS = True
    except OSError as error:
        logger.warning("the C++ kernels cannot be loaded; remove %s (%s)", file, error)


_load_cpu_kernels()


def has_kernel(x: Tensor) -> bool:
    """Return whether the ops take x: a CUDA tensor, or a CPU tensor that the C++ kernels take."""
    return x.device.type != "cpu" or (HAS_CPU_KERNELS and x.dtype in CPU_DTYPES)


def float32_on_cpu(reference: _Reference) -> _Reference:
    """Decorate a reference, so that 16-bit rows on a CPU are computed in float32 and rounded once.

    There PyTorch's LayerNorm adds up the gradients of 16-bit weights in 16 bits: at 32,000 rows those
    of a bias are 68% off. On a GPU it adds in float32.
    """

    @functools.wraps(reference)
    def compute(hidden: Tensor, *inputs: Any, **named: Any) -> Any:
        if hidden.device.type != "cpu" or hidden.dtype.itemsize > 2:
            return reference(hidden, *inputs, **named)
        inputs, named = tree_map_only(Tensor, Tensor.float, (inputs, named))
        outputs = reference(hidden.float(), *inputs, **named)
        return tree_map_only(Tensor, lambda x: x.to(hidden.dtype), outputs)

    return cast(_Reference, compute)


def from_gpu(file: str, name: str, folder: str = "cogfast.kernels.gpu") -> Callable:
    """Return function `name` of a file of `folder`, which its first call imports: Triton takes long."""

    def call(*inputs: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(f"{folder}.{file}"), name)(*inputs, **options)

    return call


def on_device_of_tensors(implementation: Callable) -> Callable:
    """Return a function of CUDA tensors that runs on their device: Triton and flash-attn launch on the current
    one, PyTorch's own ops on that of their tensors."""

    @functools.wraps(implementation)
    def run(*inputs: Any, **options: Any) -> Any:
        device = next(x for x in inputs if isinstance(x, Tensor)).device
        if device.index == torch.cuda.current_device():
            return implementation(*inputs, **options)
        with torch.cuda.device(device):
            return implementation(*inputs, **options)

    return run


def _below_autograd(op: Callable, *inputs: Any) -> Any:
    if torch.compiler.is_compiling():
        return op(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return op(*inputs)


def register_gradient(op: Any, save: Callable, backward: Callable) -> Callable:
    """Make an op differentiable for those who call it, and return it without its gradient: the forward of
    an autograd.Function would wait 5 us for Python code that has nothing to do there.

    save: keeps what backward needs, from ctx, inputs and output. backward: of a Function with these inputs.
    """
    torch.library.register_autograd(op, backward, setup_context=save, lib=_LIBRARY)
    return functools.partial(_below_autograd, op)


def register_op(
    schema: str,
    fake: Callable,
    gpu: Callable | None = None,
    cpu: Callable | None = None,
    flops: Callable[..., int] | None = None,
) -> Any:
    """Define an op and return it.

    schema: name and signature. fake: returns empty outputs, for torch.compile. gpu, cpu: implementations;
    gpu is None for an op of CPU tensors alone, cpu if the C++ library registers one under this name. flops: of
    its products, by the shapes of the arguments; None: it has none.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for key, implementation in (("CUDA", gpu and on_device_of_tensors(gpu)), ("CPU", cpu)):
        if implementation is not None:
            _LIBRARY.impl(name, implementation, key)
    torch.library.register_fake(f"cogfast::{name}", fake, lib=_LIBRARY)
    op = getattr(torch.ops.cogfast, name)
    if flops is not None:
        FLOPS[op] = flops
    return functools.partial(_once, op.default) if name.endswith("_backward") else op.default


def _once(op: Any, *inputs: Any) -> Any:
    """Run an op of gradients, which has no gradient: PyTorch would take 0 for it, and warn."""
    if torch.is_grad_enabled() and any(getattr(x, "requires_grad", False) for x in inputs):
        text = f"{op.name()} has no gradient: second derivatives need args.kernels=torch"
        raise RuntimeError(f"{text} and args.attention_backend=math")
    return op(*inputs)

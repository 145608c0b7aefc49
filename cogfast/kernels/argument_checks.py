"""Checks of the arguments of public functions, each with a one-line error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

GPU_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def refuse(op: str, argument: str, value: object, rule: str) -> NoReturn:
    """Raise a ValueError that names the op, the argument, its value and the rule it breaks."""
    # A tensor's values are of no help, its shape, dtype, device and strides are.
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        value = f"{list(value.shape)} {dtype} on {value.device}, strides {list(value.stride())}"
    raise ValueError(f"{op}: {argument} is {value}; {rule}")


def check_qkv(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check the inputs of attention, which must be alike."""
    if q.ndim != 4:
        refuse(op, "q", q, "it must be [B, S, H, D]")
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(op, name, x, q.shape, like=q)


def check_tensor(
    op: str,
    argument: str,
    tensor: Tensor | None,
    shape: Sequence[int],
    like: Tensor | None = None,
    any_dtype: bool = False,
) -> None:
    """Check shape, density of the last dim, device and dtype. None, an argument left out, passes.

    like: tensor whose device and, unless any_dtype, dtype are required. A CPU tensor may have any floating
    dtype, a GPU tensor one of GPU_DTYPES.
    """
    if tensor is None:
        return
    # Every op calls this for every tensor, so it looks at a tensor's device and dtype once.
    device, dtype = tensor.device, tensor.dtype
    if tensor.shape != tuple(shape):
        refuse(op, argument, tensor, f"its shape must be {list(shape)}")
    # Kernels read the last dim with 16-byte accesses; a dim of one entry has no stride to check.
    if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
        refuse(op, argument, tensor, "its last dim must be dense: pass x.contiguous()")
    if like is not None:
        if device != like.device:
            refuse(op, argument, tensor, f"it must be on {like.device}")
        if not any_dtype and dtype != like.dtype:
            refuse(op, argument, tensor, f"its dtype must be {like.dtype}")
    kind = device.type
    if dtype not in GPU_DTYPES and not (kind == "cpu" and dtype.is_floating_point):
        refuse(op, argument, tensor, "its dtype must be bfloat16, float16 or float32")
    # torch.compile traces with meta tensors.
    if kind not in ("cuda", "cpu", "meta"):
        refuse(op, argument, tensor, "it must be on a CUDA GPU or a CPU")

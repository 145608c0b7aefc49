"""Memory of a device, and host memory that a GPU copies from and to without the host's help."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from functools import cache
from typing import Any

import psutil
import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable
_LEAST_REGISTERED = 2**20  # bytes


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes that this process may still allocate on a device, and the device's total.

    On a CPU the processes of a machine share the available memory equally.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory in the allocator's cache is not free to the driver, but to this process.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + held, total
    memory = psutil.virtual_memory()
    return memory.available // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), memory.total


class _Pages(mmap.mmap):
    """Whole pages of this process. CUDA registers pages: malloc would let two buffers share one.

    registered: their address if CUDA has registered them, else 0.
    """

    registered = 0

    def __del__(self) -> None:
        # The base class unmaps them after this.
        if self.registered:
            _runtime().cudaHostUnregister(self.registered)


def _runtime() -> Any:
    return torch.cuda.cudart()


def host_buffer(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate host memory with the shape of `like`, page-locked if that is on a GPU.

    dtype: None: that of `like`. The memory must outlive all copies that a stream was given.
    """
    dtype = like.dtype if dtype is None else dtype
    num_bytes = like.numel() * dtype.itemsize
    if not like.is_cuda or num_bytes < _LEAST_REGISTERED:
        return torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda)
    # torch's pinned allocator would round the size up to a power of two: register it instead.
    pages = _Pages(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer = torch.frombuffer(pages, dtype=dtype).view(like.shape)
    address = buffer.data_ptr()
    if int(_runtime().cudaHostRegister(address, num_bytes, _REGISTER_PORTABLE)) == 0:
        pages.registered = address
    else:
        # CUDA keeps the error, which PyTorch raises after the next launch.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=like.device)
        _warn(num_bytes)
    return buffer


@cache
def _warn(num_bytes: int) -> None:
    """Warn once for each size."""
    logger.warning("cannot pin %d bytes of host memory: copies take longer", num_bytes)


class HostWeights:
    """Moves the weights of a frozen module to pinned host memory, and copies them back for its use.

    They do not change, so only the first `leave` copies to the host. Copies and computation are on
    the current stream. device: where the module computes; it is there at first.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.module, self.device = module, device
        self.is_present = True
        self._on_host: list[tuple[Tensor, Tensor]] = []  # tensors of the module, and their copies

    def fetch(self) -> None:
        if self.is_present:
            return
        for tensor, host in self._on_host:
            tensor.data = torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)
        self.is_present = True

    def leave(self) -> None:
        """Release the device's memory of the weights."""
        if not self._on_host:
            tensors = (*self.module.parameters(), *self.module.buffers())
            self._on_host = [(x, host_buffer(x).copy_(x)) for x in tensors]  # sync: once
        for tensor, host in self._on_host:
            tensor.data = host
        self.is_present = False

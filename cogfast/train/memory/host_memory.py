"""Host memory that a GPU copies from and to without the host's help."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable
_LEAST_REGISTERED = 2**20  # bytes; smaller buffers could share a page, which is registered whole


def host_buffer(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate host memory with the shape of `like`, page-locked if that is on a GPU.

    dtype: None: that of `like`.
    """
    dtype = like.dtype if dtype is None else dtype
    is_small = like.numel() * dtype.itemsize < _LEAST_REGISTERED
    buffer = torch.empty(like.shape, dtype=dtype, pin_memory=like.is_cuda and is_small)
    if like.is_cuda and not is_small:
        # torch's pinned allocator would round the size up to a power of two: register it instead.
        runtime: Any = torch.cuda.cudart()
        address = buffer.data_ptr()
        if int(runtime.cudaHostRegister(address, buffer.nbytes, _REGISTER_PORTABLE)) == 0:
            weakref.finalize(buffer, runtime.cudaHostUnregister, address).atexit = False
        else:
            logger.warning("cannot pin %d bytes of host memory: copies take longer", buffer.nbytes)
    return buffer

"""Tests of the CPU kernels in C++: when they run, and on how many threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from cogfast.kernels.torch_library import HAS_CPU_KERNELS

NEEDS_CPU_KERNELS = pytest.mark.skipif(
    not HAS_CPU_KERNELS, reason="the CPU kernels are not compiled: install g++, run make setup"
)


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

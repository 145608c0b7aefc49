"""Tests of the CPU kernels in C++: when they run, and equality for any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

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


def assert_same_bits_for_any_threads(compute: Callable[[], Sequence[Tensor]]) -> None:
    """Compute with 1, 2 and 3 threads and compare all bits."""
    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append([x.clone() for x in compute()])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)

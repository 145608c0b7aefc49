"""Freed memory is kept for the next step, or returned to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

RETURNING = """
import torch
from cogfast.kernels.cpu.memory import keep_freed_memory, return_freed_memory

def resident():
    return 4096 * int(open("/proc/self/statm").read().split()[1])

def allocate_and_free():
    # The last one stays: the end of the heap cannot be cut off.
    return [torch.ones(2**20) for _ in range(60)][-1]

before, sizes, last = resident(), [], []
for function in (return_freed_memory, keep_freed_memory):
    function()
    last.append(allocate_and_free())
    sizes.append(resident() - before)
return_freed_memory()
sizes.append(resident() - before)
print(*(size // 2**20 for size in sizes))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_goes_back_to_the_system() -> None:
    """8 MiB are in use at the end."""
    printed = subprocess.check_output([sys.executable, "-c", RETURNING], text=True)
    returned, kept, returned_later = map(int, printed.split())
    assert returned <= 30 and returned_later <= 30
    assert kept >= 230

"""Freed memory is used again without page faults, or returned to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

CHILD = """
import resource, sys
import torch
from cogfast.kernels.cpu.memory import keep_freed_memory

if sys.argv[1] != "default":
    keep_freed_memory()
faults = []
for _ in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(10 * 2**20) for _ in range(2)]  # 40 MiB each
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults))
"""


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
needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


@needs_glibc
def test_freed_memory_goes_back_to_the_system() -> None:
    """8 MiB are in use at the end."""
    printed = subprocess.check_output([sys.executable, "-c", RETURNING], text=True)
    returned, kept, returned_later = map(int, printed.split())
    assert returned <= 30 and returned_later <= 30
    assert kept >= 230


@needs_glibc
def test_a_step_after_the_first_has_no_page_faults() -> None:
    """glibc always returns tensors above 32 MiB; 80 MiB are 20,480 pages of 4 KiB, or 40 of 2 MiB."""
    counts = {
        name: int(subprocess.check_output([sys.executable, "-c", CHILD, name], text=True))
        for name in ("kept", "default")
    }
    assert counts["kept"] <= 2
    assert counts["default"] > counts["kept"]

"""Reuse of freed memory on a CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_KEPT = 256 * 2**20  # larger tensors go back to the system when they are freed
_MOST_KEPT = 2**31 - 1  # an int's maximum
_AT_ONCE = 128 * 2**10  # glibc's initial thresholds; setting one keeps glibc from raising it


def keep_freed_memory() -> None:
    """Let malloc keep freed tensors up to 256 MiB for the next step, whose tensors are as large.

    glibc returns freed memory to the system by default. A training step then touches thousands of
    fresh pages, each a page fault that zeroes 4 KiB. Kept memory has gaps that larger tensors do not
    fit into: docs/diagnostics.md says how much more a process takes. Other C libraries are left as
    they are.
    """
    libc = _glibc()
    if libc is not None:
        _set(libc, _LARGEST_KEPT, _MOST_KEPT, 2**20)


def return_freed_memory() -> None:
    """Let malloc return freed tensors above 128 KiB to the system at once, which leaves no gaps."""
    libc = _glibc()
    if libc is not None:
        _set(libc, _AT_ONCE, _AT_ONCE, _AT_ONCE)
        libc.malloc_trim(0)  # what was freed before


def _glibc() -> ctypes.CDLL | None:
    """Return the C library if it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None


def _set(libc: ctypes.CDLL, mmap_threshold: int, trim_threshold: int, top_pad: int) -> None:
    for parameter, value in (
        (_M_MMAP_THRESHOLD, mmap_threshold),
        (_M_TRIM_THRESHOLD, trim_threshold),
        (_M_TOP_PAD, top_pad),
    ):
        libc.mallopt(parameter, value)

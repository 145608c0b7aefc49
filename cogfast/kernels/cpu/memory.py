"""Reuse of freed memory on a CPU."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_KEPT = 256 * 2**20  # larger tensors go back to the system when they are freed
_MOST_KEPT = 2**31 - 1  # an int's maximum


def keep_freed_memory() -> None:
    """Let malloc keep freed tensors up to 256 MiB for the next step, whose tensors are as large.

    glibc returns freed memory to the system by default. A training step then touches thousands of
    fresh pages, each a page fault that zeroes 4 KiB. Kept memory has gaps that larger tensors do not
    fit into: docs/diagnostics.md says how much more a process takes. Other C libraries are left as
    they are.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
        libc.mallopt(_M_TOP_PAD, 2**20)

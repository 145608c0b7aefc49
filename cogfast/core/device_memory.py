"""The memory that this process may still allocate on its device."""

from __future__ import annotations

import os

import psutil
import torch


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

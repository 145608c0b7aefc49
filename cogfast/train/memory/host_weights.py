"""Weights of a frozen module that wait in host memory while the device does not need them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cogfast.train.memory.host_memory import host_buffer


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
        """Copy the weights to the device, if they are not there."""
        if self.is_present:
            return
        for tensor, host in self._on_host:
            tensor.data = torch.empty_like(host, device=self.device).copy_(host, non_blocking=True)
        self.is_present = True

    def leave(self) -> None:
        """Release the device's memory of the weights."""
        if not self.is_present:
            return
        if not self._on_host:
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                copy = host_buffer(tensor).copy_(tensor)  # sync: once
                self._on_host.append((tensor, copy))
        for tensor, host in self._on_host:
            tensor.data = host
        self.is_present = False

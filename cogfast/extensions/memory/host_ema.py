"""The moving average (EMA) of the weights in host memory, updated while the next step computes.

After a step the average comes to the device in chunks, takes in the new weights, and goes back: 4
bytes per weight of this rank's partition in each direction of PCIe. The next step waits, on the device,
before it changes the weights. The host waits only where it reads the average: for a checkpoint and for
an evaluation.

The float32 weights in the same float32 arithmetic give the numbers of an average on the device.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from cogfast.core.device_memory import host_buffer
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.memory.side_stream import SideStream
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, average_

_CHUNK = 1 << 24  # elements
DEVICE_BYTES = 4 * _CHUNK  # of the buffer on a GPU


class HostEma:
    """Keeps the average of float32 parameters for FusedEmaAdam (`other_ema`). On a CPU no update waits."""

    def __init__(self, kernels: KernelChoice = "triton") -> None:
        self.kernels: KernelChoice = kernels
        # {average: (p, weight, end)} of updates that have begun: the device may still read p and weight.
        self._updates: dict[Tensor, tuple[Tensor, Tensor, torch.Event | None]] = {}
        self._side = SideStream(torch.device("cpu"))  # until a parameter is on a GPU
        self._buffer = torch.empty(0)  # [_CHUNK] float32 on a GPU, which only the stream uses

    def empty(self, like: Tensor) -> Tensor:
        return host_buffer(like)

    def start(self, p: Tensor, shadow: Tensor, weight: Tensor) -> None:
        """Begin shadow += weight (p - shadow), after what the current stream has been given.

        p, shadow: of the same shape, contiguous. weight: [] on the device of p.
        """
        assert shadow not in self._updates, "the update before has been waited for"
        if p.is_cuda and self._side.stream is None:
            self._side = SideStream(p.device)
            self._buffer = torch.empty(_CHUNK, device=p.device)
        end = self._side.run(partial(self._update, p, shadow, weight))
        self._updates[shadow] = p, weight, end

    def _update(self, p: Tensor, shadow: Tensor, weight: Tensor) -> None:
        chunks = zip(shadow.view(-1).split(_CHUNK), p.view(-1).split(_CHUNK), strict=True)
        for average, weights in chunks:
            on_device = self._buffer[: average.numel()] if p.is_cuda else average
            if p.is_cuda:
                on_device.copy_(average, non_blocking=True)
            average_(on_device, weights, weight, self.kernels)
            if p.is_cuda:
                average.copy_(on_device, non_blocking=True)

    def before_update(self, shadow: Tensor) -> None:
        """Let the current stream wait until an average has taken in its weights."""
        if shadow in self._updates:
            self._side.wait(self._updates.pop(shadow)[2])

    def wait(self) -> None:
        """Wait, on the host, until the averages can be read."""
        for _, _, end in self._updates.values():
            if end is not None:
                end.synchronize()  # sync: before a checkpoint or an evaluation
        self._updates.clear()


def keep_state(optimizer: Optimizer, args: MemoryKeys, kind: str) -> None:
    """Apply args.optimizer_moments and args.ema_device to an optimizer, which the configuration calls `kind`."""
    has_codes, has_host_ema = args.optimizer_moments == "8bit", args.ema_device == "cpu"
    asked = (
        ("optimizer_moments", has_codes and type(optimizer) is not FusedEmaAdam),
        ("ema_device", has_host_ema and not isinstance(optimizer, FusedEmaAdam)),
    )
    for key, is_unsupported in asked:
        if is_unsupported:
            text = f"args.{key}={getattr(args, key)} is for deepspeed.optimizer.type=sat.ops.FusedEmaAdam, not {kind}"
            raise ValueError(f"{text}; use that type, or leave the key out")
    if isinstance(optimizer, FusedEmaAdam):
        optimizer.has_8bit_moments = has_codes
        optimizer.other_ema = HostEma(optimizer.kernels) if has_host_ema else None

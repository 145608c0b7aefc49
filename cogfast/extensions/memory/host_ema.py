"""The moving average (EMA) of the weights in host memory, updated while the next step computes.

After a step the average comes to the device in chunks, takes in the new weights, and goes back: 4
bytes per weight of this rank's partition in each direction of PCIe. The next step waits, on the device,
before it changes the weights. The host waits only where it reads the average: for a checkpoint and for
an evaluation.

The float32 weights in the same float32 arithmetic give the numbers of an average on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cogfast.extensions.memory.host_memory import host_buffer
from cogfast.kernels.block_kernels import KernelChoice
from cogfast.kernels.fused_ema_adam import average_

_CHUNK = 1 << 24  # elements
DEVICE_BYTES = 4 * _CHUNK  # of the buffer on a GPU


class HostEma:
    """Keeps the average of float32 parameters for FusedEmaAdam (`other_ema`).

    On a CPU an update is made when it is waited for.
    """

    def __init__(self, kernels: KernelChoice = "triton") -> None:
        self.kernels: KernelChoice = kernels
        # {average: (p, weight, end)} of updates that have begun. The device may still read p and weight. end: None on
        # a CPU, where nothing has begun.
        self._updates: dict[Tensor, tuple[Tensor, Tensor, torch.Event | None]] = {}
        self._stream: torch.cuda.Stream | None = None
        self._buffer = torch.empty(0)  # [_CHUNK] float32, which only the stream uses

    def empty(self, like: Tensor) -> Tensor:
        return host_buffer(like)

    def start(self, p: Tensor, shadow: Tensor, weight: Tensor) -> None:
        """Begin shadow += weight (p - shadow), after what the current stream has been given.

        p, shadow: of the same shape, contiguous. weight: [] on the device of p.
        """
        assert shadow not in self._updates, "the update before has been waited for"
        self._updates[shadow] = p, weight, self._move(p, shadow, weight) if p.is_cuda else None

    def _move(self, p: Tensor, shadow: Tensor, weight: Tensor) -> torch.Event:
        """Let the stream update an average; return the event of its end."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(p.device)
            self._buffer = torch.empty(_CHUNK, device=p.device)
        self._stream.wait_stream(torch.cuda.current_stream(p.device))
        chunks = zip(shadow.view(-1).split(_CHUNK), p.view(-1).split(_CHUNK), strict=True)
        with torch.cuda.stream(self._stream):
            for average, weights in chunks:
                on_device = self._buffer[: average.numel()]
                on_device.copy_(average, non_blocking=True)
                average_(on_device, weights, weight, self.kernels)
                average.copy_(on_device, non_blocking=True)
        return self._stream.record_event()

    def before_update(self, shadow: Tensor) -> None:
        """Let the current stream wait until an average has taken in its weights."""
        if shadow not in self._updates:
            return
        p, weight, end = self._updates.pop(shadow)
        if end is not None:
            torch.cuda.current_stream(p.device).wait_event(end)
        else:
            average_(shadow.view(-1), p.view(-1), weight, self.kernels)

    def wait(self) -> None:
        """Wait, on the host, until the averages can be read."""
        for shadow, (_, _, end) in list(self._updates.items()):
            if end is not None:
                end.synchronize()  # sync: before a checkpoint or an evaluation
            self.before_update(shadow)

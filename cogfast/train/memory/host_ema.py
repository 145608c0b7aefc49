"""The moving average (EMA) of the weights in host memory, updated while the next step computes.

After a step the average comes to the device in chunks, takes in the new weights, and goes back: 4
bytes per weight of this rank's partition in each direction of PCIe, which are used at once, since two
streams take the chunks in turn. The next step waits, on the device, before it changes the weights. The
host waits only where it reads the average: for a checkpoint and for an evaluation.

The float32 weights in the same float32 arithmetic give the numbers of an average on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cogfast.kernels.block_kernels import KernelChoice
from cogfast.kernels.fused_ema_adam import average_
from cogfast.train.memory.host_memory import host_buffer

_CHUNK = 1 << 24  # elements
_NUM_LANES = 2
DEVICE_BYTES = 4 * _NUM_LANES * _CHUNK  # of the buffers on a GPU


@dataclass(frozen=True, slots=True)
class _Lane:
    """A stream, and the buffer that only its copies and kernels use."""

    stream: torch.cuda.Stream
    buffer: Tensor  # [_CHUNK] float32


@dataclass(frozen=True, slots=True)
class _Update:
    """An update of one parameter's average that has begun."""

    p: Tensor
    shadow: Tensor
    weight: Tensor  # [], on the device of p; kept until the device has read it
    ends: list[torch.cuda.Event]  # one of each stream


class HostEma:
    """Keeps the average of float32 parameters for FusedEmaAdam (`other_ema`).

    On a CPU an update is made when it is waited for.
    """

    def __init__(self, kernels: KernelChoice = "triton") -> None:
        self.kernels: KernelChoice = kernels
        self._updates: dict[Tensor, _Update] = {}  # by average
        self._lanes: list[_Lane] = []

    def empty(self, like: Tensor) -> Tensor:
        """Allocate the average of a parameter."""
        return host_buffer(like)

    def start(self, p: Tensor, shadow: Tensor, weight: Tensor) -> None:
        """Begin shadow += weight (p - shadow), after what the current stream has been given.

        p, shadow: of the same shape, contiguous. weight: [] on the device of p.
        """
        assert shadow not in self._updates, "the update before has been waited for"
        update = self._updates[shadow] = _Update(p, shadow, weight, [])
        if not p.is_cuda:
            return
        if not self._lanes:
            self._lanes = [_Lane(*self._make_lane(p.device)) for _ in range(_NUM_LANES)]
        for lane in self._lanes:
            lane.stream.wait_stream(torch.cuda.current_stream(p.device))
        chunks = zip(shadow.view(-1).split(_CHUNK), p.view(-1).split(_CHUNK), strict=True)
        for i, (average, weights) in enumerate(chunks):
            lane = self._lanes[i % _NUM_LANES]
            on_device = lane.buffer[: average.numel()]
            with torch.cuda.stream(lane.stream):
                on_device.copy_(average, non_blocking=True)
                average_(on_device, weights, weight, self.kernels)
                average.copy_(on_device, non_blocking=True)
        for lane in self._lanes:
            end = torch.cuda.Event()
            end.record(lane.stream)
            update.ends.append(end)

    @staticmethod
    def _make_lane(device: torch.device) -> tuple[torch.cuda.Stream, Tensor]:
        return torch.cuda.Stream(device), torch.empty(_CHUNK, device=device)

    def before_update(self, shadow: Tensor) -> None:
        """Let the current stream wait until an average has taken in its weights."""
        update = self._updates.pop(shadow, None)
        if update is None:
            return
        for end in update.ends:
            torch.cuda.current_stream(update.p.device).wait_event(end)
        if not update.ends:
            average_(update.shadow.view(-1), update.p.view(-1), update.weight, self.kernels)

    def wait(self) -> None:
        """Wait, on the host, until the averages can be read."""
        for shadow, update in list(self._updates.items()):
            for end in update.ends:
                end.synchronize()  # sync: before a checkpoint or an evaluation
            self.before_update(shadow)

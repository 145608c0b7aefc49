"""Work beside the computation of a device, such as copies from and to host memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class SideStream:
    """Works beside the current stream of a device. On a CPU the same work is done at once, without streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], object]) -> torch.Event | None:
        """Start work after all that the current stream has; return the event of its end."""
        if self.stream is None:
            work()
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            work()
        return self.stream.record_event()

    def copy(self, target: Tensor, source: Tensor) -> torch.Event | None:
        return self.run(lambda: target.copy_(source, non_blocking=True))

    def wait(self, event: torch.Event | None) -> None:
        """Let the current stream wait until work is complete."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

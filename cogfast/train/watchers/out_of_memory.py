"""The error of a run that is out of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cogfast.core.machine_limits import is_lack_of_memory
from cogfast.extensions.table import hooks
from cogfast.train.activation_checkpointing import describe
from cogfast.train.watchers.watcher import Watcher

if TYPE_CHECKING:
    from cogfast.train.run.parts import Parts


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that memory of the device or of the host is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or is_lack_of_memory(error)


class OutOfMemory(Watcher):
    """Says in one line where a run ran out of memory, and how to continue it."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def close(self, error: BaseException | None) -> None:
        if error is None or not is_out_of_memory(error):
            return
        clock = self.parts.engine.clock
        texts = [f"it happened in step {clock.step + 1}, phase {clock.phase}"]
        texts.append(f"activation checkpointing: {describe(self.parts.policies)}")
        # (parts) -> texts about what was planned, and what takes less
        for explain in hooks("out_of_memory"):
            texts += explain(self.parts)
        text = "; ".join([*texts, self.parts.hints.how_to_resume()])
        raise RuntimeError(f"out of memory: {text}") from None

"""The ranks that torchrun has started, and those of them that idle."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from cogfast.distributed.lost_ranks import PATIENCE, SILENCE, join_store

_BETWEEN_QUESTIONS = 1.0  # seconds, of an idle rank
_START_TIMEOUT = timedelta(minutes=5)  # in which all ranks of a launch must have their imports


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks that torchrun has started, of which the first WORLD_SIZE train while the others idle."""

    rank: int
    num_ranks: int
    store: Any  # of torch.distributed

    @classmethod
    def join(cls) -> Ranks:
        """Connect to the store of this launch. Every rank must call it."""
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank, num_ranks, join_store(_START_TIMEOUT, waits=True))

    def idle(self) -> bool:
        """Wait for rank 0. Return whether its run is over; it may also have failed or stopped.

        Its process serves the store, so each answer is a sign of it. If it has stopped, no call returns.
        """
        is_over, last_answer = False, time.monotonic()

        def ask() -> None:
            nonlocal is_over, last_answer
            with contextlib.suppress(RuntimeError):  # a closed connection
                while not is_over:
                    time.sleep(_BETWEEN_QUESTIONS)
                    is_over, last_answer = self.store.check(["over"]), time.monotonic()
                self.store.add("left", 1)

        thread = threading.Thread(target=ask, name="idle", daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < last_answer + SILENCE.total_seconds():
            thread.join(_BETWEEN_QUESTIONS)
        return is_over

    def end_idle(self, num_training: int) -> None:
        """On rank 0: let the idle ranks end, and serve the store until they have."""
        if self.rank == 0:
            self.store.set("over", "")
            end = time.monotonic() + PATIENCE.total_seconds()  # for ranks that were lost
            while self.store.add("left", 0) < self.num_ranks - num_training:
                if time.monotonic() > end:
                    return
                time.sleep(_BETWEEN_QUESTIONS / 10)

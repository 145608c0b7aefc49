"""Position of this rank in its run, for messages of other threads and of errors."""

from __future__ import annotations

import time


class Progress:
    """Step and phase of this rank, in plain attributes.

    The training loop writes them, and other threads read them without a lock.

    step: completed optimizer steps. phase: start, data, encode, forward, backward, optimizer, log,
    evaluation, save, or what else `enter` names. num_moves: phases entered since the start. All ranks
    enter the same phases in the same order, so the rank with the lowest number is behind.
    """

    def __init__(self) -> None:
        self.step = 0
        self.phase = "start"
        self.num_moves = 0
        self.entered = time.monotonic()  # when the phase began

    def enter(self, phase: str) -> None:
        """Begin a phase; the one before it ends."""
        self.phase = phase
        self.entered = time.monotonic()
        # Last: a thread that sees the new number sees the new phase, too.
        self.num_moves += 1

"""Position of this rank in its run, for messages of other threads and of errors."""

from __future__ import annotations

import mmap
import time
from typing import BinaryIO

_HEADER = 64  # bytes


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
        self._shared: mmap.mmap | None = None

    def share(self, file: BinaryIO) -> None:
        """Keep step and phase in the first line of a file that is open for reading and writing.

        Other processes can read it there while this one is stopped.
        """
        file.write(self._line())
        file.flush()
        self._shared = mmap.mmap(file.fileno(), _HEADER)

    def unshare(self) -> None:
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.close()

    def _line(self) -> bytes:
        text = f"step {self.step + 1}, {self.phase}".encode()[: _HEADER - 1]
        return text.ljust(_HEADER - 1) + b"\n"

    def enter(self, phase: str) -> None:
        """Begin a phase; the one before it ends."""
        self.phase = phase
        self.entered = time.monotonic()
        if self._shared is not None:
            self._shared[:] = self._line()
        # Last: a thread that sees the new number sees the new phase, too.
        self.num_moves += 1

"""Errors that come from other ranks, and the end of a rank whose torchrun is gone.

This file imports nothing heavy: a rank calls `end_with_torchrun` before it imports the rest.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class UnsharedError(Exception):
    """An error of this rank while other ranks wait for it in a collective. It ends the run.

    Nothing may catch it and continue: the collectives of this rank would no longer match those of
    the others.
    """


# Message of a rank that ends because of another rank.
OTHER_RANK = "another rank failed; see its own output for the cause"
# Texts of gloo's errors when a connection breaks. NCCL's errors have their own types.
_LOST_CONNECTION = re.compile(
    r"gloo/|closed by peer|reset by peer|broken pipe|timeout caused pair closure|"
    r"timed out waiting \d+ ?ms for (recv|send) operation",
    re.IGNORECASE,
)


def is_of_another_rank(error: BaseException) -> bool:
    """Return whether `error` is a consequence of another rank's failure.

    Checks the chain of causes too: a library may have wrapped the error, or raised another error
    while it cleaned up.
    """
    seen: BaseException | None = error
    while seen is not None:
        if is_lost_connection(seen) or type(seen).__name__ == "OtherRankError":
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def is_lost_connection(error: BaseException) -> bool:
    """Return whether torch raised `error` because a collective lost its connection."""
    kind = type(error)
    if kind.__module__ == "torch.distributed" and kind.__name__.startswith("Dist"):
        return True
    return isinstance(error, RuntimeError) and _LOST_CONNECTION.search(str(error)) is not None


def tell_torchrun(text: str) -> None:
    """Write this rank's error to the file from which torchrun prints the first error of all ranks."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        # The format that torch.distributed.elastic.multiprocessing.errors reads.
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(file, "w") as out:
            json.dump({"message": {"message": text, "extraInfo": extra}}, out)


def end_with_torchrun() -> None:
    """Let the kernel kill this process when its torchrun is gone. Call it first of all.

    Nothing else would end a rank that waits in a collective for the ranks of another machine.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

"""Errors that come from other ranks, and the end of a rank whose torchrun is gone or that waits for a
rank that has stopped.

This file imports nothing heavy: a rank calls `end_with_torchrun` before it imports the rest.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

logger = logging.getLogger(__name__)

_SECONDS_TO_STORE = 10.0
_PR_SET_PDEATHSIG = 1  # of Linux's prctl


class UnsharedError(Exception):
    """An error of this rank while other ranks wait for it in a collective. It ends the run.

    Nothing may catch it and continue: this rank's collectives would no longer match the others'.
    """


# Message of a rank that ends because of another rank.
OTHER_RANK = "another rank failed; see its own output for the cause"
# Texts of gloo's errors when a connection breaks. NCCL's errors have their own types.
_LOST_CONNECTION = re.compile(
    r"gloo/|closed by peer|reset by peer|broken pipe|timeout caused pair closure|"
    r"timed out waiting \d+ ?ms for (recv|send) operation",
    re.IGNORECASE,
)
_BETWEEN_BEATS = 5.0  # seconds
# Far longer than a thread waits for Python's lock while its rank compiles, encodes, reads or writes.
SILENCE = timedelta(seconds=60)
PATIENCE = timedelta(seconds=10)  # for another rank to end first
_SECONDS_TO_FAIL = 15.0  # for the main thread to notice a closed connection itself
_ANSWER = "cogfast/met"  # key of the store: an error of a rank, or empty once all ranks have met
_BETWEEN_LINES = 30.0  # seconds, about ranks that have not come
_LONGEST_PAUSE = 0.2  # seconds, of a rank that waits to meet the others
_has_met = False  # whether this rank has begun to wait for the others


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


def check_store() -> None:
    """Raise RuntimeError if torchrun's store, where ranks find each other, cannot be reached.

    It listens before torchrun starts a rank. If torchrun was killed while a rank started, before
    `end_with_torchrun`, PyTorch would try to connect for the timeout of the collectives.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    end = time.monotonic() + _SECONDS_TO_STORE
    while True:
        try:
            socket.create_connection(address, timeout=_SECONDS_TO_STORE).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                place = f"torchrun's store at {address[0]}:{address[1]}"
                why = f"cannot be reached ({error}): torchrun has ended"
                raise RuntimeError(f"{place} {why}; start the run again") from None
        time.sleep(0.2)


def join_store(timeout: timedelta, waits: bool = False) -> Any:
    """Connect to the store of this launch, where its ranks find each other.

    Without torchrun rank 0 serves it. waits: it waits until all ranks have come.
    """
    from torch.distributed import TCPStore

    check_store()
    is_served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_server = is_served and os.environ["RANK"] == "0"
    # PyTorch connects to it again, and its server is shared.
    options = {"wait_for_workers": waits, "multi_tenant": is_served, "timeout": timeout}
    return TCPStore(*place, int(os.environ["WORLD_SIZE"]), is_server, **options)


def meet(store: Any, num_ranks: int, timeout: timedelta) -> str:
    """Wait for all ranks, before they create process groups. Return the error of one that cannot, or "".

    What a rank does alone before it, such as reading its files, may fail: it then calls `tell_ranks`.
    """
    global _has_met
    _has_met, pause = True, 0.01
    if _outlives_ranks():
        return ""
    if store.add("cogfast/here", 1) >= num_ranks:
        store.compare_set(_ANSWER, "", "")
    start = shown = time.monotonic()
    while not store.check([_ANSWER]):
        now = time.monotonic()
        is_late = now > start + timeout.total_seconds()
        if is_late or now > shown + _BETWEEN_LINES:
            text, shown = f"{store.add('cogfast/here', 0)} of {num_ranks} ranks have started", now
            if is_late:
                return f"{text} in {timeout.seconds} s"
            logger.info("%s; waiting for the others at %s", text, os.environ["MASTER_ADDR"])
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    text = store.get(_ANSWER).decode()
    if text:
        _leave(store, num_ranks)
    return text


def tell_ranks(text: str) -> None:
    """Tell the ranks that wait in `meet`, or will, that this one has failed before it."""
    num_ranks, groups = int(os.environ.get("WORLD_SIZE", "1")), sys.modules.get("torch.distributed")
    if num_ranks == 1 or _has_met or _outlives_ranks() or (groups and groups.is_initialized()):
        return
    # They have ended, or a signal came within the import of torch.
    with contextlib.suppress(Exception):
        store = join_store(SILENCE)
        store.compare_set(_ANSWER, "", f"rank {os.environ['RANK']} failed: {text}")
        _leave(store, num_ranks)


def _outlives_ranks() -> bool:
    """Whether torchrun restarts ranks that fail, and keeps the store with what earlier ones have written."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return is_kept and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _leave(store: Any, num_ranks: int) -> None:
    """Wait until all ranks know the error, if this process serves the store."""
    count = store.add("cogfast/left", 1)
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    end = time.monotonic() + SILENCE.total_seconds()  # for ranks that were lost
    while count < num_ranks and time.monotonic() < end:
        time.sleep(_LONGEST_PAUSE)
        count = store.add("cogfast/left", 0)


class Heartbeat:
    """A thread in which all ranks meet every few seconds, until each of them has called `stop`.

    A process or a machine that stops closes no connection: the other ranks would wait for it in their
    collective, half an hour for tensors and hours for a decision. The thread meets the others whatever
    its rank does, so that work which takes long ends no run.
    """

    def __init__(self, rank: int) -> None:
        """Start the thread, with a gloo group of its own. Each rank must call it."""
        import torch
        import torch.distributed as dist

        # The thread imports nothing and reads no state of torch.distributed, which the main thread changes.
        self._group: Any = dist.new_group(backend="gloo", timeout=SILENCE)
        self.rank, self._leaves = rank, False
        self._count, self._is_over = torch.zeros((), dtype=torch.int64), threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()
        # A thread that is in a collective when Python ends would abort the process.
        atexit.register(self._leave)

    def stop(self) -> None:
        """Wait for the other ranks to call it, too."""
        self._is_over.set()
        self._thread.join()
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """End the thread of a rank that failed, while the others still meet it."""
        self._leaves = True
        self._is_over.set()
        self._thread.join(2 * _BETWEEN_BEATS)

    def _beat(self) -> None:
        while True:
            is_over = self._is_over.wait(_BETWEEN_BEATS)
            if self._leaves:
                return
            try:
                if self._meet(is_over):
                    return
            except RuntimeError as error:
                if "timed out" in str(error).lower() and not self._leaves:
                    found = re.search(r"Rank (\d+) failed to pass", str(error))
                    lost = 0 if found is None else int(found[1])
                    self._end(f"rank {lost} has stopped: no sign of it for {SILENCE.seconds} s")
                # Any other error is a closed connection, which ends this rank's collectives, too. But NCCL
                # may not notice a rank that has ended.
                if not self._is_over.wait(_SECONDS_TO_FAIL):
                    self._end(OTHER_RANK)
                return

    def _meet(self, is_over: bool) -> bool:
        """Wait for the other ranks. Return whether it is over for all of them."""
        # The first rank waits for each rank and can name the one that has stopped; the others wait for it.
        self._group.monitored_barrier(SILENCE if self.rank == 0 else SILENCE + PATIENCE)
        self._count.fill_(int(is_over))
        self._group.allreduce(self._count).wait()
        return int(self._count) == self._group.size()

    def _end(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the disk is full
            tell_torchrun(text)
        os.write(2, f"cogfast: rank {self.rank} ends: {text}\n".encode())
        os._exit(1)  # nothing else ends the main thread's wait in a collective

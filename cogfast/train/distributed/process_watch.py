"""Ends a rank whose run cannot continue, because another rank or torchrun is gone.

Otherwise the rank waits in a collective, with NCCL for half an hour: torchrun's SIGTERM asks it to
stop at the next step, which never comes. And after torchrun was killed, nothing would stop its ranks.

This file imports nothing heavy: ranks watch their torchrun while they import the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

_INTERVAL = 2.0  # seconds between two checks
_GRACE = 10.0  # seconds that a rank has to fail by itself, with a better error message
_SILENCE = 60.0  # seconds without a heartbeat from a machine, after which it counts as lost
_GONE = "cogfast/gone"  # key in the store; its value is the reason
_LAUNCHER_WATCH = "launcher watch"  # name of the thread


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


def watch_launcher() -> None:
    """Start a thread that ends this process when its torchrun is gone. Call it first of all.

    Does nothing if the thread is running or if the process was not started by torchrun.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if _LAUNCHER_WATCH in (thread.name for thread in threading.enumerate()):
        return

    def watch(launcher: int) -> None:
        # The kernel gives an orphan another parent.
        while os.getppid() == launcher:
            time.sleep(_INTERVAL)
        _end(os.environ["RANK"], "torchrun is gone")

    Thread(target=watch, args=(os.getppid(),), name=_LAUNCHER_WATCH, daemon=True).start()


class ProcessWatch:
    """A thread that watches the other ranks until `stop`.

    Every rank checks the processes on its machine and counts up its machine's heartbeat in `store`.
    Rank 0 checks the heartbeats of all machines.

    machines: {torchrun: {rank: process id}}, in order of ranks. store: shared by all ranks; the first
    torchrun runs its server.
    """

    def __init__(self, rank: int, machines: Mapping[str, Mapping[int, int]], store: Store) -> None:
        self.rank, self.machines, self.store = rank, machines, store
        self.here = next(name for name, ranks in machines.items() if rank in ranks)
        # {machine: (heartbeat count, time at which it was first seen)}
        self._heard: dict[str, tuple[int, float]] = {}
        self._is_over = Event()
        Thread(target=self._watch, name="process watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching. Call it when all ranks have finished, before any of them exits."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL):
            reason = self._find_loss()
            if reason is not None and not self._is_over.wait(_GRACE):
                _end(self.rank, reason)

    def _find_loss(self) -> str | None:
        """Send a heartbeat and check the others; return why the run cannot continue, or None."""
        try:
            self.store.add(self.here, 1)
            for rank, pid in self.machines[self.here].items():
                if not _is_alive(pid):
                    self.store.set(_GONE, f"rank {rank} is gone")
            # One rank is enough: every rank reads the key below.
            for machine in self.machines if self.rank == 0 else ():
                if self._seconds_since(machine) > _SILENCE:
                    ranks = ", ".join(map(str, self.machines[machine]))
                    self.store.set(_GONE, f"no heartbeat from ranks {ranks} ({machine})")
            return self.store.get(_GONE).decode() if self.store.check([_GONE]) else None
        except RuntimeError:  # the base class of torch.distributed's errors
            return "the store of the first torchrun is gone"

    def _seconds_since(self, machine: str) -> float:
        """Return the seconds since the last heartbeat of a machine."""
        # Adding 0 reads the counter and, unlike `get`, does not wait for a missing key. Only this
        # machine's clock is used, since clocks differ.
        count, now = self.store.add(machine, 0), time.monotonic()
        if machine not in self._heard or self._heard[machine][0] != count:
            self._heard[machine] = count, now
        return now - self._heard[machine][1]


def _end(rank: int | str, reason: str) -> None:
    with contextlib.suppress(OSError):  # torchrun removed its folder, or the disk is full
        tell_torchrun(f"{OTHER_RANK} ({reason})")
    sys.stderr.write(f"cogfast: rank {rank} ends: {reason}\n")
    sys.stderr.flush()
    os._exit(1)  # nothing else interrupts the main thread, which is in a collective


def _is_alive(pid: int) -> bool:
    try:
        # Signal 0 only checks that the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _machine() -> str:
    """Return a name of the machine, or container, within which process ids are the same."""
    name = platform.node()
    # Containers may have one host name, and even the same process ids.
    with contextlib.suppress(OSError):  # not Linux
        name += f", boot {Path('/proc/sys/kernel/random/boot_id').read_text()[:8]}"
        name += f", {os.readlink('/proc/self/ns/pid')}"
    return name


def watch_processes(
    rank: int, world_size: int, control: ProcessGroup | None
) -> ProcessWatch | None:
    """Watch the ranks that torchrun started.

    Returns None for a single process and for processes that torchrun did not start.
    """
    watch_launcher()
    if "TORCHELASTIC_RUN_ID" not in os.environ or control is None:
        return None
    import torch.distributed as dist

    place = (f"{_machine()}, torchrun {os.getppid()}", rank, os.getpid())
    places: list = [None] * world_size
    dist.all_gather_object(places, place, group=control)
    machines: dict[str, dict[int, int]] = {}
    for torchrun, other, pid in places:
        machines.setdefault(torchrun, {})[other] = pid
    # A separate connection: a thread that waits for an answer would block the other threads.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    # After torchrun restarts the ranks, the store still has the keys of the failed attempt.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return ProcessWatch(rank, machines, dist.PrefixStore(f"attempt {attempt}", server))

"""Ends a rank whose run cannot go on, because another rank or torchrun is gone.

Left alone such a rank waits in a collective, NCCL's for half an hour: torchrun's SIGTERM asks it
to stop at the next step, which never comes. And ranks whose torchrun was killed would go on without
anything that could stop them, or wait for the store that it held.

Nothing heavy is imported with this file: ranks watch their torchrun while they import the rest.
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
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

_INTERVAL = 2.0  # seconds between two looks
_GRACE = 10.0  # seconds that a rank has to fail by itself, with what it has to say
_SILENCE = 60.0  # seconds without a word from any rank of a machine: power or network is gone
_GONE = "cogfast/gone"
_LAUNCHER_WATCH = "launcher watch"  # its thread's name


# What a rank says whose run ends because of another one.
OTHER_RANK = "another rank failed; see its own output for the cause"
# In what gloo says when a connection breaks, in whichever call; NCCL's errors have types.
_LOST_CONNECTION = re.compile(
    r"gloo/|closed by peer|reset by peer|broken pipe|timeout caused pair closure|"
    r"timed out waiting \d+ ?ms for (recv|send) operation",
    re.IGNORECASE,
)


def is_of_another_rank(error: BaseException) -> bool:
    """Whether the cause is a rank that failed: its own error is the one to be seen.

    A library may have wrapped the error, or met it while it cleaned up after another one.
    """
    seen: BaseException | None = error
    while seen is not None:
        kind = type(seen)
        is_torchs = kind.__module__ == "torch.distributed" and kind.__name__.startswith("Dist")
        is_lost = isinstance(seen, RuntimeError) and _LOST_CONNECTION.search(str(seen)) is not None
        if is_torchs or is_lost or kind.__name__ == "OtherRankError":
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def tell_torchrun(text: str) -> None:
    """Give torchrun what it prints last, when all ranks have ended: the first error of any."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file is not None:
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with open(file, "w") as out:
            json.dump({"message": {"message": text, "extraInfo": extra}}, out)


def watch_launcher() -> None:
    """End this process when the torchrun that started it is gone; to be called first of all. Where
    that was done, or something else started us, nothing happens."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if _LAUNCHER_WATCH in (thread.name for thread in threading.enumerate()):
        return

    def watch(launcher: int) -> None:
        while os.getppid() == launcher:
            time.sleep(_INTERVAL)
        _end(os.environ["RANK"], "torchrun is gone")

    Thread(target=watch, args=(os.getppid(),), name=_LAUNCHER_WATCH, daemon=True).start()


class ProcessWatch:
    """A thread that looks after the other ranks until `stop`.

    machines: {torchrun: {rank: process id}}, in order of ranks. store: by which ranks of several
    machines hear of each other; its server goes when the first torchrun does. Every rank looks
    after the processes beside it, and rank 0 after the torchruns: their ranks keep counting there.
    """

    def __init__(self, rank: int, machines: Mapping[str, Mapping[int, int]], store: Store) -> None:
        self.rank, self.machines, self.store = rank, machines, store
        self.here = next(name for name, ranks in machines.items() if rank in ranks)
        self._heard: dict[str, tuple[int, float]] = {}  # of a machine: its count, and since when
        self._is_over = Event()
        Thread(target=self._watch, name="process watch", daemon=True).start()

    def stop(self) -> None:
        """To be called when all ranks have come to their end, and before any leaves."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL):
            reason = self._who_is_gone()
            if reason is not None and not self._is_over.wait(_GRACE):
                _end(self.rank, reason)

    def _who_is_gone(self) -> str | None:
        try:
            self.store.add(self.here, 1)
            for rank, pid in self.machines[self.here].items():
                if not _is_alive(pid):
                    self.store.set(_GONE, f"rank {rank} is gone")
            for machine in self.machines if self.rank == 0 else ():
                if self._seconds_since(machine) > _SILENCE:
                    ranks = ", ".join(map(str, self.machines[machine]))
                    self.store.set(_GONE, f"nothing is heard of ranks {ranks} ({machine})")
            return self.store.get(_GONE).decode() if self.store.check([_GONE]) else None
        except RuntimeError:  # torch.distributed's errors are
            return "the store of the first torchrun is gone"

    def _seconds_since(self, machine: str) -> float:
        """Since a rank of a machine counted."""
        count, now = self.store.add(machine, 0), time.monotonic()
        if machine not in self._heard or self._heard[machine][0] != count:
            self._heard[machine] = count, now
        return now - self._heard[machine][1]


def _end(rank: int | str, reason: str) -> None:
    with contextlib.suppress(OSError):  # the folder went with torchrun, or the disk is full
        tell_torchrun(f"{OTHER_RANK} ({reason})")
    sys.stderr.write(f"cogfast: rank {rank} ends: {reason}\n")
    sys.stderr.flush()
    os._exit(1)  # the main thread is in a collective, which nothing else interrupts


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def watch_processes(
    rank: int, world_size: int, control: ProcessGroup | None
) -> ProcessWatch | None:
    """Watch over the ranks that torchrun started; None where something else did, or for one alone."""
    watch_launcher()
    if "TORCHELASTIC_RUN_ID" not in os.environ or control is None:
        return None
    import torch.distributed as dist

    place = (f"{platform.node()}, torchrun {os.getppid()}", rank, os.getpid())
    places: list = [None] * world_size
    dist.all_gather_object(places, place, group=control)
    machines: dict[str, dict[int, int]] = {}
    for torchrun, other, pid in places:
        machines.setdefault(torchrun, {})[other] = pid
    # A connection of its own: a thread that waits for an answer holds up no other.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return ProcessWatch(rank, machines, dist.PrefixStore(f"attempt {attempt}", server))

"""Ends a rank whose run cannot go on, because another rank or torchrun is gone.

Left alone such a rank waits in a collective, NCCL's for half an hour: torchrun's SIGTERM asks it
to stop at the next step, which never comes. And ranks whose torchrun was killed would go on without
anything that could stop them, or wait for the store that it held.

Nothing heavy is imported with this file: ranks watch their torchrun while they import the rest.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_INTERVAL = 2.0  # seconds between two looks
_GRACE = 10.0  # seconds that a rank has to fail by itself, with what it has to say
_GONE = "cogfast/gone"
_LAUNCHER_WATCH = "launcher watch"  # its thread's name


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
    """A thread that looks after the ranks of this rank's torchrun until `stop`.

    siblings: {rank: process id} of the other ranks of this torchrun. store: by which ranks of
    several machines hear of it; its server goes when the first torchrun does.
    """

    def __init__(self, rank: int, siblings: Mapping[int, int], store: dist.Store) -> None:
        self.rank, self.siblings, self.store = rank, siblings, store
        self._is_over = Event()
        Thread(target=self._watch, name="process watch", daemon=True).start()

    def stop(self) -> None:
        """To be called before the ranks leave each other."""
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_INTERVAL):
            reason = self._who_is_gone()
            if reason is not None and not self._is_over.wait(_GRACE):
                _end(self.rank, reason)

    def _who_is_gone(self) -> str | None:
        try:
            for rank, pid in self.siblings.items():
                if not _is_alive(pid):
                    self.store.set(_GONE, f"rank {rank} is gone")
            return self.store.get(_GONE).decode() if self.store.check([_GONE]) else None
        except RuntimeError:  # torch.distributed's errors are
            return "the store of the first torchrun is gone"


def _end(rank: int | str, reason: str) -> None:
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
    rank: int, world_size: int, control: dist.ProcessGroup | None
) -> ProcessWatch | None:
    """Watch over the ranks that torchrun started; None where something else did, or for one alone."""
    watch_launcher()
    if "TORCHELASTIC_RUN_ID" not in os.environ or control is None:
        return None
    import torch.distributed as dist

    launcher = (platform.node(), os.getppid())
    places: list = [None] * world_size
    dist.all_gather_object(places, (launcher, os.getpid()), group=control)
    siblings = {
        other: pid for other, (its, pid) in enumerate(places) if its == launcher and other != rank
    }
    # A connection of its own: a thread that waits for an answer holds up no other.
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    server = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return ProcessWatch(rank, siblings, dist.PrefixStore(f"attempt {attempt}", server))

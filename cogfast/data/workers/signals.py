"""Signal handling of reading processes, which ignore requests to stop a run.

A terminal's Ctrl-C, torchrun and Slurm signal every process. The trainer, however, continues until
its checkpoint is written and needs batches until then, so it ends its workers itself.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# Signals that ask a run to stop; the trainer handles them (distributed/stop_signals.py).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_POLL_SECONDS = 2  # between checks that the trainer is alive


@contextmanager
def stop_signals_blocked(start_method: str) -> Iterator[None]:
    """Block the stop signals in this thread, so that processes started inside inherit the mask.

    Threads that libraries start in these processes inherit it too, and so does the fork server.
    """
    if sys.platform != "linux":  # no sigwaitinfo
        yield
        return
    if start_method != "fork":
        # Start the tracker first: when it starts it unblocks SIGINT and SIGTERM in this thread.
        resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals_except_parent(worker: int) -> None:
    """Let a worker end only by the trainer's SIGTERM, or when the trainer ends."""
    # Only sigtimedwait reports a signal's sender, so a thread waits for it. The thread also polls
    # the trainer: torch's own watchdog polls the direct parent, which under forkserver is the
    # server, and the server lives as long as its workers.
    if sys.platform != "linux":
        return
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "called in the trainer, not in a worker"

    def end_with_trainer() -> None:
        while trainer.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, _POLL_SECONDS)
            if received is not None and received.si_pid == trainer.pid:
                break
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()

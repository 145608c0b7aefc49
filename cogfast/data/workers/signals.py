"""Reading processes outlive the signals that ask a run to stop: it goes on until its checkpoint and
needs batches until then, while a terminal's Ctrl-C, torchrun and Slurm signal every process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

# What asks a run to stop; the trainer listens to them (train/run/stop_signals.py).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_LOOK_SECONDS = 2  # between looks for the trainer


@contextmanager
def signals_withheld(start_method: str) -> Iterator[None]:
    """Processes that start inside inherit the mask, with all threads that libraries start in them,
    and so does the server that forks them where CUDA is up."""
    if sys.platform != "linux":  # no sigwaitinfo
        yield
        return
    if start_method != "fork":
        resource_tracker.ensure_running()  # starting later, it would lift the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_parent_only(worker: int) -> None:
    """In a worker: let it end by the trainer's SIGTERM, and with the trainer.

    Only who waits for a signal is told its sender, hence a thread. It also looks for the trainer,
    since torch's worker looks for its parent, and a server that forks workers lives as long as they.
    """
    if sys.platform != "linux":
        return
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "the trainer is no worker"

    def end_with_trainer() -> None:
        while trainer.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_SECONDS)
            if received is not None and received.si_pid == trainer.pid:
                break
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()

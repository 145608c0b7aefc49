"""Reads batches ahead of their use: in processes, or in threads of this process.

Threads are for DALI, whose tensors lie on this process's device, and for reads so short that passing
the result from another process would take longer. A terminal's Ctrl-C, torchrun and Slurm signal
every process; reading processes ignore these signals, because the trainer needs batches until its
checkpoint is written, and ends its workers itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.pool import AsyncResult, ThreadPool
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from cogfast.core.machine_limits import describe_lack
from cogfast.core.signals import STOP_SIGNALS
from cogfast.data.video.clip import DeviceReader

_POLL_SECONDS = 2  # between checks that the trainer is alive
_M_ARENA_MAX = -8  # option of glibc's mallopt: the number of memory pools
_MIN_AHEAD = 2  # reads by threads in flight while the consumer works on a batch
_END_SECONDS = 10.0  # how long ThreadedReads.close waits for reads in flight, since one may hang


class Reads(Dataset):
    """Maps keys to what is read for them. Runs in reading processes or threads."""

    @abstractmethod
    def __getitem__(self, key: Any) -> Any: ...

    @abstractmethod
    def name(self, key: Any) -> str:
        """Name what the key reads, for error messages."""


def read_ahead(
    reads: Reads,
    keys: Iterable,
    *,
    reader: DeviceReader | None,
    by_threads: bool = False,
    num_workers: int,
    prefetch_factor: int,
) -> ThreadedReads | ReadingProcesses:
    """Iterate over `reads[key]` for each of `keys`, in order; close() stops the readers.

    On a machine with a GPU, tensors are on it if `reader` reads, else in pinned memory. num_workers:
    number of threads if `reader` or `by_threads` is set, else of processes, each `prefetch_factor`
    keys ahead; 0 reads in this process.
    """
    if reader is not None or by_threads:
        return ThreadedReads(reads.__getitem__, keys, reader, num_workers)
    return ReadingProcesses(reads, keys, num_workers, prefetch_factor)


class ReadingProcesses(Iterator[Any]):
    """Iterates over `reads[key]` for each of `keys`, in order, read by processes."""

    def __init__(
        self, reads: Reads, keys: Iterable, num_workers: int, prefetch_factor: int
    ) -> None:
        method = start_method()
        self._name, (self._keys, ahead) = reads.name, itertools.tee(keys)
        with warnings.catch_warnings():
            # torch warns twice in every process of more workers than cores.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                reads,
                batch_size=None,  # each key is already a whole batch
                sampler=ahead,
                collate_fn=_as_is,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor if num_workers else None,
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context=method if num_workers else None,
                worker_init_fn=_start_worker if num_workers else None,
            )
            before = signal.getsignal(signal.SIGCHLD) or signal.SIG_DFL
            if method != "fork":
                # Start the tracker first: when it starts it unblocks SIGINT and SIGTERM in this thread.
                resource_tracker.ensure_running()
            # The processes, their threads and the fork server inherit the mask.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
            try:
                self._results = iter(loader)  # starts the processes
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            if threading.current_thread() is threading.main_thread():
                # torch's handler raises wherever this thread is; next() sees a lost process, too.
                signal.signal(signal.SIGCHLD, before)

    def __next__(self) -> Any:
        if self._results is None:
            raise StopIteration
        key = next(self._keys)
        try:
            return next(self._results)
        except Exception as error:
            # The traceback's frames refer to torch's iterator, which keeps the processes alive.
            traceback.clear_frames(error.__traceback__)
            self.close()
            # torch has no exception type for a killed worker. Python raises EOFError where the
            # file descriptor of a tensor does not come, and ConnectionError where its sender is gone.
            is_killed = str(error).startswith("DataLoader worker")
            if is_killed or isinstance(error, EOFError | ConnectionError):
                text = f"a reading process was killed at or after {self._name(key)}; if memory, /dev/shm or the "
                text += "number of open files (ulimit -n) ran out, lower args.num_workers or args.prefetch_factor"
            elif (lack := describe_lack(error)) is not None:
                text = f"batches cannot be read ahead at or after {self._name(key)}: {lack}"
            else:
                raise
            raise RuntimeError(text) from error

    def close(self) -> None:
        self._results = None  # torch's iterator joins its processes when it is dropped


def _start_worker(_: int) -> None:
    # Let it end only by the trainer's SIGTERM, or when the trainer ends. Only sigtimedwait reports a
    # signal's sender, so a thread waits for it. The thread also polls the trainer: torch's own watchdog
    # polls the direct parent, which under forkserver is the server, and that lives as long as its workers.
    trainer = multiprocessing.parent_process()
    assert trainer is not None, "called in the trainer, not in a worker"

    def end_with_trainer() -> None:
        while trainer.is_alive():
            received = signal.sigtimedwait({signal.SIGTERM}, _POLL_SECONDS)
            if received is not None and received.si_pid == trainer.pid:
                break
        os._exit(0)

    threading.Thread(target=end_with_trainer, daemon=True).start()
    # Otherwise Python prints that a batch cannot be sent, and the trainer waits for it for ever.
    sys.excepthook = _end_without_files
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # pyright: ignore[reportAttributeAccessIssue]
    # Each sample is read in a new thread. By default glibc gives threads memory pools of their own,
    # whose free memory other threads do not use.
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _end_worker(error: BaseException, _: object = None) -> NoReturn:
    sys.stderr.write(f"cogfast: a reading process ends: {describe_lack(error) or error}\n")
    sys.stderr.flush()
    os._exit(1)


def _end_without_files(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Report a thread's error. The thread that hands tensors over tries again, whatever happens."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        _end_worker(error)
    sys.__excepthook__(kind, error, trace)


def _as_is(read: Any) -> Any:
    return read


def start_method() -> str:
    """The start method of reading processes: fork, the fastest one, if it is safe."""
    # A forked process cannot use the CUDA context that it inherits.
    return "forkserver" if torch.cuda.is_initialized() else "fork"


class ThreadedReads(Iterator[Any]):
    """Iterates over the results of reading `keys`, in order.

    read: reads a key, in several threads at once. num_threads: number of threads, each with its own
    decoder, and of keys read ahead; at least 2. An error is raised in place of its result. reader: what reads
    clips; None leaves tensors in host memory, pinned if there is a GPU.
    """

    def __init__(
        self, read: Callable, keys: Iterable, reader: DeviceReader | None, num_threads: int
    ) -> None:
        num_ahead = max(_MIN_AHEAD, num_threads)
        self._read_key, self._reader, self._keys = read, reader, iter(keys)
        # The pool's threads are daemons: a hanging decoder does not keep the process from ending.
        self._pool = ThreadPool(num_ahead)
        self._pending: deque[AsyncResult] = deque()
        self._read_ahead(num_ahead)

    def _read_ahead(self, number: int) -> None:
        for key in itertools.islice(self._keys, number):
            self._pending.append(self._pool.apply_async(self._read, (key,)))

    def _read(self, key: Any) -> Any:
        if self._reader is None:
            read = self._read_key(key)
            is_pinned = torch.cuda.is_available()
            return tree_map_only(Tensor, Tensor.pin_memory, read) if is_pinned else read
        with self._reader.on_device():  # batches are collated on the device
            return self._read_key(key)

    def __next__(self) -> Any:
        if not self._pending:
            raise StopIteration
        first = self._pending.popleft()
        self._read_ahead(1)
        return tree_map_only(Tensor, _record_on_current_stream, first.get())

    def close(self) -> None:
        if self._reader is not None:
            # With DALI the process aborts if it exits while a thread decodes.
            deadline = time.monotonic() + _END_SECONDS
            for read in self._pending:
                read.wait(max(0.0, deadline - time.monotonic()))
        self._pending.clear()
        self._pool.terminate()


def _record_on_current_stream(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # The memory was allocated on the readers' stream; it must not be reused there until the
        # consumer's stream has finished with it.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor

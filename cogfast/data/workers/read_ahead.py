"""Reads batches ahead of their use, in processes, or in threads if DALI decodes on the device."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import sys
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from multiprocessing.queues import Queue
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader, Dataset

from cogfast.core.machine_limits import describe_lack
from cogfast.data.video.dali import DaliReader
from cogfast.data.workers.signals import ignore_signals_except_parent, stop_signals_blocked
from cogfast.data.workers.threads import ThreadedReads

_M_ARENA_MAX = -8  # option of glibc's mallopt: the number of memory pools


class Reads(Dataset):
    """Maps keys to what is read for them. Runs in reading processes or threads."""

    @abstractmethod
    def __getitem__(self, key: Any) -> Any: ...

    @abstractmethod
    def name(self, key: Any) -> str:
        """Name what the key reads, for error messages."""

    def for_thread(self) -> Callable[[Any], Any]:
        """Return a version of __getitem__ for the use of one thread."""
        return self.__getitem__


def read_ahead(
    reads: Reads,
    keys: Iterable,
    *,
    dali: DaliReader | None,
    by_threads: bool = False,
    num_workers: int,
    prefetch_factor: int,
) -> ThreadedReads | ReadingProcesses:
    """Iterate over `reads[key]` for each of `keys`, in order; close() stops the readers.

    On a machine with a GPU, tensors are on it if DALI reads, else in pinned memory. num_workers:
    number of threads if `dali` or `by_threads` is set, else of processes, each `prefetch_factor`
    keys ahead; 0 reads in this process.
    """
    if dali is not None or by_threads:
        return ThreadedReads(reads.for_thread, keys, dali, num_workers)
    return ReadingProcesses(reads, keys, num_workers, prefetch_factor)


class ReadingProcesses:
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
            with stop_signals_blocked(method):
                self._results = iter(loader)  # starts the processes

    def __iter__(self) -> ReadingProcesses:
        return self

    def __next__(self) -> Any:
        if self._results is None:
            raise StopIteration
        for key in self._keys:
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
                    text = (
                        f"a reading process was killed at or after {self._name(key)}; if memory, "
                        "/dev/shm or the number of open files (ulimit -n) ran out, lower "
                        "args.num_workers or args.prefetch_factor"
                    )
                elif (lack := describe_lack(error)) is not None:
                    text = f"batches cannot be read ahead at or after {self._name(key)}: {lack}"
                else:
                    raise
                raise RuntimeError(text) from error
        raise StopIteration

    def close(self) -> None:
        self._results = None  # torch's iterator joins its processes when it is dropped


def _start_worker(worker: int) -> None:
    ignore_signals_except_parent(worker)
    # Otherwise Python prints that a batch cannot be sent, and the trainer waits for it for ever.
    sys.excepthook = _end_without_files
    Queue._on_queue_feeder_error = staticmethod(_end_worker)  # pyright: ignore[reportAttributeAccessIssue]
    if sys.platform == "linux":
        # Each sample is read in a new thread. By default glibc gives threads memory pools of their
        # own, whose free memory other threads do not use.
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
    if sys.platform != "linux":
        return "spawn"
    # A forked process cannot use the CUDA context that it inherits.
    return "forkserver" if torch.cuda.is_initialized() else "fork"

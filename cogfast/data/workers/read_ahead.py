"""What is read before it is asked for: by processes, or by threads where DALI decodes on the device."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import traceback
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from cogfast.data.video.dali import DaliReader
from cogfast.data.workers.signals import heed_parent_only, signals_withheld
from cogfast.data.workers.threads import ThreadedReads

logger = logging.getLogger(__name__)

_M_ARENA_MAX = -8  # of glibc's mallopt


class Reads(Dataset):
    """What is read for a key. Lives in processes or threads."""

    @abstractmethod
    def __getitem__(self, key: Any) -> Any: ...

    @abstractmethod
    def name(self, key: Any) -> str:
        """What the key reads, where it is told of."""

    def of_a_thread(self) -> Callable[[Any], Any]:
        """__getitem__, to be called in one thread alone."""
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
    """An iterator over what `reads` makes of each of `keys`, in their order; close() ends it.

    Where there is a GPU, tensors are on it where DALI reads, else in pinned memory. num_workers:
    threads where DALI reads or by_threads says so, else processes, each `prefetch_factor` keys
    ahead, or none for 0.
    """
    if dali is not None or by_threads:
        return ThreadedReads(reads.of_a_thread, keys, dali, num_workers)
    return ReadingProcesses(reads, keys, num_workers, prefetch_factor)


class ReadingProcesses:
    """Iterates over what `reads` makes of each of `keys`, in their order."""

    def __init__(
        self, reads: Reads, keys: Iterable, num_workers: int, prefetch_factor: int
    ) -> None:
        method = start_method()
        _check_cores(num_workers)
        with warnings.catch_warnings():
            # Of num_workers: torch gives it at both calls below, in every process.
            warnings.filterwarnings("ignore", "This DataLoader will create")
            loader = DataLoader(
                reads,
                batch_size=None,  # of a key is read what belongs together
                sampler=keys,
                collate_fn=_as_is,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor if num_workers else None,
                pin_memory=torch.cuda.is_available(),
                multiprocessing_context=method if num_workers else None,
                worker_init_fn=_start_worker if num_workers else None,
            )
            self._name, self._keys = reads.name, iter(keys)
            with signals_withheld(method):
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
                # Its frames hold torch's iterator, and so the processes, in a cycle.
                traceback.clear_frames(error.__traceback__)
                self.close()
                if not str(error).startswith("DataLoader worker"):
                    raise
                raise RuntimeError(
                    f"a reading process was killed at or after {self._name(key)}; where memory or "
                    "/dev/shm ran out, lower args.num_workers or args.prefetch_factor"
                ) from error
        raise StopIteration

    def close(self) -> None:
        self._results = None  # torch's iterator joins its processes when it is dropped


def _check_cores(num_workers: int) -> None:
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    if num_workers > num_cores:
        logger.info(
            "args.num_workers=%d reading processes share %d cores; use at most %d where reading is slow",
            *(num_workers, num_cores, num_cores),
        )


def _start_worker(worker: int) -> None:
    heed_parent_only(worker)
    if sys.platform == "linux":
        # Samples are read in ever new threads; memory that glibc gave one would stay apart.
        with contextlib.suppress(AttributeError):  # another C library
            ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def _as_is(read: Any) -> Any:
    return read


def start_method() -> str:
    """How processes start: by fork, the quick way, where nothing speaks against it."""
    if sys.platform != "linux":
        return "spawn"
    # A fork of a process that holds a CUDA context inherits one that it cannot use.
    return "forkserver" if torch.cuda.is_initialized() else "fork"

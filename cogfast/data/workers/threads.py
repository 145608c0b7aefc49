"""Reads ahead in threads of this process.

For DALI, whose tensors lie on this process's device, and for reads so short that passing the result
from another process would take longer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any

import torch
from torch import Tensor

from cogfast.data.video.dali import DaliReader

_MIN_AHEAD = 2  # reads in flight while the consumer works on a batch
_END_SECONDS = 10.0  # how long close() waits for reads in flight, since one may hang


class ThreadedReads:
    """Iterates over the results of reading `keys`, in order.

    new_reads: returns the reading function of one thread. num_threads: number of threads, each
    with its own decoder, and of keys read ahead; at least 2. An error is raised in place of its
    result. dali: the decoder; None leaves tensors in host memory, pinned if there is a GPU.
    """

    def __init__(
        self,
        new_reads: Callable[[], Callable[[Any], Any]],
        keys: Iterable,
        dali: DaliReader | None,
        num_threads: int,
    ) -> None:
        num_ahead = max(_MIN_AHEAD, num_threads)
        self._dali, self._keys = dali, iter(keys)
        self._own = threading.local()
        # The pool's threads are daemons: a hanging decoder does not keep the process from ending.
        self._pool = ThreadPool(num_ahead, lambda: setattr(self._own, "read", new_reads()))
        self._pending: deque[AsyncResult] = deque()
        for _ in range(num_ahead):
            self._read_another()

    def _read_another(self) -> None:
        for key in self._keys:
            self._pending.append(self._pool.apply_async(self._read, (key,)))
            return

    def _read(self, key: Any) -> Any:
        if self._dali is None:
            read = self._own.read(key)
            return _each_tensor(read, Tensor.pin_memory) if torch.cuda.is_available() else read
        with self._dali.on_device():  # batches are collated on the device
            return self._own.read(key)

    def __iter__(self) -> ThreadedReads:
        return self

    def __next__(self) -> Any:
        if not self._pending:
            raise StopIteration
        first = self._pending.popleft()
        if not first.ready():
            self._read_another()
            read = first.get()
        else:
            # Start the next read after this one is handed over: a new reader would compete with
            # the consumer.
            read = first.get()
            self._read_another()
        return _each_tensor(read, _record_on_current_stream)

    def close(self) -> None:
        if self._dali is not None:
            # The process aborts if it exits while DALI runs in a thread.
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


def _each_tensor(read: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to a tensor, and to tensors in lists and in values of dicts."""
    if isinstance(read, Tensor):
        return change(read)
    if isinstance(read, dict):
        return {key: _each_tensor(value, change) for key, value in read.items()}
    if isinstance(read, list):
        return [_each_tensor(value, change) for value in read]
    return read

"""What is read ahead by threads of this process: where its tensors lie on its device, and where
reading is so little work that handing over from another process would be more."""

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

_LEAST_AHEAD = 2  # reads that go on while their taker works on another
_END_SECONDS = 10.0  # that close() waits for reads under way; one may hang


class ThreadedReads:
    """Iterates over what `new_reads()` makes of each of `keys`, in their order.

    new_reads: makes a function for one thread. num_threads: of them, each a decoder of its own; so
    many keys, and two at least, are read before they are asked for. An error comes where its result
    would. dali: what decodes; None: tensors lie in host memory, pinned where there is a GPU.
    """

    def __init__(
        self,
        new_reads: Callable[[], Callable[[Any], Any]],
        keys: Iterable,
        dali: DaliReader | None,
        num_threads: int,
    ) -> None:
        num_ahead = max(_LEAST_AHEAD, num_threads)
        self._dali, self._keys = dali, iter(keys)
        self._own = threading.local()
        # Its threads are daemons: one whose decoder hangs does not keep the process from ending.
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
        with self._dali.on_device():  # samples are put together there
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
        else:  # a reader that starts now would only hold up who takes this one
            read = first.get()
            self._read_another()
        return _each_tensor(read, _kept_for_taker)

    def close(self) -> None:
        if self._dali is not None:
            # A process that ends while DALI is at work in a thread is aborted.
            deadline = time.monotonic() + _END_SECONDS
            for read in self._pending:
                read.wait(max(0.0, deadline - time.monotonic()))
        self._pending.clear()
        self._pool.terminate()


def _kept_for_taker(tensor: Tensor) -> Tensor:
    if tensor.is_cuda:
        # Its memory belongs to the readers' stream, which must not take it back too early.
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
    return tensor


def _each_tensor(read: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """`read`, its tensors changed, also those in lists and in values of dicts."""
    if isinstance(read, Tensor):
        return change(read)
    if isinstance(read, dict):
        return {key: _each_tensor(value, change) for key, value in read.items()}
    if isinstance(read, list):
        return [_each_tensor(value, change) for value in read]
    return read

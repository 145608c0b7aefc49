"""Micro-batches read ahead by threads of this process: where their tensors lie on its device, and
where reading is so little work that handing over from another process would be more."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from multiprocessing.pool import AsyncResult, ThreadPool

import torch
from torch import Tensor

from cogfast.data.dali_reader import DaliReader

_LEAST_AHEAD = 2  # micro-batches that are decoded while the trainer works on another


class ThreadedReads:
    """Iterates over what `new_reads()` makes of each of `slots`, in their order.

    new_reads: makes a function for one thread, which returns a batch. num_threads: of them, each a
    decoder of its own; so many batches, and two at least, are read before they are asked for. An
    error comes where its batch would. dali: what decodes; None: batches lie in host memory, pinned
    where there is a GPU.
    """

    def __init__(
        self,
        new_reads: Callable[[], Callable[[tuple[int, list[int]]], dict]],
        slots: Iterable[tuple[int, list[int]]],
        dali: DaliReader | None,
        num_threads: int,
    ) -> None:
        num_ahead = max(_LEAST_AHEAD, num_threads)
        self._dali, self._slots = dali, iter(slots)
        self._own = threading.local()
        # Its threads are daemons: one whose decoder hangs does not keep the process from ending.
        self._pool = ThreadPool(num_ahead, lambda: setattr(self._own, "read", new_reads()))
        self._pending: deque[AsyncResult] = deque()
        for _ in range(num_ahead):
            self._read_another()

    def _read_another(self) -> None:
        slots = next(self._slots, None)
        if slots is not None:
            self._pending.append(self._pool.apply_async(self._read, (slots,)))

    def _read(self, slots: tuple[int, list[int]]) -> dict:
        if self._dali is None:
            return _pinned(self._own.read(slots))
        with self._dali.on_device():  # samples are put together there
            return self._own.read(slots)

    def __iter__(self) -> ThreadedReads:
        return self

    def __next__(self) -> dict:
        if not self._pending:
            raise StopIteration
        first = self._pending.popleft()
        if not first.ready():
            self._read_another()
            batch = first.get()
        else:  # a reader that starts now would only hold up who takes this one
            batch = first.get()
            self._read_another()
        for value in batch.values():
            if isinstance(value, Tensor) and value.is_cuda:
                # Its memory belongs to the readers' stream, which must not take it back too early.
                value.record_stream(torch.cuda.current_stream(value.device))
        return batch

    def close(self) -> None:
        self._pool.terminate()


def _pinned(batch: dict) -> dict:
    if not torch.cuda.is_available():
        return batch
    return {k: v.pin_memory() if isinstance(v, Tensor) else v for k, v in batch.items()}

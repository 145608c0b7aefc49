"""Batches for tensor-parallel groups: the first rank reads them and broadcasts them to the group.

On a GPU the next batches are copied to the device while the model computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cogfast.data.batches import Batch, BatchLoader, to_device
from cogfast.distributed.process_groups import OtherRankError, ProcessGroups
from cogfast.distributed.step_clock import CLOCK


class DeviceAhead:
    """Iterator that copies the tensors of `batches` to a GPU, `depth` batches ahead, on its own stream.

    Keeps the order: an error or the end of `batches` is raised at its place. Blocks while a batch is
    still being read. The batches should be in pinned memory; otherwise each copy blocks the host.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device, depth: int) -> None:
        self._batches, self._device, self._depth = batches, device, depth
        self._stream = torch.cuda.Stream(device)
        self._ahead: deque[tuple[Batch, torch.Event] | Exception] = deque()

    def __iter__(self) -> DeviceAhead:
        return self

    def __next__(self) -> Batch:
        # The batch that is returned now, and `depth` more behind it.
        while len(self._ahead) <= self._depth and not self._has_ended():
            self._ahead.append(self._start_next())
        first = self._ahead.popleft()
        if isinstance(first, Exception):
            self._ahead.appendleft(first)  # every later call raises it again
            raise first
        batch, is_copied = first
        now = torch.cuda.current_stream(self._device)
        # The compute stream waits, and the host does not.
        now.wait_event(is_copied)
        for value in batch.values():
            if isinstance(value, Tensor):
                # The allocator would otherwise give its memory to the copy stream too early.
                value.record_stream(now)
        return batch

    def _has_ended(self) -> bool:
        return bool(self._ahead) and isinstance(self._ahead[-1], Exception)

    def _start_next(self) -> tuple[Batch, torch.Event] | Exception:
        try:
            batch = next(self._batches)
        except Exception as error:  # including StopIteration
            return error
        with torch.cuda.stream(self._stream):
            batch = {
                key: value.to(self._device, non_blocking=True)
                if isinstance(value, Tensor)
                else value
                for key, value in batch.items()
            }
        return batch, self._stream.record_event()


class ModelBatches:
    """Iterator over the micro-batches of one data-parallel rank, on its devices.

    loader: the loader on the first of the ranks that work on the same samples; None on the others,
    which do not read. num_ahead: number of batches that are copied to a GPU ahead of time. num_needed:
    number of batches that are used; None: unknown.
    """

    def __init__(
        self,
        loader: BatchLoader | None,
        groups: ProcessGroups,
        num_ahead: int = 1,
        num_needed: int | None = None,
    ) -> None:
        assert (loader is not None) == groups.is_first_of_model
        self.loader, self.groups = loader, groups
        self._batches: Iterator[Batch] | None = loader
        if loader is not None and num_ahead and groups.device.type == "cuda":
            # It must not wait for a batch that nothing uses: a latent cache may still be being written.
            needed = islice(loader, num_needed)
            self._batches = DeviceAhead(needed, groups.device, num_ahead)

    def __enter__(self) -> ModelBatches:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.loader is not None:
            self.loader.close()

    def __next__(self) -> Batch:
        """Return the next batch of the BatchLoader, on the device and with "mp4" float32 in [-1, 1].

        If the first rank cannot read it, the other ranks of the group raise OtherRankError.
        """
        if self.groups.model is None:
            assert self._batches is not None, "a rank that works alone reads"
            return to_device(next(self._batches), self.groups.device)
        return to_device(self._shared(), self.groups.device)

    def _shared(self) -> Batch:
        groups = self.groups
        batch: Batch = {}
        error: Exception | None = None
        if self._batches is not None:
            try:
                batch = next(self._batches)
            except Exception as caught:  # raised below, once the waiting ranks know of it
                error = caught
        # The others wait in a collective: an error must reach them in place of the batch.
        message = None if error is None else f"{type(error).__name__}: {error}"
        # First the shapes: the other ranks allocate before they receive.
        outline = {key: _Outline.of(value) for key, value in batch.items()}
        outline, message = groups.broadcast_in_model((outline, message))
        if error is not None:
            raise error
        if message is not None:
            raise OtherRankError(f"rank {groups.first_of_model} failed: {message}")
        return {key: self._send(batch.get(key), of) for key, of in outline.items()}

    def _send(self, value: Any, outline: object) -> object:
        if not isinstance(outline, _Outline):
            return outline
        device = self.groups.device
        if value is None:
            value = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        value = value.to(device, non_blocking=True).contiguous()
        # Send bytes: gloo does not support every dtype.
        bytes_ = value.flatten().view(torch.uint8)
        assert self.groups.model is not None, "a rank that works alone sends nothing"
        group = self.groups.model.process_group
        with CLOCK.waiting():
            dist.broadcast(bytes_, self.groups.first_of_model, group=group)
        return value


class _Outline:
    """Shape and dtype of a tensor, sent in its place with the other values of a batch."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def of(value: object) -> object:
        return _Outline(value.shape, value.dtype) if isinstance(value, Tensor) else value

"""Batches for ranks that work on the same samples: the first one reads them and broadcasts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import Batch, BatchLoader, to_device
from cogfast.distributed.process_groups import OtherRankError, ProcessGroups, attempt


class ModelBatches(AbstractContextManager["ModelBatches"]):
    """Iterator over the micro-batches of one data-parallel rank, on its devices.

    loader: the loader on the first of the ranks that work on the same samples; None on the others,
    which do not read. has_own_files: machines have folders of the run of their own, as in a store.
    """

    def __init__(
        self, loader: BatchLoader | None, groups: ProcessGroups, has_own_files: bool = False
    ) -> None:
        assert (loader is not None) == groups.is_first_of_model
        self.loader, self.groups, self.has_own_files = loader, groups, has_own_files
        self._listed: set[str] = set()  # bad samples that all machines have listed

    def __exit__(self, *exc_info: object) -> None:
        if self.loader is not None:
            self.loader.close()

    def __next__(self) -> Batch:
        """Return the next batch of the BatchLoader, on the device and with "mp4" float32 in [-1, 1].

        If the first rank cannot read it, the other ranks of the group raise OtherRankError.
        """
        return self._read(next)

    def replaced(self, batch: Batch, error: BadSample, attempt: int) -> Batch:
        """Return other samples for the slots of `batch`, as BatchLoader.replaced does."""
        return self._read(lambda loader: loader.replaced(batch, error, attempt))

    def share_bad(self) -> None:
        """List on each machine the bad samples that ranks of others have found, and check their number.

        Every rank calls it. Without an effect if the ranks share a file of the run.
        """
        if not self.has_own_files:
            return
        log = None if self.loader is None else self.loader.bad_samples
        reasons = {} if log is None else log.reasons
        found = self.groups.gather({p: r for p, r in reasons.items() if p not in self._listed})
        for path, reason in (row for of_rank in found for row in of_rank.items()):
            self._listed.add(path)
            if log is not None:
                log.add(path, reason, is_logged=self.groups.is_main)
        if any(found):
            self.groups.on_all(lambda: log.check() if log is not None else None)

    def _read(self, read: Callable[[BatchLoader], Batch]) -> Batch:
        groups, loader = self.groups, self.loader
        if groups.model is None:
            assert loader is not None, "a rank that works alone reads"
            return to_device(read(loader), groups.device)
        batch, error = ({}, None) if loader is None else attempt(lambda: read(loader))
        # The others wait in a collective: an error must reach them in place of the batch.
        message = None if error is None else f"{type(error).__name__}: {error}"
        # First the shapes and dtypes: the other ranks allocate before they receive.
        outline = {
            key: value.to("meta") if isinstance(value, Tensor) else value
            for key, value in (batch or {}).items()
        }
        outline, message = groups.broadcast_in_model((outline, message))
        if error is not None:
            raise error
        if message is not None:
            raise OtherRankError(f"rank {groups.first_of_model} failed: {message}")
        sent = {key: self._send(batch.get(key), of) for key, of in outline.items()}
        return to_device(sent, groups.device)

    def _send(self, value: Any, outline: object) -> object:
        if not isinstance(outline, Tensor):
            return outline
        device = self.groups.device
        if value is None:
            value = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        value = value.to(device, non_blocking=True).contiguous()
        # Send its bytes, in place: gloo does not support every dtype.
        self.groups.broadcast_tensor_in_model(value.flatten().view(torch.uint8))
        return value

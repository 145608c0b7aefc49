"""The batches of ranks that share a model: the first of them reads, all get what it has read."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from cogfast.data.batches import Batch, BatchLoader, to_device
from cogfast.train.process_groups import OtherRankError, ProcessGroups


class ModelBatches:
    """The micro-batches of one data-parallel rank, on its devices.

    loader: on the first rank of a model; None on the others, which have no reading processes.
    """

    def __init__(self, loader: BatchLoader | None, groups: ProcessGroups) -> None:
        assert (loader is not None) == groups.is_first_of_model
        self.loader, self.groups = loader, groups

    def __enter__(self) -> ModelBatches:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.loader is not None:
            self.loader.close()

    def __next__(self) -> Batch:
        """As BatchLoader's, its tensors on the device and "mp4" float32 in [-1, 1].

        What the first rank cannot read ends all ranks of the model, on the others in OtherRankError.
        """
        if self.groups.tensor is None:
            return to_device(next(self.loader), self.groups.device)
        return to_device(self._shared(), self.groups.device)

    def _shared(self) -> Batch:
        groups, batch, error = self.groups, {}, None
        if self.loader is not None:
            try:
                batch = next(self.loader)
            except Exception as caught:  # the others wait for this batch
                error = caught
        told = None if error is None else f"{type(error).__name__}: {error}"
        outline = {key: _Outline.of(value) for key, value in batch.items()}
        outline, told = groups.broadcast_in_model((outline, told))
        if error is not None:
            raise error
        if told is not None:
            raise OtherRankError(f"rank {groups.first_of_model} failed: {told}")
        return {key: self._send(batch.get(key), of) for key, of in outline.items()}

    def _send(self, value: object, outline: object) -> object:
        if not isinstance(outline, _Outline):
            return outline
        device = self.groups.device
        if value is None:
            value = torch.empty(outline.shape, dtype=outline.dtype, device=device)
        value = value.to(device, non_blocking=True).contiguous()
        # As bytes: gloo does not carry every dtype.
        bytes_ = value.flatten().view(torch.uint8)
        tensor = self.groups.tensor.process_group
        dist.broadcast(bytes_, self.groups.first_of_model, group=tensor)
        return value


class _Outline:
    """In a tensor's place where the other values of a batch are sent as objects."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype

    @staticmethod
    def of(value: object) -> object:
        return _Outline(value.shape, value.dtype) if isinstance(value, Tensor) else value

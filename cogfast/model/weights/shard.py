"""Describes the part (shard) of a parameter that a tensor-parallel model holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """Shard `index` of `count` equal shards of a parameter of `shape`, split along `dim`.

    `dim` consists of `num_parts` equal parts (q, k and v: three), each of which is split, so the
    shard has one stretch of every part.
    """

    shape: tuple[int, ...]  # of the whole parameter
    dim: int
    num_parts: int
    index: int
    count: int

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """[start, stop) of each stretch along `dim`."""
        # These divisions leave no rest: both callers, tensor parallelism and manifests, check it.
        part = self.shape[self.dim] // self.num_parts
        width = part // self.count
        starts = [i * part + self.index * width for i in range(self.num_parts)]
        return [(start, start + width) for start in starts]

    @property
    def share_shape(self) -> tuple[int, ...]:
        before, after = self.shape[: self.dim], self.shape[self.dim + 1 :]
        return (*before, self.shape[self.dim] // self.count, *after)

    def of(self, whole: Tensor) -> Tensor:
        """Return this shard of the whole parameter; a view if it is one stretch."""
        # Some formats store a parameter flat.
        whole = whole.reshape(self.shape)
        pieces = [whole.narrow(self.dim, start, stop - start) for start, stop in self.ranges]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dim)


def shard_of(parameter: Tensor) -> Shard | None:
    """Return this rank's shard of a parameter; None if it is not sharded (set by `parallelize`)."""
    return getattr(parameter, "shard", None)


def whole_shape(parameter: Tensor) -> list[int]:
    """Return a parameter's shape before sharding by tensor parallelism or ZeRO-3; [1] for a single number."""
    shard = shard_of(parameter)
    if shard is not None:
        return list(shard.shape)
    return list(getattr(parameter, "ds_shape", parameter.shape)) or [1]


def join(shares: Sequence[Tensor], dim: int, num_parts: int) -> Tensor:
    """Return the whole parameter from all its shards in order: the inverse of Shard.of."""
    if len(shares) == 1:
        return shares[0]
    # Part by part: the shards of q, then those of k, then those of v.
    parts = [share.chunk(num_parts, dim) for share in shares]
    return torch.cat([part[i] for i in range(num_parts) for part in parts], dim)

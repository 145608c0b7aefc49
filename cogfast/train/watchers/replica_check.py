"""Checks that parameters replicated across a tensor-parallel group are still bitwise equal.

All ranks of a group compute the same update of a replicated parameter from the same gradient, so the
copies stay equal. If they diverge (a non-deterministic sum, a memory fault), nothing else notices:
every rank continues to train, each with a different model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.distributed.parallelize import find_shards
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.train.watchers.watcher import Watcher

_CHUNK = 2**20  # elements hashed at a time, with 8 bytes of temporary memory each
_ODD = 0x2545F4914F6CDD1D  # makes the hash depend on the order of the chunks
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio as int64, spreads indices
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by item size


class ReplicaCheck(Watcher):
    """Ends a run whose tensor-parallel ranks differ in a replicated parameter.

    Each check reads the replicated parameters once, sends 8 bytes per parameter to the other ranks of
    the group, and has one host-device sync.

    group: None without tensor parallelism; then nothing is compared. every: optimizer steps between
    checks; None: never. await_weights: returns when the parameters may be read.
    """

    def __init__(
        self,
        transformer: nn.Module,
        group: ParallelGroup | None,
        every: int | None,
        await_weights: Callable[[], None] = lambda: None,
    ) -> None:
        shards = find_shards(transformer)
        self.replicated = {n: p for n, p in transformer.named_parameters() if n not in shards}
        self.group, self.every, self.await_weights = group, every, await_weights

    def after_step(self, step: int) -> None:
        """Compare the copies if a check is due. Call it on all ranks after optimizer step `step`.

        Raises:
            RuntimeError: the copies differ; the same on every rank of the group.
        """
        if self.group is None or not self.every or step % self.every:
            return
        self.await_weights()
        mine = hash_parameters(list(self.replicated.values()))
        hashes = mine.new_empty(self.group.size * len(mine))
        dist.all_gather_into_tensor(hashes, mine, group=self.group.process_group)
        hashes = hashes.view(self.group.size, -1).cpu()  # sync: once per `every` steps
        differs = hashes != hashes[0]  # [size, P]
        names = [n for n, is_one in zip(self.replicated, differs.any(0), strict=True) if is_one]
        if names:
            first = differs[:, list(self.replicated).index(names[0])]
            differing = first.nonzero().flatten().tolist()  # sync: none, a CPU tensor
            ranks = ", ".join(map(str, differing))
            others = f" and {len(names) - 1} more" if names[1:] else ""
            raise RuntimeError(
                f"step {step}: the tensor-parallel ranks no longer have the same {names[0]}{others}: "
                f"rank {ranks} differs from rank 0. Resume from the last checkpoint (--resume latest); "
                "if it happens again, try args.deterministic=true, then another machine, and report it "
                "with this line"
            )


def hash_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """Hash the bits and positions of each parameter's elements: [P] int64, on their device.

    Under ZeRO-3 it hashes the part that this rank owns, which is the same part on all ranks of a
    tensor-parallel group.
    """
    device = parameters[0].device
    place = torch.arange(1, _CHUNK + 1, device=device) * _GOLDEN
    # Odd weights always detect a change of one element. Other changes are missed with a probability
    # of at most 2^-32.
    weights = (place ^ (place >> 32)) * _GOLDEN | 1
    return torch.stack([_hash(own_values(p).to(device), weights) for p in parameters])


def _hash(values: Tensor, weights: Tensor) -> Tensor:
    """Hash values [N] of any dtype -> [] int64."""
    # Bits and not values: 0.0 equals -0.0, and NaN differs from itself.
    bits = values.view(_INTEGERS[values.element_size()])
    # int64 sums wrap around without an error, which a hash may.
    sums = [(chunk * weights[: len(chunk)]).sum() for chunk in bits.split(_CHUNK)]
    return reduce(lambda total, chunk: total * _ODD + chunk, sums)


def own_values(parameter: Any) -> Tensor:  # Any: ZeRO-3 adds attributes to a Parameter
    """Return the elements that this rank has, [N]; under ZeRO-3, those of its partition."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().flatten()
    # The last rank's partition ends with padding, whose values are arbitrary.
    before = parameter.ds_zero_partition_rank * partition.ds_numel
    return partition.detach()[: max(0, parameter.ds_numel - before)]

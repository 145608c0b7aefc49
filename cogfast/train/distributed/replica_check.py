"""Do the processes that hold a model together still have the same numbers where each has all?

They compute the same update of a replicated parameter from the same gradient, so its copies stay
equal bit for bit. Where they part (an op whose sums depend on timing, a fault of the memory),
nothing else tells: every process trains on, each with a model of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.train.distributed.parallelize import find_shards
from cogfast.train.distributed.tensor_parallel import TensorParallelGroup

_CHUNK = 2**20  # elements, of which 8 bytes each are needed at a time
_ODD = 0x2545F4914F6CDD1D  # keeps the order of chunks
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, which spreads indices
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


class ReplicaCheck:
    """Ends a run whose tensor-parallel processes differ in a parameter that all of them have.

    group: None where every process has a model of its own, and nothing to compare. every: optimizer
    steps between two checks; None never checks. await_weights: returns when the parameters may be
    read. Each check reads the replicated ones once, sends 8 bytes per parameter to the others of the
    group, and reads the host once.
    """

    def __init__(
        self,
        transformer: nn.Module,
        group: TensorParallelGroup | None,
        every: int | None,
        await_weights: Callable[[], None] = lambda: None,
    ) -> None:
        shards = find_shards(transformer)
        self.replicated = {n: p for n, p in transformer.named_parameters() if n not in shards}
        self.group, self.every, self.await_weights = group, every, await_weights

    def after_step(self, step: int) -> None:
        """To be called by all processes after optimizer step `step`; where the copies differ, each
        of the group raises the same RuntimeError."""
        if self.group is None or not self.every or step % self.every:
            return
        self.await_weights()
        mine = hash_parameters(list(self.replicated.values()))
        hashes = mine.new_empty(self.group.size * len(mine))
        dist.all_gather_into_tensor(hashes, mine, group=self.group.process_group)
        hashes = hashes.view(self.group.size, -1).cpu()  # sync: to compare, every N steps
        differs = hashes != hashes[0]  # [size, P]
        names = [n for n, is_one in zip(self.replicated, differs.any(0), strict=True) if is_one]
        if names:
            first = differs[:, list(self.replicated).index(names[0])]
            differing = first.nonzero().flatten().tolist()  # sync: none, on the CPU by now
            ranks = ", ".join(map(str, differing))
            others = f" and {len(names) - 1} more" if names[1:] else ""
            raise RuntimeError(
                f"step {step}: the tensor-parallel ranks no longer have the same {names[0]}{others}: "
                f"that of rank {ranks} is not rank 0's. Resume from the last checkpoint (--resume "
                "latest); if it comes again, try args.deterministic=true, then another machine, and "
                "report it with this line"
            )


def hash_parameters(parameters: list[nn.Parameter]) -> Tensor:
    """[P] int64, on the parameters' device: of the bits of each and their places.

    Under ZeRO-3 of the part that this process owns: the others of its tensor-parallel group own
    the same part.
    """
    device = parameters[0].device
    place = torch.arange(1, _CHUNK + 1, device=device) * _GOLDEN
    # Odd: a change of one element always shows. Of other changes one in 2^32 at most is missed.
    weights = (place ^ (place >> 32)) * _GOLDEN | 1
    return torch.stack([_hash(_own_values(p).to(device), weights) for p in parameters])


def _hash(values: Tensor, weights: Tensor) -> Tensor:
    """[] int64 of values [N] in any dtype."""
    bits = values.view(_INTEGERS[values.element_size()])
    sums = [(chunk * weights[: len(chunk)]).sum() for chunk in bits.split(_CHUNK)]
    return reduce(lambda total, chunk: total * _ODD + chunk, sums)


def _own_values(parameter: nn.Parameter) -> Tensor:
    """[N]: all, or our part without the padding behind the parameter's end, which is arbitrary."""
    partition = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().flatten()
    before = parameter.ds_zero_partition_rank * partition.ds_numel
    return partition.detach()[: max(0, parameter.ds_numel - before)]

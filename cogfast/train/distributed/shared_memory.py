"""Exchange of gradients and weights in shared memory, between CPU ranks that are on one machine.

Every rank has a row of memory that all data-parallel ranks map, and writes only into its own row:

    gradients     flat, in the order of zero.bit16_groups_flat, in the accumulation dtype
    new weights   its partition, in the training dtype; two places, for alternate gathers

Each parameter's gradient goes straight from autograd into the row, and micro-batches are summed
there. At the end of a step each rank averages its own partition over all rows, in place. Compared
with DeepSpeed's reduction over gloo there are no buckets, no copies through sockets, and no
communication before the last micro-batch. A rank without others uses ordinary memory.

A rank writes gradients again only after FusedStep's all-reduce of the norm, to which every rank comes
after it has averaged its partition.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cogfast.train.distributed.fused_step import WeightGather, own_weights
from cogfast.train.run.health.step_clock import CLOCK

T = TypeVar("T")
Size = tuple[int, torch.dtype]  # number of elements and their dtype

_ALIGNMENT = 64  # bytes: a cache line
# Elements that one thread averages at a time, so that their float32 sum stays in its L2 cache.
_CHUNK = 32_768


class FlatGradients:
    """The gradients of this rank in its row, and the average of its partition over all ranks.

    Replaces DeepSpeed's hooks of the parameters and its reduction.

    zero: DeepSpeed's optimizer of stage 1 or 2. gradients: for each rank of its data-parallel group
    and each parameter group, the flat gradients. partitions: after `reduce` at the end of a step, the
    averaged gradients of this rank's partitions.
    """

    def __init__(self, zero, gradients: Sequence[Sequence[Tensor]]) -> None:
        self.zero, self.group = zero, zero.dp_process_group
        rank, num_ranks = dist.get_rank(group=self.group), len(gradients)
        of_ranks = [[flat.chunk(num_ranks) for flat in row] for row in gradients]
        self.partitions = [parts[rank] for parts in of_ranks[rank]]
        self._sources = [  # by parameter group, this rank's partition in every row
            [row[i][rank] for row in of_ranks] for i in range(len(self.partitions))
        ]
        # DeepSpeed's own hooks would copy gradients into its buckets a second time.
        for hook in zero._grad_acc_hooks:
            hook.remove()
        zero._grad_acc_hooks.clear()
        self._places: list[Tensor] = []  # of the parameters' gradients in this rank's row
        for i, parameters in enumerate(zero.bit16_groups):
            weights = zero.bit16_groups_flat[i]
            for parameter in parameters:
                # DeepSpeed's weights are views of one flat tensor: the same place serves the
                # gradient.
                start = (parameter.data_ptr() - weights.data_ptr()) // weights.itemsize
                place = gradients[rank][i].narrow(0, start, parameter.numel())
                store = partial(self._store, len(self._places))
                zero._grad_acc_hooks.append(parameter.register_post_accumulate_grad_hook(store))
                self._places.append(place.view(parameter.shape))
        # Indices of the parameters that have no gradient in this step yet.
        self._missing = set(range(len(self._places)))
        zero.overlapping_partition_gradients_reduce_epilogue = self.reduce
        zero.reduce_gradients = lambda pipeline_parallel=False: self.reduce()

    def _store(self, index: int, parameter: nn.Parameter) -> None:
        """Copy a new gradient to its place, or add it if the step has had micro-batches before."""
        place, gradient = self._places[index], parameter.grad
        assert gradient is not None, "autograd calls this after it has set the gradient"
        if index in self._missing:
            self._missing.remove(index)
            place.copy_(gradient)
        else:
            place.add_(gradient)
        # The row has the gradient: without this, autograd would add to the old one.
        parameter.grad = None

    @torch.no_grad()
    def reduce(self) -> None:
        """Average this rank's partitions over all ranks after the last micro-batch. Collective."""
        if not self.zero.is_gradient_accumulation_boundary():
            return
        # A parameter without a gradient counts as zero, as under DeepSpeed, and not as its last
        # gradient.
        for index in self._missing:
            self._places[index].zero_()
        self._missing = set(range(len(self._places)))
        if len(self._sources[0]) > 1:
            with CLOCK.waiting():
                self._average()

    def _average(self) -> None:
        dist.barrier(group=self.group)  # all ranks have written their gradients
        size = _CHUNK * torch.get_num_threads()
        # Sums are in float32 and in the order of ranks, whichever rank computes them.
        scratch = torch.empty(size, dtype=torch.float32)
        for own, sources in zip(self.partitions, self._sources, strict=True):
            for mean, *pieces in zip(
                own.split(size), *(source.split(size) for source in sources), strict=True
            ):
                total = scratch[: mean.numel()].copy_(pieces[0])
                for piece in pieces[1:]:
                    total += piece
                mean.copy_(total.div_(len(sources)))


class SharedGather(WeightGather):
    """A gather of weights through the ranks' rows.

    places: for each rank and each of the two alternate gathers, by parameter group, where the rank
    writes its partition. With two, one barrier per gather is enough: a rank that starts a gather has
    completed the one before, for which every rank had read what was gathered earlier.
    """

    def __init__(self, zero, places: Sequence[Sequence[Sequence[Tensor]]]) -> None:
        super().__init__(zero)
        self.group, self._places, self._turn = zero.dp_process_group, places, 0
        self._rank = dist.get_rank(group=self.group)

    def start(self) -> None:
        self.wait()
        self._turn = 1 - self._turn
        own = self._places[self._rank][self._turn]
        for place, weights in zip(own, own_weights(self.zero), strict=True):
            place.copy_(weights)
        work = dist.barrier(group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        self._under_way.append(work)

    @torch.no_grad()
    def wait(self) -> None:
        if not self._under_way:
            return
        with CLOCK.waiting():
            super().wait()
            for rank, places in enumerate(self._places):
                if rank != self._rank:
                    wholes = self.zero.parallel_partitioned_bit16_groups
                    for partitions, place in zip(wholes, places[self._turn], strict=True):
                        partitions[rank].copy_(place)


def share_memory(zero) -> tuple[FlatGradients, WeightGather]:
    """Exchange the gradients and weights of `zero` through shared memory. Collective.

    Raises:
        OSError: on every rank, if one of them cannot map the rows of all.
    """
    group = zero.dp_process_group
    num_ranks = dist.get_world_size(group=group)
    wholes: list[Tensor] = zero.bit16_groups_flat
    sizes = [(flat.numel(), zero.gradient_accumulation_dtype) for flat in wholes]
    if num_ranks == 1:
        return FlatGradients(zero, [_split(None, sizes)]), WeightGather(zero)
    for _turn in range(2):
        sizes += [(flat.numel() // num_ranks, flat.dtype) for flat in wholes]
    rows = [_split(row, sizes) for row in map_rows(_offsets(sizes)[-1], group)]
    n = len(wholes)
    gradients = FlatGradients(zero, [row[:n] for row in rows])
    return gradients, SharedGather(zero, [(row[n : 2 * n], row[2 * n :]) for row in rows])


def _offsets(sizes: Sequence[Size]) -> list[int]:
    """Return where each tensor begins in a row, in bytes, and the size of the row."""
    padded = [-(-n * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT for n, dtype in sizes]
    return list(accumulate(padded, initial=0))


def _split(row: Tensor | None, sizes: Sequence[Size]) -> list[Tensor]:
    """Return views of a row, uint8 [nbytes]; None: of new memory."""
    offsets = _offsets(sizes)
    if row is None:
        row = torch.zeros(offsets[-1], dtype=torch.uint8)
    return [
        row.narrow(0, start, n * dtype.itemsize).view(dtype)
        for start, (n, dtype) in zip(offsets, sizes, strict=False)
    ]


def map_rows(nbytes: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Map a row of zeros of every rank of `group`, each uint8 [nbytes]. Collective.

    The memory has no name in a file system: it is free once no process maps it, however they end.

    Raises:
        OSError: on every rank, if one of them cannot reserve its row or map another's.
    """
    files: list[int] = []

    def reserve() -> tuple[int, int, str]:
        name = f"cogfast-{secrets.token_hex(16)}"
        files.append(os.memfd_create(name))
        # Memory is reserved: otherwise a machine without memory would end the process at its first write.
        os.posix_fallocate(files[0], 0, nbytes)
        return os.getpid(), files[0], name

    try:
        addresses = _on_all_ranks(reserve, group)
        rows: list[Tensor] = []
        _on_all_ranks(lambda: rows.extend(_map_row(nbytes, *a) for a in addresses), group)
    finally:
        for file in files:
            os.close(file)
    return rows


def _map_row(nbytes: int, process: int, file: int, name: str) -> Tensor:
    path = f"/proc/{process}/fd/{file}"
    # On another machine this path does not exist, or is another program's file.
    if not os.path.lexists(path) or os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError("the ranks are on several machines or in several containers")
    opened = os.open(path, os.O_RDWR)
    try:
        return torch.frombuffer(mmap.mmap(opened, nbytes), dtype=torch.uint8)
    finally:
        # A mapping outlives the file that it was made from.
        os.close(opened)


def _on_all_ranks(make: Callable[[], T], group: dist.ProcessGroup) -> list[T]:
    """Return the results of every rank's `make`. OSError on all ranks if it fails on one."""
    try:
        answer = make(), ""
    except OSError as error:
        answer = None, str(error)
    answers: list = [None] * dist.get_world_size(group=group)
    # This is a barrier, too: no rank maps a row before its owner has reserved it.
    dist.all_gather_object(answers, answer, group=group)
    for rank, (_, problem) in enumerate(answers):
        if problem:
            raise OSError(f"rank {rank}: {problem}")
    return [result for result, _ in answers]

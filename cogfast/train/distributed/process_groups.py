"""The processes of a run: who we are, how many of us load data, and how we agree to stop.

torchrun starts the processes; without it there is one. They form a mesh of two axes: the
`tensor_size` ranks that follow each other hold one model together and work on the same samples, and
each such group has samples of its own. Rank = data_rank * tensor_size + tensor_rank, so that a model
stays on one machine. NCCL carries tensors between GPUs, gloo between CPUs, and gloo groups of their
own carry decisions, so that agreeing never waits for a GPU.
"""

from __future__ import annotations

import atexit
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cogfast.train.distributed.process_watch import ProcessWatch, watch_processes
from cogfast.train.distributed.tensor_parallel import TensorParallelGroup
from cogfast.train.run.stop_signals import StopSignals, name_of

logger = logging.getLogger(__name__)

_TENSOR_TIMEOUT = timedelta(minutes=30)
# Ranks without a video to sample wait for those that have one. A rank that dies is torchrun's.
_DECISION_TIMEOUT = timedelta(hours=12)


T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another rank failed, and says there why."""


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """This process's place. data_rank of data_size groups read different slots of the batch.

    control: of all ranks, for decisions. tensor: the ranks that share our model, model_control the
    same ones for decisions, data: those that have our part of other models; None: nobody, nobody,
    and all ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None
    is_owner: bool  # whether we made the default group, and so end it
    watch: ProcessWatch | None = None
    tensor: TensorParallelGroup | None = None
    model_control: dist.ProcessGroup | None = None
    data: dist.ProcessGroup | None = None

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor is None else self.tensor.size

    @property
    def tensor_rank(self) -> int:
        return 0 if self.tensor is None else self.tensor.rank

    @property
    def data_rank(self) -> int:
        return self.rank // self.tensor_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.tensor_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_model(self) -> bool:
        """Whether we read and write files for the ranks that share our model."""
        return self.tensor_rank == 0

    @property
    def first_of_model(self) -> int:
        return self.rank - self.tensor_rank

    def mean(self, value: Tensor) -> Tensor:
        """The mean of `value` over the data-parallel ranks, on the device."""
        if self.data_size > 1:
            value = value.clone()
            dist.all_reduce(value, group=self.data)
            value /= self.data_size
        return value

    def same_in_model(self, value: Tensor) -> Tensor:
        """The first's `value` on all ranks that share our model: what each computes for itself may
        differ in its last bit, and what they hold in common would drift apart."""
        if self.tensor is not None:
            value = value.contiguous()
            dist.broadcast(value, self.first_of_model, group=self.tensor.process_group)
        return value

    def broadcast_in_model(self, value: object) -> object:
        """The first's `value` on all ranks that share our model."""
        if self.tensor is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, self.first_of_model, group=self.model_control)
        return box[0]

    def gather(self, value: object) -> list:
        """Every rank's `value`, in order of rank, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list = [None] * self.world_size
        dist.all_gather_object(out, value, group=self.control)
        return out

    def broadcast(self, value: object) -> object:
        """Rank 0's `value` on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def agree(self, error: BaseException | None) -> None:
        """Raise this rank's `error`, or that another rank has one, on every rank at the same place.

        Whatever may fail on one rank alone goes through here before the next collective, so that
        nobody waits for a rank that is gone.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise OtherRankError(f"rank {rank} failed: {text}")

    def with_own_control(self) -> ProcessGroups:
        """The same ranks with a control group of its own, for a thread that agrees by itself."""
        if self.control is None:
            return self
        group = dist.new_group(backend="gloo", timeout=_DECISION_TIMEOUT)
        return dataclasses.replace(self, control=group)

    def on_main(self, make: Callable[[], T]) -> T:
        """What `make` returns on rank 0, on every rank; its error ends all of them."""
        value, error = None, None
        if self.is_main:
            try:
                value = make()
            except Exception as caught:
                error = caught
        self.agree(error)
        return self.broadcast(value)

    def close(self) -> None:
        """Leave together, if we joined: a gloo rank that leaves early makes the others fail.

        A lone process keeps its group to the end, for the next run in it: DeepSpeed remembers it.
        """
        if self.is_owner and self.world_size > 1:
            dist.barrier(group=self.control)
            if self.watch is not None:
                self.watch.stop()
            dist.destroy_process_group()


def start_processes(tensor_size: int = 1) -> ProcessGroups:
    """Join the processes that torchrun started, or stand alone; DeepSpeed finds the group made.

    tensor_size: how many ranks share a model; it divides their number.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            raise ValueError(
                f"this machine has {num_gpus} GPUs, but torchrun started a process with "
                f"LOCAL_RANK={local_rank}; use --nproc_per_node={num_gpus}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    is_owner = not dist.is_initialized()
    if is_owner:
        for key, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
            os.environ.setdefault(key, str(value))
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore() if world_size == 1 else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=_TENSOR_TIMEOUT
        )
        if world_size == 1:
            atexit.register(_end_lone_process)
    control = None
    if world_size > 1:
        control = dist.new_group(backend="gloo", timeout=_DECISION_TIMEOUT)
    watch = watch_processes(rank, world_size, control) if is_owner else None
    groups = ProcessGroups(rank, world_size, local_rank, device, control, is_owner, watch)
    return groups if tensor_size == 1 else _with_shared_models(groups, tensor_size)


def _with_shared_models(groups: ProcessGroups, tensor_size: int) -> ProcessGroups:
    assert groups.world_size % tensor_size == 0, f"{groups.world_size} ranks, {tensor_size=}"
    ranks = range(groups.world_size)
    models = [list(ranks[i : i + tensor_size]) for i in ranks[::tensor_size]]
    columns = [list(ranks[i::tensor_size]) for i in range(tensor_size)]
    split = partial(dist.new_subgroups_by_enumeration, timeout=_TENSOR_TIMEOUT)
    model, _ = split(models)
    data, _ = split(columns)
    control, _ = dist.new_subgroups_by_enumeration(
        models, timeout=_DECISION_TIMEOUT, backend="gloo"
    )
    tensor = TensorParallelGroup(groups.rank % tensor_size, tensor_size, model)
    return dataclasses.replace(groups, tensor=tensor, model_control=control, data=data)


def _end_lone_process() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class StopRequest:
    """SIGINT, SIGTERM, SIGHUP or SIGUSR1 on any rank stops every rank at the same step boundary; so
    does the end of `max_hours`, counted from the start of the process.

    Within `with` it listens, which starts on all ranks together. A second SIGINT ends the process at once; hint: what is to be
    written then. Each step starts a reduction of "was I asked to stop?" and reads the one of the
    step before, which has long arrived: nobody waits, and all ranks read the same answer.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        max_hours: float | None = None,
        hint: Callable[[], str] = lambda: "",
    ) -> None:
        import psutil

        self.groups, self.max_hours, self.hint = groups, max_hours, hint
        self.deadline = math.inf
        if max_hours is not None:
            self.deadline = psutil.Process().create_time() + 3600 * max_hours
        self._signals = StopSignals(self._last_line, announce=self._announce)
        self.is_stopping = False  # whether all ranks have agreed
        self._pending: tuple[dist.Work, Tensor] | None = None

    def __enter__(self) -> StopRequest:
        # A rank that is still starting ends at a signal: none may be listening here already.
        self.groups.gather(None)
        self._signals.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._signals.__exit__(*exc_info)

    def finish(self) -> None:
        """Complete the reduction under way, before the ranks part."""
        if self._pending is not None:
            self._pending[0].wait()
        self._pending = None

    def _announce(self, number: int) -> None:
        logger.info(
            "%s: the run saves a checkpoint after this step and ends; a second Ctrl-C ends it at once",
            name_of(number),
        )

    def _last_line(self, reason: str) -> str:
        return f"cogfast: {reason}; {self.hint()}" if self.groups.is_main else ""

    @property
    def reason(self) -> str:
        """What asked the ranks to stop."""
        if self._signals.received:
            return name_of(self._signals.received[0])
        return f"args.max_hours={self.max_hours:g}" if self.is_asked else "a signal to another rank"

    @property
    def is_asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self._signals.received) or time.time() >= self.deadline

    def is_agreed(self) -> bool:
        """Whether all ranks stop now; to be called once per step by every rank."""
        if self.groups.world_size == 1:
            self.is_stopping = self.is_asked
            return self.is_stopping
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            self.is_stopping = bool(flag.item())  # sync: none, a CPU tensor
        flag = torch.tensor([int(self.is_asked)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.groups.control, async_op=True)
        self._pending = (work, flag)
        return self.is_stopping


class ModelParallelUnit:
    """The names are DeepSpeed's; groups: with a tensor axis."""

    def __init__(self, groups: ProcessGroups) -> None:
        assert groups.tensor is not None, "every rank has a model of its own"
        self.groups = groups

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self.groups.data)

    def get_data_parallel_world_size(self) -> int:
        return self.groups.data_size

    def get_data_parallel_rank(self) -> int:
        return self.groups.data_rank

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups.tensor.process_group

    def get_model_parallel_world_size(self) -> int:
        return self.groups.tensor_size

    def get_model_parallel_rank(self) -> int:
        return self.groups.tensor_rank

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank

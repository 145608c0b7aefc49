"""The processes of a run: who we are, how many of us load data, and how we agree to stop.

torchrun starts the processes; without it there is one. NCCL carries tensors between GPUs, gloo
between CPUs, and a second gloo group carries decisions, so that agreeing never waits for a GPU.
"""

from __future__ import annotations

import atexit
import os
import signal
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """This process's place. data_rank of data_size ranks read different slots of the batch."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None
    is_owner: bool  # whether we made the default group, and so end it

    @property
    def data_rank(self) -> int:
        return self.rank

    @property
    def data_size(self) -> int:
        return self.world_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def mean(self, value: Tensor) -> Tensor:
        """The mean of `value` over the data-parallel ranks, on the device."""
        if self.data_size > 1:
            value = value.clone()
            dist.all_reduce(value)
            value /= self.data_size
        return value

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

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(group=self.control)

    def close(self) -> None:
        """Leave together, if we joined: a gloo rank that leaves early makes the others fail.

        A lone process keeps its group to the end, for the next run in it: DeepSpeed remembers it.
        """
        if self.is_owner and self.world_size > 1:
            dist.barrier()
            dist.destroy_process_group()


def start_processes(timeout_minutes: float = 30.0) -> ProcessGroups:
    """Join the processes that torchrun started, or stand alone; DeepSpeed finds the group made."""
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    timeout = timedelta(minutes=timeout_minutes)
    is_owner = not dist.is_initialized()
    if is_owner:
        for key, value in (("RANK", rank), ("WORLD_SIZE", world_size), ("LOCAL_RANK", local_rank)):
            os.environ.setdefault(key, str(value))
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore() if world_size == 1 else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        if world_size == 1:
            atexit.register(_end_lone_process)
    control = dist.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
    return ProcessGroups(rank, world_size, local_rank, device, control, is_owner)


def _end_lone_process() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class StopRequest:
    """SIGTERM or SIGUSR1 on any rank stops every rank at the same step boundary.

    Each step starts a reduction of "was I told to stop?" and reads the one of the step before,
    which has long arrived: nobody waits, and all ranks read the same answer.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self.groups = groups
        self.is_asked = False
        self._pending: tuple[dist.Work, Tensor] | None = None
        self._before = {
            number: signal.signal(number, self._handle)
            for number in (signal.SIGTERM, signal.SIGUSR1)
        }

    def _handle(self, number: int, frame: object) -> None:
        self.is_asked = True

    def is_agreed(self) -> bool:
        """Whether all ranks stop now; to be called once per step by every rank."""
        if self.groups.world_size == 1:
            return self.is_asked
        agreed = False
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            agreed = bool(flag.item())  # a CPU tensor: no device is waited for
        flag = torch.tensor([int(self.is_asked)])
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.groups.control, async_op=True)
        self._pending = (work, flag)
        return agreed

    def close(self) -> None:
        """Finish the reduction under way and give the signals back."""
        if self._pending is not None:
            self._pending[0].wait()
            self._pending = None
        for number, handler in self._before.items():
            signal.signal(number, handler)

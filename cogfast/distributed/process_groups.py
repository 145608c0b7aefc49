"""Process groups of a run: ranks, their mesh, and agreement between ranks.

torchrun starts the processes; without it there is one. They form a mesh of three axes: consecutive
ranks work on the same samples, `tensor_size` with shards of the weights and `context_size` such groups
with shards of the rows, and the next ones work on different samples.
Rank = (data_rank * context_size + context_rank) * tensor_size + tensor_rank, so that the ranks that
talk most are on one machine.
Tensors use NCCL between GPUs and gloo between CPUs. Decisions use separate gloo groups, so that they
never wait for a GPU.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cogfast.distributed.lost_ranks import (
    Heartbeat,
    UnsharedError,
    is_lost_connection,
    join_store,
    meet,
)
from cogfast.distributed.stop_signals import StopSignals, signal_name
from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.kernels import torch_library

logger = logging.getLogger(__name__)

# Long, because ranks without a video to sample wait for those that have one. For a rank that dies or
# stops they do not wait this long (lost_ranks.py).
_DECISION_TIMEOUT = timedelta(hours=12)
_VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3  # malloc.h
_LARGEST_KEPT = 256 * 2**20  # larger tensors go back to the system when they are freed
_MOST_KEPT = 2**31 - 1  # an int's maximum
# How long a rank that failed in work with collectives waits for the other ranks to fail like it.
_PATIENCE = timedelta(seconds=10)
_LONGEST_VALUE = 200  # characters, of a message
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}  # without torchrun
_SIGNAL = 2  # in the all-reduce of StopRequest: a signal to a rank; 1: max_hours


T = TypeVar("T")


class OtherRankError(RuntimeError):
    """Another rank failed. Its own output has the cause."""


class Ranks(Protocol):
    """The ranks that torchrun has started, of which only some train (extensions/elastic/ranks.py)."""

    @property
    def store(self) -> Any: ...

    def end_idle(self, num_training: int) -> None: ...


@dataclass(frozen=True, slots=True)
class ProcessGroups:
    """Position of this process in the mesh, and its process groups.

    Each of the data_size data-parallel ranks reads different slots of the batch.

    control: gloo group of all ranks, for decisions. tensor, context: the tensor- and the
    context-parallel group (None: this rank alone). model, model_control: the ranks that work on the
    same samples, for tensors, and their gloo group for decisions (None: this rank alone). replicas:
    the ranks with the same shard of the weights, between which ZeRO shards them (None: all ranks).
    heartbeat: notices ranks that stop. launch: with the idle ranks that end with this run.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    control: dist.ProcessGroup | None
    is_owner: bool  # whether this object created the default group, and so destroys it
    heartbeat: Heartbeat | None = None
    launch: Ranks | None = None
    tensor: ParallelGroup | None = None
    context: ParallelGroup | None = None
    model: ParallelGroup | None = None
    model_control: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    @property
    def tensor_size(self) -> int:
        return 1 if self.tensor is None else self.tensor.size

    @property
    def context_size(self) -> int:
        return 1 if self.context is None else self.context.size

    @property
    def model_size(self) -> int:
        """Number of ranks that work on the same samples."""
        return self.tensor_size * self.context_size

    @property
    def data_rank(self) -> int:
        return self.rank // self.model_size

    @property
    def data_size(self) -> int:
        return self.world_size // self.model_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_first_of_model(self) -> bool:
        """Whether this rank reads and writes files for the ranks that work on the same samples."""
        return self.rank == self.first_of_model

    @property
    def first_of_model(self) -> int:
        return self.data_rank * self.model_size

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum of `value` over all ranks, on the device."""
        if self.world_size > 1:
            # all_reduce works in place, and the caller keeps its tensor.
            value = value.clone()
            dist.all_reduce(value)
        return value

    def broadcast_tensor_in_model(self, value: Tensor) -> Tensor:
        """Return the first rank's tensor on every rank that works on the same samples.

        A value that each rank computes for itself may differ in its last bit, and replicated
        parameters would drift apart.
        """
        if self.model is not None:
            # Collectives need contiguous memory.
            value = value.contiguous()
            with _collective():
                dist.broadcast(value, self.first_of_model, group=self.model.process_group)
        return value

    def broadcast_in_model(self, value: T) -> T:
        """Return the first rank's `value` on every rank that works on the same samples."""
        first, among = self.first_of_model, self.model_control
        return value if self.model is None else _broadcast(value, first, among)

    def gather(self, value: object) -> list:
        """Return every rank's `value`, in order of rank, on every rank."""
        if self.world_size == 1:
            return [value]
        out: list = [None] * self.world_size
        with _collective():
            dist.all_gather_object(out, value, group=self.control)
        return out

    def decide(self, flag: bool) -> bool:
        """Return whether `flag` is true on any rank, the same on every rank. Collective.

        A rank's own clock, files or signals must not decide whether it joins collectives.
        """
        return any(self.gather(flag))

    def broadcast(self, value: T) -> T:
        """Return rank 0's `value` on every rank."""
        return value if self.world_size == 1 else _broadcast(value, 0, self.control)

    def agree(self, error: BaseException | None) -> None:
        """Raise this rank's `error`, or OtherRankError if another rank has one. Collective.

        Call it after anything that may fail on one rank alone, before the next collective. Otherwise
        the other ranks would wait for a rank that is gone.
        """
        texts = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text is not None:
                raise OtherRankError(f"rank {rank} failed: {text}")

    def on_all(self, make: Callable[[], T], among: dist.ProcessGroup | None = None) -> T:
        """Run `make` on every rank and return its result. An error on one rank is raised on all.

        among: as for `together`, if `make` has collectives.
        """
        value, error = attempt(lambda: self.together(make, among))
        self.agree(error)
        return value

    def together(self, make: Callable[[], T], among: dist.ProcessGroup | None) -> T:
        """Run `make`, which has collectives with the ranks `among`, and return its result.

        If this rank fails in it and the others do not, they wait for it for ever, so an UnsharedError
        ends the run. If all of them fail alike, such as out of memory, each raises its own error and
        can continue. among: a group for decisions; None: this rank alone.
        """
        value, error = attempt(make)
        if among is not None and not (error is not None and is_lost_connection(error)):
            with _collective():
                work = dist.all_reduce(torch.zeros(1), group=among, async_op=True)
                assert work is not None, "an asynchronous collective returns its work"
                try:
                    work.wait(timedelta() if error is None else _PATIENCE)  # 0: no limit of its own
                except RuntimeError:
                    if error is None:
                        raise
                    text = f"rank {self.rank} failed in work that ranks do together, so the run cannot continue"
                    raise UnsharedError(f"{text}: {type(error).__name__}: {error}") from error
        if error is not None:
            raise error
        return value

    def with_own_control(self) -> ProcessGroups:
        """Return these groups with a new control group, for use in a thread of its own."""
        if self.control is None:
            return self
        # Two threads must not mix their collectives in one group.
        return replace(self, control=_decision_group())

    def without_models(self) -> ProcessGroups:
        """Return these groups as if every rank worked on samples of its own."""
        return replace(
            self, tensor=None, context=None, model=None, model_control=None, replicas=None
        )

    def on_main(self, make: Callable[[], T]) -> T:
        """Run `make` on rank 0 and return its result on every rank. Its error ends all ranks."""
        value, error = attempt(make if self.is_main else lambda: None)
        # First agree: otherwise the other ranks would wait for a value that never comes.
        self.agree(error)
        return self.broadcast(value)

    def check_same(self, values: Mapping[str, object]) -> None:
        """Raise ValueError on all ranks unless `values`, of the configuration that each rank has read, are
        those of rank 0, but for folders of each machine. Collective."""
        first = self.broadcast(values)

        def compare() -> None:
            for key in sorted({*first, *values}):
                here, there = (repr(each.get(key)) for each in (values, first))
                if here != there and not key.endswith(".local_cache"):
                    # From where long values differ
                    start = max(0, len(os.path.commonprefix([here, there])) - _LONGEST_VALUE // 2)
                    here, there = (text[start:][:_LONGEST_VALUE] for text in (here, there))
                    text = f"{key}={here}, but {there} on rank 0; give all ranks the same files and words"
                    raise ValueError(text)

        self.on_all(compare)

    def close(self, ends_idle: bool = True) -> None:
        """Destroy the process groups if this object created them. ends_idle: for idle ranks the run is over,
        too (`Ranks`).

        A single process keeps its group for the next run in it, because DeepSpeed stores a reference.
        """
        if not self.is_owner:
            return
        if self.world_size > 1:
            # With gloo, a rank that leaves early makes the others fail.
            dist.barrier(group=self.control)
        if ends_idle and self.launch is not None:
            self.launch.end_idle(self.world_size)
        if self.heartbeat is not None:
            self.heartbeat.stop()
        if self.world_size > 1:
            dist.destroy_process_group()


def use_expandable_segments(device: int) -> None:
    """Let PyTorch's allocator map memory where it needs it, unless the user has configured it.

    Memory between tensors is then not lost for larger ones. Call it before CUDA is initialized.
    """
    if {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # not Linux, or not NVIDIA's
        return
    found, handle = ctypes.c_int(), ctypes.c_int()
    driver.cuInit(0)
    driver.cuDeviceGet(ctypes.byref(handle), device)
    # Some virtual GPUs cannot do it.
    driver.cuDeviceGetAttribute(ctypes.byref(found), _VIRTUAL_MEMORY, handle)
    if found.value:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def keep_freed_memory() -> None:
    """Let malloc keep freed tensors up to 256 MiB for the next step, whose tensors are as large.

    glibc returns freed memory to the system by default. A training step then touches thousands of
    fresh pages, each a page fault that zeroes 4 KiB. Kept memory has gaps that larger tensors do not
    fit into: docs/diagnostics.md says how much more a process takes. Other C libraries are left as
    they are.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT)
        libc.mallopt(_M_TOP_PAD, 2**20)


def attempt(make: Callable[[], T]) -> tuple[Any, Exception | None]:
    """Return the result of `make`, or the error that it raises and that the ranks can share."""
    try:
        return make(), None
    except UnsharedError:
        raise
    except Exception as error:
        return None, error


def _broadcast(value: T, source: int, group: dist.ProcessGroup | None) -> T:
    box = [value]
    with _collective():
        dist.broadcast_object_list(box, source, group=group)
    return box[0]


@contextlib.contextmanager
def _collective() -> Iterator[None]:
    """Turn an error in a collective, which the other ranks have joined, into an UnsharedError."""
    try:
        yield
    except UnsharedError:
        raise
    except Exception as error:
        if is_lost_connection(error):
            raise
        text = f"{type(error).__name__}: {error}"
        raise UnsharedError(f"a collective failed on rank {dist.get_rank()}: {text}") from error


def start_processes(
    tensor_size: int = 1, context_size: int = 1, timeout_s: int = 1800, launch: Ranks | None = None
) -> ProcessGroups:
    """Create the process groups, of the ranks that torchrun started or of a single process.

    tensor_size, context_size: number of ranks that share the weights and the rows of a sample; their
    product must divide the world size. timeout_s: how long a collective on tensors waits for another
    rank. launch: if only some of the ranks that torchrun started train.
    """
    rank, world_size, local_rank = (int(os.environ.get(k, v)) for k, v in _ALONE.items())
    if torch.cuda.is_available():
        num_gpus = torch.cuda.device_count()
        if local_rank >= num_gpus:
            text = f"this machine has {num_gpus} GPUs, but torchrun started a process with LOCAL_RANK={local_rank}"
            raise ValueError(f"{text}; use --nproc_per_node={num_gpus}")
        if world_size == 1 < num_gpus and "TORCHELASTIC_RUN_ID" not in os.environ:
            text = "1 of %d GPUs is used, %d are idle; to use all: torchrun --standalone --nproc_per_node=%d "
            logger.info(text + "--no-python cogfast ...", num_gpus, num_gpus - 1, num_gpus)
        device = torch.device("cuda", local_rank)
        use_expandable_segments(local_rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        keep_freed_memory()
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
    timeout = timedelta(seconds=timeout_s)
    # DeepSpeed uses the default group if one exists.
    is_owner = not dist.is_initialized()
    if is_owner:
        # DeepSpeed reads these, and only torchrun sets them.
        for key, value in _ALONE.items():
            os.environ.setdefault(key, value)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if launch is not None:
            launch.store.set_timeout(timeout)
            store: dist.Store | None = dist.PrefixStore("training", launch.store)
        else:
            # One process needs no TCP store, whose port another run could have taken.
            store = dist.HashStore() if world_size == 1 else None
        if world_size > 1:
            joined = join_store(timeout) if launch is None else launch.store
            if text := meet(joined, world_size, timeout):
                raise OtherRankError(text)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout
        )
        if world_size == 1:
            # torch warns of a group that still exists at the end of the process.
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
    control = _decision_group() if world_size > 1 else None
    heartbeat = Heartbeat(rank) if world_size > 1 and is_owner else None
    place = rank, world_size, local_rank, device
    groups = ProcessGroups(*place, control, is_owner, heartbeat, launch)
    if device.type == "cpu":
        _take_cpu_kernels(groups)
    if tensor_size * context_size == 1:
        return groups
    return _with_shared_models(groups, tensor_size, context_size, timeout)


def _take_cpu_kernels(groups: ProcessGroups) -> None:
    """Compile the C++ kernels if they are missing, and use them on all ranks or on none.

    Ranks that round differently would let replicated weights drift apart.
    """
    reasons = [*filter(None, groups.gather(torch_library.compile_cpu_kernels()))]
    torch_library.HAS_CPU_KERNELS = not reasons
    if reasons and groups.is_main:
        text = "the C++ kernels are not used, so that a CPU runs PyTorch's ops, which take longer"
        logger.warning("%s: %s", text, reasons[0])


def _decision_group() -> dist.ProcessGroup:
    """Create a group of all ranks for decisions. Every rank must call it."""
    group = dist.new_group(backend="gloo", timeout=_DECISION_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def _with_shared_models(
    groups: ProcessGroups, tensor_size: int, context_size: int, timeout: timedelta
) -> ProcessGroups:
    size = tensor_size * context_size
    assert groups.world_size % size == 0, f"{groups.world_size} ranks, {size=}"
    ranks = list(range(groups.world_size))
    # Every rank creates every group, in this order: creating one is collective.
    split = partial(dist.new_subgroups_by_enumeration, timeout=timeout)

    def group_of(lists: list[list[int]]) -> ParallelGroup | None:
        if len(lists[0]) == 1:
            return None
        group, _ = split(lists)
        assert isinstance(group, dist.ProcessGroup), "every rank is in one of the groups"
        return ParallelGroup(dist.get_rank(group), len(lists[0]), group)

    models = [ranks[i : i + size] for i in ranks[::size]]
    tensor = group_of([ranks[i : i + tensor_size] for i in ranks[::tensor_size]])
    context = group_of([model[i::tensor_size] for model in models for i in range(tensor_size)])
    # With one axis, its group is that of the model.
    model = group_of(models) if tensor and context else tensor or context
    replicas, _ = split([ranks[i::tensor_size] for i in range(tensor_size)])
    control, _ = dist.new_subgroups_by_enumeration(models, _DECISION_TIMEOUT, backend="gloo")
    groups = replace(groups, tensor=tensor, context=context, model=model)
    return replace(groups, model_control=control, replicas=replicas)


class StopRequest(StopSignals):
    """Stops every rank at the same step boundary after a signal to any rank or after `max_hours`.

    The signals are SIGINT, SIGTERM, SIGHUP and SIGUSR1; `max_hours` counts from the start of the
    process. As a context manager it listens for them on all ranks. A second SIGINT ends the process
    at once, with `hint()` in its last line.

    Each step starts an asynchronous all-reduce of "was this rank asked to stop?" and reads the
    result of the step before, which is complete by then: no rank waits, and all read the same answer.
    """

    def __init__(
        self,
        groups: ProcessGroups,
        max_hours: float | None = None,
        hint: Callable[[], str] = lambda: "",
    ) -> None:
        import psutil

        super().__init__(self._last_line, announce=self._announce)
        self.groups, self.max_hours, self.hint = groups, max_hours, hint
        self.deadline = math.inf
        if max_hours is not None:
            self.deadline = psutil.Process().create_time() + 3600 * max_hours
        self.is_stopping = False  # whether all ranks have agreed
        self.is_by_signal = False  # and not because of max_hours
        self._pending: tuple[dist.Work, Tensor] | None = None

    def __enter__(self) -> StopRequest:
        # A signal ends a rank that is still starting, so no rank asks for a save before all are ready.
        self.groups.gather(None)
        super().__enter__()
        return self

    def finish(self) -> None:
        """Wait for the pending all-reduce. Call it before the groups are destroyed."""
        if self._pending is not None:
            self._pending[0].wait()
        self._pending = None

    def _announce(self, number: int) -> None:
        text = "%s: the run will save a checkpoint after this step and end; a second Ctrl-C ends it at once"
        logger.info(text, signal_name(number))

    def _last_line(self, reason: str) -> str:
        return f"cogfast: {reason}; {self.hint()}" if self.groups.is_main else ""

    @property
    def reason(self) -> str:
        """The signal or key that asked the ranks to stop."""
        if self.received:
            return signal_name(self.received[0])
        return f"args.max_hours={self.max_hours:g}" if self.is_asked else "a signal to another rank"

    @property
    def is_asked(self) -> bool:
        return bool(self.received) or time.time() >= self.deadline

    def is_agreed(self) -> bool:
        """Return whether all ranks stop now. Every rank calls it once per step."""
        if self.groups.world_size == 1:
            self.is_stopping, self.is_by_signal = self.is_asked, bool(self.received)
            return self.is_stopping
        if self._pending is not None:
            work, flag = self._pending
            work.wait()
            value = int(flag.item())  # sync: none, a CPU tensor
            self.is_stopping, self.is_by_signal = value > 0, value == _SIGNAL
        flag = torch.tensor([_SIGNAL if self.received else int(self.is_asked)])
        # MAX: one rank that was asked stops all.
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.groups.control, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        self._pending = (work, flag)
        return self.is_stopping


class ModelParallelUnit:
    """DeepSpeed's `mpu` interface over `groups`, which have a tensor-parallel group."""

    def __init__(self, groups: ProcessGroups) -> None:
        assert groups.tensor is not None and groups.replicas is not None, "no tensor parallelism"
        replicas, tensor = groups.replicas, groups.tensor.process_group
        self.get_data_parallel_group = lambda: replicas
        self.get_data_parallel_group_ranks = lambda: dist.get_process_group_ranks(replicas)
        self.get_data_parallel_world_size = replicas.size
        self.get_data_parallel_rank = replicas.rank
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: tensor
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = tensor.size
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = tensor.rank

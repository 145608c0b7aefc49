"""Find memory that a stream may still use when PyTorch's allocator gives it to another tensor.

The allocator hands freed memory out again in the order of the stream that allocated it. A tensor that
another stream uses must therefore call record_stream, or the first stream must wait for that use
before the tensor is freed. The order of streams is kept by a class of PyTorch's sanitizer (TORCH_CUDA_SANITIZER),
which itself forgets a tensor when it is freed.
"""

import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.cuda import _gpu_trace as trace
from torch.cuda._sanitizer import StreamSynchronizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import set_checkpoint_early_stop

_RECORD_STREAM = torch.ops.aten.record_stream.default
_FRAMES = 4  # of the stack of a use, in a report


class _Memory:
    """An allocation: its stream, streams that it has recorded, and its last use on each other one."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.recorded: set[int] = set()
        self.uses: dict[int, tuple[int, str]] = {}


class StreamCheck(TorchDispatchMode):
    """Watches all operations while it is entered; `problems` has a sentence for each fault.

    It does not see kernels of NCCL, whose tensors c10d itself keeps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.problems: set[str] = set()
        self.num_uses = 0  # on streams other than the one that allocated
        self._order = StreamSynchronizations()
        self._memory: dict[int, _Memory] = {}
        self._time = 0
        self._is_active = True
        # Recomputation that stops early raises an exception, during which PyTorch cannot report frees.
        self._no_early_stop = set_checkpoint_early_stop(False)
        self._no_early_stop.__enter__()
        torch._C._activate_gpu_trace()
        order = self._order
        trace.register_callback_for_event_creation(order.create_event)
        trace.register_callback_for_event_deletion(order.delete_event)
        trace.register_callback_for_event_record(order.record_state)
        trace.register_callback_for_event_wait(
            lambda event, stream: order.stream_wait_for_event(stream, event)
        )
        trace.register_callback_for_stream_creation(order.create_stream)
        trace.register_callback_for_device_synchronization(order.sync_all_streams)
        trace.register_callback_for_stream_synchronization(order.all_streams_wait_for_stream)
        trace.register_callback_for_event_synchronization(order.all_streams_wait_for_event)
        trace.register_callback_for_memory_allocation(self._allocate)
        trace.register_callback_for_memory_deallocation(self._free)

    def __exit__(self, *error: Any) -> None:
        self._is_active = False
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is _RECORD_STREAM:
            for place in _places(args[0]):
                if place in self._memory:
                    self._memory[place].recorded.add(_handle_of(args[1]))
            return func(*args, **given)
        out = func(*args, **given)
        stream = _current_stream()
        self._time += 1
        self._order.update_seq_num(stream, self._time)
        for place in _places((args, given, out)):
            memory = self._memory.get(place)
            if memory is not None and memory.stream != stream:
                self.num_uses += 1
                memory.uses[stream] = (self._time, f"{func} at {_where()}")
        return out

    def _allocate(self, place: int) -> None:
        self._memory[place] = _Memory(_current_stream())

    def _free(self, place: int) -> None:
        memory = self._memory.pop(place, None)
        if memory is None or not self._is_active:
            return
        for stream, (time, use) in memory.uses.items():
            is_over = self._order.is_ordered_after(memory.stream, time, stream)
            if stream not in memory.recorded and not is_over:
                self.problems.add(f"freed while another stream may still use it: {use}")


def _handle_of(stream: torch.Stream) -> int:
    known = {"device_index": stream.device_index, "device_type": stream.device_type}
    return torch.cuda.Stream(stream_id=stream.stream_id, **known).cuda_stream


def _current_stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _places(values: Any) -> Iterator[int]:
    """Yield the addresses of the allocations of all CUDA tensors in nested values."""
    for value in tree_leaves(values):
        if isinstance(value, Tensor) and value.is_cuda and value.layout == torch.strided:
            yield value.untyped_storage().data_ptr()


def _where() -> str:
    stack = [f for f in traceback.extract_stack() if "/torch/" not in f.filename][:-2]
    return " < ".join(f"{f.filename}:{f.lineno}" for f in reversed(stack[-_FRAMES:]))

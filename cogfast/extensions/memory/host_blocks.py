"""Frozen weights of the last blocks in pinned host memory, fetched one block ahead (args.offload_blocks).

The device has two slots, each for the linears' weights of one block. While a block computes, a second
stream copies the weights of the next one into the other slot: forward in the order of the blocks,
backward in reverse. The weights do not change, so that nothing is copied back. After a backward pass the
slots hold the first two offloaded blocks, after a forward pass the last two: neither pass begins with a
wait. With activation checkpointing the recomputation uses what its backward pass has fetched.

A fetch waits on the device for all work that was issued before it, which includes the last use of the
slot. On a CPU the same copies are made without streams.
"""

# pyright: reportIncompatibleMethodOverride=false
# torch declares backward(ctx, *grads); the function here names the one gradient that it gets.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cogfast.core.device_memory import host_buffer
from cogfast.distributed.tensor_parallel import ParallelLinear
from cogfast.extensions.memory.keys import MemoryKeys
from cogfast.extensions.memory.quantized_base import QuantizedWeight, base_linears, quantize_base
from cogfast.extensions.memory.side_stream import SideStream
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.model.weights.source import Target

NUM_SLOTS = 2
_ALIGNMENT = 512  # bytes, as PyTorch's allocator aligns


@dataclass(frozen=True, slots=True)
class _Place:
    """Place of a tensor of a block, `name` of `module`, in the bytes of its slot. like: on the meta device."""

    module: nn.Module
    name: str
    like: Tensor
    start: int

    def view(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of the slot's bytes [N]."""
        numbers = memory[self.start : self.start + self.like.nbytes]
        return numbers.view(self.like.dtype).view(self.like.shape)


@dataclass(slots=True)
class _Slot:
    """Device memory [N] for the weights of a block. holds: that block's number; -1: none yet."""

    memory: Tensor
    holds: int = -1
    filled: torch.Event | None = None  # after the last copy


class HostBlocks:
    """Holds the frozen linear weights of the last `num_offloaded` blocks of a transformer.

    The transformer is on the meta device, where this takes the weights from it; `allocate` follows.
    """

    def __init__(self, transformer: DiffusionTransformer, num_offloaded: int) -> None:
        self.num_blocks = len(transformer.blocks)
        self.first = self.num_blocks - num_offloaded
        assert 0 <= self.first < self.num_blocks, f"{num_offloaded} of {self.num_blocks} blocks"
        self._places: dict[int, list[_Place]] = {i: [] for i in range(self.first, self.num_blocks)}
        ends = dict.fromkeys(self._places, 0)
        for path, linear in base_linears(transformer):
            number = int(path.split(".")[1])
            if number < self.first:
                continue
            buffers = dict(linear.named_buffers(recurse=False))
            for name, tensor in {"weight": linear.weight, **buffers}.items():
                assert not tensor.requires_grad, f"{path} is trained"
                tensor = tensor.detach()
                self._places[number].append(_Place(linear, name, tensor, ends[number]))
                ends[number] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                # From now on plain attributes: neither parameters, which ZeRO would take, nor buffers.
                delattr(linear, name)
                setattr(linear, name, tensor)
        self._num_bytes, self._num_slots = max(ends.values()), min(NUM_SLOTS, num_offloaded)
        self._stored: dict[nn.Module, dict[str, Tensor]] = {}
        self._host: dict[int, Tensor] = {}
        self._slots: list[_Slot] = []

    @property
    def host_bytes(self) -> int:
        return len(self._places) * self._num_bytes

    @property
    def slot_bytes(self) -> int:
        return self._num_slots * self._num_bytes

    def allocate(self, device: torch.device) -> None:
        """Allocate slots and host memory, and bind the weights to the slots."""
        new = lambda: torch.empty(self._num_bytes, dtype=torch.uint8, device=device)
        self._slots = [_Slot(new()) for _ in range(self._num_slots)]
        self._side = SideStream(device)
        for number, places in self._places.items():
            slot = self._slot(number)
            host = self._host[number] = host_buffer(slot.memory)
            for place in places:
                setattr(place.module, place.name, place.view(slot.memory))
                self._stored.setdefault(place.module, {})[place.name] = place.view(host)

    def stored(self, module: nn.Module) -> dict[str, Tensor]:
        """Return {name: tensor} of a module in host memory, to be filled; {} if none is offloaded."""
        return self._stored.get(module, {})

    def around(self, calls: Iterable[BlockCall]) -> list[BlockCall]:
        """Return the calls of the blocks, each with its weights fetched before it."""
        return [partial(self._run, number, call) for number, call in enumerate(calls)]

    def _run(self, number: int, call: BlockCall, *inputs: Any) -> Tensor:
        self._use(number, number + 1)
        out = call(*inputs)
        return _UseInBackward.apply(out, self, number) if number >= self.first else out

    def _use(self, number: int, ahead: int) -> None:
        """Wait for the weights of a block, if it is offloaded, and start to fetch those of `ahead`."""
        if number >= self.first:
            self._fetch(number)
            self._side.wait(self._slot(number).filled)
        if self.first <= ahead < self.num_blocks:
            self._fetch(ahead)

    def _fetch(self, number: int) -> None:
        slot = self._slot(number)
        if slot.holds != number:
            # Not in place for autograd, which keeps views of this memory: before their backward pass the
            # block is fetched again.
            slot.filled = self._side.copy(slot.memory.data, self._host[number])
            slot.holds = number

    def _slot(self, number: int) -> _Slot:
        return self._slots[number % len(self._slots)]


def hold_base(transformer: DiffusionTransformer, args: MemoryKeys) -> None:
    """Apply args.quantize_base and args.offload_blocks to a transformer on the meta device."""
    if args.quantize_base != "none":
        quantize_base(transformer, args.quantize_base)
    if args.offload_blocks:
        transformer.runtime.source = HostBlocks(transformer, args.offload_blocks)
    linears = base_linears(transformer)
    is_held = lambda linear: "weight" not in dict(linear.named_parameters(recurse=False))
    held = {f"{path}.weight": linear.weight for path, linear in linears if is_held(linear)}
    transformer.runtime.held = held


def allocate_base(transformer: DiffusionTransformer, device: torch.device) -> dict[str, Target]:
    """Allocate what `hold_base` has taken to the host, once the rest of the transformer is on the device.

    Returns {name: target} of all weights that are no parameters, to be loaded or initialized.
    """
    source, held = transformer.runtime.source, dict[str, Target]()
    if isinstance(source, HostBlocks):
        source.allocate(device)
    for path, linear in base_linears(transformer):
        # "weight" and, of a weight of 8 bits, "scale", on the device or in host memory
        stored, group = dict(linear.named_buffers(recurse=False)), None
        if isinstance(source, HostBlocks):
            stored |= source.stored(linear)
        if isinstance(linear, ParallelLinear) and linear.shards["weight"].dim == 1:
            group = linear.group
        if "scale" in stored:
            target = QuantizedWeight(stored["weight"], stored["scale"], device, group)
            held[f"{path}.weight"] = target
        elif "weight" in stored:
            held[f"{path}.weight"] = stored["weight"]
    return held


class _UseInBackward(torch.autograd.Function):
    """Identity of a block's output whose backward fetches the block's weights, before it needs them."""

    @staticmethod
    def forward(ctx, out: Tensor, blocks: HostBlocks, number: int) -> Tensor:
        ctx.blocks, ctx.number = blocks, number
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.blocks._use(ctx.number, ctx.number - 1)
        return grad, None, None

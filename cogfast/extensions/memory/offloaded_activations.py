"""Host memory for what checkpointed blocks keep from their forward to their backward pass.

While a block computes, a second stream copies what it keeps (activation_checkpointing.py) to pinned
host memory, and in the backward pass back to the device while the block after it computes. The device
then holds what two blocks keep, however many there are. The last two blocks keep theirs on the device,
since they need it first. Only bytes move: results are those without offloading, bit for bit.

On a CPU the same copies are made, without streams and pinned memory.
"""

from __future__ import annotations

import weakref
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from cogfast.core.device_memory import host_buffer
from cogfast.extensions.memory.side_stream import SideStream
from cogfast.model.transformer import BlockCall, DiffusionTransformer
from cogfast.train.activation_checkpointing import (
    LADDER,
    Policy,
    checkpoint_options,
    kept_contexts,
)

NUM_RESIDENT = 2  # last blocks, whose activations stay on the device
# Blocks whose copies may still run when the next one begins. Until then their tensors stay alive.
_NUM_IN_FLIGHT = 1


class OffloadedActivations:
    """Moves what the blocks of a transformer keep. One object serves all blocks of a run."""

    def __init__(self, num_blocks: int, device: torch.device) -> None:
        self.num_blocks, self.device = num_blocks, device
        self.side = SideStream(device)
        # Host buffers that are not in use, by the position of their tensors in a block.
        self.free: dict[int, list[Tensor]] = defaultdict(list)
        self._last: BlockTensors | None = None  # of the block that ran last
        self._in_flight: deque[BlockTensors] = deque()

    def begin_block(self, number: int, num_rows: int) -> BlockTensors:
        """Return the place for what block `number` keeps for num_rows (B S) rows."""
        while len(self._in_flight) > _NUM_IN_FLIGHT:
            # The copies may still read the block's tensors: later work on their memory waits.
            self._in_flight.popleft().release()
        is_resident = number >= self.num_blocks - NUM_RESIDENT
        previous = None if number == 0 else self._last
        self._last = block = BlockTensors(self, previous, None if is_resident else num_rows)
        self._in_flight.append(block)
        return block

    def take(self, position: int, like: Tensor) -> Tensor:
        """Return a host buffer of at least the bytes of `like`."""
        if free := self.free[position]:
            if (buffer := free.pop()).nbytes >= like.nbytes:
                return buffer
            if self.side.stream is not None:
                # A larger bucket of videos replaces the buffers of a smaller one, which copies may still use.
                self.side.stream.synchronize()  # sync: once for each size and buffer of a block
        return host_buffer(like)

    def copy(self, target: Tensor, source: Tensor) -> torch.Event | None:
        # Modes that watch a step would read the copy too early.
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            return self.side.copy(target, source)


class BlockTensors:
    """The tensors that one call of a block keeps.

    least_numel: smaller tensors stay on the device; None: all do.
    """

    def __init__(
        self, owner: OffloadedActivations, previous: BlockTensors | None, least_numel: int | None
    ) -> None:
        self.owner, self.previous, self.least_numel = owner, previous, least_numel
        # Autograd owns the copies: they are freed with the graph, also if there is no backward pass.
        self.copies: list[weakref.ref[HostCopy]] = []
        self.sources: list[Tensor] = []
        self.event: torch.Event | None = None  # after the last copy to the host

    def pack(self, x: Tensor) -> Tensor | HostCopy:
        """Start to copy a tensor to the host."""
        x = x.detach()
        if self.least_numel is None or x.numel() < self.least_numel:
            return x
        copy = HostCopy(self, len(self.copies), x)
        self.event = self.owner.copy(copy.host, x)
        self.sources.append(x)
        self.copies.append(weakref.ref(copy))
        return copy

    def unpack(self, packed: Tensor | HostCopy) -> Tensor:
        """Return a packed tensor on the device, and start to fetch those of the block before."""
        tensor = packed if isinstance(packed, Tensor) else packed.on_device()
        if self.previous is not None:
            self.previous.fetch()
        if isinstance(packed, HostCopy):
            self.owner.side.wait(packed.event)
        return tensor

    def fetch(self) -> None:
        """Start to copy all tensors back to the device, once."""
        copies, self.copies = self.copies, []
        for reference in copies:
            if (copy := reference()) is not None:
                copy.fetch()

    def release(self) -> None:
        """Let go of the device's tensors when their copies are complete."""
        self.owner.side.wait(self.event)
        self.sources.clear()


class HostCopy:
    """A tensor of a block in a host buffer, and on the device once it is fetched."""

    def __init__(self, block: BlockTensors, position: int, x: Tensor) -> None:
        self.block, self.position = block, position
        self.buffer = block.owner.take(position, x)
        # Strides stay: what a kernel computes may depend on them.
        strides = torch.empty_like(x, device="meta").stride()
        numbers = self.buffer.view(-1).view(torch.uint8)[: x.nbytes].view(x.dtype)
        self.host = numbers.as_strided(x.shape, strides)
        self.tensor: Tensor | None = None
        self.event: torch.Event | None = None  # after the copy to the device

    def fetch(self) -> None:
        owner = self.block.owner
        self.tensor = torch.empty_like(self.host, device=owner.device)
        self.event = owner.copy(self.tensor, self.host)

    def on_device(self) -> Tensor:
        if self.tensor is None:
            self.fetch()
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "fetched above"
        return tensor

    def __del__(self) -> None:
        owner = self.block.owner
        if self.tensor is not None and owner.side.stream is not None:
            # Fetched but not used: the copy may still write to the memory.
            self.tensor.record_stream(owner.side.stream)
        # Later copies into the buffer follow those out of it on the same stream.
        owner.free[self.position].append(self.buffer)


def apply_offloaded(
    transformer: DiffusionTransformer,
    policies: Sequence[Policy],
    offload: OffloadedActivations,
    is_compiled: bool = False,
) -> None:
    """Run each block under its policy in training mode, and move what it keeps to host memory.

    No policy may be `none`, and is_compiled allows `full` alone.
    """
    assert set(policies) <= {*(("full",) if is_compiled else LADDER[:-1])}, policies
    keep_rng = transformer.uses_dropout

    def offloading(block: nn.Module, policy: Policy, number: int) -> BlockCall:
        def call(hidden: Tensor, *others: Any) -> Tensor:
            kept = offload.begin_block(number, hidden.shape[:2].numel())
            packing = kept.pack, kept.unpack
            options = checkpoint_options(policy, keep_rng, kept_contexts, *packing)
            with saved_tensors_hooks(*packing):  # the checkpoint saves the inputs by them
                return checkpoint(block, hidden, *others, **options)

        return call

    pairs = zip(transformer.blocks, policies, strict=True)
    transformer.use_calls([offloading(*pair, i) for i, pair in enumerate(pairs)])


def offload_activations(
    transformer: DiffusionTransformer,
    policies: Sequence[Policy],
    device: torch.device,
    is_compiled: bool,
) -> None:
    """Run each block under its policy, and move what it keeps to host memory (args.offload_activations)."""
    apply_offloaded(transformer, policies, OffloadedActivations(len(policies), device), is_compiled)

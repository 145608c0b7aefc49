"""Costs of a model, from one run of its parts on the meta device: memory, FLOPs, bytes moved and sent.

One block runs forward and backward under its policy of activation checkpointing and its layout, and so
do the parts before and after the blocks. The ops are those of a GPU. Parameters get no gradients here:
an event says when one is complete, since where it goes depends on ZeRO (zero.py).
"""

# pyright: reportIncompatibleMethodOverride=false
# torch declares backward(ctx, *grads); the functions here name the one gradient that they get.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from cogfast.core.live_bytes import LiveBytes
from cogfast.distributed.context_parallel import ContextParallelRows
from cogfast.distributed.sequence_parallel import SequenceParallelBlock
from cogfast.extensions.memory.quantized_base import Linear
from cogfast.extensions.sparse.attention import Blocks
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.activation_checkpointing import Policy, block_call
from cogfast.train.video_size import LatentSize
from cogfast.train.watchers.model_flops import block_inputs, flop_formulas

Kind = Literal["matmul", "fp8", "attention", "attention backward", "memory", "sent"]

_META = torch.device("meta")
_ALLOCATOR_BLOCK = 512  # bytes; PyTorch's allocator rounds sizes up to it
_ROWS_AT_ONCE = 128  # rows of a tile of attention's backward pass
_ops, _sends, _aten = torch.ops.cogfast, torch.ops._c10d_functional, torch.ops.aten
_ATTENTION = _aten._scaled_dot_product_flash_attention
_ATTENTION_BACKWARD = _aten._scaled_dot_product_flash_attention_backward
_SPARSE, _SPARSE_BACKWARD = _ops.sparse_attention, _ops.sparse_attention_backward
_KINDS: dict[Any, Kind] = {
    _ATTENTION: "attention",
    _SPARSE: "attention",
    _ATTENTION_BACKWARD: "attention backward",
    _SPARSE_BACKWARD: "attention backward",
}
_INT8 = (_ops.int8_linear, _ops.int8_linear_backward)
_FP8 = (_ops.fp8_linear, _ops.fp8_linear_backward)


class Op(NamedTuple):
    """FLOPs of an op, and the bytes that it reads and writes, or sends to other GPUs."""

    kind: Kind
    flops: float
    num_bytes: float


Work = Counter[Op]


@dataclass(frozen=True, slots=True)
class Event:
    """A complete gradient of `numel` elements (0: the end of the backward pass).

    peak: the most bytes since the event before. live: those at the event, without the gradient. Both are
    above the bytes in use before the part's forward pass.
    """

    peak: int
    live: int
    numel: int


@dataclass(frozen=True, slots=True)
class Trace:
    """kept: bytes that a part adds from its forward to its backward pass. backward: empty without one."""

    kept: int
    backward: tuple[Event, ...]
    forward_work: Work
    backward_work: Work


@dataclass(frozen=True, slots=True)
class Edges:
    """The parts before and after the blocks. embedded: bytes in use when the first block begins. head: output
    layer and loss, up to the gradient of the last block's output. embed: from the first block's input on."""

    embedded: int
    head: tuple[Event, ...]
    embed: tuple[Event, ...]
    work: Work


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _nbytes(*values: Any) -> int:
    """Return the bytes of tensors in (nested) arguments; an expanded one is read as it is stored."""
    return sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in _tensors(values))


def scratch(op: Any, args: Sequence[Any]) -> int:
    """Return the bytes that an op allocates inside."""
    packet = op._overloadpacket
    if packet is _ATTENTION_BACKWARD:
        b, h, s, d = args[1].shape
        # dq is summed in float32; delta is float32, too.
        rows = -(-s // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        return 4 * b * h * rows * (d + 1)
    if packet is _ops.choose_blocks:
        b, s, h, d = args[0].shape
        n = Blocks.of(s, args[2]).count
        # means of queries and keys, and a byte for each pair of blocks
        return b * h * n * (2 * 4 * d + n)
    if packet is _SPARSE_BACKWARD:
        return 4 * args[1].shape[:3].numel()  # delta
    if packet in _INT8:
        return args[1].numel() * args[0].element_size()  # the weight in the dtype of x
    if packet in _FP8:
        # x or dy in fp8, and in backward the transposed weight
        return args[0].numel() + args[1].numel() * (packet is _FP8[1])
    return 0


def _op_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, formula: Any
) -> Op | None:
    """Return what an op costs; None for one that moves nothing, such as a view. formula: of its FLOPs, or None."""
    packet = func._overloadpacket
    ring = lambda size: (size - 1) / size * _nbytes(args[0])
    if packet in (_sends.all_reduce, _sends.all_reduce_):
        return Op("sent", 0, 2 * ring(int(args[2].rpartition("/")[2])))
    if packet is _sends.all_gather_into_tensor:
        return Op("sent", 0, (args[1] - 1) * _nbytes(args[0]))
    if packet is _sends.reduce_scatter_tensor:
        return Op("sent", 0, ring(args[2]))
    if packet is _sends.all_to_all_single:
        return Op("sent", 0, ring(len(args[1])))
    given = {t.untyped_storage()._cdata for t in _tensors([*args, *kwargs.values()])}
    made = [t for t in _tensors([out]) if t.untyped_storage()._cdata not in given]
    if func.namespace == "_c10d_functional" or "empty" in packet._qualified_op_name:
        return None
    if not made and not func._schema.is_mutable:
        return None
    num_bytes = _nbytes(*args, *kwargs.values(), *made)
    if not made:
        num_bytes += _nbytes(args[0])  # in place: read and written
    flops = 0 if formula is None else formula(*args, **kwargs, out_val=out)
    kind: Kind = "matmul" if flops else "memory"
    if packet in _INT8:
        # The weight is written in the dtype of x, and read again by the product.
        num_bytes += 2 * args[1].numel() * args[0].element_size()
    if packet in _FP8:
        # A number of x is written as a byte and read again; backward transposes the weight.
        num_bytes += 2 * args[0].numel() + 2 * args[1].numel() * (packet is _FP8[1])
        kind = "fp8"
    return Op(_KINDS.get(packet, kind), flops, num_bytes)


class _Recorder(LiveBytes):
    """Counts the ops of `part` and the events of its backward pass."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__(_ALLOCATOR_BLOCK, scratch)
        # Weights in host memory are neither parameters nor buffers.
        held = [module.weight for module in part.modules() if isinstance(module, Linear)]
        self.ignore([*part.parameters(), *part.buffers(), *held])
        self.trained = [p for p in part.parameters() if p.requires_grad]
        self.work, self.base, self.formulas = Work(), 0, flop_formulas()
        self.events: list[Event] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._overloadpacket is _sends.wait_tensor:
            return args[0]  # PyTorch's version for the meta device makes another tensor
        out = super().__torch_dispatch__(func, types, args, kwargs)
        formula = self.formulas.get(func._overloadpacket)
        op = _op_of(func, args, kwargs or {}, out, formula)
        if op is not None:
            self.work[op] += 1
        return out

    def take_work(self) -> Work:
        work, self.work = self.work, Work()
        return work

    def take_events(self) -> tuple[Event, ...]:
        self.mark()
        events, self.events = tuple(self.events), []
        return events

    def mark(self, gradient: Tensor | None = None) -> None:
        numel, num_bytes = (0, 0) if gradient is None else (gradient.numel(), gradient.nbytes)
        live = self.live - self.base - num_bytes
        self.events.append(Event(self.peak - self.base, live, numel))
        self.peak = self.live

    def backward(self, loss: Tensor) -> None:
        """Run a backward pass in which every complete gradient is an event."""

        def take(parameter: nn.Parameter) -> None:
            self.mark(parameter.grad)
            parameter.grad = None
            self.peak = self.live

        handles = [p.register_post_accumulate_grad_hook(take) for p in self.trained]
        try:
            self.peak = self.live
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()


class _Border(torch.autograd.Function):
    """Return make(x). `gradient` makes the gradient of x of that of the result, which has one if `seed` does."""

    @staticmethod
    def forward(ctx, x: Tensor, seed: Tensor, make: Callable, gradient: Callable) -> Tensor:
        ctx.gradient = gradient
        return make(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        return ctx.gradient(grad), None, None, None


def trace_block(
    transformer: DiffusionTransformer,
    number: int,
    shape: tuple[int, int],
    policy: Policy,
    has_input_gradient: bool = True,
) -> Trace:
    """Trace a block of a transformer on the meta device under a policy.

    shape: (B, S) of the input of all blocks, on this rank.
    """
    block = transformer.blocks[number]
    recorder = _Recorder(block)
    given = _block_inputs(transformer, block, shape)
    call = block_call(block, policy, keep_rng=transformer.uses_dropout)
    seed = torch.empty((), device=_META, requires_grad=has_input_gradient)
    with recorder:
        # Nothing else holds it, and its gradient is dropped.
        hidden = _Border.apply(given[0], seed, torch.empty_like, lambda grad: None)
        recorder.take_work()
        recorder.base = recorder.live
        out = call(hidden, *given[1:])
        del hidden
        kept, forward_work = recorder.live - recorder.base, recorder.take_work()
        if not out.requires_grad:
            return Trace(kept, (), forward_work, Work())
        kind = {"size": out.shape, "dtype": out.dtype, "device": _META}
        scalar = lambda x: x.new_empty(())
        loss = _Border.apply(out, seed, scalar, lambda grad: torch.empty(**kind))
        del out
        recorder.backward(loss)
        del loss
        return Trace(kept, recorder.take_events(), forward_work, recorder.take_work())


def trace_forward(transformer: DiffusionTransformer, shape: tuple[int, int]) -> int:
    """Return the peak bytes of a forward pass without gradients, with the blocks' input."""
    block = transformer.blocks[len(transformer.blocks) // 2]
    recorder = _Recorder(block)
    like, *given = _block_inputs(transformer, block, shape)
    with torch.no_grad(), recorder:
        block(torch.empty_like(like), *given)
    return recorder.peak


def _block_inputs(
    transformer: DiffusionTransformer, block: nn.Module, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, int, Rotation | None]:
    config, (batch, rows), whole = transformer.config, shape, shape[1]
    split = transformer.runtime.row_split
    if isinstance(split, ContextParallelRows):
        split.rows = [rows] * split.group.size
        whole = rows * split.group.size
        split.num_text = min(config.text_length, whole)
    hidden, conditioning, num_text, rotation = block_inputs(transformer, batch, rows, whole)
    if isinstance(block, SequenceParallelBlock) and not block.is_first:
        hidden = hidden.new_empty(batch, rows // block.group.size, config.hidden_size)
    return hidden, conditioning, num_text, rotation


def trace_edges(transformer: DiffusionTransformer, size: LatentSize, batch: int) -> Edges:
    """Trace what a micro-batch of `batch` samples costs before and after the blocks, with the loss."""
    config = transformer.config
    recorder = _Recorder(nn.ModuleList(m for n, m in transformer.named_children() if n != "blocks"))
    head, embedded = list[tuple[Event, ...]](), list[int]()

    def boundary(hidden: Tensor, *_: Any) -> Tensor:
        embedded.append(recorder.live)
        recorder.base = recorder.peak = recorder.live
        seed = torch.empty((), device=_META, requires_grad=True)
        return _Border.apply(hidden, seed, lambda x: x.view_as(x), passed)

    def passed(grad: Tensor) -> Tensor:
        head.append(recorder.take_events())
        return grad

    shape = (batch, size.channels, size.frames, size.height, size.width)
    # Channels of the conditions, such as image-to-video's first frame
    extra = config.in_channels - size.channels
    empty = lambda *sides, **kind: torch.empty(sides, device=_META, **kind)
    text = empty(batch, config.text_length, config.text_hidden_size, dtype=transformer.dtype)
    conditions = None if extra <= 0 else empty(batch, extra, *shape[2:])
    x0, timesteps = empty(*shape), empty(batch, dtype=torch.int64)
    runtime, was_training = transformer.runtime, transformer.training
    # What brings weights to the blocks has no memory here.
    transformer.runtime = replace(runtime, source=None)
    transformer.train().use_calls([boundary])
    try:
        with recorder:
            # The arithmetic of diffusion/loss.py and denoiser.py, with one number as noise level.
            noised = x0 * 0.5 + torch.empty_like(x0) * 0.5
            out = transformer(noised, timesteps, text, condition_latents=conditions)
            error = out.float() * 0.5 + noised * 0.5 - x0
            del out
            loss = error.square().flatten(1).mean(dim=1).mean()
            del error, noised
            peak = recorder.peak
            recorder.backward(loss)
            del loss
            embed = recorder.take_events()
    finally:
        transformer.runtime = runtime
        transformer.train(was_training)
    first = Event(peak - recorder.base, peak - recorder.base, 0)
    return Edges(embedded[0], (first, *head[0]), embed, recorder.take_work())


class Traces:
    """The traces of a transformer on the meta device, each made once. Blocks that are alike have one."""

    def __init__(self, transformer: DiffusionTransformer) -> None:
        self.transformer = transformer
        self.edges = cache(partial(trace_edges, transformer))
        self.forward = cache(partial(trace_forward, transformer))
        self._block = cache(partial(trace_block, transformer))
        # Each block has the number of the first one that is alike, and whether their inputs have gradients.
        self._alike: list[tuple[int, bool]] = []
        first_of_kind: dict[tuple, int] = {}
        has_input_gradient = transformer.patch_embedding.weight.requires_grad
        for number, block in enumerate(transformer.blocks):
            trained = tuple(n for n, p in block.named_parameters() if p.requires_grad)
            modules = tuple(n for n, _ in block.named_modules())
            ends = isinstance(block, SequenceParallelBlock) and (block.is_first, block.is_last)
            kind = (has_input_gradient, trained, modules, ends)
            self._alike.append((first_of_kind.setdefault(kind, number), has_input_gradient))
            has_input_gradient |= bool(trained)

    def block(self, number: int, shape: tuple[int, int], policy: Policy) -> Trace:
        first, has_input_gradient = self._alike[number]
        return self._block(first, shape, policy, has_input_gradient)

"""CUDA graphs of the blocks (args.cuda_graphs): a block's kernels are launched by one call forward and
one backward.

A graph repeats kernels at the addresses of its capture. So each shape of a micro-batch that repeats
has tensors of its own, into which the blocks' inputs are copied, and the weights must not move. The
output of a block is the next block's input. Gradients of weights leave in tensors of their own, since
DeepSpeed and autograd keep them for longer than until the next replay. The embedding and the output
layer, the loss, DeepSpeed's hooks and the optimizer run as without graphs.

A graph may only be replayed while no later pass needs what an earlier one has left there: a second
forward pass before the first one's backward pass runs the blocks themselves.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.transformer import BlockCall, DiffusionTransformer

logger = logging.getLogger(__name__)

# Forward passes of a shape before it is captured: kernels are compiled and chosen in the first.
_PASSES_BEFORE = 2
MOST_SHAPES = 4

# Captures what a function launches, and returns a function that launches it again.
Capture = Callable[[Callable[[], None]], Callable[[], object]]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Everything that a graph depends on, except for the numbers in its inputs."""

    hidden: torch.Size
    conditioning: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype]
    needs_gradient: tuple[bool, bool]
    num_text: int
    grid: tuple[int, int, int] | None
    table: torch.Size | None

    @classmethod
    def of(
        cls, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
    ) -> _Shape:
        return cls(
            hidden.shape,
            conditioning.shape,
            (hidden.dtype, conditioning.dtype),
            (hidden.requires_grad, conditioning.requires_grad),
            num_text,
            None if rotation is None else (rotation.t, rotation.h, rotation.w),
            None if rotation is None else rotation.table.shape,
        )


class _Pass:
    """A forward pass whose backward pass may follow. next: the block whose gradient is due."""

    def __init__(self, last: int, first: int) -> None:
        self.next, self.first = last, first

    @property
    def is_over(self) -> bool:
        return self.next < self.first

    def begin_backward(self, number: int) -> None:
        if number != self.next:
            raise RuntimeError(
                "args.cuda_graphs=true allows one backward pass through the network for each forward "
                "pass, because the graphs' memory is used again; set args.cuda_graphs=false"
            )
        self.next -= 1


class _BlockGraph:
    """The graphs of a block and the tensors that they read and write.

    hidden, out: [B, S, M], the block's input and output. backward: None if nothing in front of or in
    the block is trained. gradients: of `parameters`, shared by all blocks.
    """

    def __init__(self, number: int, parameters: Sequence[nn.Parameter], hidden: Tensor) -> None:
        self.number, self.parameters, self.hidden = number, parameters, hidden
        self.out: Tensor = hidden
        self.forward: Callable[[], object] = lambda: None
        self.backward: Callable[[], object] | None = None
        self.gradients: list[Tensor | None] = []


class _Inputs:
    """The inputs that all blocks of a shape share, and the gradients that they pass on.

    gradient: [B, S, M], of the output of the block whose backward pass is next, then of its input.
    """

    def __init__(self, shape: _Shape, device: torch.device) -> None:
        dtype, conditioning_dtype = shape.dtypes
        self.shape = shape
        needs_hidden, needs_conditioning = shape.needs_gradient
        self.hidden = torch.empty(shape.hidden, dtype=dtype, device=device)
        self.hidden.requires_grad_(needs_hidden)
        self.conditioning = torch.empty(
            shape.conditioning, dtype=conditioning_dtype, device=device
        ).requires_grad_(needs_conditioning)
        self.conditioning_gradient = torch.empty_like(self.conditioning, requires_grad=False)
        self.rotation: Rotation | None = None
        if shape.grid is not None and shape.table is not None:
            table = torch.empty(shape.table, dtype=torch.float32, device=device)
            self.rotation = Rotation(table, *shape.grid)
        self.gradient = torch.empty_like(self.hidden, requires_grad=False)
        self.blocks: list[_BlockGraph] = []

    @torch.no_grad()
    def take(self, conditioning: Tensor, rotation: Rotation | None) -> None:
        self.conditioning.copy_(conditioning)
        if self.rotation is not None and rotation is not None:
            self.rotation.table.copy_(rotation.table)

    def begin_pass(self) -> _Pass:
        trained = [block.number for block in self.blocks if block.backward is not None]
        return _Pass(len(self.blocks) - 1, min(trained, default=len(self.blocks)))


class _Replay(torch.autograd.Function):
    """Replays the graphs of a block."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: _Inputs,
        block: _BlockGraph,
        current: _Pass,
        hidden: Tensor,
        conditioning: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.inputs, ctx.block, ctx.current = inputs, block, current
        # The first block's input comes from elsewhere.
        if hidden.data_ptr() != block.hidden.data_ptr():
            block.hidden.copy_(hidden)
        block.forward()
        return block.out.detach()

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, gradient: Tensor
    ) -> tuple[Any, ...]:
        inputs, block = ctx.inputs, ctx.block
        ctx.current.begin_backward(block.number)
        if gradient.data_ptr() != inputs.gradient.data_ptr():
            inputs.gradient.copy_(gradient)
        assert block.backward is not None, "this block has no gradient"
        block.backward()
        # Tensors of their own, since the next block overwrites the shared ones.
        filled = [g for g in block.gradients if g is not None]
        copies = [torch.empty_like(g) for g in filled]
        if filled:
            torch._foreach_copy_(copies, filled)
        left = iter(copies)
        of_parameters = [None if g is None else next(left) for g in block.gradients]
        of_hidden = None
        if block.hidden.requires_grad:
            # The block in front reads it before it changes; others may keep it.
            of_hidden = inputs.gradient.detach() if block.number else inputs.gradient.clone()
        of_conditioning = None
        if inputs.conditioning.requires_grad:
            of_conditioning = inputs.conditioning_gradient.clone()
        return (None, None, None, of_hidden, of_conditioning, *of_parameters)


class BlockGraphs:
    """Runs the blocks of a transformer in training mode through graphs, where a shape repeats.

    transformer: its training_calls are set, and its weights are where they stay. capture: captures
    into memory that all graphs share, and that nothing else uses.
    """

    def __init__(self, transformer: DiffusionTransformer, capture: Capture | None = None) -> None:
        assert transformer.training_calls is not None, "activation checkpointing sets them"
        assert transformer.block_source is None and transformer.row_split is None
        self.blocks = transformer.blocks
        self.calls = transformer.training_calls
        self.device = next(transformer.parameters()).device
        self._capture = capture
        self._passes: Counter[_Shape] = Counter()
        self._inputs: dict[_Shape, _Inputs] = {}
        self._gradients: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}
        self._tensors = [*self.blocks.named_parameters(), *self.blocks.named_buffers()]
        self._addresses: list[int] = []
        self._current: weakref.ref[_Pass] | None = None
        # Set while a forward pass replays graphs; None while it runs the blocks themselves.
        self._used: tuple[_Inputs, _Pass, Tensor] | None = None
        transformer.training_calls = [self._call_of(i) for i in range(len(self.blocks))]

    def _call_of(self, number: int) -> BlockCall:
        def call(
            hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
        ) -> Tensor:
            if number == 0:
                self._used = self._begin(hidden, conditioning, num_text, rotation)
            if self._used is None:
                return self.calls[number](hidden, conditioning, num_text, rotation)
            inputs, current, given = self._used
            assert conditioning is given, "all blocks have one conditioning"
            block = inputs.blocks[number]
            if number == len(self.blocks) - 1:
                self._used = None
            return _Replay.apply(inputs, block, current, hidden, conditioning, *block.parameters)

        return call

    def _begin(
        self, hidden: Tensor, conditioning: Tensor, num_text: int, rotation: Rotation | None
    ) -> tuple[_Inputs, _Pass, Tensor] | None:
        """Return what a forward pass replays; None if it runs the blocks themselves."""
        # Ops inside of a graph could not be seen by what watches them.
        if not torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
            return None
        current = None if self._current is None else self._current()
        if current is not None and not current.is_over:
            return None
        shape = _Shape.of(hidden, conditioning, num_text, rotation)
        self._passes[shape] += 1
        inputs = self._inputs.get(shape)
        if inputs is None:
            return None
        self._check_addresses()
        inputs.take(conditioning, rotation)
        current = inputs.begin_pass()
        self._current = weakref.ref(current)
        return inputs, current, conditioning

    def _check_addresses(self) -> None:
        """Raise an error if a weight has moved since the capture: graphs would read its old place."""
        for (name, tensor), address in zip(self._tensors, self._addresses, strict=True):
            if tensor.data_ptr() != address:
                raise RuntimeError(
                    f"blocks.{name} has moved in memory since its CUDA graph was captured; set "
                    "args.cuda_graphs=false, and please report this"
                )

    def after_step(self) -> None:
        """Capture the shapes that have repeated. Call it after each optimizer step."""
        for shape, number in self._passes.items():
            if number < _PASSES_BEFORE or shape in self._inputs:
                continue
            if len(self._inputs) < MOST_SHAPES:
                self._add(shape)
            elif len(self._inputs) == MOST_SHAPES and number == _PASSES_BEFORE:
                logger.info(
                    "args.cuda_graphs: %d shapes have graphs; others run without", MOST_SHAPES
                )

    def _add(self, shape: _Shape) -> None:
        if self._capture is None:
            self._capture = cuda_capture(self.device)
        if not self._addresses:
            self._addresses = [tensor.data_ptr() for _, tensor in self._tensors]
        before = self._reserved()
        try:
            self._inputs[shape] = self._capture_all(shape, self._capture)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                "args.cuda_graphs=true: the blocks cannot be captured, perhaps because of "
                f"args.attention_backend; set args.cuda_graphs=false ({error})"
            ) from error
        logger.info(
            "args.cuda_graphs: %d blocks captured for a micro-batch of %d x %d rows; the graphs keep "
            "%.2f GiB",
            len(self.blocks),
            *shape.hidden[:2],
            (self._reserved() - before) / 2**30,
        )

    def _reserved(self) -> int:
        """Return the bytes that PyTorch has reserved, after it has returned what it can."""
        if self.device.type != "cuda":
            return 0
        gc.collect()  # a graph that Python frees during a capture would end it
        # sync: both, before and after the capture of a shape
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self.device)

    def _capture_all(self, shape: _Shape, capture: Capture) -> _Inputs:
        """Capture the forward passes of all blocks, then their backward passes, as they follow each
        other in a step: their memory is used again in that order."""
        inputs = _Inputs(shape, self.device)
        hidden, outs = inputs.hidden, list[Tensor]()
        with _aliased(self.blocks) as trained:
            for number, call in enumerate(self.calls):
                block = _BlockGraph(number, [p for p, _ in trained[number]], hidden)
                block.forward = capture(_forward(call, inputs, hidden, outs))
                out = outs[number]
                assert out.shape == hidden.shape and out.is_contiguous(), out.stride()
                block.out = hidden = out.detach().requires_grad_(out.requires_grad)
                inputs.blocks.append(block)
            while outs:
                block = inputs.blocks[len(outs) - 1]
                if outs[-1].requires_grad:
                    aliases = [alias for _, alias in trained[block.number]]
                    block.backward = capture(self._backward(inputs, block, outs, aliases))
                outs.pop()
        return inputs

    def _backward(
        self, inputs: _Inputs, block: _BlockGraph, outs: list[Tensor], aliases: Sequence[Tensor]
    ) -> Callable[[], None]:
        def run() -> None:
            wanted = [block.hidden, inputs.conditioning, *aliases]
            asked = [t for t in wanted if t.requires_grad]
            given = torch.autograd.grad(outs[-1], asked, inputs.gradient, allow_unused=True)
            found = dict(zip(map(id, asked), given, strict=True))
            gradients = [found[id(alias)] for alias in aliases]
            places = [
                None if g is None else self._gradient_place(i, p)
                for i, (p, g) in enumerate(zip(block.parameters, gradients, strict=True))
            ]
            targets = [place for place in places if place is not None]
            if targets:
                torch._foreach_copy_(targets, [g for g in gradients if g is not None])
            if inputs.conditioning.requires_grad:
                _copy_or_zero(inputs.conditioning_gradient, found[id(inputs.conditioning)])
            # Last, because the pass above reads it.
            if block.hidden.requires_grad:
                _copy_or_zero(inputs.gradient, found[id(block.hidden)])
            block.gradients = places

        # Before the capture, whose memory the next one takes again. The copy loads its kernel.
        places = [self._gradient_place(i, p) for i, p in enumerate(block.parameters)]
        if places:
            torch._foreach_copy_(places, [torch.zeros_like(place) for place in places])
        return run

    def _gradient_place(self, i: int, parameter: Tensor) -> Tensor:
        """Return the memory for a gradient of a block's i-th trained parameter, the same in all."""
        key = i, parameter.shape, parameter.dtype
        if key not in self._gradients:
            like = {"dtype": parameter.dtype, "device": parameter.device}
            self._gradients[key] = torch.empty(parameter.shape, **like)
        return self._gradients[key]


def _forward(
    call: BlockCall, inputs: _Inputs, hidden: Tensor, outs: list[Tensor]
) -> Callable[[], None]:
    def run() -> None:
        outs.append(call(hidden, inputs.conditioning, inputs.shape.num_text, inputs.rotation))

    return run


def _copy_or_zero(target: Tensor, values: Tensor | None) -> None:
    if values is None:
        target.zero_()
    else:
        target.copy_(values)


@contextlib.contextmanager
def _aliased(
    blocks: Iterable[nn.Module],
) -> Iterator[list[list[tuple[nn.Parameter, nn.Parameter]]]]:
    """Replace the trained parameters of the blocks by others with the same memory, and yield both.

    Hooks of the parameters, such as DeepSpeed's, must not run in a capture, and the nodes that
    autograd keeps for them belong to another stream.
    """
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    trained = []
    try:
        for block in blocks:
            pairs: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
            for module in block.modules():
                for name, parameter in module._parameters.items():
                    if parameter is None or not parameter.requires_grad:
                        continue
                    pair = parameter, nn.Parameter(parameter.detach())
                    _, alias = pairs.setdefault(id(parameter), pair)
                    replaced.append((module, name, parameter))
                    module._parameters[name] = alias
            trained.append(list(pairs.values()))
        yield trained
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter


def cuda_capture(device: torch.device) -> Capture:
    """Return a function that captures CUDA graphs. All of them have one pool of memory."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)

    def capture(run: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            # Threads that load data or write a checkpoint may use the device meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                run()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return graph.replay

    return capture

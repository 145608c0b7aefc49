"""Counts the memory of a training step by running three blocks of the model on the meta device.

The ops are those of a GPU. What three blocks show holds for all: each adds what its policy keeps, and
its backward pass needs the same on top. A gradient is counted until it is complete; where it goes then
depends on ZeRO (cogfast/train/plan/state.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from cogfast.core.live_bytes import LiveBytes
from cogfast.diffusion.denoiser import Conditioning
from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.plan.activations import Policy
from cogfast.train.video_size import LatentSize

_ALLOCATOR_BLOCK = 512  # bytes; sizes are rounded up to it
_ROWS_AT_ONCE = 128  # rows of a tile of attention's backward pass
_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class Event:
    """A complete gradient of `numel` elements. peak: the most bytes since the event before, above the
    bytes in use before the part's forward pass."""

    peak: int
    numel: int


@dataclass(frozen=True, slots=True)
class PartTrace:
    """Bytes of a part of the network, above those in use before its forward pass.

    forward: peak of the forward pass. kept: after it. backward: the events of the backward pass; the
    last one has no gradient.
    """

    forward: int
    kept: int
    backward: tuple[Event, ...]


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A micro-batch under one policy: inputs and embedding, the first block, every other block, and
    the output layer with the loss."""

    embed: PartTrace
    first: PartTrace
    block: PartTrace
    head: PartTrace


def scratch(op: Any, args: Sequence[Any]) -> int:
    """Return the bytes that an attention op, or a product with a weight of 8 bits, allocates inside."""
    if op is torch.ops.aten._scaled_dot_product_flash_attention_backward.default:
        b, h, s, d = args[1].shape
        # dq is summed in float32; delta is float32, too.
        rows = -(-s // _ROWS_AT_ONCE) * _ROWS_AT_ONCE
        return 4 * b * h * rows * (d + 1)
    if op in (
        torch.ops.cogfast.int8_linear.default,
        torch.ops.cogfast.int8_linear_backward.default,
    ):
        x, q = args[:2]
        return q.numel() * x.element_size()  # the weight in the dtype of x
    if op is torch.ops.cogfast.fp8_linear.default:
        return args[0].numel()  # x in fp8
    if op is torch.ops.cogfast.fp8_linear_backward.default:
        return args[0].numel() + args[1].numel()  # dy in fp8, and the weight, transposed
    return 0


class _Recorder(LiveBytes):
    """Splits the peak by marks."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(_ALLOCATOR_BLOCK, scratch)
        self.ignore([*module.parameters(), *module.buffers()])
        self.events: list[tuple[str, int, int, int]] = []  # name, peak before it, live, numel

    def mark(self, name: str, numel: int = 0) -> None:
        self.events.append((name, max(self.peak, self.live), self.live, numel))
        self.peak = self.live


def example_inputs(
    transformer: DiffusionTransformer, size: LatentSize, batch: int
) -> tuple[Tensor, Tensor, Conditioning]:
    """Return latents, timesteps and conditioning on the meta device."""
    config = transformer.config
    shape = (batch, size.channels, size.frames, size.height, size.width)
    extra = config.in_channels - size.channels  # image latents of image-to-video
    empty = lambda *sides, **kind: torch.empty(sides, device=_META, **kind)
    text = empty(batch, config.text_length, config.text_hidden_size, dtype=transformer.dtype)
    image = None if extra <= 0 else empty(batch, extra, *shape[2:])
    timesteps = empty(batch, dtype=torch.int64)
    return empty(*shape), timesteps, Conditioning(text, image)


def trace_step(
    transformer: DiffusionTransformer, size: LatentSize, batch: int, policy: Policy
) -> StepTrace:
    """Trace a micro-batch of `batch` samples of a transformer on the meta device.

    Only its first, second and last block run; parameters get no gradients.
    """
    recorder = _Recorder(transformer)
    policies: list[Policy] = [policy] * len(transformer.blocks)
    apply_policies(transformer, policies)
    calls = transformer.training_calls
    assert calls is not None, "apply_policies sets them"
    transformer.train().use_calls(
        [_marked(c, i, recorder) for i, c in enumerate((calls[0], calls[1], calls[-1]))]
    )
    trained = [p for p in transformer.parameters() if p.requires_grad]
    handles = [p.register_post_accumulate_grad_hook(_taken(recorder)) for p in trained]
    x0, timesteps, given = example_inputs(transformer, size, batch)
    try:
        with recorder:
            recorder.mark("start")
            # The arithmetic of diffusion/loss.py and denoiser.py, with one number as noise level.
            noise = torch.empty(x0.shape, device=_META)
            noised = x0 * 0.5 + noise * 0.5
            del noise
            out = transformer(noised, timesteps, given.text, image_latents=given.image_latents)
            recorder.mark("head")
            error = out.float() * 0.5 + noised * 0.5 - x0
            del out
            loss = error.square().flatten(1).mean(dim=1).mean()
            del error, noised
            recorder.mark("loss")
            loss.backward()
            del loss
            recorder.mark("end")
    finally:
        for handle in handles:
            handle.remove()
        transformer.use_calls(None)
    return _parts(recorder.events)


def _taken(recorder: _Recorder) -> Callable[[nn.Parameter], None]:
    def take(parameter: nn.Parameter) -> None:
        recorder.mark("gradient", parameter.numel())
        parameter.grad = None

    return take


def _marked(call: Callable[..., Tensor], number: int, recorder: _Recorder) -> Callable[..., Tensor]:
    """Wrap a block so that its forward and backward pass begin with a mark."""

    def run(*inputs: Any) -> Tensor:
        recorder.mark(f"forward {number}")
        out = call(*inputs)
        recorder.mark(f"forward {number} ends")
        if out.requires_grad:
            out.register_hook(lambda _: recorder.mark(f"backward {number}"))
        return out

    return run


def _parts(events: list[tuple[str, int, int, int]]) -> StepTrace:
    """Divide the marks into the parts of the network."""
    at = {name: i for i, (name, *_) in enumerate(events) if name != "gradient"}
    peak = lambda name: events[at[name]][1]
    live = lambda name: events[at[name]][2]

    def backward(start: str, end: str, base: int) -> tuple[Event, ...]:
        some = events[at[start] + 1 : at[end] + 1]
        return tuple(Event(peak - base, numel) for _, peak, _, numel in some)

    begin = live("start")
    blocks = [
        PartTrace(
            forward=peak(f"forward {i} ends") - live(f"forward {i}"),
            kept=live(f"forward {i} ends") - live(f"forward {i}"),
            backward=(),
        )
        for i in range(3)
    ]
    # A frozen first block without trained parameters before it has no backward pass of its own.
    ends = {2: "backward 1", 1: "backward 0", 0: "end"}
    full = []
    for i, block in enumerate(blocks):
        base = live(f"forward {i}")
        full.append(PartTrace(block.forward, block.kept, backward(f"backward {i}", ends[i], base)))
    base = live("forward 2 ends")
    head = PartTrace(
        forward=max(peak("head"), peak("loss")) - base,
        kept=live("loss") - base,
        backward=backward("loss", "backward 2", base),
    )
    embed = PartTrace(
        forward=peak("forward 0") - begin, kept=live("forward 0") - begin, backward=()
    )
    return StepTrace(embed=embed, first=full[0], block=full[1], head=head)


def trace_forward(transformer: DiffusionTransformer, size: LatentSize, batch: int) -> int:
    """Return the peak bytes of a forward pass without gradients, as evaluations run it."""
    recorder = _Recorder(transformer)
    latents, timesteps, given = example_inputs(transformer, size, batch)
    blocks = transformer.blocks
    transformer.eval().use_calls(None)
    try:
        transformer.blocks = nn.ModuleList([blocks[0], blocks[1], blocks[-1]])
        with torch.no_grad(), recorder:
            transformer(latents, timesteps, given.text, image_latents=given.image_latents)
    finally:
        transformer.blocks = blocks
        transformer.train()
    return recorder.peak

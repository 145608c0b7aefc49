"""FusedEmaAdam on flat partitions, as under ZeRO, or on many tensors; its peers for the same update.

Bytes per parameter of a perfect kernel, for FusedEmaAdam and for torch's AdamW with a foreach EMA:

    gradient bf16 2; weight, m, v and shadow read and written 32                   34    28 + 12
    the new weight in bf16                                                        + 2        + 6
    clipping: the norm reads the gradient; torch's also scales it in place        + 2       + 12

torch needs gradients in float32, the dtype of the weights. With the quickstart's
count of parameters all of them have float32 gradients, in one tensor and in 100.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from bench.harness.outcome import Row, Settings
from bench.kernel_ops.op_bench import APEX, COMPILED, EAGER, OURS, compile_call, has_apex
from cogfast.kernels.fused_ema_adam import (
    FusedEmaAdam,
    fused_ema_adam_reference,
    sum_of_squares,
)

_ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-2}
_EMA_DECAY = 0.9999
_NORM = 1.0  # maximal gradient norm
_STEPS_BEFORE = 10  # so that bias correction and EMA warm-up matter
_RTOL, _ATOL = 1e-6, 1e-7  # for float32, from the notes of the golden files
_SLICE = 4096  # elements that are compared at each place
_CHECKED_LENGTHS, _TINY_LENGTHS = (1, 999, 70_001), (1, 999)
_GOAL = 88.0
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of gradients, at the short lengths
_OPTIONS = ((False, False), (True, False), (True, True))  # copy, clip
# 2B whole; 5B over two GPUs: more than 2^31 elements in one tensor
_SIZES = (("2B", 1_700_000_000), ("5B, half", 2_785_000_000))
_TINY_SIZES = (("2B", 5_003), ("5B, half", 9_001))
_QUICKSTART = 5_800_000  # parameters


@dataclass(slots=True)
class Streams:
    """The tensors [n] of an update: g is bf16 or the dtype of the weights, copy is bf16."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    shadow: Tensor
    copy: Tensor | None

    def slice(self, start: int, dtype: torch.dtype) -> Streams:
        """Return copies of _SLICE elements, without `copy`, for the reference."""
        streams = (self.p, self.g, self.m, self.v, self.shadow)
        rows = (x.detach()[start : start + _SLICE].to(dtype, copy=True) for x in streams)
        return Streams(*rows, None)


def draw_streams(n: int, gradient: torch.dtype, has_copy: bool, device: torch.device) -> Streams:
    def draw(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(n, dtype=dtype, device=device).normal_(std=0.02)

    p = draw()
    copy = torch.empty(n, dtype=torch.bfloat16, device=device) if has_copy else None
    v = draw().square_()
    return Streams(
        p.requires_grad_(), draw(gradient), draw().mul_(0.1), v, p.detach().clone(), copy
    )


def _clip_factor(g: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(g, dtype=torch.float32)
    return (_NORM / (norm + 1e-6)).clamp_(max=1.0)


def _cut(x: Tensor, num_tensors: int) -> list[Tensor]:
    """Return the tensors of an update as views of one flat tensor."""
    return list(x.detach().tensor_split(num_tensors))


def _ours(streams: Streams, num_tensors: int, has_clip: bool) -> Callable[[], object]:
    params = [p.requires_grad_() for p in _cut(streams.p, num_tensors)]
    grads = _cut(streams.g, num_tensors)
    optimizer = FusedEmaAdam(params, **_ADAM, ema_decay=_EMA_DECAY)
    for p, g in zip(params, grads, strict=True):
        # Allows a bf16 gradient of a float32 parameter.
        p.grad_dtype = g.dtype
        p.grad = g
        optimizer.state[p]["step"] = torch.full((), float(_STEPS_BEFORE), device=p.device)
    moments = {"exp_avg": streams.m, "exp_avg_sq": streams.v, "shadow": streams.shadow}
    for name, moment in moments.items():
        for p, piece in zip(params, _cut(moment, num_tensors), strict=True):
            optimizer.state[p][name] = piece
    if streams.copy is not None:
        copies = zip(params, _cut(streams.copy, num_tensors), strict=True)
        optimizer.low_precision_copies.update(copies)

    def call() -> None:
        if has_clip:
            norm = sum_of_squares(grads).sqrt().float()
            optimizer.gradient_scale = (_NORM / (norm + 1e-6)).clamp_(max=1.0)
        optimizer.step()

    return call


def _reference(
    streams: Streams, num_tensors: int = 1, has_clip: bool = False
) -> Callable[[], object]:
    """Return the plain update, whose ops are elementwise: one tensor stands for any number."""

    @torch.no_grad()
    def call() -> None:
        g = streams.g.to(streams.p.dtype)
        if has_clip:
            g = g * _clip_factor(streams.g)
        moments = (streams.m, streams.v, streams.shadow)
        ema = {"step": _STEPS_BEFORE + 1, "ema_decay": _ema_decay(_STEPS_BEFORE + 1)}
        fused_ema_adam_reference(streams.p, g, *moments, **_ADAM, **ema, adam_w_mode=True)
        if streams.copy is not None:
            streams.copy.copy_(streams.p)

    return call


def _ema_decay(step: int) -> float:
    return min(_EMA_DECAY, (1 + step) / (10 + step))


_TORCH_ADAMW = partial(torch.optim.AdamW, **_ADAM, fused=True)


def _fused_adamw(
    streams: Streams, num_tensors: int, has_clip: bool, make: Callable = _TORCH_ADAMW
) -> Callable[[], object]:
    """Return a fused AdamW with torch's clipping, a foreach EMA and a cast."""
    params: list[Tensor] = [nn.Parameter(p) for p in _cut(streams.p, num_tensors)]
    for p, g in zip(params, _cut(streams.g, num_tensors), strict=True):
        p.grad = g
    shadows = _cut(streams.shadow, num_tensors)
    copies = [] if streams.copy is None else _cut(streams.copy, num_tensors)
    optimizer = make(params)
    # The optimizer has its own; the memory does not hold both.
    streams.m = streams.v = torch.empty(0)

    @torch.no_grad()
    def call() -> None:
        if has_clip:
            nn.utils.clip_grad_norm_(params, _NORM, foreach=True)
        optimizer.step()
        torch._foreach_lerp_(shadows, params, 1 - _EMA_DECAY)
        if copies:
            torch._foreach_copy_(copies, params)

    return call


def _apex(streams: Streams, num_tensors: int, has_clip: bool) -> Callable[[], object]:
    from apex.optimizers import FusedAdam

    return _fused_adamw(streams, num_tensors, has_clip, lambda p: FusedAdam(p, **_ADAM))


PEERS: dict[str, Callable[[Streams, int, bool], Callable[[], object]]] = {
    EAGER: _reference,
    COMPILED: _reference,
    "AdamW(fused) + lerp": _fused_adamw,
}
_APEX = {f"{APEX} FusedAdam + lerp": _apex}


@dataclass(frozen=True, slots=True)
class OptimizerBench:
    """An update of float32 weights; `gradient` is the dtype of cogfast's gradients."""

    settings: Settings
    model: str
    num_parameters: int
    has_copy: bool
    has_clip: bool
    num_tensors: int = 1
    gradient: torch.dtype = torch.bfloat16

    ways = ("step",)
    dtype = torch.float32  # of the weights

    @property
    def peers(self) -> Sequence[str]:
        return (*PEERS, *(_APEX if has_apex(self.settings.device) else ()))

    def __str__(self) -> str:
        return f"{self.describe()['op']}, {self.describe()['model']}"

    def describe(self) -> Row:
        options = ["clip"] * self.has_clip + ["copy"] * self.has_copy
        many = f", {self.num_tensors} tensors" if self.num_tensors > 1 else ""
        op = " ".join(["FusedEmaAdam", *options])
        return {"op": op, "model": f"{self.model}{many}", "shape": str(self.num_parameters)}

    def num_bytes(self, way: str) -> int:
        gradient = self.gradient.itemsize
        return self.num_parameters * (32 + gradient + 2 * self.has_copy + gradient * self.has_clip)

    def goal(self, way: str) -> float:
        return _GOAL

    def check(self) -> list[str]:
        small = _TINY_LENGTHS if self.settings.is_tiny else _CHECKED_LENGTHS
        wrong = []
        for n in (self.num_parameters, *small):
            for dtype in _DTYPES if n != self.num_parameters else (self.gradient,):
                try:
                    wrong += self._compare(n, dtype)
                except Exception as error:  # the other ops are measured after any failure
                    wrong.append(f"{self}: {type(error).__name__}: {error}".splitlines()[0])
        return wrong

    def _compare(self, n: int, gradient: torch.dtype) -> list[str]:
        """Compare the first, middle and last elements of a step with float64."""
        streams = draw_streams(n, gradient, self.has_copy, self.settings.device)
        # Element 2^31 is where 32-bit offsets overflow.
        starts = sorted({0, max(0, min(2**31, n) - _SLICE // 2), max(0, n - _SLICE)})
        expected = [streams.slice(start, torch.float64) for start in starts]
        # The clip factor is of the whole gradient, the comparison of slices.
        factor = _clip_factor(streams.g).double() if self.has_clip else None
        _ours(streams, self.num_tensors, self.has_clip)()
        wrong = []
        for start, truth in zip(starts, expected, strict=True):
            if factor is not None:
                truth.g.mul_(factor)
            _reference(truth)()
            for name in ("p", "m", "v", "shadow"):
                value = getattr(streams, name).detach()[start : start + _SLICE].double()
                true = getattr(truth, name)
                off = ((value - true).abs() / (_RTOL * true.abs() + _ATOL)).max().item()
                if not off <= 1:  # also true for NaN
                    wrong.append(f"{name} from {start} of {n}: {off:.3g} times the tolerance")
            if streams.copy is not None:
                rows = slice(start, start + _SLICE)
                if not torch.equal(streams.copy[rows], streams.p.detach()[rows].bfloat16()):
                    wrong.append(f"copy from {start} of {n} differs from the weight in bf16")
        dtype = str(gradient).removeprefix("torch.")
        return [f"{self}, {dtype} gradient: {text}" for text in wrong]

    def calls(self, name: str) -> dict[str, Sequence[Callable[[], object]]]:
        device = self.settings.device
        # Adam of torch needs the gradient in the dtype of the weights.
        makers = {OURS: _ours, **PEERS, **_APEX}
        takes_any_gradient = makers[name] in (_ours, _reference)
        gradient = self.gradient if takes_any_gradient else torch.float32
        streams = draw_streams(self.num_parameters, gradient, self.has_copy, device)
        call = makers[name](streams, self.num_tensors, self.has_clip)
        if name == COMPILED:
            call = compile_call(call, self.settings.is_tiny)
        return {"step": [call]}  # larger than the caches: one buffer set is enough


def optimizer_benches(settings: Settings) -> list[OptimizerBench]:
    """Return updates of the models' sizes; on a CPU only those of the quickstart's."""
    sizes = _TINY_SIZES if settings.is_tiny else _SIZES
    if settings.device.type == "cpu" and not settings.is_tiny:
        sizes = ()
    benches = [OptimizerBench(settings, *size, *options) for size in sizes for options in _OPTIONS]
    length = _TINY_SIZES[0][1] if settings.is_tiny else _QUICKSTART
    given = {"has_copy": False, "has_clip": True, "gradient": torch.float32}
    for number in (1, 100):
        benches.append(OptimizerBench(settings, "quickstart", length, num_tensors=number, **given))
    return benches

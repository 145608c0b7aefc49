"""The benchmark of an op of a block at a shape: by cogfast, by eager PyTorch and by torch.compile.

Outputs and gradients of cogfast are compared with float32 or float64 first. The error of a tensor may
be twice that of the op's reference in the same dtype plus a floor, both in the norm and at the worst
element.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor

from bench.harness.outcome import Row, Settings
from bench.harness.timing import time_calls
from bench.kernel_ops.op_cases import (
    WAYS,
    Op,
    Tensors,
    TokenShape,
    as_leaves,
    bytes_of,
    draw_inputs,
    small,
)

OURS, EAGER, COMPILED, APEX = "cogfast", "torch eager", "torch.compile", "apex"
# {way: its calls, which use different buffers}
Calls = Mapping[str, Sequence[Callable[[], object]]]
Compute = Callable[[TokenShape, Tensors], Sequence[Tensor]]

_FACTOR = 2.0
# bf16, fp16: an eighth of the spacing of numbers. float32: a different summation order changes a result
# by a few spacings.
_FLOORS = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13, torch.float32: 2.0**-20}
_MOST_CHARACTERS = 300  # of an error message


@dataclass(frozen=True, slots=True)
class OpBench:
    """An op of a block at a shape. A way is forward or backward; peers: what it is compared with."""

    settings: Settings
    op: Op
    shape: TokenShape
    dtype: torch.dtype = torch.bfloat16

    ways = WAYS

    @property
    def peers(self) -> Sequence[str]:
        has_peer = self.op.apex is not None and has_apex(self.settings.device)
        return (EAGER, COMPILED, *[APEX] * has_peer)

    def __str__(self) -> str:
        return f"{self.op}, {self.shape}"

    def describe(self) -> Row:
        b, s, h = self.shape.batch, self.shape.num_tokens, self.shape.num_heads
        return {
            "op": str(self.op),
            "model": self.shape.model,
            "shape": f"{b} x {s} x {h} x {self.shape.head_width}",
        }

    def num_bytes(self, way: str) -> int:
        """Return the bytes that a perfect kernel reads and writes."""
        return bytes_of(self.op, way, self.shape, self.dtype)

    def goal(self, way: str) -> float:
        """Return the goal in percent of the copy rate."""
        return self.op.goals[way]

    def check(self) -> list[str]:
        """Return a sentence for each result of cogfast that is wrong."""
        return check_op(self.op, self.shape, self.settings.device, self.dtype)

    def calls(self, name: str) -> Calls:
        op, device = self.op, self.settings.device
        compiled = op.exact or op.reference
        computes = {OURS: op.run, EAGER: op.reference, COMPILED: compiled, APEX: op.apex}
        compute: Any = computes[name]
        if name == COMPILED:
            compute = compile_call(compute, self.settings.is_tiny)
        sets = [
            draw_inputs(op, self.shape, self.dtype, device)
            for _ in range(self.settings.num_buffer_sets(self.num_bytes("forward")))
        ]
        return {
            "forward": [lambda inputs=inputs: compute(self.shape, inputs) for inputs in sets],
            "backward": [self._backward(compute, inputs) for inputs in sets],
        }

    def _backward(self, compute: Compute, inputs: Tensors) -> Callable[[], object]:
        # The graph is kept, so that backward can be timed many times.
        outputs, leaves = compute(self.shape, inputs), trained(self.op, inputs)
        given = [torch.randn_like(out) for out in outputs]
        return lambda: torch.autograd.grad(outputs, leaves, given, retain_graph=True)


def compile_call(call: Callable, is_tiny: bool) -> Callable:
    """Compile a call for one shape; at tiny sizes without code generation, which takes seconds."""
    torch.compiler.reset()  # else earlier shapes would make sizes symbolic
    # This backward pass is timed many times: it must not overwrite its buffers.
    torch._functorch.config.donated_buffer = False
    backend = "aot_eager" if is_tiny else "inductor"
    return torch.compile(call, backend=backend, dynamic=False)


def time_contestant(bench: Any, name: str, ways: Sequence[str]) -> dict[str, list[float]]:
    """Return the milliseconds of single calls of `cogfast` or of a peer, by way."""
    settings = bench.settings
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    # Peers hold buffers of several GB: the ones of the peer before are freed first.
    calls = bench.calls(name)
    return {way: time_calls(calls[way], settings.device, settings.seconds) for way in ways}


def trained(op: Op, inputs: Tensors) -> list[Tensor]:
    """Return the inputs that are not frozen."""
    return [x for name, x in inputs.items() if name not in op.frozen]


def has_apex(device: torch.device) -> bool:
    """Whether NVIDIA's apex is installed, which has kernels for GPUs alone; another package has its name."""
    with suppress(ModuleNotFoundError):
        return (
            device.type == "cuda" and find_spec("apex.normalization.fused_layer_norm") is not None
        )
    return False


def check_op(
    op: Op, shape: TokenShape, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> list[str]:
    """Check the op of cogfast in `dtype` at this shape, and in three dtypes at a small one."""
    cases = [(shape, dtype)] + [(small(shape), each) for each in _FLOORS]
    wrong = []
    for case_shape, dtype in cases:
        torch.manual_seed(0)  # the largest error depends on the draws
        inputs = draw_inputs(op, case_shape, dtype, device)
        try:
            found = _differences(op, case_shape, inputs)
        except Exception as error:  # the other ops are measured after any failure
            found = [f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_CHARACTERS]]
        kind = str(dtype).removeprefix("torch.")
        wrong += [f"{op}, {case_shape}, {kind}: {text}" for text in found]
    return wrong


def _differences(op: Op, shape: TokenShape, inputs: Tensors) -> list[str]:
    dtype = next(iter(inputs.values())).dtype
    # One precision above that of the op.
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    with torch.no_grad():
        given = [torch.randn_like(out) for out in op.reference(shape, inputs)]
    raised = as_leaves(op, {k: x.to(exact) for k, x in inputs.items()})
    truth = _answers(op.exact or op.reference, op, shape, raised, [x.to(exact) for x in given])
    plain = _answers(op.reference, op, shape, inputs, given)
    return compare(_answers(op.run, op, shape, inputs, given), plain, truth, _FLOORS[dtype])


def _answers(
    compute: Compute, op: Op, shape: TokenShape, inputs: Tensors, given: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Return outputs and gradients by name; those of packed qkv are three."""
    outputs = compute(shape, inputs)
    found = dict(zip(op.outputs, outputs, strict=True))
    names = [name for name in inputs if name not in op.frozen]
    gradients = torch.autograd.grad(outputs, trained(op, inputs), given)
    for name, gradient in zip(names, gradients, strict=True):
        if name == "qkv":
            found |= dict(zip(("d_q", "d_k", "d_v"), gradient.unbind(2), strict=True))
        else:
            found[f"d_{name}"] = gradient
    return {name: x.detach() for name, x in found.items()}


def compare(found: Tensors, plain: Tensors, truth: Tensors, floor: float) -> list[str]:
    """Return a sentence for each tensor whose error is above its limit; `plain` are the reference's."""
    wrong = []
    for name, true in truth.items():
        value = found[name]
        # Subtraction would broadcast.
        if value.shape != true.shape:
            wrong.append(f"{name}: shape {list(value.shape)}, not {list(true.shape)}")
            continue
        off, usual = (x.to(true.dtype) - true for x in (value, plain[name]))
        norm, top = true.norm(), true.abs().max()
        relative, limit = (off.norm() / norm).item(), (usual.norm() / norm).item()
        largest, most = off.abs().max().item(), usual.abs().max().item()
        limit, most = _FACTOR * limit + floor, _FACTOR * most + floor * top.item()
        if not relative <= limit:  # also true for NaN
            wrong.append(f"{name}: relative error {relative:.2e} > {limit:.2e}")
        elif not largest <= most:
            wrong.append(f"{name}: largest error {largest:.2e} > {most:.2e}")
    return wrong

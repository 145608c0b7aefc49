"""The benchmark of an op of a block at a shape, by `cogfast` and by its peers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from bench.harness.outcome import Row, Settings
from bench.kernel_ops.op_cases import (
    WAYS,
    Op,
    Run,
    Tensors,
    TokenShape,
    bytes_of,
    draw_given,
    draw_inputs,
    run_ours,
)
from bench.kernel_ops.op_check import check_op, check_peer, given_for, parts
from bench.kernel_ops.peers import compile_call, is_compiled, peers_of
from cogfast.diagnostics.timing import time_calls

OURS = "cogfast"
Calls = Mapping[
    str, Sequence[Callable[[], object]]
]  # by way; the calls of a way use different buffers


class Bench(Protocol):
    """An op at a shape that can be checked and timed. A way is forward, backward or step."""

    settings: Settings
    ways: Sequence[str]

    def describe(self) -> Row:
        """Return op, model and shape."""

    def num_bytes(self, way: str) -> int:
        """Return the bytes that a perfect kernel reads and writes."""

    def goal(self, way: str) -> float:
        """Return the goal in percent of the copy rate."""

    def peers(self) -> Sequence[str]:
        """Return the names of the peers."""

    def check(self, at_small_shapes: bool = True) -> list[str]:
        """Return a sentence for each result of cogfast that is wrong."""

    def calls(self, name: str) -> Calls:
        """Return the calls of `cogfast` or of a peer; Unavailable or ImportError if it cannot run."""


@dataclass(frozen=True, slots=True)
class OpBench:
    """A Bench of an op of a block."""

    settings: Settings
    op: Op
    shape: TokenShape

    ways = WAYS

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
        return bytes_of(self.op, way, self.shape)

    def goal(self, way: str) -> float:
        return self.op.goals[way]

    def peers(self) -> Sequence[str]:
        return tuple(peers_of(self.op))

    def check(self, at_small_shapes: bool = True) -> list[str]:
        return check_op(self.op, self.shape, self.settings.device, at_small_shapes)

    def calls(self, name: str) -> Calls:
        device = self.settings.device
        build = peers_of(self.op).get(name, run_ours)
        if name != OURS:
            check_peer(build, self.op, self.shape, device)
        num_sets = self.settings.num_buffer_sets(self.num_bytes("forward"))
        sets: list[Tensors] = [
            draw_inputs(self.op, self.shape, torch.bfloat16, device) for _ in range(num_sets)
        ]
        runs = [build(self.op, self.shape, inputs) for inputs in sets]
        # All calls share one compilation: only the first one resets the compiler.
        if is_compiled(name):
            is_tiny = self.settings.is_tiny
            compiled = [compile_call(run.call, is_tiny, i == 0) for i, run in enumerate(runs)]
            runs = [Run(call, run.leaves) for call, run in zip(compiled, runs, strict=True)]
        with torch.no_grad():
            given = draw_given(self.op, self.op.reference(self.shape, sets[0]))
        return {
            "forward": [run.call for run in runs],
            "backward": [_backward(run, given) for run in runs],
        }


def _backward(run: Run, given: Tensors) -> Callable[[], object]:
    # The graph is kept, so that backward can be timed many times.
    outputs = run.call()
    flat, leaves, gradients = parts(outputs), parts(run.leaves), given_for(outputs, given)
    return lambda: torch.autograd.grad(flat, leaves, gradients, retain_graph=True)


def time_contestant(bench: Bench, name: str, ways: Sequence[str]) -> dict[str, list[float]]:
    """Return the milliseconds of single calls of `cogfast` or of a peer, by way."""
    settings = bench.settings
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    # Peers hold buffers of several GB: the ones of the peer before are freed first.
    calls = bench.calls(name)
    return {way: time_calls(calls[way], settings.device, settings.seconds) for way in ways}

"""Compare predicted and real step times on this CPU: python -m bench.checks.plan_step_time --out FILE

For each shape the rates of the linears' products, of attention, of copies and of two memory-bound
kernels are measured at that shape, in turn with real steps of bench.step. Both are times of the process
in one thread, the least of all rounds, because other processes only add to them. The prediction is
that of `cogfast plan` (cogfast/train/plan/step_time.py), which knows the rates and nothing of the steps.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.harness.machine import write_report
from bench.harness.outcome import Outcome, Row, table
from bench.steps.step_cases import Case, Plan, make_call
from bench.steps.step_models import Variant
from bench.steps.step_sides import Ours
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.model.block import MLP_RATIO, NORM_EPS
from cogfast.train.plan.step_time import Rates, StepTime, estimate
from cogfast.train.plan.traffic import Layout

DEVICE = torch.device("cpu")
CASES = (
    Case("tiny"),
    Case("tiny", checkpointing="pointwise"),
    Case("tiny", mode="lora", checkpointing="full"),
    Case("quickstart"),
    Case("wide", num_layers=1),
    Case("wide", num_layers=1, mode="lora", checkpointing="attention_kept"),
)
_LINEARS = ((1, 3), (1, 1), (1, MLP_RATIO), (MLP_RATIO, 1))  # inputs and outputs, in widths
_ROUNDS = 5
_TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Probe:
    """A call whose work is known, in FLOPs or bytes; `times` are its seconds."""

    name: str
    work: float
    call: Callable[[], object]
    times: list[float]

    @property
    def seconds(self) -> float:
        return min(self.times)


def make_probes(variant: Variant) -> list[Probe]:
    """Return the products of the linears, attention in both directions and a copy."""
    config, rows = variant.config, variant.batch_size * variant.num_tokens
    width, heads = config.hidden_size, config.num_attention_heads
    draw = lambda *shape: torch.randn(*shape, dtype=variant.dtype)
    probes = []
    for num_in, num_out in _LINEARS:
        n, k = num_out * width, num_in * width
        x, w, dy = draw(rows, k), draw(n, k), draw(rows, n)
        products = (
            lambda x=x, w=w: x @ w.T,
            lambda dy=dy, w=w: dy @ w,
            lambda dy=dy, x=x: dy.T @ x,
        )
        probes += [Probe("matmul", 2 * rows * n * k, product, []) for product in products]
    shape = (variant.batch_size, heads, variant.num_tokens, width // heads)
    q, k, v = (draw(*shape).requires_grad_() for _ in range(3))
    out, given = F.scaled_dot_product_attention(q, k, v), draw(*shape)
    work = rows * variant.num_tokens * width
    forward = lambda: F.scaled_dot_product_attention(q.detach(), k.detach(), v.detach())
    backward = lambda: torch.autograd.grad(out, (q, k, v), given, retain_graph=True)
    probes.append(Probe("attention_forward", 4 * work, forward, []))
    probes.append(Probe("attention_backward", 10 * work, backward, []))
    # There are as many buffers as a block keeps: none is in a cache when it is copied again.
    pairs = [(draw(rows, width), draw(rows, width)) for _ in range(12)]
    copy = lambda: [target.copy_(source) for source, target in pairs]
    num_bytes = 2 * len(pairs) * rows * width * variant.dtype.itemsize
    probes.append(Probe("copy", num_bytes, copy, []))
    return probes + _kernel_probes(variant)


def _kernel_probes(variant: Variant) -> list[Probe]:
    """Return two memory-bound kernels of a block in both directions, with the bytes of docs/kernels.md.

    On a CPU they compute more than a copy of the same bytes takes.
    """
    b, s, width = variant.batch_size, variant.num_tokens, variant.config.hidden_size
    draw = lambda *shape: torch.randn(*shape, dtype=variant.dtype).requires_grad_()
    ops, unit = choose_kernels(), b * s * width * variant.dtype.itemsize
    x, bias = draw(b, s, MLP_RATIO * width), draw(MLP_RATIO * width)
    vectors, rows = [draw(width) for _ in range(3)], [draw(b, s, width) for _ in range(2)]
    modulation = [draw(b, 2, width) for _ in range(3)]
    given = (rows[0], rows[1], vectors[0], modulation[0], *vectors[1:], *modulation[1:])
    text = variant.config.text_length
    calls = {
        "gelu": ((8, 12), lambda: ops.gelu(x, bias), (x, bias)),
        "norm": ((4, 6), lambda: ops.residual_adaptive_layernorm(*given, text, NORM_EPS), given),
    }
    probes = []
    for units, forward, inputs in calls.values():
        made = forward()
        outputs = made if isinstance(made, tuple) else (made,)
        gradients = [torch.randn_like(out) for out in outputs]
        backward = lambda o=outputs, i=inputs, g=gradients: torch.autograd.grad(
            o, i, g, retain_graph=True
        )
        probes.append(Probe("kernels", units[0] * unit, forward, []))
        probes.append(Probe("kernels", units[1] * unit, backward, []))
    return probes


def rates_of(probes: Sequence[Probe], memory_bound: str = "kernels") -> Rates:
    """Return all work of each kind over all of its time. memory_bound: the probes of that rate."""

    def rate(name: str) -> float:
        kind = [probe for probe in probes if probe.name == name]
        return sum(probe.work for probe in kind) / sum(probe.seconds for probe in kind)

    return Rates(
        matmul=rate("matmul"),
        attention_forward=rate("attention_forward"),
        attention_backward=rate("attention_backward"),
        copy=rate(memory_bound),
        link=1.0,
        is_measured=True,
        source="this run",
    )


def predict(variant: Variant, case: Case, rates: Rates) -> StepTime:
    assert case.checkpointing != "auto", "a policy"
    layout = Layout(
        data_size=1, batch_size=variant.batch_size, bytes_per_number=variant.dtype.itemsize
    )
    return estimate(variant.config, variant.num_tokens, layout, rates, case.checkpointing)


def measure(case: Case, num_rounds: int = _ROUNDS) -> Row:
    """Measure a row: the rates, the prediction with its parts, the real step, and their ratio."""
    variant = Plan(DEVICE, torch.float32).variant(case)
    side = Ours(variant)
    side.use_checkpointing(case.checkpointing)
    step = Probe("step", 0.0, make_call("ours", side, case, variant), [])
    probes = make_probes(variant)
    for probe in (step, *probes):
        probe.call()  # allocates memory, and the optimizer's state
    for _ in range(num_rounds):
        for probe in (step, *probes):
            started = time.process_time()
            probe.call()
            probe.times.append(time.process_time() - started)
    rates = rates_of(probes)
    copies = rates_of(probes, "copy")
    predicted, at_copy_rate = predict(variant, case, rates), predict(variant, case, copies)
    milliseconds = [1000 * seconds for seconds in sorted(step.times)]
    return {
        "model": case.model,
        "num_layers": case.layers,
        "mode": case.mode,
        "checkpointing": case.checkpointing,
        "num_tokens": variant.num_tokens,
        "batch_size": variant.batch_size,
        "matmul_gflop_per_s": rates.matmul / 1e9,
        "attention_forward_gflop_per_s": rates.attention_forward / 1e9,
        "attention_backward_gflop_per_s": rates.attention_backward / 1e9,
        "copy_gb_per_s": copies.copy / 1e9,
        "kernels_gb_per_s": rates.copy / 1e9,
        "matmul_ms": 1000 * predicted.matmul,
        "attention_ms": 1000 * predicted.attention,
        "memory_bound_ms": 1000 * predicted.memory_bound,
        "predicted_ms": 1000 * predicted.seconds,
        "step_ms": 1000 * step.seconds,
        "most_step_ms": milliseconds[-1],
        "ratio": predicted.seconds / step.seconds,
        "ratio_at_copy_rate": at_copy_rate.seconds / step.seconds,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    outcome, close = Outcome(), 0
    for case in CASES:
        row = measure(case, arguments.rounds)
        shown = [key for key in row if not key.endswith("_per_s")]
        outcome = replace(outcome, rows=[*outcome.rows, row], shown=shown)
        gc.collect()
        print(table(outcome), flush=True)
        close = sum(abs(row["ratio"] - 1) <= _TOLERANCE for row in outcome.rows)
        numbers = {"rounds": arguments.rounds, "within_15_percent": close}
        numbers["clock"] = "time of the process, least of the rounds"
        # After every row: a run that is killed keeps them.
        write_report(
            arguments.out, "plan_step_time", DEVICE, threads=1, numbers=numbers, rows=outcome.rows
        )
    print(f"within {_TOLERANCE:.0%}: {close} of {len(outcome.rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

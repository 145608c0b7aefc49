"""Is what is about to be timed right? Outputs and gradients against float32 or float64.

A tensor may be off by twice what the op's own reference is off in the same dtype, and a floor: in
the norm of the whole, and at its worst element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bench.kernel_ops.op_cases import (
    Op,
    Run,
    Tensors,
    TokenShape,
    Values,
    draw_given,
    draw_inputs,
    mark_trained,
    run_ours,
    run_reference,
    small,
)

_FACTOR = 2.0
# An eighth of the spacing of numbers; sums in another order differ by a few spacings of float32.
_FLOORS = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13, torch.float32: 2.0**-20}
_MOST_CHARACTERS = 300
_SAME = 1e-4  # in float32, of the norm
_SMALL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parts(values: Values) -> list[Tensor]:
    return [
        x for value in values.values() for x in (value if isinstance(value, tuple) else [value])
    ]


def given_for(outputs: Values, given: Tensors) -> list[Tensor]:
    """The gradients of `outputs`, each in the layout of its output."""
    laid_out = []
    for name, value in outputs.items():
        pieces = value if isinstance(value, tuple) else (value,)
        rows = given[name].split([piece.shape[1] for piece in pieces], dim=1)
        laid_out += [torch.empty_like(p).copy_(r) for p, r in zip(pieces, rows, strict=True)]
    return laid_out


def answers(run: Run, given: Tensors) -> dict[str, Tensor]:
    """Outputs and gradients by name, each whole; the packed qkv part by part."""
    outputs = run.call()
    gradients = iter(
        torch.autograd.grad(parts(outputs), parts(run.leaves), given_for(outputs, given))
    )
    told: dict[str, Tensor] = {}
    for name, value in outputs.items():
        told[name] = torch.cat(value, dim=1) if isinstance(value, tuple) else value
    for name, leaf in run.leaves.items():
        if isinstance(leaf, tuple):
            told[f"d_{name}"] = torch.cat([next(gradients) for _ in leaf], dim=1)
        elif name == "qkv":
            told |= dict(zip(("d_q", "d_k", "d_v"), next(gradients).unbind(2), strict=True))
        else:
            told[f"d_{name}"] = next(gradients)
    return {name: x.detach() for name, x in told.items()}


def expected(
    op: Op, shape: TokenShape, inputs: Tensors, given: Tensors
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """The truth, and how far from it an answer may be, in relative norm and at the worst element."""
    dtype = next(iter(inputs.values())).dtype
    exact = torch.float64 if dtype == torch.float32 else torch.float32
    raised = mark_trained(op, {k: x.to(exact) for k, x in inputs.items()})
    raised_given = {name: x.to(exact) for name, x in given.items()}
    truth = answers(run_reference(op, shape, raised, exact=True), raised_given)
    plain = answers(run_reference(op, shape, inputs), given)
    floor = _FLOORS[dtype]
    norms, worst = {}, {}
    for name, true in truth.items():
        off = plain[name].to(exact) - true
        norms[name] = _FACTOR * (off.norm() / true.norm()).item() + floor
        worst[name] = _FACTOR * off.abs().max().item() + floor * true.abs().max().item()
    return truth, norms, worst


def compare(
    told: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    norms: Mapping[str, float],
    worst: Mapping[str, float],
) -> list[str]:
    """A sentence for each answer that is too far off."""
    wrong = []
    for name, value in told.items():
        true = truth[name]
        if value.shape != true.shape:
            wrong.append(f"{name}: shape {list(value.shape)}, not {list(true.shape)}")
            continue
        off = value.to(true.dtype) - true
        relative, largest = (off.norm() / true.norm()).item(), off.abs().max().item()
        if not relative <= norms[name]:  # NaN too
            wrong.append(f"{name}: relative error {relative:.2e} > {norms[name]:.2e}")
        elif not largest <= worst[name]:
            wrong.append(f"{name}: largest error {largest:.2e} > {worst[name]:.2e}")
    return wrong


def check_run(run: Run, reference: tuple, given: Tensors) -> list[str]:
    """What is wrong with a run on inputs whose expected() is known; whatever it raises, too."""
    try:
        return compare(answers(run, given), *reference)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_CHARACTERS]]


def check_op(
    op: Op, shape: TokenShape, device: torch.device, at_small_shapes: bool = True
) -> list[str]:
    """What is wrong with our op: in bf16 at this shape, in three dtypes at a small one."""
    cases = [(shape, torch.bfloat16)]
    if at_small_shapes:
        cases += [(small(shape), dtype) for dtype in _SMALL_DTYPES]
    wrong = []
    for case_shape, dtype in cases:
        torch.manual_seed(
            0
        )  # a verdict that repeats: the largest error of many is a matter of luck
        inputs = draw_inputs(op, case_shape, dtype, device)
        with torch.no_grad():
            given = draw_given(op, op.reference(case_shape, inputs))
        reference = expected(op, case_shape, inputs, given)
        told = check_run(run_ours(op, case_shape, inputs), reference, given)
        kind = str(dtype).removeprefix("torch.")
        wrong += [f"{op}, {case_shape}, {kind}: {text}" for text in told]
    return wrong


def check_peer(build: Callable, op: Op, shape: TokenShape, device: torch.device) -> None:
    """Refuse a peer that computes something else; it rounds where its authors want."""
    shape = small(shape)
    inputs = draw_inputs(op, shape, torch.float32, device)
    with torch.no_grad():
        given = draw_given(op, op.reference(shape, inputs))
    truth = answers(run_reference(op, shape, inputs), given)
    told = answers(build(op, shape, inputs), given)
    for name, value in told.items():
        off = ((value - truth[name]).norm() / truth[name].norm()).item()
        assert off <= _SAME, f"{op}: {name} of the peer is off by {off:.2e}"

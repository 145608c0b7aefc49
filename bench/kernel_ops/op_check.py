"""Check outputs and gradients of an op against float32 or float64 before it is timed.

The error of a tensor may be twice that of the op's reference in the same dtype plus a floor, both in
the norm and at the worst element.
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
# bf16, fp16: an eighth of the spacing of numbers. float32: a different summation order changes a result
# by a few spacings.
_FLOORS = {torch.bfloat16: 2.0**-10, torch.float16: 2.0**-13, torch.float32: 2.0**-20}
_MOST_CHARACTERS = 300  # of an error message
_SAME = 1e-4  # relative error in float32 up to which a peer computes the same op
_SMALL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def parts(values: Values) -> list[Tensor]:
    """Return all tensors as a flat list."""
    return [
        x for value in values.values() for x in (value if isinstance(value, tuple) else [value])
    ]


def given_for(outputs: Values, given: Tensors) -> list[Tensor]:
    """Return the gradients of `outputs`, each in the layout of its output."""
    laid_out = []
    for name, value in outputs.items():
        pieces = value if isinstance(value, tuple) else (value,)
        rows = given[name].split([piece.shape[1] for piece in pieces], dim=1)
        laid_out += [torch.empty_like(p).copy_(r) for p, r in zip(pieces, rows, strict=True)]
    return laid_out


def answers(run: Run, given: Tensors) -> dict[str, Tensor]:
    """Return outputs and gradients by name, with split rows joined and packed qkv split."""
    outputs = run.call()
    gradients = iter(
        torch.autograd.grad(parts(outputs), parts(run.leaves), given_for(outputs, given))
    )
    found: dict[str, Tensor] = {}
    for name, value in outputs.items():
        found[name] = torch.cat(value, dim=1) if isinstance(value, tuple) else value
    for name, leaf in run.leaves.items():
        if isinstance(leaf, tuple):
            found[f"d_{name}"] = torch.cat([next(gradients) for _ in leaf], dim=1)
        elif name == "qkv":
            found |= dict(zip(("d_q", "d_k", "d_v"), next(gradients).unbind(2), strict=True))
        else:
            found[f"d_{name}"] = next(gradients)
    return {name: x.detach() for name, x in found.items()}


def expected(
    op: Op, shape: TokenShape, inputs: Tensors, given: Tensors
) -> tuple[dict[str, Tensor], dict[str, float], dict[str, float]]:
    """Return the exact answers, and the limits of relative norm and worst element for each."""
    dtype = next(iter(inputs.values())).dtype
    # One precision above that of the op.
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
    found: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    norms: Mapping[str, float],
    worst: Mapping[str, float],
) -> list[str]:
    """Return a sentence for each answer whose error is above its limit."""
    wrong = []
    for name, value in found.items():
        true = truth[name]
        # Subtraction would broadcast.
        if value.shape != true.shape:
            wrong.append(f"{name}: shape {list(value.shape)}, not {list(true.shape)}")
            continue
        off = value.to(true.dtype) - true
        relative, largest = (off.norm() / true.norm()).item(), off.abs().max().item()
        if not relative <= norms[name]:  # also true for NaN
            wrong.append(f"{name}: relative error {relative:.2e} > {norms[name]:.2e}")
        elif not largest <= worst[name]:
            wrong.append(f"{name}: largest error {largest:.2e} > {worst[name]:.2e}")
    return wrong


def check_run(run: Run, reference: tuple, given: Tensors) -> list[str]:
    """Compare a run with the result of expected(); an exception becomes a sentence, too."""
    try:
        return compare(answers(run, given), *reference)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0][:_MOST_CHARACTERS]]


def check_op(op: Op, shape: TokenShape, device: torch.device) -> list[str]:
    """Check the op of cogfast in bf16 at this shape, and in three dtypes at a small one."""
    wrong = []
    cases = [(shape, torch.bfloat16)] + [(small(shape), dtype) for dtype in _SMALL_DTYPES]
    for case_shape, dtype in cases:
        torch.manual_seed(0)  # the largest error depends on the draws
        inputs = draw_inputs(op, case_shape, dtype, device)
        with torch.no_grad():
            given = draw_given(op, op.reference(case_shape, inputs))
        reference = expected(op, case_shape, inputs, given)
        found = check_run(run_ours(op, case_shape, inputs), reference, given)
        kind = str(dtype).removeprefix("torch.")
        wrong += [f"{op}, {case_shape}, {kind}: {text}" for text in found]
    return wrong


def check_peer(build: Callable, op: Op, shape: TokenShape, device: torch.device) -> None:
    """Refuse a peer that computes something else. The check is in float32, where rounding is negligible."""
    shape = small(shape)
    inputs = draw_inputs(op, shape, torch.float32, device)
    with torch.no_grad():
        given = draw_given(op, op.reference(shape, inputs))
    truth = answers(run_reference(op, shape, inputs), given)
    found = answers(build(op, shape, inputs), given)
    for name, value in found.items():
        off = ((value - truth[name]).norm() / truth[name].norm()).item()
        assert off <= _SAME, f"{op}: {name} of the peer has relative error {off:.2e} > {_SAME}"

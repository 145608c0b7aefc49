"""FusedEmaAdam's C++ kernel for a CPU against float64 and plain PyTorch; its passes over memory; the
sum of squares of the gradient's norm."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from cogfast.kernels.fused_ema_adam import _CPU_CHUNK, FusedEmaAdam, sum_of_squares
from tests.kernels.test_fused_ema_adam import (
    HYPER,
    close,
    random_case,
    reference,
    run,
    without_kernel,
)
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS


class _OpSizes(TorchDispatchMode):
    """Record the elements of every tensor that an operator reads, writes or creates."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[int], int]] = []  # name, elements of inputs, new elements

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            inputs = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            known = {x.untyped_storage().data_ptr() for x in inputs}
            outputs = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
            new = sum(x.numel() for x in outputs if x.untyped_storage().data_ptr() not in known)
            self.calls.append((func.name(), [x.numel() for x in inputs], new))
        return result


def ops_of_a_step(num_tensors):
    """Return the operators of a second step over 2 million elements."""
    params, (grads,) = random_case([2_000_000 // num_tensors] * num_tensors, num_steps=1)
    optimizer = FusedEmaAdam(params, **HYPER)
    run(optimizer, params, [grads])  # creates the state
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    with _OpSizes() as ops:
        optimizer.step()
    assert max(new for _, _, new in ops.calls) <= 1, "no memory of a parameter's size"
    return [call for call in ops.calls if max(call[1], default=0) > 1]


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("num_tensors", [100, 1])
def test_the_cpu_kernel_passes_once_over_all_tensors(num_tensors):
    """One call reads weight, gradient, two moments and EMA of all tensors once."""
    ((name, sizes, _),) = ops_of_a_step(num_tensors)
    assert name == "cogfast::ema_adam_"
    assert sum(n for n in sizes if n > 1) == 5 * 2_000_000


@pytest.mark.parametrize("num_tensors", [100, 1])
def test_a_step_without_the_kernel_passes_over_each_stream_while_it_is_in_the_caches(
    num_tensors, monkeypatch
):
    """A step takes two operators per chunk and no memory of a parameter's size.

    torch's AdamW and a foreach EMA pass over whole tensors. `python -m bench.ops` measures the time
    that this saves.
    """
    without_kernel(monkeypatch)
    passes = ops_of_a_step(num_tensors)
    size = 2_000_000 // num_tensors
    assert len(passes) == 2 * num_tensors * math.ceil(size / _CPU_CHUNK)
    assert {name for name, _, _ in passes} == {"aten::_fused_adamw_", "aten::lerp_.Tensor"}
    assert max(max(sizes) for _, sizes, _ in passes) <= _CPU_CHUNK
    # Adam reads weight, gradient and two moments; the EMA reads the weight again and itself.
    assert sum(n for _, sizes, _ in passes for n in sizes if n > 1) == 6 * 2_000_000


# Empty, one element, less than a vector, a piece and one more, several pieces.
LENGTHS = (0, 1, 7, 4096, 4097, 8203)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def mixed_case(num_steps):
    """Draw parameters, copies and gradients in every combination of dtypes."""
    lengths = (0, 1, 7, 4097)
    kinds = list(itertools.product(lengths, DTYPES, DTYPES, (None, *DTYPES)))
    params, grads = random_case([n for n, *_ in kinds], num_steps)
    params = [
        p.detach().to(dtype).requires_grad_()
        for p, (_, dtype, *_) in zip(params, kinds, strict=True)
    ]
    copies = {
        p: torch.zeros(n, dtype=dtype)
        for p, (n, _, _, dtype) in zip(params, kinds, strict=True)
        if dtype is not None
    }
    for p in params:
        p.grad_dtype = None
    grads = [[g.to(k[2]) for g, k in zip(step, kinds, strict=True)] for step in grads]
    return params, grads, copies


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize(
    "options",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.0, "bias_correction": False},
        {"weight_decay": 0.1, "adam_w_mode": False, "use_num_updates": False},
        {"weight_decay": 0.1, "adam_w_mode": False, "bias_correction": False},
    ],
    ids=["adamw", "unbiased", "adam-constant", "adam-unbiased"],
)
def test_the_cpu_kernel_equals_plain_pytorch(options, monkeypatch):
    """All lengths and dtypes in one call, with a scale: two steps are the same up to rounding."""
    results = []
    for has_kernel in (True, False):
        if not has_kernel:
            without_kernel(monkeypatch)
        params, grads, copies = mixed_case(num_steps=2)
        optimizer = FusedEmaAdam(params, **{**HYPER, "eps": 1e-4, **options})
        optimizer.low_precision_copies = copies
        optimizer.gradient_scale = torch.tensor(0.7)
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g
            optimizer.step()
        results.append((params, optimizer, copies))
    (params, kernel, copies), (twins, plain, other_copies) = results
    for p, q in zip(params, twins, strict=True):
        # A 16-bit weight that is rounded the other way changes the next step.
        near = (1e-5, 1e-6) if p.dtype == torch.float32 else (2**-8, 1e-4)
        for name in ("step", "exp_avg", "exp_avg_sq", "shadow"):
            assert torch.allclose(kernel.state[p][name], plain.state[q][name], *near), name
        for x, y in ((p, q), *([(copies[p], other_copies[q])] if p in copies else [])):
            rtol = 1e-5 if x.dtype == p.dtype == torch.float32 else 2**-7
            assert torch.allclose(x, y, rtol, 1e-5)


@NEEDS_CPU_KERNELS
def test_the_cpu_kernel_equals_float64():
    params, grads, copies = mixed_case(num_steps=1)
    expected = [reference(p, [g]) for p, g in zip(params, grads[0], strict=True)]
    optimizer = FusedEmaAdam(params, **HYPER)
    optimizer.low_precision_copies = copies
    for p, g in zip(params, grads[0], strict=True):
        p.grad = g
    optimizer.step()
    for p, want in zip(params, expected, strict=True):
        for name in ("exp_avg", "exp_avg_sq", "shadow"):
            close(optimizer.state[p][name], want[name])
        for x in (p, *([copies[p]] if p in copies else [])):
            # Half a unit in the last place, and the float32 arithmetic before.
            half_unit = 0 if x.dtype == torch.float32 else torch.finfo(x.dtype).eps / 2
            rtol = half_unit + 1e-6
            torch.testing.assert_close(x.detach().double(), want["p"], rtol=rtol, atol=1e-6)


@NEEDS_CPU_KERNELS
def test_the_cpu_kernel_leaves_everything_if_found_inf_is_set():
    params, grads, copies = mixed_case(num_steps=2)
    optimizer = FusedEmaAdam(params, **HYPER)
    optimizer.low_precision_copies = copies
    for flag, step in zip((0.0, 1.0), grads, strict=True):
        optimizer.found_inf = torch.tensor(flag)
        for p, g in zip(params, step, strict=True):
            p.grad = g
        state = [x for p in params for x in optimizer.state[p].values()]
        tensors = [*params, *copies.values(), *state]
        before = [x.detach().clone() for x in tensors]
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@NEEDS_CPU_KERNELS
def test_the_cpu_kernel_refuses_state_of_another_shape_or_dtype():
    p = torch.ones(4, requires_grad=True)
    p.grad = torch.ones(4)
    for name, wrong in (("exp_avg", torch.zeros(3)), ("shadow", torch.zeros(4).double())):
        optimizer = FusedEmaAdam([p])
        optimizer.state_of(p)[name] = wrong
        with pytest.raises(RuntimeError, match="must be"):
            optimizer.step()
        assert optimizer.state[p]["step"] == 0 and torch.equal(p.detach(), torch.ones(4))


@pytest.mark.parametrize("on", [pytest.param("cpu", marks=NEEDS_CPU_KERNELS), "plain"])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_sum_of_squares(on, dtype, monkeypatch):
    """All tensors in one call, in float64, where float32 would overflow, too."""
    if on == "plain":
        without_kernel(monkeypatch)
    tensors = [g.to(dtype) for g in random_case(LENGTHS)[1][0]]
    tensors += [torch.full((3, 5), 1e25, dtype=dtype)[:, ::2], torch.randn(6, 4).to(dtype).t()]
    got = sum_of_squares(tensors)
    want = sum(x.double().square().sum() for x in tensors)
    assert got.dtype == torch.float64 and got.shape == ()
    torch.testing.assert_close(got, want, rtol=1e-14, atol=0)
    for x in tensors[:6]:  # without the large ones, which hide the rest
        torch.testing.assert_close(
            sum_of_squares([x]), x.double().square().sum(), rtol=1e-13, atol=0
        )


def test_sum_of_squares_of_other_tensors():
    """Half precision, non-finite numbers and no tensor at all."""
    half = torch.randn(50, generator=torch.Generator().manual_seed(1)).half()
    want = half.double().square().sum() + 2
    torch.testing.assert_close(sum_of_squares([half, torch.ones(2)]), want)
    assert sum_of_squares([torch.ones(9), torch.tensor([float("nan")])]).isnan()
    assert sum_of_squares([torch.ones(40), torch.tensor([-float("inf")])]) == float("inf")
    assert sum_of_squares([]) == 0


@NEEDS_CPU_KERNELS
def test_opcheck():
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.cogfast.sum_of_squares, ([torch.ones(5), torch.ones(3)],), test_utils=tests
    )
    streams = [[torch.rand(5), torch.rand(3)] for _ in range(5)]
    copies = [torch.zeros(5).bfloat16(), None]
    numbers = {**HYPER, "beta1": 0.9, "beta2": 0.95, "ema_decay": 0.99, "gradient_scale": 0.5}
    del numbers["betas"]
    flags = dict.fromkeys(("bias_correction", "adam_w_mode", "use_num_updates"), True)
    steps = [torch.zeros(()), torch.zeros(())]
    arguments = (*streams, copies, [None, None], [None, None], steps)
    torch.library.opcheck(
        torch.ops.cogfast.ema_adam_, arguments, {**numbers, **flags}, test_utils=tests
    )
    average = (torch.rand(5), torch.rand(5), torch.tensor(0.5))
    torch.library.opcheck(torch.ops.cogfast.average_, average, test_utils=tests)

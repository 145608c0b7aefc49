"""LoRA's second product added to a linear's output: the interpreted kernel, the CPU version and the
gradients against float64."""

import pytest
import torch
from torch import Tensor

from cogfast.kernels.add_low_rank import add_low_rank, add_low_rank_reference, read_low_rank
from cogfast.kernels.gpu.add_low_rank import launch

# Rows, columns of a part, rank; parts with a matrix, of how many. Float32 tiles are 64 x 64 x 32.
CASES = {
    "one part": (5, 48, 4, [0], 1),
    "q, k and v": (66, 40, 8, [0, 1, 2], 3),
    "k alone": (7, 130, 20, [1], 3),
    "q and v": (65, 64, 33, [0, 2], 3),  # two tiles of rows, two of the rank
}
ON_CASES = pytest.mark.parametrize("name", CASES)
Case = tuple[Tensor, Tensor, list[Tensor], list[int], int, float]
SCALING = 0.7


def draw(name: str, dtype: torch.dtype = torch.float32) -> Case:
    rows, n, rank, parts, num_parts = CASES[name]
    generator = torch.Generator().manual_seed(0)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    matrices = [make(n, rank) for _ in parts]
    x, low = make(1, rows, num_parts * n), make(1, rows, len(parts) * rank)
    return x, low, matrices, parts, num_parts, SCALING


def exact(case: Case) -> Tensor:
    """Return y in float64, part by part."""
    x, low, matrices, parts, num_parts, scaling = case
    y, rank = x.double().clone(), matrices[0].shape[1]
    n = x.shape[-1] // num_parts
    for i, (part, matrix) in enumerate(zip(parts, matrices, strict=True)):
        of_part = low[..., i * rank : (i + 1) * rank].double()
        y[..., part * n : (part + 1) * n] += scaling * of_part @ matrix.double().t()
    return y


def close(found: Tensor, expected: Tensor, terms: int) -> None:
    # Terms are of magnitude 1: rounding errors add up like a random walk.
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6 * terms**0.5)


@pytest.mark.parametrize("op", [launch, add_low_rank, add_low_rank_reference])
@ON_CASES
def test_results_equal_float64(op, name: str) -> None:
    case = draw(name)
    close(op(*case), exact(case), CASES[name][2])


def test_half_precision_rounds_once() -> None:
    """The sum is in float32: it differs from float64's by one rounding to bf16."""
    case = draw("q, k and v", torch.bfloat16)
    torch.testing.assert_close(add_low_rank(*case).double(), exact(case), rtol=2**-8, atol=1e-5)


@ON_CASES
def test_gradients(name: str) -> None:
    x, low, matrices, parts, num_parts, _ = draw(name, torch.float64)
    leaves = [t.requires_grad_() for t in (x, low, *matrices)]
    case = (x, low, matrices, parts, num_parts, SCALING)
    y = exact(case)
    dy = torch.randn_like(y)
    expected = torch.autograd.grad(y, leaves, dy)
    found = torch.autograd.grad(add_low_rank(*case), leaves, dy)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_frozen_inputs_cost_nothing() -> None:
    """Without gradients of B only those of x and low are computed, and x is not kept."""
    x, low, matrices, parts, num_parts, _ = draw("q and v")
    x.requires_grad_()
    low.requires_grad_()
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = add_low_rank(x, low, matrices, parts, num_parts)
    y.sum().backward()
    assert all(t.shape != x.shape for t in saved)
    assert torch.equal(x.grad, torch.ones_like(x)) and low.grad is not None
    assert all(matrix.grad is None for matrix in matrices)


def adapted_gradients(dtype: torch.dtype, separate: bool) -> tuple[Tensor, ...]:
    """Return the gradients of x [2, 33, 96] and of A [130, 96] beside a frozen linear, and of the linear's
    input alone. separate: autograd's product and sum."""
    generator = torch.Generator().manual_seed(1)
    make = lambda *shape: torch.randn(shape, generator=generator).bfloat16().to(dtype)
    x, a = make(2, 33, 96).requires_grad_(), make(130, 96).requires_grad_()
    weight, dy, dlow = make(16, 96), make(2, 33, 16), make(2, 33, 130)
    given, low = (x, torch.nn.functional.linear(x, a)) if separate else read_low_rank(x, a)
    of_linear: list[Tensor] = []
    given.register_hook(of_linear.append)
    y = torch.nn.functional.linear(given, weight)
    of_x, of_a = torch.autograd.grad((y, low), (x, a), (dy, dlow))
    return of_x, of_a, of_linear[0]


def test_the_gradient_of_the_linears_input_becomes_that_of_x() -> None:
    exact_x, exact_a, _ = adapted_gradients(torch.float64, separate=True)
    for found, wanted in zip(
        adapted_gradients(torch.float64, separate=False)[:2], (exact_x, exact_a), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    of_x, of_a, of_linear = adapted_gradients(torch.bfloat16, separate=False)
    assert of_x.data_ptr() == of_linear.data_ptr()
    twice_rounded, same_a, _ = adapted_gradients(torch.bfloat16, separate=True)
    assert torch.equal(of_a, same_a)
    error, allowed = ((t.double() - exact_x).square().mean() for t in (of_x, twice_rounded))
    assert error < 0.7 * allowed, error / allowed  # the product of the adapters is not rounded


def test_x_without_a_gradient_gets_none_from_the_linear() -> None:
    x, a = torch.randn(3, 8), torch.randn(2, 8, requires_grad=True)
    given, low = read_low_rank(x, a)
    assert not given.requires_grad and low.requires_grad


def test_tensors_that_are_not_contiguous() -> None:
    x, low, *others = draw("q and v")
    wanted = exact((x, low, *others)).unflatten(1, (13, 5))[0]
    turned = [
        t.unflatten(1, (13, 5))[0].transpose(0, 1).contiguous().transpose(0, 1) for t in (x, low)
    ]
    assert not turned[0].is_contiguous()
    for op in (add_low_rank, launch):
        close(op(*turned, *others), wanted, 33)


def test_no_rows() -> None:
    x, low, matrix = torch.zeros(1, 0, 16), torch.zeros(1, 0, 4), torch.zeros(16, 4)
    assert launch(x, low, [matrix], [0], 1, 1.0).shape == (1, 0, 16)
    assert add_low_rank(x, low, [matrix], [0], 1).shape == (1, 0, 16)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["5B's q, k and v", "one part", "q and v"])
def test_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Allow twice the reference's error in the same dtype, against float64."""
    production = (1777, 3072, 128, [0, 1, 2], 3)
    rows, n, rank, parts, num_parts = CASES.get(name, production)
    make = lambda *shape: torch.randn(shape, device="cuda", dtype=dtype)
    matrices = [make(n, rank) for _ in parts]
    x, low = make(1, rows, num_parts * n), make(1, rows, len(parts) * rank)
    dy, results = torch.randn_like(x), []
    for op, work in (
        (add_low_rank, dtype),
        (add_low_rank_reference, dtype),
        (lambda *case: exact(case), torch.float64),
    ):
        leaves = [t.to(work).requires_grad_() for t in (x, low, *matrices)]
        y = op(*leaves[:2], leaves[2:], parts, num_parts, SCALING)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, dy.to(work))))
    for got, reference, truth in zip(*results, strict=True):
        error, allowed = ((t.double() - truth).abs().max() for t in (got, reference))
        assert error <= 2 * allowed + 1e-6 * truth.abs().max()

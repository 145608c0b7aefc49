"""The linear with an fp8 weight: its rounding, products and gradients against float64, what autograd
keeps, its ops, and the interpreted kernel that rounds rows."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cogfast.kernels.gpu.fp8_linear import launch
from cogfast.kernels.quantized.float8 import FP8
from cogfast.kernels.quantized.fp8_linear import (
    fp8_linear,
    fp8_linear_reference,
    quantize_rows,
)

# (rows, in, out): production's widths, primes, one row, one entry
SHAPES = {"wide": (64, 192, 768), "ragged": (37, 53, 71), "one row": (1, 64, 96), "tiny": (3, 1, 2)}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rounded(x: Tensor) -> Tensor:
    """Round the rows of x [R, N] to 3 bits behind the leading one, in float64 and without float8.

    The largest entry of a row becomes 448, and the smallest normal number is 2^-6.
    """
    scale = x.abs().amax(1, keepdim=True) / 448
    quotient = x / scale
    step = torch.exp2(quotient.abs().log2().floor().clamp_min(-6) - 3)
    return torch.round(quotient / step) * step * scale  # to the nearest, ties to even


def test_rounding_is_to_four_bits_of_each_entry() -> None:
    weight = draw(40, 300).double() * torch.logspace(-6, 3, 40, dtype=torch.float64)[:, None]
    q, scale = quantize_rows(weight.float())
    assert q.dtype == FP8 and scale.dtype == torch.float32
    assert q.float().abs().amax(1).eq(448).all()
    found, wanted = q.double() * scale.double()[:, None], rounded(weight)
    # Quotients that float32 rounds across the middle of two steps are one step of 1/8 away.
    is_other = (found - wanted).abs() > 1e-6 * wanted.abs()
    assert is_other.float().mean() < 1e-3
    assert ((found - wanted).abs() <= 0.126 * wanted.abs() + 1e-12).all()


def test_special_rows() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [math.inf, 1.0], [math.nan, 1.0], [-3.0, 3.0]])
    q, scale = quantize_rows(weight)
    assert q[0].tolist() == [0, 0] and scale.isfinite().tolist() == [True, True, False, False, True]
    assert (q[1].float() * scale[1]).abs().max() <= 1e-43
    assert q[4].tolist() == [-448, 448]
    # A row of x that is not finite gives no finite output, and the others do.
    out = fp8_linear(weight, *quantize_rows(torch.eye(2)))
    assert out.isfinite().all(1).tolist() == [True, True, False, False, True]


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products_and_gradients_are_those_of_rounded_rows(shape, has_bias) -> None:
    """In float64 from the formulas: y of rounded x and W, dx of rounded scale dy and q."""
    rows, columns, outputs = shape
    q, scale = quantize_rows(draw(outputs, columns))
    x, dy = draw(rows, columns, seed=1).requires_grad_(), draw(rows, outputs, seed=2)
    bias = draw(outputs, seed=3).requires_grad_() if has_bias else None
    y = fp8_linear(x, q, scale, bias)
    y.backward(dy)
    as_found = lambda t: (lambda q, s: q.double() * s.double()[:, None])(*quantize_rows(t))
    wanted = as_found(x.detach()) @ (q.double() * scale.double()[:, None]).t()
    wanted = wanted if bias is None else wanted + bias.double()
    torch.testing.assert_close(y.double(), wanted, rtol=1e-5, atol=1e-4)
    gradient = as_found(dy * scale) @ q.double()
    torch.testing.assert_close(x.grad.double(), gradient, rtol=1e-5, atol=1e-4)
    if bias is not None:
        torch.testing.assert_close(bias.grad.double(), dy.double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_error_of_normally_distributed_numbers(dtype: torch.dtype) -> None:
    """Each factor is off by 2.6% on average, a product by 3.7%."""
    weight, x = draw(256, 512), draw(100, 512, seed=1, dtype=dtype).requires_grad_()
    dy = draw(100, 256, seed=2, dtype=dtype)
    far = lambda found, wanted: ((found.double() - wanted).norm() / wanted.norm()).item()
    y = fp8_linear(x, *quantize_rows(weight))
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype
    assert 0.03 < far(y, x.double() @ weight.double().t()) < 0.042
    assert 0.03 < far(x.grad, dy.double() @ weight.double()) < 0.042


def test_autograd_keeps_the_fp8_weight_alone() -> None:
    q, scale = quantize_rows(draw(96, 64))
    x, kept = draw(5, 64).requires_grad_(), []
    note = lambda tensor: kept.append(tensor) or tensor
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = fp8_linear(x, q, scale)
    assert {t.data_ptr() for t in kept} == {q.data_ptr(), scale.data_ptr()}
    assert out.requires_grad


def test_ops() -> None:
    q, scale = quantize_rows(draw(96, 64))
    for op, given in (
        (torch.ops.cogfast.fp8_linear, (draw(2, 5, 64), q, scale, draw(96))),
        (torch.ops.cogfast.fp8_linear_backward, (draw(2, 5, 96), q, scale)),
    ):
        # test_schema multiplies the inputs, which PyTorch cannot with float8.
        torch.library.opcheck(op, given, test_utils="test_faketensor")


def test_the_compiled_linear_is_the_eager_one() -> None:
    q, scale = quantize_rows(draw(96, 64))
    x = draw(5, 64).requires_grad_()
    run = lambda x: fp8_linear(x, q, scale).square().sum()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, wanted = (torch.autograd.grad(function(x), x)[0] for function in (compiled, run))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    "columns", [None, draw(300, seed=1).abs() + 0.1], ids=["x", "times columns"]
)
def test_the_kernel_that_rounds_rows(columns: Tensor | None) -> None:
    """The interpreter loses the carry where a mantissa rounds up to the next power of two, and cuts off
    what is below 2^-6."""
    x = draw(37, 300) * torch.logspace(-6, 3, 37)[:, None]
    x[3] = 0
    q, scale = launch(x, columns)
    wanted, scales = quantize_rows(x if columns is None else x * columns)
    assert q.dtype == FP8 and torch.equal(scale, scales)
    found, wanted = q.double(), wanted.double()
    is_power, is_normal = wanted.abs().log2().frac() == 0, wanted.abs() >= 2**-6
    is_plain = is_normal & ~is_power
    assert torch.equal(found[is_plain], wanted[is_plain]) and is_plain.double().mean() > 0.8
    assert ((found - wanted).abs()[~is_normal] <= 2**-9).all()
    carries = found[is_power] / wanted[is_power]
    assert ((carries == 1) | (carries == 0.5)).all()


def test_the_kernel_marks_rows_that_are_not_finite() -> None:
    x = torch.ones(4, 20)
    x[1, 3], x[2, 4] = math.nan, -math.inf
    assert launch(x, None)[1].isfinite().tolist() == [True, False, False, True]
    assert launch(torch.empty(0, 16), None)[0].shape == (0, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 8), (4, 9)), r"fp8_linear: x is .*; its shape must be \[2, 9\]"),
        (
            ((2, 8), (4, 8), torch.int8),
            r"fp8_linear: q is .*; it must be a matrix of float8_e4m3fn",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments, message) -> None:
    x, q, *dtype = arguments
    with pytest.raises(ValueError, match=message):
        fp8_linear(torch.zeros(x), torch.zeros(q).to((dtype or [FP8])[0]), torch.ones(4))


def test_reference_does_not_round_the_input() -> None:
    q, scale = quantize_rows(draw(8, 16))
    x = draw(3, 16, seed=1, dtype=torch.float64)
    wanted = x @ (q.double() * scale.double()[:, None]).t()
    torch.testing.assert_close(fp8_linear_reference(x, q, scale.double(), None), wanted)


has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_fp8, reason="needs a GPU with fp8")
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1777, 3072, 12288), (226, 1920, 5760), (64, 32, 48)], ids=str)
def test_on_a_gpu(shape: tuple[int, int, int], has_bias: bool) -> None:
    """Rows are rounded as on a CPU; sums, of fewer bits in the GPU's products, differ by less than a
    tenth of the roundings' errors."""
    rows, columns, outputs = shape
    q, scale = quantize_rows(draw(outputs, columns))
    x, dy = (draw(rows, n, seed=n, dtype=torch.bfloat16) for n in (columns, outputs))
    bias = draw(outputs, seed=3, dtype=torch.bfloat16) if has_bias else None
    for given, factor in ((x, None), (dy, scale)):
        found, scales = launch(given.cuda(), None if factor is None else factor.cuda())
        wanted, rights = quantize_rows(given.float() if factor is None else given.float() * factor)
        torch.testing.assert_close(scales.cpu(), rights, rtol=1e-6, atol=0)
        # Quotients that float32 rounds across the middle of two steps are one step away.
        assert (found.cpu().float() != wanted.float()).float().mean() < 1e-3
    outs = []
    for place in ("cpu", "cuda"):
        leaf = x.detach().to(place).requires_grad_()
        given = (q.to(place), scale.to(place), None if bias is None else bias.to(place))
        y = fp8_linear(leaf, *given)
        y.backward(dy.to(place))
        outs.append((y.detach().cpu().double(), leaf.grad.cpu().double()))
    for wanted, found in zip(*outs, strict=True):
        assert (found - wanted).norm() <= 3.7e-3 * wanted.norm()

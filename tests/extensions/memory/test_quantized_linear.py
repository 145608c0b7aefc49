"""The linears with int8 and fp8 weights: their rounding, products and gradients against float64, what
autograd and the compiler keep, and the interpreted kernel that rounds rows."""

import math

import pytest
import torch
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor

from cogfast.distributed.tensor_parallel import ParallelGroup
from cogfast.extensions.memory import quantized_base
from cogfast.extensions.memory.fp8_linear import launch
from cogfast.extensions.memory.quantized_linear import (
    FP8,
    quantize_rows,
    quantized_linear,
    row_maxima,
)

INT8 = torch.int8
# (rows, in, out): production's ratio, primes, one row, one entry
SHAPES = {"wide": (64, 64, 256), "ragged": (37, 53, 71), "one row": (1, 64, 96), "tiny": (3, 1, 2)}

ON_CASES = pytest.mark.parametrize(
    ("shape", "has_bias", "dtype"),
    [
        ("wide", True, torch.float32),
        ("wide", False, torch.bfloat16),
        ("ragged", True, torch.bfloat16),
        ("one row", False, torch.float32),
        ("tiny", True, torch.float32),
    ],
    ids=str,
)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(q: Tensor, scale: Tensor) -> Tensor:
    """Return the weight in float64."""
    return q.double() * scale.double()[:, None]


def int8_reference(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + bias in the dtype of x."""
    return torch.nn.functional.linear(x, (q * scale[:, None]).to(x.dtype), bias)


def rounded_to_fp8(x: Tensor) -> Tensor:
    """Round the rows of x [R, N] to 3 bits behind the leading one, in float64 and without float8.

    The largest entry of a row becomes 448, and the smallest normal number is 2^-6.
    """
    scale = x.abs().amax(1, keepdim=True) / 448
    quotient = x / scale
    step = torch.exp2(quotient.abs().log2().floor().clamp_min(-6) - 3)
    return torch.round(quotient / step) * step * scale  # to the nearest, ties to even


def test_int8_rounds_to_the_nearest_of_255_steps_of_a_row() -> None:
    weight = draw(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    q, scale = quantize_rows(weight, INT8)
    assert q.dtype == INT8 and scale.dtype == torch.float32
    assert q.abs().amax(1).eq(127).all()
    # Half a step, and float32's rounding of a quotient of up to 127
    error = (whole(q, scale) - weight.double()).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 1e-5)).all()
    # A uniform error of one step has a root mean square of a step over the root of 12.
    steps = error.square().mean(1).sqrt() / scale
    torch.testing.assert_close(steps.mean().item(), 12**-0.5, rtol=0.03, atol=0)


def test_fp8_rounds_to_four_bits_of_each_entry() -> None:
    weight = draw(40, 300).double() * torch.logspace(-6, 3, 40, dtype=torch.float64)[:, None]
    q, scale = quantize_rows(weight.float(), FP8)
    assert q.dtype == FP8 and scale.dtype == torch.float32
    assert q.float().abs().amax(1).eq(448).all()
    found, wanted = whole(q, scale), rounded_to_fp8(weight)
    # Quotients that float32 rounds across the middle of two steps are one step of 1/8 away.
    is_other = (found - wanted).abs() > 1e-6 * wanted.abs()
    assert is_other.float().mean() < 1e-3
    assert ((found - wanted).abs() <= 0.126 * wanted.abs() + 1e-12).all()


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_columns_of_a_rank_are_rounded_with_the_maxima_of_whole_rows(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = draw(40, 300) * torch.linspace(1, 9, 300)
    q, scale = quantize_rows(weight, dtype)
    # The ranks of a group find the largest numbers of whole rows together.
    monkeypatch.setattr(quantized_base, "largest_of_group", lambda x, group: row_maxima(weight))
    for columns in (slice(0, 100), slice(100, 300)):
        part = torch.empty_like(q[:, columns]), torch.empty_like(scale)
        kept = quantized_base.QuantizedWeight(*part, weight.device, ParallelGroup(0, 2, None))
        kept.copy_(weight[:, columns])
        assert torch.equal(part[0].float(), q[:, columns].float()) and torch.equal(part[1], scale)


@pytest.mark.parametrize(("dtype", "most"), [(INT8, 127), (FP8, 448)], ids=["int8", "fp8"])
def test_special_rows(dtype: torch.dtype, most: int) -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [math.inf, 1.0], [math.nan, 1.0], [-3.0, 3.0]])
    q, scale = quantize_rows(weight, dtype)
    assert q[0].tolist() == [0, 0] and scale.isfinite().tolist() == [True, True, False, False, True]
    assert (q[1].float() * scale[1]).abs().max() <= 1e-43
    assert q[4].tolist() == [-most, most]
    # A row of x that is not finite gives no finite output, and the others do.
    out = quantized_linear(weight, *quantize_rows(torch.eye(2), dtype))
    assert out.isfinite().all(1).tolist() == [True, True, False, False, True]


@ON_CASES
def test_int8_products_and_gradients_are_those_of_the_rounded_weight(
    shape: str, has_bias: bool, dtype: torch.dtype
) -> None:
    rows, columns, outputs = SHAPES[shape]
    q, scale = quantize_rows(draw(outputs, columns), INT8)
    x, dy = draw(2, rows, columns, seed=1, dtype=dtype), draw(2, rows, outputs, seed=2, dtype=dtype)
    bias = draw(outputs, seed=3, dtype=dtype) if has_bias else None

    def run(function, kind: torch.dtype) -> list[Tensor]:
        given = [None if t is None else t.to(kind, copy=True).requires_grad_() for t in (x, bias)]
        out = function(given[0], q, scale if kind != torch.float64 else scale.double(), given[1])
        out.backward(dy.to(kind))
        return [out.detach(), *(t.grad for t in given if t is not None)]

    found, reference = run(quantized_linear, dtype), run(int8_reference, dtype)
    for ours, theirs, exact in zip(
        found, reference, run(int8_reference, torch.float64), strict=True
    ):
        assert ours.dtype == dtype
        allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6
        assert (ours.double() - exact).abs().max() <= allowed


@ON_CASES
def test_fp8_products_and_gradients_are_those_of_rounded_rows(
    shape: str, has_bias: bool, dtype: torch.dtype
) -> None:
    """In float64 from the formulas: y of rounded x and W, dx of rounded scale dy and q."""
    rows, columns, outputs = SHAPES[shape]
    q, scale = quantize_rows(draw(outputs, columns), FP8)
    x = draw(rows, columns, seed=1, dtype=dtype).requires_grad_()
    dy = draw(rows, outputs, seed=2, dtype=dtype)
    bias = draw(outputs, seed=3, dtype=dtype).requires_grad_() if has_bias else None
    y = quantized_linear(x, q, scale, bias)
    y.backward(dy)
    assert y.dtype == x.grad.dtype == dtype
    as_found = lambda t: whole(*quantize_rows(t, FP8))
    wanted = as_found(x.detach()) @ whole(q, scale).t()
    wanted = wanted if bias is None else wanted + bias.double()
    near = {"rtol": 1e-5 if dtype == torch.float32 else 2**-8, "atol": 1e-4}
    torch.testing.assert_close(y.double(), wanted, **near)
    gradient = as_found(dy.float() * scale) @ q.double()
    torch.testing.assert_close(x.grad.double(), gradient, **near)
    if bias is not None:
        torch.testing.assert_close(bias.grad.double(), dy.double().sum(0), **near)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=["int8", "fp8"])
def test_autograd_and_the_compiler_keep_the_8_bit_weight_alone(dtype: torch.dtype) -> None:
    """A dequantized weight that is kept from forward to backward would fill the memory."""
    q, scale = quantize_rows(draw(96, 64), dtype)
    x, kept = draw(5, 64).requires_grad_(), []
    run = lambda x, q, scale: quantized_linear(x, q, scale).square()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        quantized_linear(x, q, scale)
    assert {t.data_ptr() for t in kept} == {q.data_ptr(), scale.data_ptr()}
    wanted = torch.autograd.grad(run(x, q, scale).sum(), x)[0]

    found: list[list[torch.dtype]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        found.append([t.dtype for t in inputs if t.shape == q.shape])
        return graph

    function = aot_function(
        run, fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition
    )
    function(x, q, scale).sum().backward()
    assert found == [[dtype], [dtype]]
    assert torch.equal(x.grad, wanted)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_ops(kind: str) -> None:
    q, scale = quantize_rows(draw(96, 64), INT8 if kind == "int8" else FP8)
    # test_schema multiplies the inputs, which PyTorch cannot with float8.
    tests = ("test_schema", "test_faketensor") if kind == "int8" else "test_faketensor"
    for name, given in (
        (f"{kind}_linear", (draw(2, 5, 64), q, scale, draw(96))),
        (f"{kind}_linear_backward", (draw(2, 5, 96), q, scale)),
    ):
        torch.library.opcheck(getattr(torch.ops.cogfast, name), given, test_utils=tests)


@pytest.mark.parametrize(
    "columns", [None, draw(300, seed=1).abs() + 0.1], ids=["x", "times columns"]
)
def test_the_kernel_that_rounds_rows(columns: Tensor | None) -> None:
    """The interpreter loses the carry where a mantissa rounds up to the next power of two, and cuts off
    what is below 2^-6."""
    x = draw(9, 300) * torch.logspace(-6, 3, 9)[:, None]
    x[3] = 0
    q, scale = launch(x, columns)
    wanted, scales = quantize_rows(x if columns is None else x * columns, FP8)
    assert q.dtype == FP8 and torch.equal(scale, scales)
    found, wanted = q.double(), wanted.double()
    is_power, is_normal = wanted.abs().log2().frac() == 0, wanted.abs() >= 2**-6
    is_plain = is_normal & ~is_power
    assert torch.equal(found[is_plain], wanted[is_plain]) and is_plain.double().mean() > 0.7
    assert ((found - wanted).abs()[~is_normal] <= 2**-9).all()
    carries = found[is_power] / wanted[is_power]
    assert ((carries == 1) | (carries == 0.5)).all()


def test_the_kernel_marks_rows_that_are_not_finite() -> None:
    x = torch.ones(4, 20)
    x[1, 3], x[2, 4] = math.nan, -math.inf
    assert launch(x, None)[1].isfinite().tolist() == [True, False, False, True]
    assert launch(torch.empty(0, 16), None)[0].shape == (0, 16)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (torch.zeros(4, 9, dtype=INT8), r"int8_linear: x is .*; its shape must be \[2, 9\]"),
        (torch.zeros(4, 8), r"q is .*; it must be a matrix of int8 or float8_e4m3fn"),
        (torch.zeros(3, 8).to(FP8), r"fp8_linear: scale is .*; it must be float32 of shape \[3\]"),
    ],
    ids=["width", "dtype", "scale"],
)
def test_wrong_arguments_are_refused(q: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantized_linear(torch.zeros(2, 8), q, torch.ones(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_int8_on_a_gpu(dtype: torch.dtype) -> None:
    """Allow twice the reference's error in the same dtype, against float64."""
    q, scale = (t.cuda() for t in quantize_rows(draw(768, 192), INT8))
    x, dy, bias = (
        t.cuda() for t in (draw(64, 192, seed=1), draw(64, 768, seed=2), draw(768, seed=3))
    )
    results = []
    for op, work in (
        (quantized_linear, dtype),
        (int8_reference, dtype),
        (lambda x, q, scale, bias: x @ whole(q, scale).t() + bias, torch.float64),
    ):
        leaf = x.to(dtype).to(work).requires_grad_()
        y = op(leaf, q, scale, bias.to(dtype).to(work))
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy.to(dtype).to(work))))
    for got, reference, truth in zip(*results, strict=True):
        error, allowed = ((t.double() - truth).abs().max() for t in (got, reference))
        assert error <= 2 * allowed + 1e-6 * truth.abs().max()


has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.mark.skipif(not has_fp8, reason="needs a GPU with fp8")
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(1777, 3072, 12288), (226, 1920, 5760), (64, 32, 48)], ids=str)
def test_fp8_on_a_gpu(shape: tuple[int, int, int], has_bias: bool) -> None:
    """Rows are rounded as on a CPU; sums, of fewer bits in the GPU's products, differ by less than a
    tenth of the roundings' errors."""
    rows, columns, outputs = shape
    q, scale = quantize_rows(draw(outputs, columns), FP8)
    x, dy = (draw(rows, n, seed=n, dtype=torch.bfloat16) for n in (columns, outputs))
    bias = draw(outputs, seed=3, dtype=torch.bfloat16) if has_bias else None
    for given, factor in ((x, None), (dy, scale)):
        found, scales = launch(given.cuda(), None if factor is None else factor.cuda())
        values = given.float() if factor is None else given.float() * factor
        wanted, rights = quantize_rows(values, FP8)
        torch.testing.assert_close(scales.cpu(), rights, rtol=1e-6, atol=0)
        # Quotients that float32 rounds across the middle of two steps are one step away.
        assert (found.cpu().float() != wanted.float()).float().mean() < 1e-3
    outs = []
    for place in ("cpu", "cuda"):
        leaf = x.detach().to(place).requires_grad_()
        given = (q.to(place), scale.to(place), None if bias is None else bias.to(place))
        y = quantized_linear(leaf, *given)
        y.backward(dy.to(place))
        outs.append((y.detach().cpu().double(), leaf.grad.cpu().double()))
    for wanted, found in zip(*outs, strict=True):
        assert (found - wanted).norm() <= 3.7e-3 * wanted.norm()


def test_a_single_row_has_the_gradients_of_a_matrix() -> None:
    q, scale = quantize_rows(draw(5, 8), INT8)
    x, bias = draw(8, seed=1).requires_grad_(), draw(5, seed=2).requires_grad_()
    quantized_linear(x, q, scale, bias).backward(draw(5, seed=3))
    rows, other = x.detach()[None].requires_grad_(), bias.detach().requires_grad_()
    quantized_linear(rows, q, scale, other).backward(draw(5, seed=3)[None])
    assert torch.equal(x.grad, rows.grad[0]) and torch.equal(bias.grad, other.grad)

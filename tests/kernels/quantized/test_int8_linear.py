"""The linear with an int8 weight: its rounding, product and gradients against float64, what autograd
keeps, and its ops under torch.compile."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cogfast.kernels.quantized.int8_linear import int8_linear, int8_linear_reference, quantize_rows

# (rows, in, out): production's widths, primes, one row, one entry
SHAPES = {"wide": (64, 192, 768), "ragged": (37, 53, 71), "one row": (1, 64, 96), "tiny": (3, 1, 2)}


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_rounding_is_to_the_nearest_of_255_steps_of_a_row() -> None:
    weight = draw(40, 300) * torch.logspace(-6, 3, 40)[:, None]
    q, scale = quantize_rows(weight)
    assert q.dtype == torch.int8 and scale.dtype == torch.float32
    assert q.abs().amax(1).eq(127).all()
    # Half a step, and float32's rounding of a quotient of up to 127
    error = (q.double() * scale.double()[:, None] - weight.double()).abs()
    assert (error <= scale.double()[:, None] * (0.5 + 1e-5)).all()
    # A uniform error of one step has a root mean square of a step over the root of 12.
    steps = error.square().mean(1).sqrt() / scale
    torch.testing.assert_close(steps.mean().item(), 12**-0.5, rtol=0.03, atol=0)


def test_special_rows() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-44, 0.0], [math.inf, 1.0], [math.nan, 1.0], [-3.0, 3.0]])
    q, scale = quantize_rows(weight)
    assert q[0].tolist() == [0, 0] and scale[0] == 0
    assert (q[1] * scale[1]).abs().max() <= 1e-43
    assert not scale[2:4].isfinite().any()  # damage stays visible
    assert q[4].tolist() == [-127, 127]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products_and_gradients_are_those_of_the_rounded_weight(shape, has_bias, dtype) -> None:
    rows, columns, outputs = shape
    q, scale = quantize_rows(draw(outputs, columns))
    x, dy = draw(2, rows, columns, seed=1, dtype=dtype), draw(2, rows, outputs, seed=2, dtype=dtype)
    bias = draw(outputs, seed=3, dtype=dtype) if has_bias else None

    def run(function, kind: torch.dtype) -> list[Tensor]:
        given = [None if t is None else t.to(kind, copy=True).requires_grad_() for t in (x, bias)]
        out = function(given[0], q, scale if kind != torch.float64 else scale.double(), given[1])
        out.backward(dy.to(kind))
        return [out.detach(), *(t.grad for t in given if t is not None)]

    found, reference = run(int8_linear, dtype), run(int8_linear_reference, dtype)
    for ours, theirs, exact in zip(
        found, reference, run(int8_linear_reference, torch.float64), strict=True
    ):
        assert ours.dtype == dtype
        allowed = 2 * (theirs.double() - exact).abs().max() + 1e-6
        assert (ours.double() - exact).abs().max() <= allowed


def test_autograd_keeps_the_int8_weight_alone() -> None:
    q, scale = quantize_rows(draw(96, 64))
    x, kept = draw(5, 64).requires_grad_(), []

    def note(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        out = int8_linear(x, q, scale)
    assert sorted(str(t.dtype) for t in kept) == ["torch.float32", "torch.int8"]
    assert {t.data_ptr() for t in kept} == {q.data_ptr(), scale.data_ptr()}
    assert out.requires_grad


def test_the_compiler_sees_ops_and_keeps_the_int8_weight_alone() -> None:
    """A dequantized weight that the compiler keeps from forward to backward would fill the memory."""
    q, scale = quantize_rows(draw(96, 64))
    arguments = (draw(2, 5, 64), q, scale, draw(96))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cogfast.int8_linear, arguments, test_utils=tests)
    backward = (draw(2, 5, 96), q, scale)
    torch.library.opcheck(torch.ops.cogfast.int8_linear_backward, backward, test_utils=tests)

    from functorch.compile import aot_function, min_cut_rematerialization_partition

    found: list[list[torch.dtype]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[Tensor]):
        found.append([t.dtype for t in inputs if t.shape == q.shape])
        return graph

    function = aot_function(
        lambda x, q, scale: int8_linear(x, q, scale).square(),
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=min_cut_rematerialization_partition,
    )
    x = draw(5, 64).requires_grad_()
    function(x, q, scale).sum().backward()
    assert found == [[torch.int8], [torch.int8]]
    expected = torch.autograd.grad(int8_linear_reference(x, q, scale, None).square().sum(), x)[0]
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 8), (4, 9)), r"int8_linear: x is .*; its shape must be \[2, 9\]"),
        (((2, 8), (4, 8), torch.float32), r"int8_linear: q is .*; it must be a matrix of int8"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message) -> None:
    x, q, *dtype = arguments
    with pytest.raises(ValueError, match=message):
        int8_linear(torch.zeros(x), torch.zeros(q, dtype=(dtype or [torch.int8])[0]), torch.ones(4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_on_a_gpu(dtype: torch.dtype) -> None:
    """Allow twice the reference's error in the same dtype, against float64."""
    q, scale = (t.cuda() for t in quantize_rows(draw(768, 192)))
    x, dy, bias = (
        t.cuda() for t in (draw(64, 192, seed=1), draw(64, 768, seed=2), draw(768, seed=3))
    )
    results = []
    for op, work in ((int8_linear, dtype), (int8_linear_reference, dtype), (None, torch.float64)):
        leaf = x.to(dtype).to(work).requires_grad_()
        b = bias.to(dtype).to(work)
        if op is None:
            y = torch.nn.functional.linear(leaf, q.double() * scale.double()[:, None], b)
        else:
            y = op(leaf, q, scale, b)
        results.append((y.detach(), *torch.autograd.grad(y, leaf, dy.to(dtype).to(work))))
    for got, reference, truth in zip(*results, strict=True):
        error, allowed = ((t.double() - truth).abs().max() for t in (got, reference))
        assert error <= 2 * allowed + 1e-6 * truth.abs().max()

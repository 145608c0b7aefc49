"""GELU: the interpreted kernels, the CPU version and the gradients against float64."""

import math

import pytest
import torch
from torch import Tensor

from cogfast.kernels.gelu import gelu, gelu_reference
from cogfast.kernels.gpu.gelu import launch_backward, launch_forward
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

# exp2 may overflow; numpy, which the interpreter runs, warns about it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")

# A tile is 4 x 512, the interpreter runs 50 programs: 4 blocks of columns have 12 each.
SHAPES = {
    "one-row": (1, 1, 512),
    "tiny": (2, 3, 41),  # a width that is no multiple of anything
    "off-block": (1, 13, 520),  # a second block of 8 columns, three rows in the last tile
    "two-tiles-each": (2, 41, 1536),  # 21 tiles of rows for 16 programs
}
CASES = [
    ("one-row", "none"),
    ("tiny", "bias"),
    ("tiny", "frozen"),
    ("off-block", "bias"),
    ("off-block", "none"),
    ("two-tiles-each", "bias"),
]
ON_CASES = pytest.mark.parametrize(("shape", "bias_kind"), CASES)
HALF = (torch.bfloat16, torch.float16)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)


def draw_case(
    shape: str | tuple[int, ...], bias_kind: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw dy, x and bias, exactly representable in dtype."""
    shape = SHAPES[shape] if isinstance(shape, str) else shape
    dy, x = draw(*shape, seed=1, dtype=dtype), draw(*shape, seed=2, dtype=dtype)
    return dy, x, None if bias_kind == "none" else draw(shape[-1], seed=3, dtype=dtype)


def formula(u: Tensor) -> Tensor:
    return 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))


def exact(dy: Tensor, x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return y, dx, dbias in float64."""
    x = x.double().requires_grad_()
    bias = None if bias is None else bias.double().requires_grad_()
    y = formula(x if bias is None else x + bias)
    dx, *rest = torch.autograd.grad(y, [t for t in (x, bias) if t is not None], dy.double())
    return y.detach(), dx, rest[0] if rest else None


def close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32, terms: int = 1
) -> None:
    """Compare; `terms` is how many numbers each entry of `actual` sums."""
    assert actual.dtype == dtype
    # The interpreter truncates to bf16 and fp16: one unit in the last place.
    rtol = {torch.float32: 2e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    # exp2's argument is up to 100 here, where float32's rounding error is 4e-6.
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=6e-6 * terms**0.5)


@pytest.mark.parametrize(
    ("shape", "bias_kind", "dtype"),
    [(*case, torch.float32) for case in CASES] + [("off-block", "bias", d) for d in HALF],
    ids=str,
)
def test_kernels(shape: str, bias_kind: str, dtype: torch.dtype) -> None:
    dy, x, bias = draw_case(shape, bias_kind, dtype)
    y, dx, dbias = exact(dy, x, bias)
    needs_dbias = bias_kind == "bias"
    close(launch_forward(x, bias), y, dtype)
    got_dx, got_dbias = launch_backward(dy, x, bias, needs_dbias)
    close(got_dx, dx, dtype)
    if needs_dbias:
        close(got_dbias, dbias, dtype, terms=len(x[..., 0].flatten()))
    else:
        assert got_dbias.numel() == 0


@pytest.mark.parametrize(
    "on", ["triton", pytest.param("cpu", marks=NEEDS_CPU_KERNELS), "reference"]
)
def test_large_inputs_stay_finite(on: str) -> None:
    """exp2 overflows at u = -10 and u^2 at 2e19: y is u or 0, its derivative 1 or 0."""
    u = torch.tensor([-3e38, -1e20, -1e13, -300.0, -40.0, 40.0, 300.0, 1e13, 1e20, 3e38])
    dy = torch.full_like(u, 0.5)
    forward = {"triton": launch_forward, "cpu": gelu, "reference": gelu_reference}[on]
    assert torch.equal(forward(u, None), u.clamp(min=0))
    if on != "reference":  # torch's gradient is NaN from 1e13 on
        backward = launch_backward if on == "triton" else torch.ops.cogfast.gelu_backward
        dx, _ = backward(dy, u, None, False)
        assert torch.equal(dx, 0.5 * (u > 0))


def test_tensors_that_are_not_contiguous() -> None:
    dy, x, bias = draw_case((24, 5), "none", torch.float32)
    dy, x = dy.t(), x.t()
    y, dx, _ = exact(dy, x, bias)
    close(launch_forward(x, None), y)
    close(launch_backward(dy, x, None, False)[0], dx)


def test_no_rows() -> None:
    x, bias = torch.zeros(1, 0, 16, requires_grad=True), torch.zeros(16, requires_grad=True)
    assert launch_forward(x, bias).shape == (1, 0, 16)
    on_a_cpu = torch.autograd.grad(gelu(x, bias).sum(), (x, bias))
    for dx, dbias in (launch_backward(x, x, bias, True), on_a_cpu):
        assert dx.shape == (1, 0, 16) and torch.equal(dbias, torch.zeros(16))


@pytest.mark.parametrize("op", [gelu, gelu_reference])
@ON_CASES
def test_on_a_cpu(shape: str, bias_kind: str, op) -> None:
    dy, x, bias = draw_case(shape, bias_kind, torch.float32)
    want = exact(dy, x, bias)
    x.requires_grad_()
    if bias is not None:
        bias.requires_grad_(bias_kind == "bias")
    y = op(x, bias)
    y.backward(dy)
    close(y.detach(), want[0])
    close(x.grad, want[1])
    if bias_kind == "bias":
        close(bias.grad, want[2], terms=len(x[..., 0].flatten()))


@NEEDS_CPU_KERNELS
@ON_CASES
def test_cpu_kernels_in_bfloat16(shape: str, bias_kind: str) -> None:
    """The arithmetic is float32: results differ from float64's by one rounding to bf16."""
    dy, x, bias = draw_case(shape, bias_kind, torch.bfloat16)
    want = exact(dy, x, bias)
    leaves = [x.requires_grad_(), *([] if bias is None else [bias.requires_grad_()])]
    y = gelu(x, bias)
    got = (y.detach(), *torch.autograd.grad(y, leaves, dy))
    for actual, expected in zip(got, want, strict=False):
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-5)


@NEEDS_CPU_KERNELS
def test_keeps_one_activation() -> None:
    """Autograd saves x and the bias itself, not their sum."""
    x, bias = draw(2, 3, 8, seed=1, dtype=torch.float32).requires_grad_(), torch.ones(8)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gelu(x, bias.requires_grad_())
    assert [t.data_ptr() for t in saved if t.shape == x.shape] == [x.data_ptr()]


@pytest.mark.parametrize(
    ("bias_kind", "dtype"),
    [("bias", torch.bfloat16), ("frozen", torch.float32), ("none", torch.bfloat16)],
    ids=str,
)
def test_opcheck(bias_kind: str, dtype: torch.dtype) -> None:
    dy, x, bias = draw_case((2, 3, 16), bias_kind, dtype)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.cogfast.gelu, (x, bias), test_utils=tests)
    arguments = (dy, x, bias, bias_kind == "bias")
    torch.library.opcheck(torch.ops.cogfast.gelu_backward, arguments, test_utils=tests)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 17776, 7680), (2, 1577, 12288), (1, 3, 41)], ids=str)
def test_on_a_gpu(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Allow twice the reference's error in the same dtype, against float64."""
    dy, x, bias = (t.cuda() for t in draw_case(shape, "bias", dtype))
    want = exact(dy, x, bias)
    results = []
    for op in (gelu, gelu_reference):
        leaves = [x.clone().requires_grad_(), bias.clone().requires_grad_()]
        y = op(*leaves)
        results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
    for got, reference, truth in zip(*results, want, strict=True):
        error, allowed = ((t.double() - truth).abs().max() for t in (got, reference))
        assert error <= 2 * allowed + 1e-6 * truth.abs().max()

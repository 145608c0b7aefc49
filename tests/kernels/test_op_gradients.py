"""torch.ops.cogfast: all of opcheck, and the gradients of each op against those of its reference in float64."""

import pytest
import torch
from torch import Tensor

from cogfast.extensions.memory.quantized_linear import quantize_rows, quantized_linear
from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import gelu as activation
from cogfast.kernels import qk_norm_rope3d as qk
from cogfast.kernels.add_low_rank import add_low_rank_reference
from cogfast.kernels.attention_backends import flash_attention_reference
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

EPS = 1e-5


def draw(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def rotation() -> qk.Rotation:
    angles = draw(1 * (2 * 2 + 3 * (2 + 3)))
    return qk.Rotation(torch.stack([angles.cos(), angles.sin()]).float(), 2, 2, 3)


def normed(*inputs, num_text: int = 2) -> Tensor:
    return norm.adaptive_layernorm_reference(*inputs, num_text, EPS)[1]


MODULATION = [draw(2, 2, 16, seed=seed) for seed in range(3)]
ROWS, VECTORS = [draw(2, 5, 16, seed=s) for s in range(2)], [draw(16, seed=s) for s in range(3)]
# {case: (op, its inputs in float64, which of its outputs count, reference of the inputs that are tensors)}
CASES = {
    "gelu": (
        "gelu",
        (draw(2, 3, 16), draw(16)),
        slice(1),
        lambda x, bias: [activation.gelu_reference(x, bias)],
    ),
    "adaptive_layernorm": (
        "adaptive_layernorm",
        (ROWS[0], None, None, None, *VECTORS[:2], *MODULATION[:2], 2, EPS),
        slice(1, 2),
        lambda *inputs: [normed(*inputs)],
    ),
    "gated_residual": (
        "adaptive_layernorm",
        (*ROWS, VECTORS[2], MODULATION[2], None, None, None, None, 2, EPS),
        slice(1),
        lambda *inputs: [norm.gated_residual_reference(*inputs, 2)],
    ),
    "residual_adaptive_layernorm": (
        "adaptive_layernorm",
        (*ROWS, VECTORS[2], MODULATION[2], *VECTORS[:2], *MODULATION[:2], 2, EPS),
        slice(2),
        lambda *inputs: norm.residual_adaptive_layernorm_reference(*inputs, 2, EPS),
    ),
    "qk_norm_rope3d": (
        "qk_norm_rope3d",
        (draw(1, 14, 3, 2, 16), *(draw(16, seed=s) for s in range(4)), rotation().table, None)
        + (2, 2, 2, 3, True, qk.EPS),
        slice(2),
        lambda qkv, a, b, c, d, table: qk.qk_norm_rope3d_reference(
            qkv, (a, b), (c, d), rotation(), 2
        )[:2],
    ),
    "cpu_attention": (
        "cpu_attention",
        tuple(draw(2, 6, 2, 8, seed=s) for s in range(3)),
        slice(1),
        lambda *qkv: [flash_attention_reference(*qkv)],
    ),
    "add_low_rank": (
        "add_low_rank",
        (draw(2, 3, 12), draw(2, 3, 4), [draw(4, 2), draw(4, 2, seed=1)], [0, 2], 3, 0.5),
        slice(1),
        lambda x, low, a, b: [add_low_rank_reference(x, low, [a, b], [0, 2], 3, 0.5)],
    ),
}


def prepared(inputs: tuple) -> tuple[tuple, list[Tensor]]:
    """Return the inputs in float32 with gradients, tables without, and all their tensors."""
    tensors: list[Tensor] = []

    def single(x):
        if isinstance(x, list) and isinstance(x[0], Tensor):
            return [single(each) for each in x]
        if isinstance(x, Tensor):
            tensors.append(x.float().clone().requires_grad_(x.dtype == torch.float64))
            return tensors[-1]
        return x

    return tuple(map(single, inputs)), tensors


# add_low_rank has no kernel in C++.
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c == "add_low_rank" else NEEDS_CPU_KERNELS) for c in CASES]
)
def test_ops_have_gradients(case: str) -> None:
    name, inputs, which, reference = CASES[case]
    given, tensors = prepared(inputs)
    op = getattr(torch.ops.cogfast, name).default
    torch.library.opcheck(op, given)

    outputs = op(*given)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs[which]
    exact = [x.detach().double().requires_grad_(x.requires_grad) for x in tensors]
    wanted = reference(*exact)
    cotangents = [draw(*y.shape, seed=3) for y in wanted]
    leaves = [i for i, x in enumerate(tensors) if x.requires_grad]
    torch.autograd.backward(outputs, [g.float() for g in cotangents])
    grads = torch.autograd.grad(wanted, [exact[i] for i in leaves], cotangents)
    for x, y in zip(outputs, wanted, strict=True):
        torch.testing.assert_close(x.double(), y.double(), rtol=1e-5, atol=1e-5)
    for i, wanted_grad in zip(leaves, grads, strict=True):
        # Rotations are float32 in the reference, too.
        torch.testing.assert_close(tensors[i].grad.double(), wanted_grad, rtol=1e-4, atol=1e-5)


@NEEDS_CPU_KERNELS
def test_statistics_have_no_gradient() -> None:
    """The mean and rstd that the op returns for its backward are constants, and say so."""
    given, _ = prepared(CASES["adaptive_layernorm"][1])
    _, n, mean, rstd = torch.ops.cogfast.adaptive_layernorm(*given)
    assert n.requires_grad and not mean.requires_grad and not rstd.requires_grad


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantized_products_have_gradients(dtype: torch.dtype) -> None:
    """The op's gradients are those of the public function, bit for bit."""
    q, scale = quantize_rows(draw(32, 16).float(), dtype)
    name = "int8_linear" if dtype == torch.int8 else "fp8_linear"
    results = []
    for function in (getattr(torch.ops.cogfast, name), quantized_linear):
        x, bias = (draw(*s).float().requires_grad_() for s in ((2, 3, 16), (32,)))
        function(x, q, scale, bias).square().sum().backward()
        results.append((x.grad, bias.grad))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("case", [case for case in CASES if case != "add_low_rank"])
def test_second_derivatives_are_refused(case: str) -> None:
    """PyTorch would take 0 for the gradient of an op of gradients."""
    name, inputs, which, _ = CASES[case]
    given, tensors = prepared(inputs)
    outputs = getattr(torch.ops.cogfast, name).default(*given)
    first = outputs if isinstance(outputs, Tensor) else outputs[which][0]
    leaves = [x for x in tensors if x.requires_grad]
    with pytest.raises(RuntimeError, match=f"{name}_backward has no gradient: second derivatives"):
        torch.autograd.grad(first.square().sum(), leaves[:1], create_graph=True)

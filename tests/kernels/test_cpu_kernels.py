"""The CPU kernels in C++: instruction sets, threads and builds; and the references in their place."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cogfast.kernels import torch_library
from cogfast.kernels.adaptive_layernorm import residual_adaptive_layernorm
from cogfast.kernels.attention_backends import flash_attention
from cogfast.kernels.block_kernels import BlockKernels, choose_kernels
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, sum_of_squares
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import Rotation, qk_norm_rope3d
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS, threads

Tensors = tuple[Tensor, ...]
# Tests that compare the kernels with their references, in every op's file.
COMPARED = "functions_on_a_cpu or on_a_cpu or in_bfloat16 or to_bf16_once or equal_float64"
COMPARED = f"({COMPARED} or sum_of_squares or same_bits) and not triton and not reference"


def run_gelu(dtype: torch.dtype) -> Tensors:
    x, dy = torch.randn(2, 3, 700, 72).to(dtype).unbind()
    leaves = [x.clone().requires_grad_(), torch.randn(72).to(dtype).requires_grad_()]
    y = gelu(*leaves)
    return y.detach(), *torch.autograd.grad(y, leaves, dy)


def run_adaptive_layernorm(dtype: torch.dtype) -> Tensors:
    x, branch, dout, dn = torch.randn(4, 2, 900, 72).to(dtype).unbind()
    weight, bias, branch_bias = torch.randn(3, 72).unbind()
    gate, shift, scale = torch.randn(3, 2, 2, 72).unbind()
    leaves = [x, branch, branch_bias, gate, weight, bias, shift, scale]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    outputs = residual_adaptive_layernorm(*leaves, 130, 1e-5)
    return *outputs, *torch.autograd.grad(outputs, leaves, (dout, dn))


def run_qk_norm_rope3d(dtype: torch.dtype) -> Tensors:
    grid, num_text, width = (3, 8, 10), 10, 64
    table = torch.randn(2, width // 16 * (2 * grid[0] + 3 * (grid[1] + grid[2])))
    qkv = torch.randn(2, 250, 3, 3, width).to(dtype).requires_grad_()
    gradients = torch.randn(3, 2, 250, 3, width).to(dtype)
    affine = [torch.randn(width).to(dtype).requires_grad_() for _ in range(4)]
    norms = tuple(affine[:2]), tuple(affine[2:])
    outputs = qk_norm_rope3d(qkv, *norms, Rotation(table, *grid), num_text)
    return *outputs, *torch.autograd.grad(outputs, (qkv, *affine), gradients.unbind())


def run_attention(dtype: torch.dtype) -> Tensors:
    qkv = [torch.randn(2, 300, 3, 64).to(dtype).requires_grad_() for _ in range(3)]
    out = flash_attention(*qkv, "cogfast")
    return out.detach(), *torch.autograd.grad(out, qkv, torch.randn_like(out))


def run_fused_ema_adam(dtype: torch.dtype) -> Tensors:
    lengths = (1, 300_001, 7, 0, 4097, 70_000)
    start, grads = ([torch.randn(n).to(dtype) for n in lengths] for _ in range(2))
    params = [x.clone().requires_grad_() for x in start]
    copies = [torch.zeros(n, dtype=torch.bfloat16) for n in lengths]
    optimizer = FusedEmaAdam(params)
    optimizer.low_precision_copies = dict(zip(params, copies, strict=True))
    optimizer.has_8bit_moments = dtype == torch.bfloat16
    for _ in range(2):
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        square = sum_of_squares(grads)
        optimizer.gradient_scale = 1 / square.sqrt()
        optimizer.step()
    state = [x for p in params for x in optimizer.state[p].values()]
    return *params, *copies, *state, square


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "run",
    [run_gelu, run_adaptive_layernorm, run_qk_norm_rope3d, run_attention, run_fused_ema_adam],
)
def test_same_bits_for_any_threads(run: Callable[..., Tensors], dtype: torch.dtype) -> None:
    results = []
    for count in (1, 2, 3):
        torch.manual_seed(0)
        with threads(count):
            results.append(run(dtype))
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            assert torch.equal(x, y)


@NEEDS_CPU_KERNELS
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has AVX2 alone"
)
def test_kernels_for_avx2() -> None:
    """Run the CPU tests of all ops with the AVX2 build, which machines without AVX-512 take."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    build = [sys.executable, "-m", "cogfast", "doctor", "--build-kernels"]
    built = subprocess.run(build, env=environment, capture_output=True, text=True, check=True)
    assert "-AVX2-" in built.stdout
    command = f"{sys.executable} -m pytest -x -p no:cacheprovider tests/kernels".split()
    result = subprocess.run(
        [*command, "-k", COMPARED], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout


# --- without the kernels ---

# {function of BlockKernels with a norm: (its call, the shapes of its inputs for rows [2, s, W])}
W = 64
M = (W,)
VECTORS = (2, 2, W)
NORMS = {
    "adaptive_layernorm": (
        lambda ops, *x: ops.adaptive_layernorm(*x, 5, 1e-5),
        lambda s: ((2, s, W), M, M, VECTORS, VECTORS),
    ),
    "residual_adaptive_layernorm": (
        lambda ops, *x: ops.residual_adaptive_layernorm(*x, 5, 1e-5),
        lambda s: ((2, s, W), (2, s, W), M, VECTORS, M, M, VECTORS, VECTORS),
    ),
    "layernorm": (lambda ops, *x: (ops.layernorm(*x, 1e-5),), lambda s: ((2, s, W), M, M)),
    "qk_norm_rope3d": (
        lambda ops, qkv, *norms: ops.qk_norm_rope3d(qkv, norms[:2], norms[2:], None, 5),
        lambda s: ((2, s // 2, 3, 2, W), M, M, M, M),  # 2 heads: s rows of queries, s of keys
    ),
}


@pytest.mark.parametrize("kernels", ["triton", "torch"])
@pytest.mark.parametrize("op", NORMS)
def test_gradients_of_norms_in_bf16_are_summed_in_float32(
    op: str, kernels: str, monkeypatch
) -> None:
    """Allow twice bf16's rounding of the float64 gradient. The sums of PyTorch's LayerNorm over 8,000 rows
    are off by 32%."""
    # No CPU tensor has a kernel, just like on a machine without a compiler.
    monkeypatch.setattr(torch_library, "HAS_CPU_KERNELS", False)
    call, shapes_of = NORMS[op]
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator).bfloat16()
    inputs = [draw(shape) for shape in shapes_of(4_000)]
    # Sums that grow with the rows
    cotangents = [draw(inputs[0].shape) + 0.3, draw(inputs[0].shape) + 0.3]
    if op == "qk_norm_rope3d":
        cotangents = [draw((*inputs[0].shape[:2], 2, W)) + 0.3 for _ in range(3)]

    def gradients(ops: BlockKernels, dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        outputs = call(ops, *leaves)
        given = [g.to(dtype) for g in cotangents[: len(outputs)]]
        return torch.autograd.grad(outputs, leaves, given)

    exact = gradients(choose_kernels("torch"), torch.float64)
    for got, want in zip(gradients(choose_kernels(kernels), torch.bfloat16), exact, strict=True):
        rounding = (want.bfloat16().double() - want).norm()
        assert (got.double() - want).norm() <= 2 * rounding

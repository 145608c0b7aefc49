"""The CPU kernels in C++: instruction sets, threads and builds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from cogfast.kernels.adaptive_layernorm import residual_adaptive_layernorm
from cogfast.kernels.fused_ema_adam import FusedEmaAdam, sum_of_squares
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import Rotation, qk_norm_rope3d
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS, assert_same_bits_for_any_threads

pytestmark = NEEDS_CPU_KERNELS
# Tests that compare the kernels with their references, in every op's file.
COMPARED = "functions_on_a_cpu or on_a_cpu or in_bfloat16 or to_bf16_once or the_cpu_kernel"
COMPARED += " or sum_of_squares or same_bits"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gelu_has_the_same_bits_for_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(2, 3, 700, 72).to(dtype).unbind()
    bias = torch.randn(72).to(dtype).requires_grad_()

    def compute():
        leaf = x.clone().requires_grad_()
        y = gelu(leaf, bias)
        return y.detach(), *torch.autograd.grad(y, (leaf, bias), dy)

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_adaptive_layernorm_has_the_same_bits_for_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, branch, dout, dn = torch.randn(4, 2, 900, 72).to(dtype).unbind()
    weight, bias, branch_bias = torch.randn(3, 72).unbind()
    gate, shift, scale = torch.randn(3, 2, 2, 72).unbind()

    def compute():
        leaves = [x, branch, branch_bias, gate, weight, bias, shift, scale]
        leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
        outputs = residual_adaptive_layernorm(*leaves, 130, 1e-5)
        return *outputs, *torch.autograd.grad(outputs, leaves, (dout, dn))

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_qk_norm_rope3d_has_the_same_bits_for_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grid, num_text, width = (3, 8, 10), 10, 64
    table = torch.randn(2, width // 16 * (2 * grid[0] + 3 * (grid[1] + grid[2])))
    qkv = torch.randn(2, 250, 3, 3, width).to(dtype)
    gradients = torch.randn(3, 2, 250, 3, width).to(dtype)
    affine = [torch.randn(width).to(dtype).requires_grad_() for _ in range(4)]

    def compute():
        leaf, norms = qkv.clone().requires_grad_(), (tuple(affine[:2]), tuple(affine[2:]))
        outputs = qk_norm_rope3d(leaf, *norms, Rotation(table, *grid), num_text)
        return *outputs, *torch.autograd.grad(outputs, (leaf, *affine), gradients.unbind())

    assert_same_bits_for_any_threads(compute)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_ema_adam_has_the_same_bits_for_any_threads(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    lengths = (1, 300_001, 7, 0, 4097, 70_000)
    start, grads = ([torch.randn(n).to(dtype) for n in lengths] for _ in range(2))

    def compute():
        params = [x.clone().requires_grad_() for x in start]
        copies = [torch.zeros(n, dtype=torch.bfloat16) for n in lengths]
        optimizer = FusedEmaAdam(params)
        optimizer.low_precision_copies = dict(zip(params, copies, strict=True))
        for _ in range(2):
            for p, g in zip(params, grads, strict=True):
                p.grad = g
            square = sum_of_squares(grads)
            optimizer.gradient_scale = 1 / square.sqrt()
            optimizer.step()
        state = [x for p in params for x in optimizer.state[p].values()]
        return *params, *copies, *state, square

    assert_same_bits_for_any_threads(compute)


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="this processor has AVX2 alone"
)
@pytest.mark.parametrize(
    "which",
    [
        pytest.param(COMPARED, id="compared"),
        pytest.param("cpu and not avx2", marks=pytest.mark.soak, id="all"),
    ],
)
def test_kernels_for_avx2(which: str) -> None:
    """Run the CPU tests of all ops with the AVX2 build, which machines without AVX-512 take."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    command = f"{sys.executable} -m pytest -x -p no:cacheprovider tests/kernels".split()
    result = subprocess.run(
        [*command, "-k", which], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout[-3000:]
    assert " passed" in result.stdout

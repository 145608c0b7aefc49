"""The reference ops against float64 formulas written out per row, values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cogfast.kernels.adaptive_layernorm import adaptive_layernorm, gated_residual

# no text, one text row, a prime number of rows of odd width, more text than video
SHAPES = {
    "no-text": (1, 0, 5, 32),
    "one": (2, 1, 6, 64),
    "prime": (3, 7, 13, 48),
    "text": (2, 9, 1, 32),
}
ROWS = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def check(op, formula, inputs: list[Tensor], floor: float = 1e-6) -> None:
    """op in float32 against formula in float64: outputs and gradients under random cotangents."""
    single = [x.detach().float().requires_grad_() for x in inputs]
    got, want = op(*single), formula(*inputs)
    cotangent = draw(*want.shape, seed=99).detach()
    got_grads = torch.autograd.grad(got, single, cotangent.float(), allow_unused=True)
    want_grads = torch.autograd.grad(want, inputs, cotangent, allow_unused=True)
    for a, b in zip((got, *got_grads), (want, *want_grads), strict=True):
        scale = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        torch.testing.assert_close(a.double(), b, atol=floor * 5 * scale, rtol=0)


def layer_norm64(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def per_row(vectors: Tensor, num_text: int, num_rows: int) -> Tensor:
    """[B, 2, M] (video, text) -> the vector of each row, [B, S, M]."""
    which = [1] * num_text + [0] * (num_rows - num_text)
    return vectors[:, which]


@ROWS
def test_adaptive_layernorm(shape: tuple[int, ...]) -> None:
    b, num_text, num_video, m = shape
    rows = num_text + num_video
    inputs = [draw(b, rows, m, seed=1), draw(m, seed=2), draw(m, seed=3)]
    inputs += [draw(b, 2, m, seed=4), draw(b, 2, m, seed=5)]

    def formula(x, weight, bias, shift, scale):
        normed = layer_norm64(x, weight, bias, 1e-5)
        return normed * (1 + per_row(scale, num_text, rows)) + per_row(shift, num_text, rows)

    check(lambda *x: adaptive_layernorm(*x, num_text, 1e-5)[1], formula, inputs)


@ROWS
def test_gated_residual(shape: tuple[int, ...]) -> None:
    b, num_text, num_video, m = shape
    rows = num_text + num_video
    inputs = [
        draw(b, rows, m, seed=1),
        draw(b, rows, m, seed=2),
        draw(m, seed=4),
        draw(b, 2, m, seed=3),
    ]
    formula = lambda h, y, bias, gate: h + per_row(gate, num_text, rows) * (y + bias)
    check(lambda *x: gated_residual(*x, num_text), formula, inputs)

"""The reference ops against float64 formulas written out per row, values and every gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cogfast.kernels.adaptive_layernorm import adaptive_layernorm, gated_residual
from cogfast.kernels.flash_attention import flash_attention, flash_attention_reference
from cogfast.kernels.gelu import gelu
from cogfast.kernels.qk_norm_rope3d import qk_norm_rope3d

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

    check(lambda *x: adaptive_layernorm(*x, num_text, 1e-5), formula, inputs)


@ROWS
def test_gated_residual(shape: tuple[int, ...]) -> None:
    b, num_text, num_video, m = shape
    rows = num_text + num_video
    inputs = [draw(b, rows, m, seed=1), draw(b, rows, m, seed=2), draw(b, 2, m, seed=3)]
    formula = lambda h, y, gate: h + per_row(gate, num_text, rows) * y
    check(lambda *x: gated_residual(*x, num_text), formula, inputs)


@pytest.mark.parametrize("which", [0, 1, 2], ids="qkv")
def test_qk_norm_rope3d(which: int) -> None:
    b, num_text, num_video, heads, width = 2, 3, 7, 2, 16
    rows = num_text + num_video
    angles = torch.zeros(rows, width // 2, dtype=torch.float64)
    angles[num_text:] = draw(num_video, width // 2, seed=7).detach() * 3
    norms = [draw(width, seed=s) for s in (2, 3, 4, 5)]

    def formula(qkv, qw, qb, kw, kb):
        if which == 2:
            return qkv[:, :, 2]
        x = layer_norm64(qkv[:, :, which], *((qw, qb), (kw, kb))[which], 1e-6)
        out = torch.empty_like(x)
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    op = lambda x, qw, qb, kw, kb: qk_norm_rope3d(x, (qw, qb), (kw, kb), rotation)[which]
    inputs = [draw(b, rows, 3, heads, width, seed=1), *norms]
    single = [x.detach().float().requires_grad_() for x in inputs]
    got, want = op(*single), formula(*inputs)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    got.sum().backward()
    want.sum().backward()
    for a, b_ in zip(single, inputs, strict=True):
        if b_.grad is None or a.grad is None:
            assert (a.grad is None or not a.grad.any()) and (b_.grad is None or not b_.grad.any())
        else:
            torch.testing.assert_close(a.grad.double(), b_.grad, atol=3e-5, rtol=0)


def test_qk_without_norm_and_rotation_is_the_input() -> None:
    qkv = draw(1, 4, 3, 2, 16, seed=1, dtype=torch.float32)
    for got, want in zip(qk_norm_rope3d(qkv, None, None, None), qkv.unbind(2), strict=True):
        assert torch.equal(got, want)


def test_rotation_of_bf16_is_rounded_once() -> None:
    """In float32 inside: the error is that of rounding the normed input and the result."""
    qkv = draw(2, 40, 3, 2, 64, seed=1, dtype=torch.bfloat16)
    angles = draw(40, 32, seed=2).detach() * 100
    rotation = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    q, _, _ = qk_norm_rope3d(qkv, (None, None), (None, None), rotation)
    exact, _, _ = qk_norm_rope3d(qkv.float(), (None, None), (None, None), rotation)
    assert q.dtype == torch.bfloat16
    assert (q.float() - exact).abs().max() <= 2**-8 * exact.abs().max() * 2


def test_gelu() -> None:
    def formula(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    check(gelu, formula, [draw(2, 3, 41, seed=1)])


@pytest.mark.parametrize("op", [flash_attention, flash_attention_reference])
def test_flash_attention(op) -> None:
    def formula(q, k, v):
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)

    check(op, formula, [draw(2, 11, 3, 16, seed=s) for s in (1, 2, 3)])


def test_both_attentions_agree_in_bf16() -> None:
    q, k, v = (draw(2, 50, 2, 64, seed=s, dtype=torch.bfloat16) for s in (1, 2, 3))
    exact = flash_attention(*(x.float() for x in (q, k, v)))
    with_gradient = flash_attention(q, k, v)
    with torch.no_grad():
        without = flash_attention(q, k, v)
    for got in (with_gradient, without):
        assert (got.float() - exact).abs().max() < 2**-7 * exact.abs().max()

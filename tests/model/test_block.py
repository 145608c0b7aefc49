"""One block under torch.compile and on both choices of kernels: the same numbers."""

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from cogfast.core.shapes import TokenGrid
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.kernels.qk_norm_rope3d import Rotation
from cogfast.model.block import Block
from cogfast.model.embeddings import RotaryPositions
from tests.support.kernels.triton_on_cpu import launchers_on_cpu
from tests.support.tiny_run import ROOT

WIDTH, HEADS, CONDITIONING, NUM_TEXT = 64, 2, 48, 3
GRID = TokenGrid(2, 3, 2)


def make_block(**options: bool) -> Block:
    """Make a block with random weights: by default PyTorch sets norms to one and zero."""
    torch.manual_seed(1)
    block = Block(WIDTH, HEADS, CONDITIONING, kernels=choose_kernels(), **options)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn(p.shape) * (0.1 if p.ndim > 1 else 0.3))
        for norm in (block.attention_norm, block.mlp_norm):
            if norm.weight is not None:
                norm.weight.add_(1)
    return block


def draw_inputs() -> tuple[Tensor, Tensor, int, Rotation]:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(2, NUM_TEXT + GRID.num_tokens, WIDTH, generator=generator)
    conditioning = torch.randn(2, CONDITIONING, generator=generator)
    rotation = RotaryPositions(GRID, WIDTH // HEADS, theta=10000.0)(GRID)
    return hidden, conditioning, NUM_TEXT, rotation


def run(block: torch.nn.Module, *inputs) -> list[Tensor]:
    """Return the output and every gradient: of hidden, of the conditioning, of each parameter."""
    hidden, conditioning = (x.clone().requires_grad_() for x in inputs[:2])
    block.zero_grad()
    out = block(hidden * 1.0, conditioning, *inputs[2:])
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    grads = [p.grad for p in block.parameters() if p.requires_grad]
    assert all(g is not None for g in grads)
    return [out.detach(), hidden.grad, conditioning.grad, *grads]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        # The floor: without rotation the key bias changes nothing, and its gradient is rounding
        # error.
        tolerance = 1e-6 + 4e-6 * b.abs().max().item()
        torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=0)


# Whether there are a rotation, head norms, weights of the norms.
VARIANTS = {
    "5b": (True, True, True),
    "2b": (False, True, True),
    "no head norms": (True, False, True),
    "norms without weights": (True, True, False),
    "neither": (False, False, False),
}


# Each op has tests of its own in the interpreter: of a block, all of them and as few as there can be.
@pytest.mark.parametrize(
    ("where", "variant"),
    [("cpu", v) for v in VARIANTS] + [("triton, interpreted", v) for v in ("5b", "neither")],
)
def test_kernels_give_the_numbers_of_plain_pytorch(where: str, variant: str) -> None:
    is_rotary, has_qk_norm, has_affine_norms = VARIANTS[variant]
    block = make_block(has_qk_norm=has_qk_norm, has_affine_norms=has_affine_norms)
    *inputs, rotation = draw_inputs()
    inputs.append(rotation if is_rotary else None)
    with nullcontext() if where == "cpu" else launchers_on_cpu():
        got = run(block, *inputs)
    block.kernels = block.attention.kernels = choose_kernels("torch")
    double = (x.double() if isinstance(x, Tensor) else x for x in inputs)
    assert_same(got, run(block.double(), *double))


def test_no_op_runs_python_wrappers_of_torch_library() -> None:
    """An op defined by torch.library.custom_op runs many Python functions in every call."""
    block, inputs = make_block(), draw_inputs()
    run(block, *inputs)  # what only the first call does
    files: set[str] = set()
    sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))
    try:
        run(block, *inputs)
    finally:
        sys.setprofile(None)
    assert any(file.endswith("kernels/attention_backends.py") for file in files)
    assert not [file for file in files if "/torch/_library/" in file]


@pytest.mark.slow  # seventy compilations
def test_launches_compile() -> None:
    """On a GPU arguments that are 1 or multiples of 16 become constants and hints; the interpreter
    does not show that."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    arguments = [sys.executable, "-m", "tests.support.kernels.triton_on_cpu"]
    done = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    kernels = {f"adaptive_layernorm_{part}_kernel" for part in ("fwd", "bwd", "sum")}
    kernels |= {"qk_norm_rope3d_fwd_kernel", "qk_norm_rope3d_bwd_kernel"}
    kernels |= {f"gelu_{part}_kernel" for part in ("fwd", "bwd", "dbias")}
    assert set(done.stdout.split()) == kernels | {"ema_adam_factors_kernel", "ema_adam_kernel"}

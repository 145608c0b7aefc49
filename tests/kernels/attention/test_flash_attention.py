"""flash_attention and its backends against float64 formulas; the op compiled and checkpointed."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cogfast.kernels.attention import backends as attention_backends
from cogfast.kernels.attention.backends import BACKENDS, backends_that_run, reason_unavailable
from cogfast.kernels.attention.flash_attention import flash_attention, flash_attention_reference

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_CPU = ("math", "flash")
# One row; a prime number of rows and an odd width; two samples, and rows beyond a block of 32 or
# 64.
SHAPES = {"one": (1, 1, 2, 8), "prime": (1, 37, 1, 5), "two": (2, 67, 3, 16)}
OP, OP_BACKWARD = torch.ops.cogfast.flash_attention, torch.ops.cogfast.flash_attention_backward


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw dense q and k, v as a part of packed qkv as in the model, and a cotangent."""
    generator = torch.Generator().manual_seed(sum(shape))
    b, s, h, d = shape
    rand = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = rand(b, s, h, d), rand(b, s, h, d), rand(b, s, 3, h, d)[:, :, 2]
    assert s == 1 or not v.is_contiguous()
    return [*(x.requires_grad_() for x in (q, k, v)), rand(b, s, h, d)]


def formula(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, D] and lse [B, H, S] in float64."""
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", weights, v), scores.exp().sum(-1).log()


def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = formula(*exact)
    gradients = torch.autograd.grad(out, exact, dout.double())
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


def raw(backend: str, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Call the two ops directly."""
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = OP(q, k, v, backend)
    gradients = OP_BACKWARD(dout, q, k, v, out, lse, backend)
    return dict(zip(("out", "lse", "dq", "dk", "dv"), (out, lse, *gradients), strict=True))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("backend", ON_CPU)
def test_op_in_float32(backend: str, shape: tuple[int, ...]) -> None:
    inputs = draw(shape, torch.float32)
    got, want = raw(backend, *inputs), expected(*inputs)
    for name, value in got.items():
        torch.testing.assert_close(
            value.double(), want[name], atol=5e-6, rtol=0, msg=lambda text, name=name: name + text
        )
        assert value.dtype == torch.float32 and value.is_contiguous()


@pytest.mark.parametrize("backend", ON_CPU)
def test_op_in_float64(backend: str) -> None:
    inputs = draw(SHAPES["two"])
    got, want = raw(backend, *inputs), expected(*inputs)
    for name, value in got.items():
        torch.testing.assert_close(value, want[name], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [None, *ON_CPU])
def test_half_precision(backend: str | None, dtype: torch.dtype) -> None:
    """Allow twice the error of plain arithmetic in that dtype, plus a quarter of its spacing."""
    *qkv, dout = draw((2, 130, 2, 64), dtype)
    want = expected(*qkv, dout)
    floor = torch.finfo(dtype).eps / 4
    plain = flash_attention_reference(*qkv)
    plain = (plain, *torch.autograd.grad(plain, qkv, dout))
    out = flash_attention(*qkv, backend)
    got = [out, *torch.autograd.grad(out, qkv, dout)]
    if backend is not None:
        of_op = raw(backend, *qkv, dout)
        got += [of_op[name] for name in ("out", "dq", "dk", "dv")]
        assert of_op["lse"].dtype == torch.float32
        assert (of_op["lse"] - want["lse"]).abs().max() < 4 * torch.finfo(dtype).eps
    for i, value in enumerate(got):
        truth = want[("out", "dq", "dk", "dv")[i % 4]]
        error, allowed = ((x.double() - truth).norm() / truth.norm() for x in (value, plain[i % 4]))
        assert error <= 2 * allowed + floor


@pytest.mark.parametrize("backend", [None, *ON_CPU])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_autograd(backend: str | None, shape: tuple[int, ...]) -> None:
    *qkv, dout = draw(shape, torch.float32)
    want = expected(*qkv, dout)
    out = flash_attention(*qkv, backend)
    got = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, qkv, dout), strict=True))
    for name, value in {"out": out, **got}.items():
        torch.testing.assert_close(value.double(), want[name], atol=5e-6, rtol=0)


def test_a_broadcast_cotangent_and_a_frozen_input() -> None:
    """The gradient of a sum is one expanded number; an input may need no gradient."""
    q, k, v, _ = draw((1, 20, 2, 8), torch.float32)
    k.requires_grad_(False)
    dq, dv = torch.autograd.grad(flash_attention(q, k, v, "flash").sum(), (q, v))
    want = expected(q, k, v, torch.ones(1, 20, 2, 8))
    torch.testing.assert_close(dq.double(), want["dq"], atol=5e-6, rtol=0)
    torch.testing.assert_close(dv.double(), want["dv"], atol=5e-6, rtol=0)


def test_math_takes_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 x 3 heads of 67 rows are taken as four and two."""
    monkeypatch.setattr(attention_backends, "_MAX_SCORES", 4 * 67**2 + 1)
    inputs = draw(SHAPES["two"], torch.float32)
    want = expected(*inputs)
    for name, value in raw("math", *inputs).items():
        torch.testing.assert_close(value.double(), want[name], atol=5e-6, rtol=0)


@pytest.mark.parametrize("backend", ON_CPU)
def test_opcheck(backend: str) -> None:
    *qkv, dout = draw((2, 9, 2, 8), torch.float32)
    q, k, v = (x.detach() for x in qkv)
    # The ops have no gradients of their own to check.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(OP, (q, k, v, backend), test_utils=checks)
    out, lse = OP(q, k, v, backend)
    torch.library.opcheck(OP_BACKWARD, (dout, q, k, v, out, lse, backend), test_utils=checks)


@pytest.mark.parametrize(
    ("dtype", "compiler"), [(torch.float32, "inductor"), (torch.bfloat16, "aot_eager")], ids=str
)
def test_compiled(dtype: torch.dtype, compiler: str) -> None:
    """One graph gives the numbers of eager mode."""
    q, k, v, dout = draw((2, 24, 2, 16), dtype)
    run = lambda q, k, v: flash_attention(2 * q, k, v)
    compiled = torch.compile(run, fullgraph=True, backend=compiler)
    got, want = (f(q, k, v) for f in (compiled, run))
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=0)
    for a, b in zip(*(torch.autograd.grad(x, (q, k, v), dout) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


class Calls(TorchDispatchMode):
    """Record the calls of the two ops."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "cogfast":
            self.names.append(op._opname)
        return op(*args, **(kwargs or {}))


def test_checkpointing_can_keep_out_and_lse() -> None:
    """The functions around the op are recomputed, not the op."""
    q, k, v, dout = draw((1, 16, 2, 8), torch.float32)

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        is_kept = op == OP.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    run = lambda q, k, v: flash_attention(q.sin(), k, v, "flash").cos()
    keep = partial(create_selective_checkpoint_contexts, policy)
    for contexts, num_forward in ((keep, 1), (None, 2)):
        arguments = {} if contexts is None else {"context_fn": contexts}
        with Calls() as calls:
            out = checkpoint(run, q, k, v, use_reentrant=False, **arguments)
            got = torch.autograd.grad(out, (q, k, v), dout)
        assert calls.names.count("flash_attention") == num_forward
        assert calls.names.count("flash_attention_backward") == 1
        for a, b in zip(got, torch.autograd.grad(run(q, k, v), (q, k, v), dout), strict=True):
            assert torch.equal(a, b)


def test_no_copy_of_a_strided_v(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend gets v as the model has it, a part of packed qkv."""
    seen = []

    def spy(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(v.stride())
        return BACKENDS["math"].forward(q, k, v)

    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], forward=spy))
    q, k, v, _ = draw((2, 5, 3, 8), torch.float32)
    flash_attention(q.detach(), k.detach(), v.detach(), "flash")
    assert seen == [(5 * 3 * 3 * 8, 3 * 3 * 8, 8, 1)]


REFUSED = {
    "three dims": (lambda q: (q[0], q[0], q[0]), r"flash_attention: q is .*\[B, S, H, D\]"),
    "rows": (lambda q: (q, q[:, :3], q), r"flash_attention: k is .* its shape must be \[1, 4, 2"),
    "dtype": (lambda q: (q, q, q.double()), "v is .* its dtype must be torch.float32"),
    "integers": (lambda q: (q.int(),) * 3, "q is .* its dtype must be bfloat16, float16 or"),
    "transposed": (
        lambda q: (q.transpose(2, 3).contiguous().transpose(2, 3), q, q),
        "q is .* its last dim must be dense",
    ),
}


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_tensors(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        flash_attention(*make(torch.zeros(1, 4, 2, 8)))


@pytest.mark.parametrize("name", ["cudnn", "efficient", "fa2", "fa3", "fa4", "fa5"])
def test_a_backend_that_cannot_run_says_what_can(name: str) -> None:
    q = torch.zeros(1, 4, 2, 8)
    reason = "there is no such" if name == "fa5" else "it needs a CUDA GPU"
    wanted = f"flash_attention: backend is {name}; {reason}; here these can: flash, math"
    with pytest.raises(ValueError, match=wanted):
        flash_attention(q, q, q, name)


H100 = {"capability": (9, 0), "cudnn": 91900, "modules": ()}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Make reason_unavailable see a GPU of that kind and packages of those names."""

    def pretend(capability: tuple[int, int], cudnn: int, modules: tuple[str, ...]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
        found = lambda name: torch if name in modules else f"{name} does not import: not there"
        monkeypatch.setattr(attention_backends, "_import", found)

    return pretend


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("machine", "dtype", "width", "runs"),
    [
        (H100, BF16, 64, ["cudnn", "flash", "efficient", "math"]),
        (H100, FP16, 256, ["flash", "efficient", "math"]),
        (H100, FP32, 64, ["efficient", "math"]),
        (H100, BF16, 36, ["math"]),
        ({**H100, "cudnn": 91400}, BF16, 64, ["flash", "efficient", "math"]),
        ({**H100, "capability": (7, 5)}, FP16, 64, ["efficient", "math"]),
        (
            {**H100, "modules": ("flash_attn.cute.interface", "flash_attn_interface")},
            BF16,
            64,
            ["cudnn", "flash", "efficient", "fa3", "fa4", "math"],
        ),
        (
            {**H100, "capability": (8, 0), "modules": ("flash_attn.flash_attn_interface",)},
            BF16,
            64,
            ["cudnn", "flash", "efficient", "fa2", "math"],
        ),
    ],
    ids=["h100", "wide", "fp32", "36", "old-cudnn", "turing", "fa3-fa4", "a100-fa2"],
)
def test_backends_that_run_on_a_gpu(
    gpu, machine: dict, dtype: torch.dtype, width: int, runs: list
) -> None:
    gpu(**machine)
    assert backends_that_run(GPU, dtype, width) == runs
    assert attention_backends.default_backend(GPU, dtype, width) == runs[0]


def test_reasons_on_a_gpu(gpu) -> None:
    gpu(**{**H100, "capability": (8, 6)})
    assert (
        reason_unavailable("fa3", GPU, BF16, 64)
        == "it needs a GPU of compute capability 9.0, this is 8.6"
    )
    assert reason_unavailable("flash", GPU, FP32, 64) == "it takes bfloat16, float16, not float32"
    wanted = "it takes head widths that are multiples of 8 up to 128, not 192"
    assert reason_unavailable("cudnn", GPU, BF16, 192) == wanted
    assert "flash_attn_interface does not import" in reason_unavailable("fa2", GPU, BF16, 64)
    gpu(**{**H100, "cudnn": 91400})
    assert reason_unavailable("cudnn", GPU, BF16, 64) == "cuDNN 91400 is older than 9.15.1 (91501)"


def test_deterministic_runs_do_without_cudnn(gpu) -> None:
    gpu(**{**H100, "modules": ("flash_attn.cute.interface",)})
    torch.use_deterministic_algorithms(True)  # a fixture of all tests resets it
    assert "do not repeat bit for bit" in reason_unavailable("cudnn", GPU, BF16, 64)
    assert backends_that_run(GPU, BF16, 64) == ["flash", "efficient", "fa4", "math"]
    gpu(**{**H100, "capability": (12, 0), "modules": ("flash_attn.cute.interface",)})
    assert "do not repeat bit for bit" in reason_unavailable("fa4", GPU, BF16, 64)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_on_a_gpu(backend: str, dtype: torch.dtype) -> None:
    """Off-block rows and two samples; allow twice the error of plain arithmetic, plus a floor."""
    reason = reason_unavailable(backend, GPU, dtype, 64)
    if reason is not None:
        # No machine has all backends: some need another GPU, a package, or do not take the dtype.
        pytest.skip(f"{backend} does not run on this GPU: {reason}")
    *qk, v, dout = (x.detach().cuda() for x in draw((2, 333, 3, 64), dtype))
    qkv = [*qk, torch.stack([v] * 3, dim=2)[:, :, 2]]  # packed, as the model has it
    want = expected(*qkv, dout)
    got = raw(backend, *qkv, dout)
    plain = raw("math", *qkv, dout)
    for name, truth in want.items():
        error, allowed = ((x[name].double() - truth).norm() / truth.norm() for x in (got, plain))
        assert error <= 2 * allowed + 1e-3, name

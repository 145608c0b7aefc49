"""flash_attention and its backends against float64 formulas, and with its output kept by checkpoints.
Packages that need a GPU are stand-ins with the parameters of flash-attn 3 and 4."""

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cpu import get_cpu_capability
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from cogfast.kernels import torch_library
from cogfast.kernels.attention_backends import (
    BACKENDS,
    backends_that_run,
    flash_attention,
    flash_attention_reference,
    keeps_output,
    reason_unavailable,
)
from cogfast.kernels.block_kernels import choose_kernels
from cogfast.kernels.gpu import flash_attn
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
COGFAST = pytest.param("cogfast", marks=NEEDS_CPU_KERNELS)
# PyTorch's fused kernel refuses bfloat16 on a processor with AMX if ATEN_CPU_CAPABILITY hides AVX-512.
NEEDS_FULL_SPEED = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() and get_cpu_capability() != "AVX512",
    reason="PyTorch has an error with ATEN_CPU_CAPABILITY=avx2 on this processor",
)
ON_CPU = ("math", "flash", COGFAST)
# One row; a prime number of rows and an odd width; two samples, and rows beyond a block of 32 or
# 64.
SHAPES = {"one": (1, 1, 2, 8), "prime": (1, 37, 1, 5), "two": (2, 67, 3, 16)}


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Draw dense q and k, v as a part of packed qkv as in the model, and a cotangent."""
    generator = torch.Generator().manual_seed(sum(shape))
    b, s, h, d = shape
    rand = lambda *size: torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    q, k, v = rand(b, s, h, d), rand(b, s, h, d), rand(b, s, 3, h, d)[:, :, 2]
    assert s == 1 or not v.is_contiguous()
    return [*(x.requires_grad_() for x in (q, k, v)), rand(b, s, h, d)]


def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return out [B, S, H, D]."""
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])).exp()
    return torch.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdim=True), v)


def with_gradients(run, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    out = run(q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def expected(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """Return out and the gradients in float64."""
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    return with_gradients(formula, *exact, dout.double())


@pytest.mark.parametrize("backend", [None, *ON_CPU])
@pytest.mark.parametrize("shape", SHAPES)
def test_out_and_gradients_on_a_cpu(backend: str | None, shape: str) -> None:
    inputs = draw(SHAPES[shape], torch.float32)
    got, want = (
        with_gradients(partial(flash_attention, backend=backend), *inputs),
        expected(*inputs),
    )
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert (value.double() - want[name]).abs().max() <= 5e-6, name


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        (None, torch.bfloat16),
        ("math", torch.float16),
        pytest.param("flash", torch.bfloat16, marks=NEEDS_FULL_SPEED),
        pytest.param("cogfast", torch.bfloat16, marks=NEEDS_CPU_KERNELS),
    ],
    ids=str,
)
def test_half_precision_on_a_cpu(backend: str | None, dtype: torch.dtype) -> None:
    """Allow twice the error of plain arithmetic in that dtype, plus a quarter of its spacing."""
    inputs = draw((2, 130, 2, 64), dtype)
    want, plain = expected(*inputs), with_gradients(flash_attention_reference, *inputs)
    got = with_gradients(partial(flash_attention, backend=backend), *inputs)
    for name, truth in want.items():
        error, allowed = ((x[name].double() - truth).norm() / truth.norm() for x in (got, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 4, name


# Rows of one block and one more, of some blocks of queries (96 or 128) and keys (192, 96; 512, 256), and widths beside
# tiles of 16 and 32 columns.
@NEEDS_CPU_KERNELS
@pytest.mark.parametrize(
    "shape",
    [(1, 96, 1, 64), (2, 97, 2, 64), (1, 193, 1, 72), (1, 400, 3, 40), (1, 577, 1, 128)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_on_a_cpu(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Large scores, in which few keys count; the error may be twice that of plain arithmetic, which is in float32 here."""
    *qkv, dout = draw(shape, dtype)
    qkv = [(x.detach() * factor).requires_grad_() for x, factor in zip(qkv, (4, 4, 1), strict=True)]
    want, plain = expected(*qkv, dout), with_gradients(flash_attention_reference, *qkv, dout)
    got = with_gradients(partial(flash_attention, backend="cogfast"), *qkv, dout)
    floor = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps / 4
    for name, truth in want.items():
        error, allowed = ((x[name].double() - truth).norm() / truth.norm() for x in (got, plain))
        assert got[name].dtype == dtype and error <= 2 * allowed + floor, name


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [48, 64, 96])
def test_huge_scores_choose_one_key_on_a_cpu(width: int, dtype: torch.dtype) -> None:
    """Rounding of the largest score and of lse, which is large here, leaves the weights alone."""
    q, k, v, dout = draw((1, 64, 1, width), dtype)
    qkv = [(x.detach() * factor).requires_grad_() for x, factor in ((q, 3e3), (k, 3e3), (v, 1))]
    got = with_gradients(partial(flash_attention, backend="cogfast"), *qkv, dout)
    scores = torch.einsum("bihd,bjhd->bhij", *(x.detach().double() for x in qkv[:2]))
    chosen = scores.argmax(-1)[0, 0]  # [64]
    torch.testing.assert_close(got["out"][0, :, 0], v[0, chosen, 0].detach(), rtol=1e-5, atol=1e-5)
    dv = torch.zeros(64, width, dtype=torch.float64).index_add_(0, chosen, dout[0, :, 0].double())
    rounded = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(got["dv"][0, :, 0].double(), dv, rtol=rounded, atol=rounded)


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_block_of_keys_without_weight_leaves_the_others_theirs_on_a_cpu(
    dtype: torch.dtype,
) -> None:
    q, k, v, _ = (x.detach() for x in draw((1, 700, 1, 16), dtype))
    k[0, :530, 0, 2], q = math.inf, -q.abs()  # scores of the first 530 keys are -inf
    out = flash_attention(q, k, v, "cogfast")
    kept = formula(*(x.double() for x in (q, k[:, 530:], v[:, 530:])))
    torch.testing.assert_close(out.double(), kept, rtol=0.02, atol=0.02)
    k[0, :, 0, 2] = math.inf
    assert flash_attention(q, k, v, "cogfast").isnan().all()  # as in PyTorch's: no score is left


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_not_finite_reach_the_output_on_a_cpu(value: float) -> None:
    q, k, v, _ = (x.detach() for x in draw((1, 130, 2, 8), torch.float32))
    k[0, 7, 1, 3] = value
    out, want = (flash_attention(q, k, v, backend) for backend in ("cogfast", "math"))
    assert not out.isfinite().all() and torch.equal(out.isfinite(), want.isfinite())


@NEEDS_CPU_KERNELS
def test_a_cpu_takes_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is cogfast's kernel but in float64, and PyTorch's where it is not compiled."""
    chosen = lambda x, run=flash_attention: _op_of(run, x)
    few, ours = draw((1, 16, 2, 8), torch.bfloat16), "cogfast::cpu_attention"
    theirs = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert chosen([x.detach() for x in few]) == chosen(few) == ours
    assert chosen(draw((1, 16, 2, 8), torch.float32)) == ours
    assert chosen(draw((1, 16, 2, 8), torch.float64)) == theirs
    torch_kernels = choose_kernels("torch").flash_attention
    assert chosen(draw((1, 16, 2, 8), torch.float32), torch_kernels) == theirs
    monkeypatch.setattr(torch_library, "HAS_CPU_KERNELS", False)
    assert chosen(draw((1, 16, 2, 8), torch.float32)) == theirs
    assert chosen([x.detach() for x in few]) == theirs and chosen(few) is None  # plain PyTorch
    assert "not compiled" in reason_unavailable("cogfast", CPU, torch.float32, 64)


def _op_of(run, inputs: list[Tensor]) -> str | None:
    with Calls() as calls:
        run(*inputs[:3])
    return calls.names[0] if calls.names else None


@NEEDS_CPU_KERNELS
def test_compiled_attention_is_one_op_on_a_cpu() -> None:
    inputs = draw((2, 70, 2, 16), torch.float32)
    attend = partial(flash_attention, backend="cogfast")
    compiled = torch.compile(
        lambda q, k, v: attend(q.sin(), k, v), backend="aot_eager", fullgraph=True
    )
    plain = with_gradients(lambda q, k, v: attend(q.sin(), k, v), *inputs)
    for name, value in with_gradients(compiled, *inputs).items():
        assert torch.equal(value, plain[name]), name


@pytest.mark.parametrize("backend", ["flash", COGFAST])
def test_a_broadcast_cotangent_and_a_frozen_input_on_a_cpu(backend: str) -> None:
    """The gradient of a sum is one expanded number; an input may need no gradient."""
    q, k, v, _ = draw((1, 20, 2, 8), torch.float32)
    k.requires_grad_(False)
    dq, dv = torch.autograd.grad(flash_attention(q, k, v, backend).sum(), (q, v))
    want = expected(q, k, v, torch.ones(1, 20, 2, 8))
    torch.testing.assert_close(dq.double(), want["dq"], atol=5e-6, rtol=0)
    torch.testing.assert_close(dv.double(), want["dv"], atol=5e-6, rtol=0)


class Calls(TorchDispatchMode):
    """Records the ops that keeps_output accepts, and the largest result of any op."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.most = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if keeps_output(op):
            self.names.append(op.name())
        out = op(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple) else (out,):
            self.most = max(self.most, x.numel() if isinstance(x, Tensor) else 0)
        return out


def assert_runs_once(attend, *inputs: Tensor) -> str:
    """Under a checkpoint that keeps attention, only what is around it runs again. Return the op."""

    def policy(ctx, op, *args, **kwargs) -> CheckpointPolicy:
        is_kept = keeps_output(op)
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    run = lambda q, k, v: attend(q.sin(), k, v).cos()
    keep = partial(create_selective_checkpoint_contexts, policy)
    plain = with_gradients(run, *inputs)
    for options, count in (({"context_fn": keep}, 1), ({}, 2)):
        with Calls() as calls:
            part = partial(checkpoint, run, use_reentrant=False, **options)
            got = with_gradients(part, *inputs)
        assert len(calls.names) == count and len(set(calls.names)) == 1, calls.names
        for name, value in got.items():
            # On a GPU, flash and cudnn sum dq with atomic additions.
            off = 1e-2 * plain[name].abs().max() if value.is_cuda and name == "dq" else 0
            assert value.is_meta or (value - plain[name]).abs().max() <= off, name
    return calls.names[0]


@pytest.mark.parametrize("backend", ["flash", COGFAST])
def test_checkpoints_can_keep_the_output_on_a_cpu(backend: str) -> None:
    attend = partial(flash_attention, backend=backend)
    name = assert_runs_once(attend, *draw((1, 16, 2, 8), torch.float32))
    names = {"flash": "aten::_scaled_dot_product_flash_attention_for_cpu"}
    assert name == names.get(backend, "cogfast::cpu_attention")


@pytest.mark.parametrize("kind", ["flash", "efficient", "cudnn"])
def test_checkpoints_can_keep_the_output_of_a_gpus_kernels(kind: str) -> None:
    """The ops that scaled_dot_product_attention runs on a GPU, on meta tensors."""
    op = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention")
    rest = () if kind == "flash" else (None, True)  # no bias, lse
    heads_first = lambda *qkv: [x.transpose(1, 2) for x in qkv]
    inputs = [x.detach().to("meta").requires_grad_() for x in draw((1, 16, 2, 8), torch.bfloat16)]
    name = assert_runs_once(lambda *qkv: op(*heads_first(*qkv), *rest)[0].transpose(1, 2), *inputs)
    assert name == f"aten::_scaled_dot_product_{kind}_attention"


@pytest.mark.parametrize("backend", [None, "cudnn"])
def test_meta_tensors_have_no_score_matrix(backend: str | None) -> None:
    """Plans trace a block on the meta device, where PyTorch's own choice keeps all scores."""
    inputs = [x.detach().to("meta").requires_grad_() for x in draw((1, 512, 2, 8), torch.bfloat16)]
    with Calls() as calls:
        found = with_gradients(partial(flash_attention, backend=backend), *inputs)
    assert all(x.shape == (1, 512, 2, 8) and x.is_contiguous() for x in found.values())
    assert len(calls.names) == 1 and calls.most <= 3 * 512 * 2 * 8


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict]]:
    """Install stand-ins for the packages that compute in plain arithmetic; yield the arguments of
    their public calls."""
    calls: list[dict] = []
    package, ours = (
        torch.library.Library(*given) for given in (("flash_attn_3", "DEF"), ("cogfast", "IMPL"))
    )

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return flash_attention_reference(q, k, v).contiguous(), q.new_zeros(q.shape[:3])

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> tuple:
        weights = torch.einsum("bihd,bjhd->bhij", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        dweights = torch.einsum("bihd,bjhd->bhij", dout, v)
        dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))
        dscores = dscores / q.shape[-1] ** 0.5
        return (
            torch.einsum("bhij,bjhd->bihd", dscores, k),
            torch.einsum("bhij,bihd->bjhd", dscores, q),
            torch.einsum("bhij,bihd->bjhd", weights, dout),
        )

    package.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    package.impl("_flash_attn_forward", forward, "CPU")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = torch.ops.flash_attn_3._flash_attn_forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            return backward(dout, *ctx.saved_tensors)

    def flash_attn_func(q, k, v, *, deterministic=False):
        calls.append({"deterministic": deterministic, "v": v})
        return Function.apply(q, k, v), None  # some releases return lse, too

    def fwd(q, k, v, *, softmax_scale=None, causal=False, return_lse=False):
        assert return_lse and softmax_scale is None and not causal
        return (*forward(q, k, v), None)  # releases differ in what follows lse

    def bwd(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, deterministic=False):
        calls.append({"deterministic": deterministic, "v": v})
        return backward(dout, q, k, v)

    ours.impl("flash_attention_4", flash_attn.forward_4, "CPU")
    ours.impl("flash_attention_4_backward", flash_attn.backward_4, "CPU")
    modules = {
        "flash_attn_interface": SimpleNamespace(flash_attn_func=flash_attn_func),
        "flash_attn.cute.interface": SimpleNamespace(_flash_attn_fwd=fwd, _flash_attn_bwd=bwd),
    }
    monkeypatch.setattr(flash_attn.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(flash_attn, "LOADED", set())
    flash_attn.load.cache_clear()
    yield calls
    flash_attn.load.cache_clear()
    package._destroy()
    ours._destroy()


@pytest.mark.parametrize(("name", "deterministic"), [("fa3", False), ("fa3", True), ("fa4", True)])
def test_flash_attn_packages(packages: list[dict], name: str, deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)  # a fixture of all tests resets it
    flash_attn.load(name)
    inputs = draw(SHAPES["two"], torch.float32)
    attend = partial(flash_attention, backend=name)
    got, want = with_gradients(attend, *inputs), expected(*inputs)
    for key, value in got.items():
        torch.testing.assert_close(value.double(), want[key], atol=5e-6, rtol=0)
    (call,) = packages
    assert call["deterministic"] is deterministic
    assert call["v"].data_ptr() == inputs[2].data_ptr()  # v was not copied
    assert call["v"].stride() == inputs[2].stride()
    assert_runs_once(attend, *inputs)


H100 = {"capability": (9, 0), "cudnn": 91900, "modules": ()}
PACKAGES = {"modules": ("flash_attn.cute.interface", "flash_attn_interface")}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Make reason_unavailable see a GPU of that kind and packages of those names."""

    def pretend(capability: tuple[int, int], cudnn: int, modules: tuple[str, ...]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)

        def found(name: str) -> object:
            module = BACKENDS[name].module
            return torch if module in modules else f"{module} does not import: not there"

        monkeypatch.setattr(flash_attn, "load", found)

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
        (H100 | PACKAGES, BF16, 64, ["cudnn", "flash", "efficient", "fa3", "fa4", "math"]),
    ],
    ids=["h100", "wide", "fp32", "36", "old-cudnn", "turing", "packages"],
)
def test_backends_that_run_on_a_gpu(
    gpu, machine: dict, dtype: torch.dtype, width: int, runs: list
) -> None:
    gpu(**machine)
    assert backends_that_run(GPU, dtype, width) == runs


def test_reasons_on_a_gpu(gpu) -> None:
    gpu(**{**H100, "capability": (8, 6)})
    wanted = "it needs a GPU of compute capability 9.0, this is 8.6"
    assert reason_unavailable("fa3", GPU, BF16, 64) == wanted
    assert reason_unavailable("flash", GPU, FP32, 64) == "it takes bfloat16, float16, not float32"
    wanted = "it takes head widths that are multiples of 8 up to 128, not 192"
    assert reason_unavailable("cudnn", GPU, BF16, 192) == wanted
    gpu(**{**H100, "cudnn": 91400})
    assert "flash_attn_interface does not import" in reason_unavailable("fa3", GPU, BF16, 64)
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
    q, k, v, dout = (x.detach().cuda() for x in draw((2, 333, 3, 64), dtype))
    packed = torch.stack([v] * 3, dim=2)[:, :, 2]  # as the model has it
    inputs = [*(x.requires_grad_() for x in (q, k, packed)), dout]
    want, plain = expected(*inputs), with_gradients(flash_attention_reference, *inputs)
    got = with_gradients(partial(flash_attention, backend=backend), *inputs)
    for name, truth in want.items():
        error, allowed = ((x[name].double() - truth).norm() / truth.norm() for x in (got, plain))
        assert error <= 2 * allowed + 1e-3, name
    if backend != "math":
        assert_runs_once(partial(flash_attention, backend=backend), *inputs)


@pytest.mark.parametrize(
    ("backend", "peer"),
    [
        ("math", SDPBackend.MATH),
        pytest.param(
            "cogfast", SDPBackend.FLASH_ATTENTION, marks=[NEEDS_CPU_KERNELS, NEEDS_FULL_SPEED]
        ),
    ],
)
def test_scores_of_16_bits_are_float32_on_a_cpu(backend: str, peer: SDPBackend) -> None:
    """Errors are those of PyTorch's own attention, and not of scores that are rounded to 16 bits."""
    inputs = draw((2, 130, 2, 64), torch.bfloat16)
    inputs = (*(3 * x.detach() for x in inputs[:2]), *inputs[2:])
    inputs = tuple(x.detach().requires_grad_() if i < 3 else x for i, x in enumerate(inputs))

    def of_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(peer):
            heads = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(*heads).transpose(1, 2)

    want, theirs = expected(*inputs), with_gradients(of_torch, *inputs)
    for name, value in with_gradients(partial(flash_attention, backend=backend), *inputs).items():
        errors = [(x.double() - want[name]).norm() for x in (value, theirs[name])]
        assert errors[0] <= 1.6 * errors[1], name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_split_batch_has_the_numbers_of_the_whole(dtype: torch.dtype) -> None:
    q, k, v, _ = draw((3, 600, 2, 64), dtype)
    whole = flash_attention(q, k, v)
    parts = [flash_attention(*(x[i : i + 1] for x in (q, k, v))) for i in range(3)]
    assert torch.equal(whole, torch.cat(parts))

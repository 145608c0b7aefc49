"""Gated residual, LayerNorm and modulation: kernels and CPU ops against float64 formulas, for
outputs and every gradient. tests/model/test_block.py compiles them."""

import pytest
import torch
from torch import Tensor

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import torch_library
from cogfast.kernels.adaptive_layernorm import Backward
from cogfast.kernels.gpu import adaptive_layernorm as kernels
from cogfast.kernels.gpu.adaptive_layernorm import launch_backward, launch_forward, split_programs
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

EPS = 1e-5
NAMES = ("hidden", "branch", "branch_bias", "gate", "weight", "bias", "shift", "scale")
# Batch, text rows, video rows, width.
SHAPES = {
    "no-text": (1, 0, 5, 32),
    "no-video": (1, 4, 0, 16),
    "one": (2, 1, 6, 64),  # two modulations
    "prime": (3, 7, 13, 48),  # masked columns, more batches than programs for their segments
    "odd": (1, 3, 8, 29),  # a width without 16-byte alignment
    "caption": (1, 9, 4, 8),  # more text than video
    "wide": (1, 2, 9, 300),  # several blocks of columns in the second stage
}
# Whether there are a residual, a branch bias, a norm, norm weights.
VARIANTS = {
    "whole": (True, True, True, True),
    "no-bias": (True, False, True, True),
    "plain-norm": (True, True, True, False),
    "first": (False, False, True, True),
    "first-plain": (False, False, True, False),
    "last": (True, True, False, False),
    "last-no-bias": (True, False, False, False),
}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def draw(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def make_inputs(shape: tuple[int, ...], kind: tuple[bool, ...]) -> dict[str, Tensor | None]:
    """Draw float64 inputs by NAMES, None for what the variant lacks; modulation as views of one
    tensor."""
    b, text, video, m = shape
    has_residual, has_branch_bias, has_norm, has_affine = kind
    modulation = draw(b, 2, 6, m, seed=1).unbind(2)
    inputs = {
        "hidden": draw(b, text + video, m, seed=2) * 2 + 1,
        "branch": draw(b, text + video, m, seed=3) if has_residual else None,
        "branch_bias": draw(m, seed=4) if has_branch_bias else None,
        "gate": modulation[2] if has_residual else None,
        "weight": draw(m, seed=5) if has_affine else None,
        "bias": draw(m, seed=6) if has_affine else None,
        "shift": modulation[3] if has_norm else None,
        "scale": modulation[4] if has_norm else None,
    }
    assert tuple(inputs) == NAMES
    return inputs


def formula(inputs: dict[str, Tensor | None], num_text: int) -> tuple[Tensor, Tensor | None]:
    """Return h' and n; each row's modulation is picked by its index."""
    x, y, y_bias, gate, weight, bias, shift, scale = (inputs[name] for name in NAMES)
    of_row = [1] * num_text + [0] * (x.shape[1] - num_text)
    if y is not None:
        x = x + gate[:, of_row] * (y if y_bias is None else y + y_bias)
    if scale is None:
        return x, None
    centred = x - x.mean(-1, keepdim=True)
    n = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    n = n if weight is None else n * weight + bias
    return x, n * (1 + scale[:, of_row]) + shift[:, of_row]


def expected(
    inputs: dict[str, Tensor | None], num_text: int, has_dout: bool = True
) -> tuple[list[Tensor | None], dict[str, Tensor], list[Tensor | None]]:
    """Return outputs h' and n, their cotangents, and float64 gradients by NAMES."""
    leaves = {k: None if v is None else v.clone().requires_grad_() for k, v in inputs.items()}
    outputs = formula(leaves, num_text)
    cotangents = [None if x is None else draw(*x.shape, seed=9 + i) for i, x in enumerate(outputs)]
    if not has_dout:
        cotangents[0] = None
    loss = sum((x * g).sum() for x, g in zip(outputs, cotangents, strict=True) if g is not None)
    loss.backward()
    gradients = {k: None if v is None else v.grad for k, v in leaves.items()}
    return [x if x is None else x.detach() for x in outputs], gradients, cotangents


def close(got: Tensor, want: Tensor, what: str, relative: float = 2e-6) -> None:
    """Compare the error with the largest value, because sums over rows cancel."""
    assert got.shape == want.shape, what
    scale = max(1.0, want.abs().max().item())
    error = (got.double() - want).abs().max().item()
    assert error <= relative * scale, f"{what}: {error} of {scale}"


def single(x: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor | None:
    """Cast and keep strides, so that views of one modulation stay views of one layout."""
    return None if x is None else x.to(dtype)


def statistics(out: Tensor) -> tuple[Tensor, Tensor]:
    mean, variance = out.mean(-1), out.var(-1, correction=0)
    return mean, (variance + EPS).rsqrt()


forward_op = torch.ops.cogfast.adaptive_layernorm
backward_op = torch.ops.cogfast.adaptive_layernorm_backward
# The C++ kernels are tested through the public functions as well.
BACKWARDS = [
    pytest.param(launch_backward, id="kernel"),
    pytest.param(lambda b: backward_op(*b), marks=NEEDS_CPU_KERNELS, id="cpu"),
]


def ids_of(shapes_and_kinds: list[tuple[str, str]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("shape", "kind"),
        [pytest.param(SHAPES[s], VARIANTS[k], id=f"{s}-{k}") for s, k in shapes_and_kinds],
    )


# Each shape with two kinds, each kind with two shapes
FEW = [(s, list(VARIANTS)[(2 * i + j) % 7]) for i, s in enumerate(SHAPES) for j in range(2)]


@ids_of(FEW)
def test_forward_kernel(shape: tuple[int, ...], kind: tuple[bool, ...]) -> None:
    inputs, num_text = make_inputs(shape, kind), shape[1]
    (out, n), _, _ = expected(inputs, num_text)
    got_out, got_n, mean, rstd = launch_forward(*map(single, inputs.values()), num_text, EPS)
    if kind[0]:
        close(got_out, out, "h'")
    else:
        assert got_out.numel() == 0
    if not kind[2]:
        assert got_n.numel() == mean.numel() == rstd.numel() == 0
        return
    close(got_n, n, "n", 1e-5)
    for got, want in zip((mean, rstd), statistics(out), strict=True):
        close(got, want, "statistics")


def run_backward(backward, shape, kind, has_dout=True, frozen=(), dtype=torch.float32):
    """Return the eight gradients by name, and their float64 values."""
    inputs, num_text = make_inputs(shape, kind), shape[1]
    if dtype != torch.float32:  # the formula gets the rounded values that the kernel gets
        inputs = {k: None if v is None else v.to(dtype).double() for k, v in inputs.items()}
    (out, n), want, (dout, dn) = expected(inputs, num_text, has_dout)
    cast = {k: single(v, dtype) for k, v in inputs.items()}
    has_norm_sums = n is not None and "scale" not in frozen
    mean, rstd = (None, None) if n is None else map(single, statistics(out))
    got = backward(
        Backward(
            dn=single(dn, dtype),
            dout=single(dout, dtype),
            out=None if n is None else out.to(dtype),
            mean=mean,
            rstd=rstd,
            weight=cast["weight"],
            bias=cast["bias"],
            scale=cast["scale"],
            branch=None if "gate" in frozen else cast["branch"],
            branch_bias=cast["branch_bias"],
            gate=cast["gate"],
            num_text=num_text,
            has_norm_sums=has_norm_sums,
            has_branch_sum=cast["branch_bias"] is not None and "branch_bias" not in frozen,
        )
    )
    return dict(zip(NAMES, got, strict=True)), want


def check_gradients(
    backward, shape: str, kind: str, frozen: tuple[str, ...] = (), has_dout: bool = True
) -> None:
    """Compare with float64; the gradients of `frozen` parameters must not be computed."""
    got, want = run_backward(backward, SHAPES[shape], VARIANTS[kind], has_dout, frozen)
    for name, x in got.items():
        # The norm's sums are one flag. If there is no norm, the gradient of hidden is the one that arrived.
        is_frozen = name in frozen or "scale" in frozen and name in ("weight", "bias", "shift")
        is_passed_on = name == "hidden" and kind.startswith("last")
        if want[name] is None or is_frozen or is_passed_on:
            assert x.numel() == 0, name
        else:
            close(x, want[name], name, 1e-5)


@pytest.mark.parametrize(("shape", "kind"), FEW)
def test_backward_kernels(shape: str, kind: str) -> None:
    check_gradients(launch_backward, shape, kind)


@pytest.mark.parametrize("left", [0, 1, 100])
def test_programs_leave_multiprocessors(monkeypatch: pytest.MonkeyPatch, left: int) -> None:
    """A quarter of the interpreter's five at most."""
    monkeypatch.setattr(torch_library, "LEFT_MULTIPROCESSORS", left)
    launched: list[int] = []
    split = kernels.split_programs
    note = lambda text, video, number: launched.append(number) or split(text, video, number)
    monkeypatch.setattr(kernels, "split_programs", note)
    check_gradients(launch_backward, "one", "whole")
    per_multiprocessor = kernels.choose_launch(
        SHAPES["one"][-1], 4, True
    ).programs_per_multiprocessor
    assert launched == [(5 - min(left, 1)) * per_multiprocessor // SHAPES["one"][0]]


@pytest.mark.parametrize(
    ("kind", "frozen", "has_dout"),
    [
        ("whole", ("scale", "gate", "branch_bias"), True),
        ("first", ("scale",), True),
        ("last", ("gate", "branch_bias"), True),
        ("whole", ("scale",), True),
        ("whole", ("gate",), True),
        ("whole", (), False),
        ("first", (), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("backward", BACKWARDS)
def test_backward_of_what_is_asked_for(
    backward, kind: str, frozen: tuple[str, ...], has_dout: bool
) -> None:
    check_gradients(backward, "one", kind, frozen, has_dout)


def test_kernels_in_bf16() -> None:
    """Compare with float64 results of the same bf16 inputs: one unit in the last place.

    Triton's interpreter truncates where a GPU rounds.
    """
    inputs, num_text = make_inputs(SHAPES["one"], VARIANTS["whole"]), 1
    inputs = {k: single(v, torch.bfloat16) for k, v in inputs.items()}
    out, n, _, _ = launch_forward(*inputs.values(), num_text, EPS)
    double = {k: single(v, torch.float64) for k, v in inputs.items()}
    torch.testing.assert_close(out.double(), formula(double, num_text)[0], rtol=2**-7, atol=1e-6)
    # n is computed from the rounded h'.
    of_out = double | {"hidden": out.double(), "branch": None}
    torch.testing.assert_close(n.double(), formula(of_out, num_text)[1], rtol=2**-7, atol=1e-5)
    got, want = run_backward(
        launch_backward, SHAPES["one"], VARIANTS["whole"], dtype=torch.bfloat16
    )
    for name, x in got.items():
        close(x, want[name], name, 2**-5)


@NEEDS_CPU_KERNELS
def test_norm_weights_and_modulation_of_their_own_dtypes() -> None:
    inputs = make_inputs(SHAPES["one"], VARIANTS["whole"])
    rows = ("hidden", "branch")
    mixed = {
        k: single(v, torch.bfloat16 if k in rows else torch.float32) for k, v in inputs.items()
    }
    kernel = launch_forward(*mixed.values(), 1, EPS)
    cpu = forward_op(*mixed.values(), 1, EPS)
    for got, want in zip(kernel, cpu, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2e-2)


def test_rows_and_modulation_of_any_strides() -> None:
    """Gradients arrive expanded or transposed, and rows may be part of a larger tensor."""
    shape = SHAPES["one"]
    inputs = {k: single(v) for k, v in make_inputs(shape, VARIANTS["whole"]).items()}
    padded = {k: torch.cat([v, v], dim=-1)[..., : shape[3]] for k, v in inputs.items()}
    padded |= {k: inputs[k] for k in ("weight", "bias", "branch_bias")} | {
        "scale": inputs["scale"].contiguous()
    }
    outputs = launch_forward(*inputs.values(), 1, EPS)
    for got, want in zip(launch_forward(*padded.values(), 1, EPS), outputs, strict=True):
        assert torch.equal(got, want)

    out, n, mean, rstd = outputs
    ones, mixed = torch.ones_like(n), draw(*n.shape, seed=8).float()

    def run(dn: Tensor, dout: Tensor, out: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
        vectors = (x["weight"], x["bias"], x["scale"], x["branch"], x["branch_bias"], x["gate"])
        return launch_backward(Backward(dn, dout, out, mean, rstd, *vectors, 1, True, True))

    expanded, transposed = ones[:1, :1, :1].expand_as(n), mixed.mT.contiguous().mT
    wide_out = torch.cat([out, out], dim=-1)[..., : shape[3]]
    wanted = run(ones, mixed, out, inputs)
    for got, want in zip(run(expanded, transposed, wide_out, padded), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("num_programs", [1, 2, 7, 132])
@pytest.mark.parametrize("rows", [(0, 5), (5, 0), (1, 16), (226, 17550)])
def test_every_row_has_one_program_of_its_segment(rows: tuple[int, int], num_programs: int) -> None:
    text, video = split_programs(*rows, num_programs)
    assert (text > 0, video > 0) == (rows[0] > 0, rows[1] > 0)
    assert text + video <= max(num_programs, 2) and text <= rows[0] and video <= rows[1]
    busiest = max(-(-count // n) for count, n in zip(rows, (text, video), strict=True) if n)
    # Bound: the shorter segment may get one program more than its share.
    assert busiest <= -(-sum(rows) // max(num_programs - 1, 1))


def call(
    inputs: dict[str, Tensor | None], num_text: int, suffix: str = ""
) -> tuple[Tensor, Tensor | None]:
    """Call the public function for the given inputs, or its reference; return h' and n."""
    rows = [inputs[name] for name in NAMES[1:4]]
    norms = [inputs[name] for name in NAMES[4:]]
    if inputs["branch"] is None:
        op = getattr(norm, f"adaptive_layernorm{suffix}")
        return op(inputs["hidden"], *norms, num_text, EPS)
    if inputs["scale"] is None:
        return getattr(norm, f"gated_residual{suffix}")(inputs["hidden"], *rows, num_text), None
    op = getattr(norm, f"residual_adaptive_layernorm{suffix}")
    return op(inputs["hidden"], *rows, *norms, num_text, EPS)


@pytest.mark.parametrize("suffix", ["", "_reference"], ids=["op", "reference"])
@ids_of([(s, k) for i, s in enumerate(SHAPES) for j, k in enumerate(VARIANTS) if (i + j) % 2])
def test_public_functions_on_a_cpu(
    suffix: str, shape: tuple[int, ...], kind: tuple[bool, ...]
) -> None:
    inputs, num_text = make_inputs(shape, kind), shape[1]
    outputs, want, cotangents = expected(inputs, num_text)
    leaves = {k: None if v is None else single(v).requires_grad_() for k, v in inputs.items()}
    got = call(leaves, num_text, suffix)
    pairs = [(x, g.float()) for x, g in zip(got, cotangents, strict=True) if g is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    for x, exact in zip(got, outputs, strict=True):
        if exact is not None:
            close(x.detach(), exact, "output", 1e-5)
    for name, leaf in leaves.items():
        if leaf is not None:
            close(leaf.grad, want[name], name, 1e-5)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("kind", ["whole", "first"])
def test_one_output_alone(kind: str, used: int) -> None:
    inputs = make_inputs(SHAPES["one"], VARIANTS[kind])
    given = {k: v for k, v in inputs.items() if v is not None}
    exact = [v.clone().requires_grad_() for v in given.values()]
    leaves = [single(v).requires_grad_() for v in given.values()]
    all_of = lambda values: dict.fromkeys(NAMES) | dict(zip(given, values, strict=True))
    want = torch.autograd.grad(
        formula(all_of(exact), 1)[used].square().sum(), exact, allow_unused=True
    )
    got = torch.autograd.grad(
        call(all_of(leaves), 1)[used].square().sum(), leaves, allow_unused=True
    )
    for name, a, b in zip(given, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            close(a, b, name, 1e-5)


@NEEDS_CPU_KERNELS
def test_frozen_parameters_get_no_gradient_and_cost_none(monkeypatch) -> None:
    """LoRA: only hidden and branch need gradients, and backward is asked for nothing else."""
    asked = []
    real = norm._backward
    monkeypatch.setattr(norm, "_backward", lambda *x: asked.append(Backward(*x)) or real(*x))
    inputs = {k: single(v) for k, v in make_inputs(SHAPES["one"], VARIANTS["whole"]).items()}
    for name in ("hidden", "branch"):
        inputs[name].requires_grad_()
    sum(x.square().sum() for x in call(inputs, 1)).backward()
    assert inputs["hidden"].grad is not None
    assert asked[0].branch is None
    assert asked[0].has_norm_sums is asked[0].has_branch_sum is False


def test_gated_residual_hands_its_gradient_on() -> None:
    """The gradient of h' becomes the gradient of hidden without a copy."""
    inputs = {k: single(v) for k, v in make_inputs(SHAPES["one"], VARIANTS["last"]).items()}
    seen = []
    before = inputs["hidden"].requires_grad_() * 1
    before.register_hook(lambda g: seen.append(g.data_ptr()))
    out, _ = call(inputs | {"hidden": before}, 1)
    cotangent = torch.ones_like(out)
    out.backward(cotangent)
    assert seen == [cotangent.data_ptr()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize(
    ("shape", "kind", "dtype"),  # each pair of values
    [
        (shape, kind, (torch.bfloat16, torch.float16)[(i + j) % 2])
        for i, shape in enumerate([(2, 3, 9, 64), (1, 22, 60, 1920), (2, 5, 41, 3072)])
        for j, kind in enumerate(["whole", "first", "last"])
    ],
    ids=str,
)
def test_low_precision_is_no_worse_than_the_reference(
    shape: tuple[int, ...], kind: str, dtype: torch.dtype, device: str
) -> None:
    """Allow twice the reference's error in that dtype, plus one unit in the last place of the
    largest value."""
    inputs = make_inputs(shape, VARIANTS[kind])
    inputs = {k: None if v is None else v.to(device, dtype) for k, v in inputs.items()}

    def run(suffix: str, dtype: torch.dtype) -> list[Tensor]:
        leaves = {k: None if v is None else v.to(dtype).requires_grad_() for k, v in inputs.items()}
        outputs = [x for x in call(leaves, shape[1], suffix) if x is not None]
        cotangents = [draw(*x.shape, seed=5 + i).to(x) for i, x in enumerate(outputs)]
        given = [x for x in leaves.values() if x is not None]
        return outputs + list(torch.autograd.grad(outputs, given, cotangents))

    exact = run("_reference", torch.float64)
    theirs, ours = run("_reference", dtype), run("", dtype)
    for a, b, x in zip(ours, theirs, exact, strict=True):
        floor = torch.finfo(dtype).eps * x.abs().max()
        assert (a.double() - x).abs().max() <= 2 * (b.double() - x).abs().max() + floor


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("whole", torch.bfloat16), ("first", torch.float32), ("last", torch.bfloat16)],
    ids=str,
)
def test_opcheck(kind: str, dtype: torch.dtype) -> None:
    """The fake outputs have the dtypes of the real ones, also those of shape [0]."""
    inputs = make_inputs(SHAPES["one"], VARIANTS[kind])
    given = [single(v, dtype) for v in inputs.values()]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(forward_op, (*given, 1, EPS), test_utils=tests)
    calls = []
    record = lambda b: calls.append(tuple(b)) or backward_op(*b)
    for frozen in ((), NAMES[2:]):
        run_backward(record, SHAPES["one"], VARIANTS[kind], frozen=frozen, dtype=dtype)
        torch.library.opcheck(backward_op, calls.pop(), test_utils=tests)

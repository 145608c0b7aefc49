"""Head norms and rotation: interpreted kernels, CPU kernels and gradients against float64 formulas
and against diffusers' rotary embedding."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cogfast.core.shapes import TokenGrid
from cogfast.kernels.gpu.qk_norm_rope3d import launch_backward, launch_forward
from cogfast.kernels.qk_norm_rope3d import EPS, Rotation, qk_norm_rope3d, qk_norm_rope3d_reference
from cogfast.model.embeddings import RotaryPositions
from tests.support.kernels.cpu_kernels import NEEDS_CPU_KERNELS

# Samples, text rows, (frames, rows, columns), heads, head width.
SHAPES = {
    "64": (2, 1, (2, 1, 3), 3, 64),  # as in every model; 7 rows, not a multiple of a tile's 2
    "no-text": (1, 0, (1, 3, 3), 1, 16),
    "padded-width": (2, 1, (3, 1, 2), 2, 48),  # 48 entries in a tile of 64; one row of text
    "text": (1, 7, (1, 1, 2), 1, 16),  # more text than video
    "many-heads": (1, 2, (2, 1, 1), 30, 32),  # two heads of a tile are masked
    "head-tiles": (1, 1, (1, 2, 1), 24, 64),  # three tiles of 8
    "widest": (1, 1, (1, 2, 2), 2, 128),
}
# A CPU takes any head width, here no multiple of a vector's 8 or 16 lanes, if nothing is rotated.
CPU_SHAPES = {name: SHAPES[name] for name in ("64", "no-text", "text", "padded-width")} | {
    "80": (2, 2, (1, 3, 2), 3, 80),
    "widest": SHAPES["widest"],
    "144": (1, 1, (2, 1, 2), 2, 144),
    "tail": (2, 2, (1, 3, 2), 3, 27),
    "narrow": (1, 0, (1, 1, 3), 2, 5),
}
# Whether there are: query weight, query bias, key weight, key bias; norm; rotation.
VARIANTS = {
    "all": ("abcd", True, True),
    "2B": ("abcd", True, False),
    "no-affine": ("", True, True),
    "no-biases": ("ac", True, True),
    "key-affine": ("cd", True, False),
    "no-norm": ("", False, True),
    "another-order": ("abcd", True, "in another order"),
}


@dataclass
class Case:
    """Inputs in float64 that float32 represents exactly."""

    qkv: Tensor  # [B, S, 3, H, D]
    affine: list[Tensor | None]  # 4 of [D]
    axes: tuple[Tensor, Tensor, Tensor] | None  # angles [t, D/8], [h, 3D/16], [w, 3D/16]
    cotangents: tuple[Tensor, Tensor, Tensor]  # of q, k, v
    num_text: int
    has_norm: bool
    order: Tensor | None = None  # [t*h*w] int32

    def rotation(self) -> Rotation | None:
        if self.axes is None:
            return None
        angles = torch.cat([axis.flatten() for axis in self.axes])
        table = torch.stack([angles.cos(), angles.sin()]).float()
        return Rotation(table, *(len(axis) for axis in self.axes), self.order)

    def raw(self) -> tuple:
        """Arguments table, order, num_text, t, h, w, has_norm, eps of launchers and ops."""
        rotation = self.rotation()
        if rotation is None:
            return None, None, self.num_text, 1, 1, 1, self.has_norm, EPS
        grid = (rotation.t, rotation.h, rotation.w)
        return rotation.table, rotation.order, self.num_text, *grid, self.has_norm, EPS

    def norms(self, parameters: list[Tensor | None]) -> tuple:
        return (tuple(parameters[:2]), tuple(parameters[2:])) if self.has_norm else (None, None)

    def to(self, dtype: torch.dtype) -> tuple[Tensor, list[Tensor | None], list[Tensor]]:
        """Return qkv, affine parameters and cotangents in dtype."""
        affine = [None if p is None else p.to(dtype) for p in self.affine]
        return self.qkv.to(dtype), affine, [g.to(dtype) for g in self.cotangents]


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).double()


def make(shape: tuple, variant: tuple, dtype: torch.dtype = torch.float32) -> Case:
    b, num_text, (t, h, w), heads, width = shape
    given, has_norm, has_rotation = variant
    rows = num_text + t * h * w
    sizes = ((t, width // 8), (h, width // 16 * 3), (w, width // 16 * 3))
    return Case(
        qkv=(draw(b, rows, 3, heads, width, seed=1) * 2 + 0.5).to(dtype).double(),
        affine=[
            draw(width, seed=10 + i, dtype=dtype) if name in given else None
            for i, name in enumerate("abcd")
        ],
        axes=tuple(draw(*s, seed=20 + i) * 3 for i, s in enumerate(sizes))
        if has_rotation
        else None,
        cotangents=tuple(draw(b, rows, heads, width, seed=30 + i, dtype=dtype) for i in range(3)),
        num_text=num_text,
        has_norm=has_norm,
        order=torch.randperm(rows - num_text, generator=torch.Generator().manual_seed(2)).int()
        if has_rotation == "in another order"
        else None,
    )


def formula(case: Case, which: int, x: Tensor, weight: Tensor | None, bias: Tensor | None):
    """Return q (0) or k (1) of x = qkv in float64, token by token."""
    x = x[:, :, which]
    if case.has_norm:
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
        x = x if weight is None else x * weight
        x = x if bias is None else x + bias
    if case.axes is None:
        return x
    time, row, column = case.axes
    places = [
        (i, j, k) for i in range(len(time)) for j in range(len(row)) for k in range(len(column))
    ]
    video = torch.stack([torch.cat([time[i], row[j], column[k]]) for i, j, k in places])
    if case.order is not None:
        video = torch.stack([video[number] for number in case.order.tolist()])
    angles = torch.cat([video.new_zeros(case.num_text, video.shape[1]), video])[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    turned = (a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos())
    return torch.stack(turned, -1).flatten(-2)


def exact(case: Case) -> tuple[list[Tensor], Tensor, list[Tensor | None]]:
    """Return in float64: q, k, v; the gradient of qkv; those of the affine parameters."""
    qkv = case.qkv.clone().requires_grad_()
    affine = [None if p is None else p.clone().requires_grad_() for p in case.affine]
    q, k = formula(case, 0, qkv, *affine[:2]), formula(case, 1, qkv, *affine[2:])
    given = [p for p in affine if p is not None]
    outputs = [q, k, qkv[:, :, 2]]
    dqkv, *grads = torch.autograd.grad(outputs, [qkv, *given], case.cotangents)
    grads = iter(grads)
    return (
        [x.detach() for x in outputs],
        dqkv,
        [None if p is None else next(grads) for p in affine],
    )


def check(got: Tensor, want: Tensor, what: str, tolerance: float = 3e-6) -> None:
    """Compare with float64, in units of the largest value."""
    assert got.shape == want.shape, what
    error = (got.double() - want).abs().max().item() / max(1.0, want.abs().max().item())
    assert error <= tolerance, f"{what}: {error}"


def check_launchers(case: Case, dtype=torch.float32, tolerance=3e-6) -> None:
    """Check the kernels' outputs and gradients."""
    qkv, affine, cotangents = case.to(dtype)
    outputs, dqkv, grads = exact(case)
    q, k = launch_forward(qkv, *affine, *case.raw())
    check(q, outputs[0], "q", tolerance)
    check(k, outputs[1], "k", tolerance)
    arguments = (*cotangents, qkv, affine[0], affine[2], *case.raw())
    needs_sums = any(g is not None for g in grads)
    got, sums = launch_backward(*arguments, needs_sums)
    check(got, dqkv, "dqkv", tolerance)
    for i, want in enumerate(grads):
        if want is not None:
            check(sums[i], want, f"affine {i}", 3e-6)
    if needs_sums:
        frozen, nothing = launch_backward(*arguments, False)
        assert torch.equal(frozen, got) and nothing.shape == (0, qkv.shape[-1])


@pytest.mark.parametrize(
    ("shape", "variant"),
    [(name, "all") for name in SHAPES] + [("no-text", name) for name in VARIANTS if name != "all"],
)
def test_kernels(shape: str, variant: str) -> None:
    check_launchers(make(SHAPES[shape], VARIANTS[variant]))


def test_kernels_in_bf16() -> None:
    """Allow one unit in the last place: the interpreter truncates where a GPU rounds."""
    case = make((1, 1, (1, 2, 1), 2, 64), VARIANTS["all"], torch.bfloat16)
    check_launchers(case, torch.bfloat16, tolerance=2**-7)


def strided(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return tensors [2, 5, 2, 16] with the strides that attention backends give gradients."""
    x = draw(2, 5, 2, 16, seed=3).to(dtype)
    return {
        "heads first": x.transpose(1, 2).contiguous().transpose(1, 2),
        "part of a larger tensor": torch.cat([x, x], -1)[..., 16:],
        "last dim not dense": x.transpose(2, 3).contiguous().transpose(2, 3),
        "one number": torch.ones((), dtype=dtype).expand(x.shape),
    }


KERNEL = (launch_forward, launch_backward)
ON_CPU = (torch.ops.cogfast.qk_norm_rope3d, torch.ops.cogfast.qk_norm_rope3d_backward)


@pytest.mark.parametrize(
    ("functions", "dtype"),
    [
        pytest.param(KERNEL, torch.float32, id="kernel"),
        pytest.param(ON_CPU, torch.float32, id="cpu", marks=NEEDS_CPU_KERNELS),
        pytest.param(ON_CPU, torch.bfloat16, id="cpu-bf16", marks=NEEDS_CPU_KERNELS),
    ],
)
def test_any_strides(functions: tuple, dtype: torch.dtype) -> None:
    """Gradients may have any strides, and q, k, v need not be packed."""
    forward, backward = functions
    case = make((2, 1, (1, 2, 2), 2, 16), VARIANTS["all"], dtype)
    qkv, affine, cotangents = case.to(dtype)
    arguments = (qkv, affine[0], affine[2], *case.raw(), True)
    # Gradients of all kinds at once: each kind comes to q, k and v in turn.
    kinds = list(strided(dtype).values())
    for i in range(3):
        gradients = [kinds[(i + j) % 4] for j in range(3)]
        got = backward(*gradients, *arguments)
        want = backward(*(g.contiguous() for g in gradients), *arguments)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    apart = qkv.permute(2, 3, 0, 1, 4).contiguous().permute(2, 3, 0, 1, 4)
    assert not apart.is_contiguous()
    found = [
        (*forward(x, *affine, *case.raw()), *backward(*cotangents, x, *arguments[1:]))
        for x in (apart, qkv)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert found[0][2].is_contiguous()


@pytest.mark.parametrize(("far_batch", "far_row"), [(2**30 + 64, 32), (0, 2**28)], ids=["B", "S"])
def test_offsets_above_31_bits(tmp_path: Path, far_batch: int, far_row: int) -> None:
    """Samples, or rows, lie more than 2^31 elements apart, in a sparse file."""
    b, rows = (3, 1) if far_batch else (1, 10)  # strides of 31 bits, products of 32
    case = make((b, 0, (1, 1, rows), 1, 16), VARIANTS["all"], torch.bfloat16)
    qkv, affine, (dq, dk, dv) = case.to(torch.bfloat16)
    size = 2**31 + 2**30
    memory = torch.from_file(str(tmp_path / "far"), shared=True, size=size, dtype=torch.bfloat16)
    far = memory.as_strided(qkv.shape, (far_batch, max(far_row, 48), 16, 16, 1))
    far.copy_(qkv)
    arguments = (affine[0], affine[2], *case.raw(), True)
    got, want = (
        (*launch_forward(x, *affine, *case.raw()), launch_backward(dq, dk, dv, x, *arguments)[0])
        for x in (far, qkv)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    far_dq = far[:, :, 0].copy_(dq)
    assert torch.equal(launch_backward(far_dq, dk, dv, qkv, *arguments)[0], want[2])


@pytest.mark.parametrize(
    ("shape", "variant", "op"),  # each pair of values
    [
        pytest.param(
            CPU_SHAPES[shape],
            VARIANTS[variant],
            (qk_norm_rope3d, qk_norm_rope3d_reference)[(i + j) % 2],
            id=f"{shape}-{variant}",
        )
        for i, shape in enumerate(CPU_SHAPES)
        for j, variant in enumerate(VARIANTS)
        if i % 2 == j // 2 % 2  # half of the product
    ],
)
def test_on_a_cpu(op, shape: tuple, variant: tuple) -> None:
    """Compare outputs and gradients with float64."""
    if shape[-1] % 16:
        variant = (*variant[:2], False)
    case = make(shape, variant)
    outputs, dqkv, grads = exact(case)
    qkv, affine, cotangents = case.to(torch.float32)
    leaves = [x.requires_grad_() for x in (qkv, *affine) if x is not None]
    got = op(qkv, *case.norms(affine), case.rotation(), case.num_text)
    got_grads = torch.autograd.grad(got, leaves, cotangents)
    wanted = [*outputs, dqkv, *(g for g in grads if g is not None)]
    for i, (a, b) in enumerate(zip((*got, *got_grads), wanted, strict=True)):
        check(a, b, str(i))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_a_cpu_takes_the_reference_for_other_dtypes(dtype: torch.dtype) -> None:
    case = make(SHAPES["64"], VARIANTS["all"], dtype=torch.float16)
    qkv, affine, _ = case.to(dtype)
    arguments = (*case.norms(affine), case.rotation(), case.num_text)
    got, want = qk_norm_rope3d(qkv, *arguments), qk_norm_rope3d_reference(qkv, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@NEEDS_CPU_KERNELS
def test_no_rows_on_a_cpu() -> None:
    qkv, norm = torch.zeros(2, 0, 3, 2, 16).requires_grad_(), torch.ones(16).requires_grad_()
    q, k, v = qk_norm_rope3d(qkv, (norm, None), (None, norm), None, 0)
    assert q.shape == k.shape == v.shape == (2, 0, 2, 16)
    dqkv, dnorm = torch.autograd.grad((q + k + v).sum(), (qkv, norm))
    assert dqkv.shape == qkv.shape and torch.equal(dnorm, torch.zeros(16))


def test_frozen_and_unused() -> None:
    """Only the gradients asked for are computed; an unused output counts as zero."""
    case = make(SHAPES["64"], VARIANTS["all"])
    _, dqkv, grads = exact(case)
    qkv, affine, cotangents = case.to(torch.float32)
    qkv.requires_grad_()
    affine[1].requires_grad_()
    q, k, v = qk_norm_rope3d(qkv, *case.norms(affine), case.rotation(), case.num_text)
    got = torch.autograd.grad((q, k, v), (qkv, affine[1]), cotangents, retain_graph=True)
    check(got[0], dqkv, "dqkv")
    check(got[1], grads[1], "query bias")
    only_v = torch.autograd.grad(v.sum(), qkv, retain_graph=True)[0]
    assert torch.equal(only_v[:, :, 2], torch.ones_like(v)) and not only_v[:, :, :2].any()
    (only_q,) = torch.autograd.grad(q, qkv, cotangents[0])
    check(only_q[:, :, 0], dqkv[:, :, 0], "dq")
    assert not only_q[:, :, 1:].any()


def test_without_norm_and_rotation_it_is_the_input() -> None:
    qkv = draw(1, 4, 3, 2, 16, seed=1).requires_grad_()
    got = qk_norm_rope3d(qkv, None, None, None, num_text=4)
    assert all(torch.equal(a, b) for a, b in zip(got, qkv.unbind(2), strict=True))


def one_rounding(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.bfloat16
    assert ((got.double() - want).abs() <= 2**-8 * want.abs() * 1.001 + 1e-5).all()


def test_the_reference_rounds_to_bf16_once() -> None:
    """Rotated heads are float32 until the end."""
    case = make((2, 4, (2, 3, 3), 2, 64), VARIANTS["all"], torch.bfloat16)
    qkv, affine, _ = case.to(torch.bfloat16)
    got = qk_norm_rope3d_reference(qkv, *case.norms(affine), case.rotation(), case.num_text)
    for a, b in zip(got[:2], exact(case)[0][:2], strict=True):
        one_rounding(a, b)


@NEEDS_CPU_KERNELS
@pytest.mark.parametrize(
    ("shape", "variant"),
    [
        ("64", VARIANTS["all"]),
        ("64", VARIANTS["no-affine"]),
        ("80", VARIANTS["2B"]),
        ("80", VARIANTS["no-norm"]),
        ("tail", ("ac", True, False)),
    ],
    ids=str,
)
def test_cpu_kernels_round_to_bf16_once(shape: str, variant: tuple) -> None:
    """The arithmetic is float32: results differ from float64's by one rounding to bf16."""
    case = make(CPU_SHAPES[shape], variant, torch.bfloat16)
    outputs, dqkv, grads = exact(case)
    qkv, affine, cotangents = case.to(torch.bfloat16)
    leaves = [x.requires_grad_() for x in (qkv, *affine) if x is not None]
    got = qk_norm_rope3d(qkv, *case.norms(affine), case.rotation(), case.num_text)
    got_grads = torch.autograd.grad(got, leaves, cotangents)
    wanted = [*outputs, dqkv, *(g for g in grads if g is not None)]
    for a, b in zip((*got, *got_grads), wanted, strict=True):
        one_rounding(a, b)


@NEEDS_CPU_KERNELS
def test_text_on_a_cpu_is_not_rotated() -> None:
    """Rotation by an angle of 0 would turn an infinite entry into NaN."""
    rotation = make((1, 2, (1, 1, 1), 1, 16), VARIANTS["no-norm"]).rotation()
    qkv = torch.ones(1, 3, 3, 1, 16)
    qkv[:, :2, :, :, ::2] = torch.inf
    for x in qk_norm_rope3d(qkv, None, None, rotation, 2)[:2]:
        assert torch.equal(x[:, :2], qkv[:, :2, 0])


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [("all", torch.bfloat16), ("2B", torch.float32), ("no-norm", torch.bfloat16)],
    ids=str,
)
def test_ops_are_well_formed(variant: str, dtype: torch.dtype) -> None:
    case = make((2, 1, (1, 2, 2), 2, 16), VARIANTS[variant])
    qkv, affine, cotangents = case.to(dtype)
    ops, numbers = torch.ops.cogfast, case.raw()
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.qk_norm_rope3d.default, (qkv, *affine, *numbers), test_utils=tests)
    for needs_sums in {False, case.has_norm}:
        arguments = (*cotangents, qkv, *affine[::2], *numbers, needs_sums)
        op = ops.qk_norm_rope3d_backward.default
        torch.library.opcheck(op, arguments, test_utils=tests)


def test_diffusers_rotates_alike() -> None:
    """Compare all angles of a grid with diffusers' implementation of the published model."""
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    t, h, w, heads, num_text = 2, 3, 4, 2, 1
    cos, sin = embeddings.get_3d_rotary_pos_embed(64, ((0, 0), (h, w)), (h, w), t)
    qkv = draw(2, num_text + t * h * w, 3, heads, 64, seed=1).float()
    rotation = RotaryPositions(TokenGrid(t, h, w), 64, theta=10000.0)(TokenGrid(t, h, w))
    raw = (rotation.table, None, num_text, t, h, w, False, EPS)
    for got in (
        qk_norm_rope3d(qkv, None, None, rotation, num_text),
        launch_forward(qkv, None, None, None, None, *raw),
    ):
        for x, original in zip(got[:2], qkv.unbind(2)[:2], strict=True):
            assert torch.equal(x[:, :num_text], original[:, :num_text])
            video = original[:, num_text:].transpose(1, 2)  # [B, H, V, D]
            want = embeddings.apply_rotary_emb(video, (cos, sin)).transpose(1, 2)
            torch.testing.assert_close(x[:, num_text:], want, atol=2e-6, rtol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", ["64", "padded-width", "text", "head-tiles", "widest"])
def test_on_a_gpu(shape: str, dtype: torch.dtype) -> None:
    """Allow twice the reference's error in the same dtype, plus a floor."""
    case = make(SHAPES[shape], VARIANTS["all"], dtype)
    outputs, dqkv, grads = exact(case)
    wanted = [*outputs, dqkv, *grads]
    rotation = case.rotation()
    rotation = Rotation(rotation.table.cuda(), rotation.t, rotation.h, rotation.w)
    errors = []
    for op in (qk_norm_rope3d, qk_norm_rope3d_reference):
        qkv, affine, cotangents = case.to(dtype)
        leaves = [x.cuda().requires_grad_() for x in (qkv, *affine)]
        got = op(leaves[0], *case.norms(leaves[1:]), rotation, case.num_text)
        got_grads = torch.autograd.grad(got, leaves, [g.cuda() for g in cotangents])
        pairs = zip((*got, *got_grads), wanted, strict=True)
        errors.append([(a.double().cpu() - b).abs().max().item() for a, b in pairs])
    floor = 2 * torch.finfo(dtype).eps
    for ours, theirs, want in zip(*errors, wanted, strict=True):
        assert ours <= 2 * theirs + floor * want.abs().max().item()
    # A width that the kernels do not support is refused.
    with pytest.raises(ValueError, match="D, its last dim, must be a multiple of 16 up to 128"):
        qk_norm_rope3d(torch.zeros(1, 1, 3, 1, 144, device="cuda"), None, None, None, 0)


@NEEDS_CPU_KERNELS
def test_the_first_row_of_each_sample_without_text_is_in_its_place() -> None:
    case = make((3, 0, (1, 2, 3), 2, 16), VARIANTS["another-order"])
    case.order = torch.tensor([4, 2, 0, 1, 5, 3], dtype=torch.int32)
    qkv, affine, _ = case.to(torch.float32)
    arguments = (*case.norms(affine), case.rotation(), 0)
    for a, b in zip(
        qk_norm_rope3d(qkv, *arguments), qk_norm_rope3d_reference(qkv, *arguments), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)

"""GELU in its tanh form, of a linear's product x and the bias that the linear left out:

u = x + bias,    z = 2 sqrt(2/pi) (u + 0.044715 u^3),    s = sigmoid(z)
y = u s                                  = 0.5 u (1 + tanh(z / 2))
dx = dy (s + u s (1 - s) dz/du),   dbias = the sum of dx over all rows

With U the bytes of a [B, S, M] activation and N = 4 M: forward moves 8 U (read x, write y),
backward 12 U (read x and dy, write dx). The bias gradient needs no pass of its own: a program of
backward keeps one block of columns and walks down the rows, adds dx in float32 before it is
rounded, and a second kernel adds the programs' sums in a fixed order (0.4 to 0.7% more bytes).

At 4.3 TB/s an element has 0.93 ps, so instructions count: sigmoid is 1 / (1 + exp2(-z log2 e)) and
the reciprocal of d >= 1 is rsqrt(d * d). Machine code (sm_90, bf16, instructions per element,
everything included): 14 so, 16 with a division, 36 with libdevice's tanh. The hardware's
`tanh.approx` would save one more, but is off by 2^-11 absolute: a fifth of y at u = -3.
On a GPU: not measured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import (
    CompileCase,
    check_tensor,
    jit,
    num_multiprocessors,
    tl,
    triton,
)


def gelu_reference(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [B, S, N], bias [N] -> [B, S, N]."""
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


# -z log2(e) = u (_E1 + _E3 u^2) and dz/du = _D0 + _D2 u^2
_LINEAR = 1.5957691216057308  # 2 sqrt(2/pi)
_CUBIC = 0.044715 * _LINEAR
_LOG2_E = 1.4426950408889634
_E1 = tl.constexpr(-_LOG2_E * _LINEAR)
_E3 = tl.constexpr(-_LOG2_E * _CUBIC)
_D0 = tl.constexpr(_LINEAR)
_D2 = tl.constexpr(3 * _CUBIC)


@jit
def _reciprocal(d):
    """1 / d of d in [1, inf]: a multiplication and one approximation, a division takes five."""
    return tl.rsqrt(d * d)


@jit
def _gelu_fwd_kernel(
    x_ptr,  # [rows, N]
    bias_ptr,  # [N] or None
    y_ptr,  # [rows, N]
    rows,
    N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """A tile; neighbouring programs take neighbouring columns. A thread's columns are the same in
    every row of the tile, so it reads their bias once."""
    num_blocks: tl.constexpr = (N + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    column = (tl.program_id(0) % num_blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = (tl.program_id(0) // num_blocks).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = (row < rows)[:, None]
    if N % BLOCK_COLUMNS != 0:
        inside = inside & (column < N)[None, :]
    offset = row[:, None] * N + column[None, :]
    u = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        u += tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    # Where exp2 overflows, s is 0 and y is 0: no infinity times zero.
    s = _reciprocal(1 + tl.exp2(u * (_E1 + _E3 * u * u)))
    tl.store(y_ptr + offset, (u * s).to(y_ptr.dtype.element_ty), mask=inside)


@jit
def _gelu_bwd_kernel(
    dy_ptr,  # [rows, N]
    x_ptr,  # [rows, N]
    bias_ptr,  # [N] or None
    dx_ptr,  # [rows, N]
    partial_ptr,  # [programs per block of columns, N] float32, or None: no bias gradient
    rows,
    N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """One block of columns, every num_programs(1)-th tile of rows: at any time the programs
    together read neighbouring rows. A thread owns whole columns, so its sums need no exchange."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    total = tl.zeros([BLOCK_COLUMNS], tl.float32)
    step = tl.num_programs(1) * BLOCK_ROWS
    for first in range(tl.program_id(1) * BLOCK_ROWS, rows, step):
        row = first + tl.arange(0, BLOCK_ROWS)
        inside = (row < rows)[:, None]
        if N % BLOCK_COLUMNS != 0:
            inside = inside & (column < N)[None, :]
        offset = row[:, None].to(tl.int64) * N + column[None, :]
        u = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + offset, mask=inside, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            u += bias
        # Beyond |u| = 100 s is 0 or 1 in any case; the bound keeps dz/du finite there.
        square = tl.minimum(u * u, 1e4)
        s = _reciprocal(1 + tl.exp2(u * (_E1 + _E3 * square)))
        dx = dy * (u * (s - s * s) * (_D0 + _D2 * square) + s)
        tl.store(dx_ptr + offset, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if partial_ptr is not None:
            total += tl.sum(dx, 0)  # dy is 0 in the rows outside
    if partial_ptr is not None:
        offset = tl.program_id(1).to(tl.int64) * N + column
        tl.store(partial_ptr + offset, total, mask=column < N)


@jit
def _gelu_dbias_kernel(
    partial_ptr,  # [num_partials, N] float32
    dbias_ptr,  # [N]
    num_partials,
    N: tl.constexpr,
    BLOCK_PARTIALS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """Second stage of the bias gradient: the sum over programs, always in the same order."""
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    total = tl.zeros([BLOCK_PARTIALS, BLOCK_COLUMNS], tl.float32)
    for first in range(0, num_partials, BLOCK_PARTIALS):
        partial = first + tl.arange(0, BLOCK_PARTIALS)
        inside = (partial < num_partials)[:, None] & (column < N)[None, :]
        offset = partial[:, None].to(tl.int64) * N + column[None, :]
        total += tl.load(partial_ptr + offset, mask=inside, other=0.0)
    dbias = tl.sum(total, 0).to(dbias_ptr.dtype.element_ty)
    tl.store(dbias_ptr + column, dbias, mask=column < N)


@dataclass(frozen=True, kw_only=True, slots=True)
class GeluLaunch:
    """A tile [rows, columns] and the warps on it; programs: of backward, per multiprocessor.

    columns = 256 num_warps in bf16: a thread then holds eight of them, 16 bytes, in every row.
    """

    rows: int
    columns: int
    num_warps: int
    programs: int = 0


FORWARD_LAUNCH = GeluLaunch(rows=4, columns=512, num_warps=2)
# All programs must start at once. 72 registers leave room for 14 of two warps in a multiprocessor,
# float32's 96 for 10, and 10 x 132 are whole numbers of 2B's 15 and 5B's 24 blocks of columns.
BACKWARD_LAUNCH = GeluLaunch(rows=4, columns=512, num_warps=2, programs=10)
# Worth timing on a GPU.
FORWARD_CANDIDATES = (
    FORWARD_LAUNCH,
    GeluLaunch(rows=2, columns=512, num_warps=2),
    GeluLaunch(rows=8, columns=512, num_warps=2),
    GeluLaunch(rows=4, columns=256, num_warps=1),
    GeluLaunch(rows=4, columns=1024, num_warps=4),
)
BACKWARD_CANDIDATES = (
    BACKWARD_LAUNCH,
    GeluLaunch(rows=2, columns=512, num_warps=2, programs=14),
    GeluLaunch(rows=1, columns=512, num_warps=2, programs=20),
    GeluLaunch(rows=4, columns=256, num_warps=1, programs=24),
    GeluLaunch(rows=4, columns=1024, num_warps=4, programs=6),
)


def launch_gelu(x: Tensor, bias: Tensor | None, launch: GeluLaunch = FORWARD_LAUNCH) -> Tensor:
    """x [.., N], bias [N] -> y [.., N]."""
    x = x.contiguous()
    y = torch.empty_like(x)
    if not x.numel():
        return y
    n = x.shape[-1]
    rows = x.numel() // n
    grid = (triton.cdiv(rows, launch.rows) * triton.cdiv(n, launch.columns),)
    _gelu_fwd_kernel[grid](
        x,
        bias,
        y,
        rows,
        N=n,
        BLOCK_ROWS=launch.rows,
        BLOCK_COLUMNS=launch.columns,
        num_warps=launch.num_warps,
    )
    return y


def launch_gelu_backward(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    needs_dbias: bool,
    launch: GeluLaunch = BACKWARD_LAUNCH,
) -> tuple[Tensor, Tensor]:
    """dy, x [.., N], bias [N] -> dx [.., N] and dbias [N]; [0] where it is not needed."""
    dy, x = dy.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    n = x.shape[-1]
    dbias = x.new_zeros(n if needs_dbias else 0)
    if not x.numel():
        return dx, dbias
    rows = x.numel() // n
    num_blocks = triton.cdiv(n, launch.columns)
    num_programs = num_multiprocessors(x.device) * launch.programs // num_blocks
    num_programs = max(1, min(num_programs, triton.cdiv(rows, launch.rows)))
    partial = None
    if needs_dbias:
        partial = torch.empty(num_programs, n, dtype=torch.float32, device=x.device)
    _gelu_bwd_kernel[(num_blocks, num_programs)](
        dy,
        x,
        bias,
        dx,
        partial,
        rows,
        N=n,
        BLOCK_ROWS=launch.rows,
        BLOCK_COLUMNS=launch.columns,
        num_warps=launch.num_warps,
    )
    if needs_dbias:
        _gelu_dbias_kernel[(triton.cdiv(n, 64),)](
            partial,
            dbias,
            num_programs,
            N=n,
            BLOCK_PARTIALS=32,
            BLOCK_COLUMNS=64,
            num_warps=4,
        )
    return dx, dbias


@torch.library.custom_op("cogfast::gelu", mutates_args=(), device_types="cuda")
def _gelu(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """y, and x + bias where backward would add it up slower than read it: on a CPU; else [0]."""
    return launch_gelu(x, bias), x.new_empty(0)


@_gelu.register_kernel("cpu")
def _(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    if bias is None:
        return F.gelu(x, approximate="tanh"), x.new_empty(0)
    u = x + bias
    return F.gelu(u, approximate="tanh"), u


@_gelu.register_fake
def _(x: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    has_sum = bias is not None and x.device.type == "cpu"
    return x.new_empty(x.shape), x.new_empty(x.shape if has_sum else 0)


@torch.library.custom_op("cogfast::gelu_backward", mutates_args=(), device_types="cuda")
def _gelu_backward(
    dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool
) -> tuple[Tensor, Tensor]:
    return launch_gelu_backward(dy, x, bias, needs_dbias)


@_gelu_backward.register_kernel("cpu")
def _(dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool) -> tuple[Tensor, Tensor]:
    u = x.contiguous() if bias is None else x + bias
    dx = torch.ops.aten.gelu_backward(dy.contiguous(), u, approximate="tanh")
    return dx, dx.flatten(0, -2).sum(0) if needs_dbias else x.new_empty(0)


@_gelu_backward.register_fake
def _(dy: Tensor, x: Tensor, bias: Tensor | None, needs_dbias: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1] if needs_dbias else 0)


def _keep(ctx, inputs: tuple, output: tuple) -> None:
    x, bias = inputs
    u = output[1]
    ctx.set_materialize_grads(False)  # of u, which gets none
    ctx.needs_dbias = bias is not None and ctx.needs_input_grad[1]
    ctx.save_for_backward(*((u, None) if u.numel() else (x, bias)))


def _backward(ctx, dy: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dx, dbias = _gelu_backward(dy, *ctx.saved_tensors, ctx.needs_dbias)
    return dx, dbias if ctx.needs_dbias else None


_gelu.register_autograd(_backward, setup_context=_keep)


def gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., N], bias [N] of x's dtype -> [.., N]."""
    check_tensor("gelu", "x", x, x.shape)
    if bias is not None:
        check_tensor("gelu", "bias", bias, x.shape[-1:], like=x)
    return _gelu(x, bias)[0]


def compile_cases() -> list[CompileCase]:
    """Both directions at the widths of 2B and 5B, and the variants and dtypes at 5B's."""
    cases = []
    for name, n, dtype, has_bias, sums in (
        ("2B", 7680, "bf16", True, True),
        ("5B", 12288, "bf16", True, True),
        ("5B fp16", 12288, "fp16", True, True),
        ("5B fp32", 12288, "fp32", True, True),
        ("5B, frozen bias", 12288, "bf16", True, False),
        ("5B, no bias", 12288, "bf16", False, False),
    ):
        for kernel, launch, max_registers in (
            (_gelu_fwd_kernel, FORWARD_LAUNCH, 56),  # 18 programs
            (_gelu_bwd_kernel, BACKWARD_LAUNCH, 96 if dtype == "fp32" else 80),  # 10, 12
        ):
            types = dict.fromkeys(("x_ptr", "bias_ptr", "y_ptr", "dy_ptr", "dx_ptr"), f"*{dtype}")
            types |= {"partial_ptr": "*fp32", "rows": "i32"}
            absent = [] if has_bias else ["bias_ptr"]
            absent += [] if sums else ["partial_ptr"]
            tile = {"BLOCK_ROWS": launch.rows, "BLOCK_COLUMNS": launch.columns}
            names = kernel.arg_names
            cases.append(
                CompileCase(
                    name=f"{kernel.__name__} {name}",
                    kernel=kernel,
                    arguments={k: types[k] for k in names if k in types and k not in absent},
                    constants={k: None for k in absent if k in names} | {"N": n} | tile,
                    num_warps=launch.num_warps,
                    max_registers=max_registers,
                    max_shared_bytes=launch.columns * 4,  # the sums change threads, once
                    narrow_loads=0,
                    narrow_stores=0,
                )
            )
    cases.append(
        CompileCase(
            name="_gelu_dbias_kernel 5B",
            kernel=_gelu_dbias_kernel,
            arguments={"partial_ptr": "*fp32", "dbias_ptr": "*bf16", "num_partials": "i32"},
            constants={"N": 12288, "BLOCK_PARTIALS": 32, "BLOCK_COLUMNS": 64},
            num_warps=4,
            max_registers=48,
            max_shared_bytes=1024,
            narrow_loads=0,
        )
    )
    return cases

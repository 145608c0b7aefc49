"""LayerNorm of every query and key head, then rotation of the video rows by their 3-D position.

Forward, for a head x [D] of q or k, with xhat = (x - mean) rstd:
    n = xhat weight + bias
    (a, b) -> (a cos - b sin, a sin + b cos)      for neighbouring entries a, b of n
The first D/8 pairs of a head turn with the token's time, 3D/16 with its row, 3D/16 with its column.
Text rows, which stand in front, are normed and not rotated.

Backward: turning the gradient of the result by the negative angle gives g, the gradient of n, and
    dx = rstd (g weight - mean(g weight) - xhat mean(g weight xhat))
    dweight = sum of g xhat,  dbias = sum of g      over all tokens and heads

Bytes, with U those of a [B, S, H, D] activation: forward moves 4 U (q and k are read where the QKV
linear left them), backward 8 U: it reads dq, dk, dv, q and k and writes the packed gradient whole,
for which q, k and v apart and a stack would take 12. Mean and rstd are worked out again, since the
row is at hand. On a GPU: not measured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.gpu.qk_norm_rope3d_launch import launch_backward, launch_forward

EPS = 1e-6  # of the head norms, in every member of the family
Affine = tuple[Tensor | None, Tensor | None]  # weight and bias [D] of a head norm
_OP = "qk_norm_rope3d"


@dataclass(frozen=True)  # no slots: DeepSpeed asks for vars() of what a module returns
class Rotation:
    """cos and sin of every axis: table [2, N] float32, row 0 the cosines, row 1 the sines, of
    t x D/8 angles of time, then h x 3D/16 of rows, then w x 3D/16 of columns, for t x h x w tokens.
    """

    table: Tensor
    t: int
    h: int
    w: int

    def per_row(self, num_text: int) -> Tensor:
        """cos + i sin of every row's angles, [L + t*h*w, D/2] complex64; those of text are 1."""
        t, h, w = self.t, self.h, self.w
        # N = t D/8 + (h + w) 3D/16 = D/16 (2t + 3h + 3w)
        unit = self.table.shape[1] // (2 * t + 3 * h + 3 * w)
        values = torch.complex(self.table[0], self.table[1])
        time, row, column = values.split((2 * unit * t, 3 * unit * h, 3 * unit * w))
        axes = [
            time.view(t, 1, 1, 2 * unit).expand(t, h, w, -1),
            row.view(1, h, 1, 3 * unit).expand(t, h, w, -1),
            column.view(1, 1, w, 3 * unit).expand(t, h, w, -1),
        ]
        video = torch.cat(axes, dim=-1).flatten(0, 2)
        return torch.cat([video.new_ones(num_text, video.shape[1]), video])


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [B, S, H, D] float32, angles [S, D/2] complex (cos + i sin) -> [B, S, H, D]."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [B, S, H, D/2]
    return torch.view_as_real(pairs * angles[:, None]).flatten(-2)


def _rotate_(x: Tensor, angles: Tensor) -> Tensor:
    """The same in place."""
    torch.view_as_complex(x.unflatten(-1, (-1, 2))).mul_(angles[:, None])
    return x


def qk_norm_rope3d_reference(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [B, S, 3, H, D]; norms: None for no norm at all, (None, None) for one without weights;
    -> normed and rotated q, k and, as it is, v: each [B, S, H, D] in the dtype of qkv. v comes out
    here too so that the gradient of qkv is written once."""
    q, k, v = qkv.unbind(2)
    angles = None if rotation is None else rotation.per_row(num_text)
    turned = []
    for x, norm in ((q, query_norm), (k, key_norm)):
        if angles is not None:
            x = x.float()
        if norm is not None:
            weight, bias = (None if p is None else p.to(x.dtype) for p in norm)
            x = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        if angles is not None:
            x = _rotate(x, angles).to(qkv.dtype)
        turned.append(x)
    return turned[0], turned[1], v


@torch.library.custom_op("cogfast::qk_norm_rope3d", mutates_args=(), device_types="cuda")
def _qk_norm_rope3d(
    qkv: Tensor,
    q_weight: Tensor | None,
    q_bias: Tensor | None,
    k_weight: Tensor | None,
    k_bias: Tensor | None,
    table: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, S, H, D] and the statistics that backward wants, [0] on a GPU; on a CPU, which works
    them out slower than it reads them, mean and rstd of q, then of k, [4, B, S, H, 1] float32."""
    affine = (q_weight, q_bias, k_weight, k_bias)
    q, k = launch_forward(qkv, *affine, table, num_text, t, h, w, has_norm, eps)
    return q, k, qkv.new_empty(0, dtype=torch.float32)


@_qk_norm_rope3d.register_kernel("cpu")
def _(
    qkv, q_weight, q_bias, k_weight, k_bias, table, num_text, t, h, w, has_norm, eps
) -> tuple[Tensor, Tensor, Tensor]:
    angles = None if table is None else Rotation(table, t, h, w).per_row(num_text)
    turned, statistics = [], []
    for x, norm in ((qkv[:, :, 0], (q_weight, q_bias)), (qkv[:, :, 1], (k_weight, k_bias))):
        x = x.float()
        if has_norm:
            weight, bias = (None if p is None else p.float() for p in norm)
            x, *moments = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
            statistics += moments
        if angles is not None:
            # in place where x is the norm's result
            x = _rotate_(x, angles) if has_norm else _rotate(x, angles)
        turned.append(x.to(qkv.dtype))
    return *turned, torch.stack(statistics) if has_norm else torch.empty(0)


@_qk_norm_rope3d.register_fake
def _(
    qkv, q_weight, q_bias, k_weight, k_bias, table, num_text, t, h, w, has_norm, eps
) -> tuple[Tensor, Tensor, Tensor]:
    b, s, _, num_heads, width = qkv.shape
    q, k = (qkv.new_empty(b, s, num_heads, width) for _ in range(2))
    has_statistics = has_norm and qkv.device.type == "cpu"
    shape = (4, b, s, num_heads, 1) if has_statistics else (0,)
    return q, k, qkv.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("cogfast::qk_norm_rope3d_backward", mutates_args=(), device_types="cuda")
def _qk_norm_rope3d_backward(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    qkv: Tensor,
    statistics: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    table: Tensor | None,
    num_text: int,
    t: int,
    h: int,
    w: int,
    has_norm: bool,
    eps: float,
    needs_sums: bool,
) -> tuple[Tensor, Tensor]:
    """dqkv [B, S, 3, H, D] and the sums of query weight, query bias, key weight, key bias [4, D]
    float32, [0, D] where they are not needed."""
    numbers = (num_text, t, h, w, has_norm, eps, needs_sums)
    return launch_backward(dq, dk, dv, qkv, q_weight, k_weight, table, *numbers)


@_qk_norm_rope3d_backward.register_kernel("cpu")
def _(
    dq,
    dk,
    dv,
    qkv,
    statistics,
    q_weight,
    k_weight,
    table,
    num_text,
    t,
    h,
    w,
    has_norm,
    eps,
    needs_sums,
) -> tuple[Tensor, Tensor]:
    angles = None
    if table is not None:
        back = torch.stack([table[0], -table[1]])
        angles = Rotation(back, t, h, w).per_row(num_text)
    shape = qkv.shape[-1:]
    sources, sums = [], []
    for i, (g, weight) in enumerate(((dq, q_weight), (dk, k_weight))):
        g = g.float()
        if angles is not None:
            g = _rotate(g.contiguous(), angles)
        if has_norm:
            if weight is None and needs_sums:  # aten sums for parameters that it is given
                weight = g.new_ones(shape)
            weight = None if weight is None else weight.float()
            mean, rstd = statistics[2 * i : 2 * i + 2]
            g, *parts = torch.ops.aten.native_layer_norm_backward(
                *(g, qkv[:, :, i].float(), shape, mean, rstd, weight, weight),
                [True, needs_sums, needs_sums],
            )
            sums += parts if needs_sums else []
        sources.append(g.to(qkv.dtype))
    return torch.stack([*sources, dv], 2), torch.stack(sums) if sums else torch.empty(0, *shape)


@_qk_norm_rope3d_backward.register_fake
def _(dq, dk, dv, qkv, *arguments) -> tuple[Tensor, Tensor]:
    rows, width = 4 if arguments[-1] else 0, qkv.shape[-1]
    return qkv.new_empty(qkv.shape), qkv.new_empty(rows, width, dtype=torch.float32)


class _QkNormRope3d(torch.autograd.Function):
    """The ops, with v beside q and k so that the gradients of all three meet."""

    @staticmethod
    def forward(ctx, qkv, q_weight, q_bias, k_weight, k_bias, table, *numbers):
        affine = (q_weight, q_bias, k_weight, k_bias)
        q, k, statistics = _qk_norm_rope3d(qkv, *affine, table, *numbers)
        ctx.save_for_backward(qkv, statistics, table, *affine)
        ctx.numbers = numbers
        return q, k, qkv[:, :, 2]

    @staticmethod
    def backward(ctx, dq, dk, dv):
        qkv, statistics, table, *affine = ctx.saved_tensors
        needs = [
            p is not None and n for p, n in zip(affine, ctx.needs_input_grad[1:5], strict=True)
        ]
        saved = (qkv, statistics, affine[0], affine[2], table)
        dqkv, sums = _qk_norm_rope3d_backward(dq, dk, dv, *saved, *ctx.numbers, any(needs))
        grads = [sums[i].to(affine[i].dtype) if needs[i] else None for i in range(4)]
        return dqkv, *grads, *[None] * (1 + len(ctx.numbers))


def qk_norm_rope3d(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v [B, S, H, D] of packed qkv [B, S, 3, H, D], see the reference above. Both norms, or
    none, are given. On a GPU D is a multiple of 16 up to 128."""
    _check(qkv, query_norm, key_norm, rotation, num_text)
    has_norm = query_norm is not None
    if not has_norm and rotation is None:
        return qkv.unbind(2)
    affine = (*query_norm, *key_norm) if has_norm else (None,) * 4
    if rotation is None:
        table, grid = None, (1, 1, 1)
    else:
        table, grid = rotation.table, (rotation.t, rotation.h, rotation.w)
    return _QkNormRope3d.apply(qkv, *affine, table, num_text, *grid, has_norm, EPS)


def _check(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> None:
    """Refuse what the ops do not take, in one line."""
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        refuse(_OP, "qkv", qkv, "its shape must be [B, S, 3, H, D]")
    check_tensor(_OP, "qkv", qkv, qkv.shape)
    num_tokens, width = qkv.shape[1], qkv.shape[4]
    if qkv.device.type == "cuda" and (width % 16 or width > 128):
        refuse(_OP, "qkv", qkv, "D, its last dim, must be a multiple of 16 up to 128")
    if (query_norm is None) != (key_norm is None):
        missing = "query_norm" if query_norm is None else "key_norm"
        refuse(_OP, missing, None, "both norms must be given, or none")
    for side, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        for name, parameter in zip(("weight", "bias"), norm or (None, None), strict=True):
            if parameter is not None:
                check_tensor(_OP, f"{side} {name}", parameter, (width,), qkv, any_dtype=True)
    if rotation is None:
        return
    table, t, h, w = rotation.table, rotation.t, rotation.h, rotation.w
    if num_text + t * h * w != num_tokens:
        rule = f"{num_text} text rows and {t}x{h}x{w} video rows must be its S"
        refuse(_OP, "qkv", qkv, rule)
    if width % 16:
        refuse(_OP, "qkv", qkv, "D, its last dim, must be a multiple of 16 to be rotated")
    check_tensor(
        _OP, "rotation.table", table, (2, width // 16 * (2 * t + 3 * (h + w))), qkv, any_dtype=True
    )
    if table.dtype != torch.float32 or not table.is_contiguous():
        refuse(_OP, "rotation.table", table, "it must be float32 and contiguous")

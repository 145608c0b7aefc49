"""LayerNorm of every query and key head, then rotation of video rows by their 3-D position.

For a head x [D] of q or k, with xhat = (x - mean) rstd, and g the gradient of n (by inverse rotation):

    n = xhat weight + bias
    (a, b) -> (a cos - b sin, a sin + b cos)      for neighbouring entries a, b of n
    dx = rstd (g weight - mean(g weight) - xhat mean(g weight xhat))
    dweight = sum of g xhat,  dbias = sum of g    over all tokens and heads

The first D/8 pairs of a head are rotated by the token's time, 3D/16 by its row, 3D/16 by its
column. Text rows, which come first, are normed and not rotated. Forward moves 4 U of memory,
backward 8 U, with U the bytes of [B, S, H, D]; docs/kernels.md counts them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.torch_library import from_gpu, has_kernel, register_gradient, register_op

EPS = 1e-6  # head norms of every CogVideoX model
Affine = tuple[Tensor | None, Tensor | None]  # weight and bias [D] of a head norm
_OP = "qk_norm_rope3d"


@dataclass(frozen=True)  # no slots: DeepSpeed calls vars() on what a module returns
class Rotation:
    """Rotation angles of t x h x w video tokens, one table per axis.

    table: [2, N] float32, cosines in row 0 and sines in row 1, of t x D/8 angles of time, then
    h x 3D/16 of rows, then w x 3D/16 of columns.
    order: [t*h*w] int32, the number of each row's token in row-major order; None: rows are in that order.
    """

    table: Tensor
    t: int
    h: int
    w: int
    order: Tensor | None = None

    def per_row(self, num_text: int) -> Tensor:
        """Return cos + i sin of every token's angles, [L + t*h*w, D/2] complex64; 1 for text."""
        t, h, w = self.t, self.h, self.w
        # N = t D/8 + (h + w) 3D/16 = D/16 (2t + 3h + 3w)
        unit = self.table.shape[1] // (2 * t + 3 * h + 3 * w)
        # The product with a complex number rotates a pair.
        values = torch.complex(self.table[0], self.table[1])
        time, row, column = values.split((2 * unit * t, 3 * unit * h, 3 * unit * w))
        axes = [
            time.view(t, 1, 1, 2 * unit).expand(t, h, w, -1),
            row.view(1, h, 1, 3 * unit).expand(t, h, w, -1),
            column.view(1, 1, w, 3 * unit).expand(t, h, w, -1),
        ]
        # Tokens are ordered by time, then row, then column.
        video = torch.cat(axes, dim=-1).flatten(0, 2)
        if self.order is not None:
            video = video[self.order]
        return torch.cat([video.new_ones(num_text, video.shape[1]), video])


def qk_norm_rope3d_reference(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed and rotated q, k, and v unchanged: [B, S, H, D] in the dtype of qkv.

    qkv: [B, S, 3, H, D]. query_norm, key_norm: weight and bias [D], (None, None) for a norm without
    parameters, None for no norm. rotation: None for no rotation.
    """
    # v is returned so that backward writes the gradient of qkv once.
    q, k, v = qkv.unbind(2)
    angles = None if rotation is None else rotation.per_row(num_text)  # [S, D/2]
    results = []
    for x, norm in ((q, query_norm), (k, key_norm)):
        # Rotate in float32, as diffusers does. A norm alone stays in the dtype of qkv, but on a CPU
        # PyTorch adds up the gradients of 16-bit weights in 16 bits.
        is_narrow = x.device.type == "cpu" and x.dtype.itemsize <= 2
        if angles is not None or (norm is not None and is_narrow):
            x = x.float()
        if norm is not None:
            weight, bias = (None if p is None else p.to(x.dtype) for p in norm)
            x = F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        if angles is not None:
            pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # [B, S, H, D/2]
            x = torch.view_as_real(pairs * angles[:, None]).flatten(-2)
        results.append(x.to(qkv.dtype))
    return results[0], results[1], v


_ARGUMENTS = "Tensor? table, Tensor? order, SymInt num_text, SymInt t, SymInt h, SymInt w, bool has_norm, float eps"


_qk_norm_rope3d = register_op(
    "qk_norm_rope3d(Tensor qkv, Tensor? q_weight, Tensor? q_bias, Tensor? k_weight,"
    f" Tensor? k_bias, {_ARGUMENTS}) -> (Tensor, Tensor)",
    gpu=from_gpu(_OP, "launch_forward"),
    fake=lambda qkv, *_: tuple(qkv.new_empty(qkv.shape[:2] + qkv.shape[3:]) for _ in range(2)),
)
_qk_norm_rope3d_backward = register_op(
    "qk_norm_rope3d_backward(Tensor dq, Tensor dk, Tensor dv, Tensor qkv, Tensor? q_weight,"
    f" Tensor? k_weight, {_ARGUMENTS}, bool needs_sums) -> (Tensor, Tensor)",
    gpu=from_gpu(_OP, "launch_backward"),
    # Its last input is needs_sums.
    fake=lambda dq, dk, dv, qkv, *inputs: (
        qkv.new_empty(qkv.shape),
        qkv.new_empty(4 if inputs[-1] else 0, qkv.shape[-1], dtype=torch.float32),
    ),
)


class _QkNormRope3d(torch.autograd.Function):
    """Return v beside q and k, so that one backward gets the gradients of all three."""

    @staticmethod
    def forward(ctx, *inputs):
        q, k = _run(*inputs)
        _QkNormRope3d.save(ctx, inputs, (q, k))
        return q, k, inputs[0][:, :, 2]

    @staticmethod
    def save(ctx, inputs, output) -> None:
        qkv, q_weight, q_bias, k_weight, k_bias, table, order, *ctx.numbers = inputs
        ctx.save_for_backward(qkv, table, order, q_weight, q_bias, k_weight, k_bias)

    @staticmethod
    def backward(ctx, *gradients):
        qkv, table, order, *affine = ctx.saved_tensors
        # Sums over all tokens are computed only if an affine parameter needs its gradient.
        wanted = zip(affine, ctx.needs_input_grad[1:5], strict=True)
        needs = [p is not None and n for p, n in wanted]
        saved = (qkv, affine[0], affine[2], table, order)
        dqkv, sums = _qk_norm_rope3d_backward(*gradients, *saved, *ctx.numbers, any(needs))
        dtypes = [p.dtype for p, n in zip(affine, needs, strict=True) if n]
        if dtypes and all(dtype == dtypes[0] for dtype in dtypes):
            sums = sums.to(dtypes[0])  # one launch instead of one for each parameter
        grads = [sums[i].to(affine[i].dtype) if needs[i] else None for i in range(4)]
        return dqkv, *grads, *[None] * (2 + len(ctx.numbers))


# The op does not return v.
_run = register_gradient(
    _qk_norm_rope3d,
    _QkNormRope3d.save,
    lambda ctx, dq, dk: _QkNormRope3d.backward(ctx, dq, dk, torch.zeros_like(dq)),
)


def qk_norm_rope3d(
    qkv: Tensor,
    query_norm: Affine | None,
    key_norm: Affine | None,
    rotation: Rotation | None,
    num_text: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return normed and rotated q, k, and v unchanged, [B, S, H, D]; see the reference above.

    qkv: [B, S, 3, H, D], on a GPU with D a multiple of 16 up to 128. query_norm, key_norm: both
    given or both None.
    """
    _check(qkv, {"query_norm": query_norm, "key_norm": key_norm}, rotation, num_text)
    has_norm = query_norm is not None
    if not has_kernel(qkv):
        return qk_norm_rope3d_reference(qkv, query_norm, key_norm, rotation, num_text)
    # Nothing to compute: views of qkv, whose gradient autograd assembles.
    if not has_norm and rotation is None:
        q, k, v = qkv.unbind(2)
        return q, k, v
    affine = (*(query_norm or (None, None)), *(key_norm or (None, None)))
    if rotation is None:
        tables, grid = (None, None), (1, 1, 1)
    else:
        tables, grid = (rotation.table, rotation.order), (rotation.t, rotation.h, rotation.w)
    return _QkNormRope3d.apply(qkv, *affine, *tables, num_text, *grid, has_norm, EPS)


def _check(qkv: Tensor, norms: dict, rotation: Rotation | None, num_text: int) -> None:
    if qkv.dim() != 5 or qkv.shape[2] != 3:
        refuse(_OP, "qkv", qkv, "its shape must be [B, S, 3, H, D]")
    check_tensor(_OP, "qkv", qkv, qkv.shape)
    num_tokens, width = qkv.shape[1], qkv.shape[4]
    if qkv.device.type == "cuda" and (width % 16 or width > 128):
        refuse(_OP, "qkv", qkv, "D, its last dim, must be a multiple of 16 up to 128")
    missing = [side for side, norm in norms.items() if norm is None]
    if len(missing) == 1:
        refuse(_OP, missing[0], None, "both norms must be given, or none")
    for side, norm in norms.items():
        for name, parameter in zip(("weight", "bias"), norm or (None, None), strict=True):
            check_tensor(_OP, f"{side} {name}", parameter, (width,), qkv, any_dtype=True)
    if rotation is None:
        return
    table, t, h, w = rotation.table, rotation.t, rotation.h, rotation.w
    if num_text + t * h * w != num_tokens:
        refuse(_OP, "qkv", qkv, f"{num_text} text rows and {t}x{h}x{w} video rows must be its S")
    # Time takes D/8 pairs, row and column 3D/16 each.
    if width % 16:
        refuse(_OP, "qkv", qkv, "D, its last dim, must be a multiple of 16 to be rotated")
    shape = (2, width // 16 * (2 * t + 3 * (h + w)))
    check_tensor(_OP, "rotation.table", table, shape, qkv, any_dtype=True)
    if table.dtype != torch.float32 or not table.is_contiguous():
        refuse(_OP, "rotation.table", table, "it must be float32 and contiguous")
    order = rotation.order
    if order is not None and (order.dtype, order.shape) != (torch.int32, (t * h * w,)):
        refuse(_OP, "rotation.order", order, f"it must be [{t * h * w}] int32")

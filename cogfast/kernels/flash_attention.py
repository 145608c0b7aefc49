"""Attention without mask: every row sees every row. One op over many backends.

Forward, q, k, v [B, S, H, D]:   s_ij = q_i k_j / sqrt(D)      lse_i = log sum_j exp(s_ij)
                                 p_ij = exp(s_ij - lse_i)      out_i = sum_j p_ij v_j
Backward:  delta_i = dout_i out_i     ds_ij = p_ij (dout_i v_j - delta_i)
           dq_i = sum_j ds_ij k_j / sqrt(D)    dk_j = sum_i ds_ij q_i / sqrt(D)    dv_j = sum_i p_ij dout_i

4 S^2 H D operations forward and 10 S^2 H D backward, five products against two, on 4 U of data
(U = S H D elements): the one op of a block that is bound by arithmetic, 61% of the 2B model's and
49% of the 5B model's operations at 17776 tokens. cuDNN's and flash-attn's kernels are written by
hand for each GPU and reach half of an H100's peak at D = 64 by their authors' figures, above those
of Triton's own; so this file has none.

The op hands out lse beside out: activation checkpointing that keeps both (1 U and S H float32)
need not run the forward again. torch.compile sees one node, whatever the backend does inside.

On a GPU: not measured. On a CPU (torch 2.13, one core with avx512_bf16, forward and backward of
[16, 80, 4, 64]): bfloat16 2.4 ms written out as plain PyTorch, whose autograd keeps the weights p,
3.9 ms written out in the op, which computes them again, 12.7 ms in PyTorch's fused kernel; float32
3.5, 5.0 and 3.7 ms. So `math` on a CPU is the plain PyTorch code.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.attention_backends import (
    BACKENDS,
    Gradients,
    backends_that_run,
    default_backend,
    is_deterministic,
    why_not,
)
from cogfast.kernels.plain_attention import lse_dtype, plain_scores

_OP = "flash_attention"
_DEFAULT = "default"  # the op's name for "the first that can run"; resolved when it runs
_MAX_WRITTEN_ROWS = 2048  # a bfloat16 score matrix of 8 MiB per head; beyond, memory decides


def flash_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [B, S, H, D] -> [B, S, H, D]; the score matrix [B, H, S, S] is written out."""
    b, s, h, d = q.shape
    q, k, v = (x.transpose(1, 2).reshape(b * h, s, d) for x in (q, k, v))
    return torch.bmm(plain_scores(q, k).softmax(-1), v).view(b, h, s, d).transpose(1, 2)


@torch.library.custom_op("cogfast::flash_attention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """q, k, v [B, S, H, D] -> out [B, S, H, D], lse [B, H, S]."""
    out, lse = BACKENDS[_resolve(backend, q)].forward(q, k, v)
    return out.contiguous(), lse.contiguous()


@torch.library.custom_op("cogfast::flash_attention_backward", mutates_args=())
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: str
) -> tuple[Tensor, Tensor, Tensor]:
    """dout, q, k, v, out [B, S, H, D], lse [B, H, S] -> dq, dk, dv [B, S, H, D]."""
    run = BACKENDS[_resolve(backend, q)].backward
    dq, dk, dv = run(dout.contiguous(), q, k, v, out, lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=lse_dtype(q))


@_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: str
) -> Gradients:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(
    ctx: torch.autograd.function.FunctionCtx,
    inputs: tuple[Tensor, Tensor, Tensor, str],
    output: tuple[Tensor, Tensor],
) -> None:
    *qkv, ctx.backend = inputs
    ctx.save_for_backward(*qkv, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros for the gradient of lse


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dout: Tensor | None, dlse: None
) -> tuple[Tensor | None, ...]:
    if dout is None:
        return None, None, None, None
    return *_backward(dout, *ctx.saved_tensors, ctx.backend), None


_forward.register_autograd(_differentiate, setup_context=_keep)


def _resolve(backend: str, q: Tensor) -> str:
    return _runnable(backend, q.device, q.dtype, q.shape[-1], is_deterministic())


@cache
def _runnable(
    backend: str, device: torch.device, dtype: torch.dtype, width: int, deterministic: bool
) -> str:
    """The name of a backend that can run; ValueError for one that cannot, with those that can."""
    if backend == _DEFAULT:
        return default_backend(device, dtype, width)
    reason = "there is no such" if backend not in BACKENDS else None
    reason = reason or why_not(backend, device, dtype, width)
    if reason is not None:
        names = ", ".join(backends_that_run(device, dtype, width))
        refuse(_OP, "backend", backend, f"{reason}; here these can: {names}")
    return backend


def flash_attention(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """q, k, v [B, S, H, D] with a dense last dim, otherwise strided as they come -> [B, S, H, D].

    backend: a name of attention_backends.BACKENDS. None: on a GPU the first that can run of cudnn,
    flash, efficient and math; on a CPU math or flash, whichever is faster.
    """
    if q.ndim != 4:
        refuse(_OP, "q", q, "it must be [B, S, H, D]")
    check_tensor(_OP, "q", q, q.shape)
    check_tensor(_OP, "k", k, q.shape, like=q)
    check_tensor(_OP, "v", v, q.shape, like=q)
    if q.device.type == "cpu":
        if backend is None:
            backend = "math" if _is_math_faster(q) else "flash"
        if backend == "math":
            return flash_attention_reference(q, k, v)
    return _forward(q, k, v, _DEFAULT if backend is None else backend)[0]


def _is_math_faster(q: Tensor) -> bool:
    """On a CPU: PyTorch's fused backward in half precision is slow, see the top of the file; for
    [1, 1000, 4, 64] in bfloat16 it takes 16.9 ms, written out 13.2 ms. It is the faster one in
    float32 and without a gradient."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.requires_grad and is_half and q.shape[1] <= _MAX_WRITTEN_ROWS

"""Attention without mask, one op over many backends.

Forward, q, k, v [B, S, H, D]:   s_ij = q_i k_j / sqrt(D)      lse_i = log sum_j exp(s_ij)
                                 p_ij = exp(s_ij - lse_i)      out_i = sum_j p_ij v_j
Backward:  delta_i = dout_i out_i     ds_ij = p_ij (dout_i v_j - delta_i)
           dq_i = sum_j ds_ij k_j / sqrt(D)      dk_j = sum_i ds_ij q_i / sqrt(D)
           dv_j = sum_i p_ij dout_i

The op returns lse beside out, so that activation checkpointing can keep both and need not run
forward again. torch.compile sees one node, whatever the backend does inside. docs/kernels.md says
why there is no Triton kernel here.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from cogfast.kernels.argument_checks import check_tensor, refuse
from cogfast.kernels.attention.backends import (
    BACKENDS,
    Gradients,
    backends_that_run,
    default_backend,
    is_deterministic,
    lse_dtype,
    plain_scores,
    reason_unavailable,
)
from cogfast.kernels.torch_library import register_op

_OP = "flash_attention"
_DEFAULT = "default"  # the first backend that can run; resolved when the op runs
_MAX_PLAIN_ROWS = 2048  # a bfloat16 score matrix of 8 MiB per head; with more rows memory decides


def flash_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of q, k, v [B, S, H, D] with the whole score matrix [B, H, S, S] in memory."""
    b, s, h, d = q.shape
    q, k, v = (x.transpose(1, 2).reshape(b * h, s, d) for x in (q, k, v))
    return torch.bmm(plain_scores(q, k).softmax(-1), v).view(b, h, s, d).transpose(1, 2)


def _run_forward(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """Return out [B, S, H, D] and lse [B, H, S]."""
    out, lse = BACKENDS[_resolve(backend, q)].forward(q, k, v)
    return out.contiguous(), lse.contiguous()


def _run_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, backend: str
) -> Gradients:
    """Return dq, dk, dv [B, S, H, D]."""
    run = BACKENDS[_resolve(backend, q)].backward
    dq, dk, dv = run(dout.contiguous(), q, k, v, out, lse)
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    b, s, h, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((b, h, s), dtype=lse_dtype(q))


_forward = register_op(
    "flash_attention(Tensor q, Tensor k, Tensor v, str backend) -> (Tensor, Tensor)",
    gpu=_run_forward,
    cpu=_run_forward,
    fake=_fake_forward,
)
_backward = register_op(
    "flash_attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,"
    " str backend) -> (Tensor, Tensor, Tensor)",
    gpu=_run_backward,
    cpu=_run_backward,
    fake=lambda dout, q, k, v, out, lse, backend: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, backend: str) -> Tensor:
        out, lse = _forward(q, k, v, backend)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.backend = backend
        return out

    @staticmethod
    def backward(ctx, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        (dout,) = output_gradients
        return *_backward(dout, *ctx.saved_tensors, ctx.backend), None


def _resolve(backend: str, q: Tensor) -> str:
    return _runnable(backend, q.device, q.dtype, q.shape[-1], is_deterministic())


@cache
def _runnable(
    backend: str, device: torch.device, dtype: torch.dtype, width: int, deterministic: bool
) -> str:
    """Resolve and check the name of a backend.

    Raises:
        ValueError: the backend cannot run; names those that can.
    """
    if backend == _DEFAULT:
        return default_backend(device, dtype, width)
    reason = "there is no such" if backend not in BACKENDS else None
    reason = reason or reason_unavailable(backend, device, dtype, width)
    if reason is not None:
        names = ", ".join(backends_that_run(device, dtype, width))
        refuse(_OP, "backend", backend, f"{reason}; here these can: {names}")
    return backend


def flash_attention(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> Tensor:
    """Return softmax(q k^T / sqrt(D)) v, [B, S, H, D].

    q, k, v: [B, S, H, D] with a dense last dim, otherwise with any strides.
    backend: a name of backends.BACKENDS. None: on a GPU the first of cudnn, flash,
        efficient and math that can run, on a CPU the faster of math and flash.
    """
    if q.ndim != 4:
        refuse(_OP, "q", q, "it must be [B, S, H, D]")
    check_tensor(_OP, "q", q, q.shape)
    check_tensor(_OP, "k", k, q.shape, like=q)
    check_tensor(_OP, "v", v, q.shape, like=q)
    if q.device.type == "cpu":
        if backend is None:
            backend = "math" if _is_math_faster(q) else "flash"
        # On a CPU autograd through plain PyTorch is faster than the op, which computes p again.
        if backend == "math":
            return flash_attention_reference(q, k, v)
    return _FlashAttention.apply(q, k, v, _DEFAULT if backend is None else backend)


def _is_math_faster(q: Tensor) -> bool:
    """Whether plain PyTorch is faster than PyTorch's fused kernel on a CPU."""
    # Forward and backward of [16, 80, 4, 64] on one core with avx512_bf16, torch 2.13: bfloat16
    # takes 2.4 ms in plain PyTorch, 3.9 ms in the op's math backend and 12.7 ms in the fused
    # kernel, whose backward is slow in half precision; float32 takes 3.5, 5.0 and 3.7 ms. In
    # bfloat16 at [1, 1000, 4, 64] plain PyTorch takes 13.2 ms and the fused kernel 16.9 ms.
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.requires_grad and is_half and q.shape[1] <= _MAX_PLAIN_ROWS

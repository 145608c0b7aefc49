"""The ops of a transformer as one value that a model is given: kernels, or plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import add_low_rank as lora
from cogfast.kernels import gelu as activation
from cogfast.kernels import qk_norm_rope3d as qk
from cogfast.kernels.attention_backends import fastest_of_pytorch, flash_attention
from cogfast.kernels.gpu import flash_attn

KernelChoice = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """The ops that a transformer calls: functions of the files of their names, or references there."""

    flash_attention: Callable[..., Tensor]  # of q, k, v; its backend is bound
    attention_backend: str | None = None
    sparse_attention: Any = None  # DiffusionTransformer.use_sparse_attention sets it
    adaptive_layernorm: Callable[..., tuple[Tensor, Tensor]] = norm.adaptive_layernorm
    residual_adaptive_layernorm: Callable[..., tuple[Tensor, Tensor]] = (
        norm.residual_adaptive_layernorm
    )
    gated_residual: Callable[..., Tensor] = norm.gated_residual
    layernorm: Callable[..., Tensor] = norm.layernorm
    qk_norm_rope3d: Callable[..., tuple[Tensor, Tensor, Tensor]] = qk.qk_norm_rope3d
    gelu: Callable[..., Tensor] = activation.gelu
    add_low_rank: Callable[..., Tensor] = lora.add_low_rank


def choose_kernels(
    kernels: KernelChoice = "triton", attention_backend: str | None = None
) -> BlockKernels:
    """Choose the implementation of all ops.

    kernels: "triton" for this package's (on a CPU their CPU versions), "torch" for the references in plain
    PyTorch. attention_backend: a name of attention_backends.BACKENDS that can run here; None: see there.
    """
    if attention_backend in flash_attn.MODULES:
        flash_attn.load(attention_backend)
    attention = partial(flash_attention, backend=attention_backend)
    if kernels == "triton":
        return BlockKernels(attention, attention_backend)
    of_pytorch = lambda q, k, v: flash_attention(
        q, k, v, attention_backend or fastest_of_pytorch(q)
    )
    return BlockKernels(
        of_pytorch,
        attention_backend,
        adaptive_layernorm=norm.adaptive_layernorm_reference,
        residual_adaptive_layernorm=norm.residual_adaptive_layernorm_reference,
        gated_residual=norm.gated_residual_reference,
        layernorm=norm.layernorm_reference,
        qk_norm_rope3d=qk.qk_norm_rope3d_reference,
        gelu=activation.gelu_reference,
        add_low_rank=lora.add_low_rank_reference,
    )

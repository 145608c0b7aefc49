"""The ops of a transformer as one value that a model is given: kernels, or plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol

from torch import Tensor

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import add_low_rank as lora
from cogfast.kernels import gelu as activation
from cogfast.kernels import qk_norm_rope3d as qk
from cogfast.kernels.flash_attention import flash_attention, load_backend

KernelChoice = Literal["triton", "torch"]


# A Protocol per op and not Callable[..., Tensor]: a checker compares calls with the parameters, and
# an editor shows them.
class AdaptiveLayerNorm(Protocol):
    """Return hidden [B, S, M] and n [B, S, M]; see adaptive_layernorm.adaptive_layernorm."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        num_text: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]: ...


class ResidualAdaptiveLayerNorm(Protocol):
    """Return h' and n [B, S, M]; see adaptive_layernorm.residual_adaptive_layernorm."""

    def __call__(
        self,
        hidden: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        gate: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shift: Tensor,
        scale: Tensor,
        num_text: int,
        eps: float,
    ) -> tuple[Tensor, Tensor]: ...


class GatedResidual(Protocol):
    """Return h' [B, S, M]; see adaptive_layernorm.gated_residual."""

    def __call__(
        self,
        hidden: Tensor,
        branch: Tensor,
        branch_bias: Tensor | None,
        gate: Tensor,
        num_text: int,
    ) -> Tensor: ...


class LayerNorm(Protocol):
    """Return the norm of hidden [B, S, M]; see adaptive_layernorm.layernorm."""

    def __call__(
        self, hidden: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor: ...


class QkNormRope3d(Protocol):
    """Return q, k, v [B, S, H, D] of qkv [B, S, 3, H, D]; see qk_norm_rope3d.qk_norm_rope3d."""

    def __call__(
        self,
        qkv: Tensor,
        query_norm: qk.Affine | None,
        key_norm: qk.Affine | None,
        rotation: qk.Rotation | None,
        num_text: int,
    ) -> tuple[Tensor, Tensor, Tensor]: ...


class Gelu(Protocol):
    """Return GELU of x [.., N] + bias [N]; see gelu.gelu."""

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor: ...


class AddLowRank(Protocol):
    """Return x [.., N] with the adapters' products; see add_low_rank.add_low_rank."""

    def __call__(
        self,
        x: Tensor,
        low: Tensor,
        matrices: Sequence[Tensor],
        parts: Sequence[int],
        num_parts: int,
        scaling: float,
    ) -> Tensor: ...


class FlashAttention(Protocol):
    """Return attention of q, k, v [B, S, H, D]; see flash_attention.flash_attention."""

    # `backend` is bound by choose_kernels.
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """The ops that a transformer calls, each with the signature of its Protocol above."""

    adaptive_layernorm: AdaptiveLayerNorm
    residual_adaptive_layernorm: ResidualAdaptiveLayerNorm
    gated_residual: GatedResidual
    layernorm: LayerNorm
    qk_norm_rope3d: QkNormRope3d
    gelu: Gelu
    add_low_rank: AddLowRank
    flash_attention: FlashAttention


def choose_kernels(
    kernels: KernelChoice = "triton", attention_backend: str | None = None
) -> BlockKernels:
    """Choose the implementation of all ops.

    Args:
        kernels: "triton" for this package's kernels (on a CPU their CPU versions), "torch" for the
            references in plain PyTorch.
        attention_backend: a name of flash_attention.BACKENDS that can run here; None: see there.
    """
    if attention_backend is not None:
        load_backend(attention_backend)
    # flash_attention has one implementation for both choices: its backend is chosen by name.
    attention = partial(flash_attention, backend=attention_backend)
    if kernels == "torch":
        return BlockKernels(
            adaptive_layernorm=norm.adaptive_layernorm_reference,
            residual_adaptive_layernorm=norm.residual_adaptive_layernorm_reference,
            gated_residual=norm.gated_residual_reference,
            layernorm=norm.layernorm_reference,
            qk_norm_rope3d=qk.qk_norm_rope3d_reference,
            gelu=activation.gelu_reference,
            add_low_rank=lora.add_low_rank_reference,
            flash_attention=attention,
        )
    return BlockKernels(
        adaptive_layernorm=norm.adaptive_layernorm,
        residual_adaptive_layernorm=norm.residual_adaptive_layernorm,
        gated_residual=norm.gated_residual,
        layernorm=norm.layernorm,
        qk_norm_rope3d=qk.qk_norm_rope3d,
        gelu=activation.gelu,
        add_low_rank=lora.add_low_rank,
        flash_attention=attention,
    )

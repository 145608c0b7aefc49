"""The fused ops of a transformer, as one value that a model is given: the kernels, or plain PyTorch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor

from cogfast.kernels import adaptive_layernorm as norm
from cogfast.kernels import gelu as activation
from cogfast.kernels import qk_norm_rope3d as qk
from cogfast.kernels.flash_attention import flash_attention

KernelChoice = Literal["triton", "torch"]


@dataclass(frozen=True, slots=True)
class BlockKernels:
    """Signatures and shapes: the functions of the same name in this package."""

    adaptive_layernorm: Callable[..., tuple[Tensor, Tensor]]
    residual_adaptive_layernorm: Callable[..., tuple[Tensor, Tensor]]
    gated_residual: Callable[..., Tensor]
    layernorm: Callable[..., Tensor]
    qk_norm_rope3d: Callable[..., tuple[Tensor, Tensor, Tensor]]
    gelu: Callable[..., Tensor]
    flash_attention: Callable[[Tensor, Tensor, Tensor], Tensor]


def choose_kernels(
    kernels: KernelChoice = "triton", attention_backend: str | None = None
) -> BlockKernels:
    """triton: the kernels of this package (on a CPU their PyTorch counterparts); torch: plain
    PyTorch everywhere, with its own gradients. attention_backend: a name of flash_attention's, or
    None for the first in its order that can run."""
    attention = partial(flash_attention, backend=attention_backend)
    if kernels == "torch":
        return BlockKernels(
            norm.adaptive_layernorm_reference,
            norm.residual_adaptive_layernorm_reference,
            norm.gated_residual_reference,
            norm.layernorm_reference,
            qk.qk_norm_rope3d_reference,
            activation.gelu_reference,
            attention,
        )
    return BlockKernels(
        norm.adaptive_layernorm,
        norm.residual_adaptive_layernorm,
        norm.gated_residual,
        norm.layernorm,
        qk.qk_norm_rope3d,
        activation.gelu,
        attention,
    )

"""The end of a training step, on both sides the same work: clip by the global norm, AdamW, an EMA of
the weights, and, where the model is in half precision, float32 masters and the copy back.

Ours is FusedEmaAdam; the peer is the fastest that torch has: AdamW(fused=True), a foreach EMA,
clip_grad_norm_ with foreach.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam

CLIP = 1.0
EMA_DECAY = 0.9999
_ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-4}


class Masters:
    """Float32 copies of the trained parameters, or the parameters themselves where they are
    float32."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.are_copies = self.parameters[0].dtype != torch.float32
        self.tensors = self.parameters
        if self.are_copies:
            self.tensors = [nn.Parameter(p.detach().float()) for p in self.parameters]

    def take_gradients(self) -> None:
        """Give the masters the gradients in float32, and let go of those in half precision."""
        if self.are_copies:
            for master, p in zip(self.tensors, self.parameters, strict=True):
                master.grad, p.grad = p.grad.float(), None

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model and drop all gradients."""
        if self.are_copies:
            torch._foreach_copy_(self.parameters, self.tensors)
        for p in self.tensors:
            p.grad = None


class OurUpdate:
    """FusedEmaAdam."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        # without the warm-up of its decay: the peer's EMA has none
        self.adam = FusedEmaAdam(
            self.masters.tensors, **_ADAM, ema_decay=EMA_DECAY, use_num_updates=False
        )

    def step(self) -> None:
        self.masters.take_gradients()
        nn.utils.clip_grad_norm_(self.masters.tensors, CLIP, foreach=True)
        self.adam.step()
        self.masters.publish()


class PeerUpdate:
    """torch's fused AdamW and a foreach EMA."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        self.adam = torch.optim.AdamW(self.masters.tensors, **_ADAM, fused=True)
        self.shadows: list[Tensor] = [p.detach().clone() for p in self.masters.tensors]

    def step(self) -> None:
        self.masters.take_gradients()
        nn.utils.clip_grad_norm_(self.masters.tensors, CLIP, foreach=True)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.shadows, self.masters.tensors, 1 - EMA_DECAY)
        self.masters.publish()


UPDATES = {"ours": OurUpdate, "diffusers": PeerUpdate}

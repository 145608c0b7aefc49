"""The optimizer step of both sides of bench.step, with the same work.

Both clip by the global norm, update with AdamW and keep an EMA of the weights; for a model in half
precision they keep float32 masters and copy them back. cogfast uses FusedEmaAdam, whose single pass
reads gradients in any dtype, scales them by the clip factor and writes the copy. The peer uses the
fastest functions of torch: clip_grad_norm_ with foreach, AdamW(fused=True), a foreach EMA and a
foreach copy; its gradients must be float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from cogfast.kernels.fused_ema_adam import FusedEmaAdam, sum_of_squares

CLIP = 1.0
EMA_DECAY = 0.9999
ADAM = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 1e-4}
_NORM_EPS = 1e-6  # as in clip_grad_norm_


class Masters:
    """Float32 copies of the trained parameters, or the parameters themselves if they are float32."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = [p for p in parameters if p.requires_grad]
        self.are_copies = self.parameters[0].dtype != torch.float32
        self.tensors = self.parameters
        if self.are_copies:
            self.tensors = [nn.Parameter(p.detach().float()) for p in self.parameters]

    def drop_gradients(self) -> None:
        for p in (*self.tensors, *self.parameters):
            p.grad = None


class OurUpdate:
    """The update of cogfast: FusedEmaAdam."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        # No warm-up of the decay, since the EMA of the peer has none.
        self.adam = FusedEmaAdam(
            self.masters.tensors, **ADAM, ema_decay=EMA_DECAY, use_num_updates=False
        )
        if self.masters.are_copies:
            for master, p in zip(self.masters.tensors, self.masters.parameters, strict=True):
                master.grad_dtype = p.dtype
                self.adam.low_precision_copies[master] = p.detach()

    def step(self) -> None:
        gradients = [p.grad for p in self.masters.parameters]
        norm = sum_of_squares(gradients).sqrt().float()
        self.adam.gradient_scale = (CLIP / (norm + _NORM_EPS)).clamp(max=1.0)
        for master, gradient in zip(self.masters.tensors, gradients, strict=True):
            master.grad = gradient
        self.adam.step()
        self.masters.drop_gradients()


class PeerUpdate:
    """The update of the peer: torch's fused AdamW and a foreach EMA."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.masters = Masters(parameters)
        self.adam = torch.optim.AdamW(self.masters.tensors, **ADAM, fused=True)
        self.shadows: list[Tensor] = [p.detach().clone() for p in self.masters.tensors]

    def step(self) -> None:
        masters = self.masters
        if masters.are_copies:
            for master, p in zip(masters.tensors, masters.parameters, strict=True):
                master.grad, p.grad = p.grad.float(), None  # one by one: not all fit in both dtypes
        nn.utils.clip_grad_norm_(masters.tensors, CLIP, foreach=True)
        self.adam.step()
        with torch.no_grad():
            torch._foreach_lerp_(self.shadows, masters.tensors, 1 - EMA_DECAY)
            if masters.are_copies:
                torch._foreach_copy_(masters.parameters, masters.tensors)
        masters.drop_gradients()


UPDATES = {"ours": OurUpdate, "diffusers": PeerUpdate}

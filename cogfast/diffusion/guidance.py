"""Classifier-free guidance (arXiv 2207.12598): combines two estimates of the clean latents.

A guider builds the network's input (unconditional first, both in one batch) and combines the
estimates that come out. A thresholding limits the values that large scales produce.
"""

from __future__ import annotations

import math
from typing import Annotated, Protocol, runtime_checkable

import torch
from torch import Tensor

from cogfast.core.values import Range
from cogfast.diffusion.denoiser import Conditioning

Scale = Annotated[float, Range(-(10**4), 10**4)]


@runtime_checkable
class Thresholding(Protocol):
    """uncond, cond: [B, C, T, h, w] -> guided [B, C, T, h, w]."""

    def __call__(self, uncond: Tensor, cond: Tensor, scale: float) -> Tensor: ...


@runtime_checkable
class Guider(Protocol):
    """Combines the network's estimates. batch_factor: number of estimates per sample."""

    batch_factor: int

    def inputs(
        self, conditioning: Conditioning, unconditional: Conditioning | None
    ) -> Conditioning: ...

    def __call__(self, denoised: Tensor, timestep: int, num_steps: int) -> Tensor: ...

    def with_num_steps(self, before: int, after: int) -> Guider: ...


class NoDynamicThresholding:
    """Plain guidance: uncond + scale * (cond - uncond)."""

    def __call__(self, uncond: Tensor, cond: Tensor, scale: float) -> Tensor:
        return uncond + scale * (cond - uncond)


class StaticThresholding:
    """Guided estimate clamped to [-1, 1]."""

    def __call__(self, uncond: Tensor, cond: Tensor, scale: float) -> Tensor:
        return (uncond + scale * (cond - uncond)).clamp(-1, 1)


class IdentityGuider:
    """No guidance: returns the conditional estimate, at half the cost."""

    batch_factor = 1

    def inputs(
        self, conditioning: Conditioning, unconditional: Conditioning | None
    ) -> Conditioning:
        return conditioning

    def __call__(self, denoised: Tensor, timestep: int, num_steps: int) -> Tensor:
        return denoised

    def with_num_steps(self, before: int, after: int) -> IdentityGuider:
        return self


class VanillaCFG:
    """Guidance with the same scale at every step."""

    batch_factor = 2

    def __init__(
        self,
        # guidance scale; 1 is no guidance
        scale: Scale,
        # limits the guided values; null: no limit
        dyn_thresh: Thresholding | None = None,
    ) -> None:
        self.scale = scale
        self.thresholding = dyn_thresh or NoDynamicThresholding()

    def inputs(
        self, conditioning: Conditioning, unconditional: Conditioning | None
    ) -> Conditioning:
        """Join both conditionings into one batch of 2B, the unconditional first."""
        if unconditional is None:
            text = "guidance needs the unconditional conditioning (the empty caption)"
            raise ValueError(f"{text}; give it, or use IdentityGuider")
        given, num_samples = conditioning.tensors.items(), len(conditioning.text)
        # One call with 2B samples is faster than two with B; __call__ relies on this order.
        return Conditioning(
            text=torch.cat([unconditional.text, conditioning.text]),
            condition_latents=_joined(
                unconditional.condition_latents, conditioning.condition_latents, num_samples
            ),
            ofs=_joined(unconditional.ofs, conditioning.ofs, num_samples),
            tensors={n: torch.cat([unconditional.tensors[n], v]) for n, v in given},
        )

    def scale_at(self, timestep: int, num_steps: int) -> float:
        """Return the scale at `timestep`, of a sampler with num_steps."""
        return self.scale

    def __call__(self, denoised: Tensor, timestep: int, num_steps: int) -> Tensor:
        """denoised: [2B, C, T, h, w], unconditional first -> [B, C, T, h, w]."""
        uncond, cond = denoised.chunk(2)
        return self.thresholding(uncond, cond, self.scale_at(timestep, num_steps))

    def with_num_steps(self, before: int, after: int) -> VanillaCFG:
        return self


class DynamicCFG(VanillaCFG):
    """Guidance with scale 1 + scale * (1 - cos(pi * (s / num_steps)^exp)) / 2 at each step.

    s is the number of steps minus the *timestep* (50 - 999, ...), as upstream computes it, so the scale
    does not rise evenly: it jumps within [1, 1 + scale].
    """

    def __init__(
        self,
        # the scale varies from 1 to 1 + this
        scale: Scale,
        # exponent of the position within the steps, a whole number
        exp: Annotated[float, Range(0, 100)],
        # length of the ramp in steps: the sampler's num_steps
        num_steps: Annotated[int, Range(1, 10**5)],
        # limits the guided values; null: no limit
        dyn_thresh: Thresholding | None = None,
    ) -> None:
        if exp != int(exp):
            text = f"guider_config exp={exp} must be a whole number, since negative numbers are raised to it; use 5"
            raise ValueError(text)
        super().__init__(scale, dyn_thresh)
        self.exp, self.num_steps = exp, num_steps

    def scale_at(self, timestep: int, num_steps: int) -> float:
        # Upstream divides by the config's num_steps, also if the sampler makes another number.
        angle = math.pi * ((num_steps - timestep) / self.num_steps) ** self.exp
        return 1 + self.scale * (1 - math.cos(angle)) / 2

    def with_num_steps(self, before: int, after: int) -> DynamicCFG:
        """Return the guider for a sampler with `after` steps instead of `before`."""
        # A num_steps that differs from the sampler's was chosen on purpose: keep it.
        num_steps = after if self.num_steps == before else self.num_steps
        return DynamicCFG(self.scale, self.exp, num_steps, self.thresholding)


def _joined(uncond: Tensor | None, cond: Tensor | None, num_samples: int) -> Tensor | None:
    """Join both sides [B, ...] to [2B, ...]; ofs [1] holds for all samples of a side."""
    assert (uncond is None) == (cond is None), (
        "image latents or ofs on one side of the guidance only"
    )
    if cond is None or uncond is None:
        return None
    return torch.cat([x.expand(num_samples, *x.shape[1:]) for x in (uncond, cond)])

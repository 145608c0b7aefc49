"""Samplers for v-predicting video models: from noise to latents.

With a = alpha_sqrt now, b = alpha_sqrt after the step, x0 the guided estimate of the clean
latents and lambda = log(a / sqrt(1 - a^2)), h = lambda_next - lambda:
    VideoDDIM          x <- q x + (b - a q) x0,                q = sqrt((1 - b^2) / (1 - a^2))
    VPODE-DPM++(2M)    x <- q x + b (1 - e^-h) D               (arXiv 2211.01095)
    VPSDE-DPM++(2M)    x <- q e^-h x + b (1 - e^-2h) D + sqrt((1 - b^2) (1 - e^-2h)) noise
where D extrapolates from the step before: D = x0 + (x0 - x0_before) / (2 r), r = h_before / h.
If b = 1, a step returns x0. The last step is of first order: D = x0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from cogfast.core.values import Range
from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser, Network
from cogfast.diffusion.guidance import Guider, IdentityGuider
from cogfast.diffusion.noise_schedule import TimestepSpacing, ZeroSNRDDPMDiscretization

NumSteps = Annotated[int, Range(0, 10**5)]
FixedFrames = Annotated[int, Range(0, 10**5)]
NoiseLike = Callable[[Tensor], Tensor]  # standard normal noise like x [B, C, T, h, w]


@dataclass(frozen=True, slots=True)
class Step:
    """A sampling step: alpha_sqrt before and after it, and the increments of lambda in it and in the
    previous step (None for the first)."""

    alpha_sqrt: float
    next_alpha_sqrt: float
    h: float
    previous_h: float | None

    @property
    def noise_ratio(self) -> float:
        """q, the factor by which the remaining noise shrinks."""
        return math.sqrt((1 - self.next_alpha_sqrt**2) / (1 - self.alpha_sqrt**2))


class VideoDDIMSampler:
    """Deterministic DDIM (arXiv 2010.02502) and the loop that all samplers share.

    Upstream reads fixed_frames and sdedit in the VPSDE sampler only. With the timestep_spacing,
    set_alpha_to_one and steps_offset of a diffusers pipeline the latents match the pipeline's.
    """

    def __init__(
        self,
        # the noise schedule
        discretization: ZeroSNRDDPMDiscretization,
        # sampling steps
        num_steps: NumSteps,
        # guidance; null: none
        guider: Guider | None = None,
        # leading latent frames that are given without noise and kept
        fixed_frames: FixedFrames = 0,
        # noise the fixed frames to the level of the others in the network's input
        sdedit: bool = False,
        # sat: SAT's timesteps; the others: those of a diffusers scheduler of that spacing
        timestep_spacing: TimestepSpacing = "sat",
        # diffusers' key: the schedule ends without noise; false: at its first entry
        set_alpha_to_one: bool = True,
        # diffusers' key: added to the timesteps of spacing leading
        steps_offset: int = 0,
    ) -> None:
        self.discretization = discretization
        self.num_steps = num_steps
        self.guider = guider or IdentityGuider()
        self.fixed_frames = fixed_frames
        self.sdedit = sdedit
        self._spacing = (timestep_spacing, set_alpha_to_one, steps_offset)
        if timestep_spacing == "sat":
            if not set_alpha_to_one or steps_offset:
                text = f"sampler_config set_alpha_to_one={set_alpha_to_one}, steps_offset={steps_offset}: "
                raise ValueError(f"{text}timestep_spacing=sat has no such options; leave them out")
            self.steps = discretization.steps_of_sat(num_steps)
        else:
            self.steps = discretization.steps_of_diffusers(
                num_steps, timestep_spacing, set_alpha_to_one, steps_offset
            )

    def with_num_steps(self, num_steps: int) -> VideoDDIMSampler:
        """Return this sampler with another number of steps; the guider's ramp follows."""
        guider = self.guider.with_num_steps(self.num_steps, num_steps)
        # Subclasses keep this constructor, so that one call rebuilds any of them.
        options = (self.fixed_frames, self.sdedit, *self._spacing)
        return type(self)(self.discretization, num_steps, guider, *options)

    @torch.no_grad()
    def __call__(
        self,
        denoiser: DiscreteDenoiser,
        network: Network,
        x: Tensor,
        conditioning: Conditioning,
        unconditional: Conditioning | None = None,
        generator: torch.Generator | NoiseLike | None = None,
    ) -> Tensor:
        """Sample latents [B, C, T, h, w] float32 from standard normal noise x of that shape.

        generator: the source of added noise, either a torch.Generator on x's device or a function
        that returns noise of its argument's shape; None: PyTorch's default generator.
        """
        # In bf16 the differences between steps would round away; only the network runs in it.
        x = x.float()
        if isinstance(generator, torch.Generator):
            noise_like = lambda x: torch.randn(x.shape, device=x.device, generator=generator)
        else:
            noise_like = generator or torch.randn_like
        given = self.guider.inputs(conditioning, unconditional)
        prefix = x[:, :, : self.fixed_frames]
        previous, steps = None, self.steps
        for i, timestep in enumerate(steps.timesteps):
            if self.fixed_frames:
                alpha_sqrt, fixed = steps.alpha_sqrt[i], prefix
                # All frames of the network's input then have one noise level, as in plain training.
                if self.sdedit:
                    fixed = alpha_sqrt * prefix + math.sqrt(1 - alpha_sqrt**2) * noise_like(prefix)
                x = torch.cat([fixed, x[:, :, self.fixed_frames :]], dim=2)
            batch = torch.cat([x] * self.guider.batch_factor)
            # After respacing, alpha_sqrt is not the table's entry at this timestep: pass both.
            level = batch.new_full(batch.shape[:1], steps.alpha_sqrt[i])
            idx = torch.full_like(level, timestep, dtype=torch.long)
            estimates = denoiser.denoise(network, batch, level, given, idx)
            denoised = self.guider(estimates, timestep, self.num_steps)
            # diffusers ends with a first-order step: no extrapolation from the step before.
            if steps.is_end[i]:
                previous = None
            # At b = 1 lambda is infinite; the limit of every update is the estimate itself.
            is_clean = steps.next_alpha_sqrt[i] == 1.0
            x = denoised if is_clean else self.advance(i, x, denoised, previous, noise_like)
            previous = denoised
        # The last step replaced the fixed frames by the network's estimate of them.
        return torch.cat([prefix, x[:, :, self.fixed_frames :]], dim=2)

    def advance(
        self, i: int, x: Tensor, denoised: Tensor, previous: Tensor | None, noise_like: NoiseLike
    ) -> Tensor:
        """Return x after step i, which leaves some noise. previous: the estimate of the step before."""
        step = self.step(i)
        q = step.noise_ratio
        return q * x + (step.next_alpha_sqrt - step.alpha_sqrt * q) * denoised

    def step(self, i: int) -> Step:
        """Return the coefficients of step i; at the first there is no signal, so h = inf."""
        before = self.steps.alpha_sqrt[i - 1] if i else None
        now, after = self.steps.alpha_sqrt[i], self.steps.next_alpha_sqrt[i]
        previous_h = None if before is None else _log_snr(now) - _log_snr(before)
        return Step(now, after, _log_snr(after) - _log_snr(now), previous_h)


class VPODEDPMPP2MSampler(VideoDDIMSampler):
    """DPM-Solver++(2M) of the probability-flow ODE; adds no noise."""

    def advance(
        self, i: int, x: Tensor, denoised: Tensor, previous: Tensor | None, noise_like: NoiseLike
    ) -> Tensor:
        step = self.step(i)
        # expm1 keeps the digits of 1 - e^-h for small h, and is -1 at the first step's h = inf.
        signal = step.next_alpha_sqrt * -math.expm1(-step.h)
        return step.noise_ratio * x + signal * _extrapolated(step, denoised, previous)


class VPSDEDPMPP2MSampler(VideoDDIMSampler):
    """DPM-Solver++(2M) of the reverse SDE; adds noise at every step with b < 1."""

    def advance(
        self, i: int, x: Tensor, denoised: Tensor, previous: Tensor | None, noise_like: NoiseLike
    ) -> Tensor:
        step = self.step(i)
        share = -math.expm1(-2 * step.h)
        noise = noise_like(x)
        # Upstream draws two noises from the second step on and drops the first. Doing the same
        # makes one seed give the same latents.
        if previous is not None:
            noise = noise_like(x)
        kept = step.noise_ratio * math.exp(-step.h)
        added = math.sqrt((1 - step.next_alpha_sqrt**2) * share)
        signal = step.next_alpha_sqrt * share
        return kept * x + signal * _extrapolated(step, denoised, previous) + added * noise


def _log_snr(a: float) -> float:
    """lambda = log(a / sqrt(1 - a^2))."""
    # With zero terminal SNR, sampling starts at a = 0.
    return math.log(a / math.sqrt(1 - a**2)) if a > 0 else -math.inf


def _extrapolated(step: Step, denoised: Tensor, previous: Tensor | None) -> Tensor:
    """Return D of the module's formulas; the first step has no earlier estimate."""
    if previous is None or step.previous_h is None:
        return denoised
    weight = step.h / (2 * step.previous_h)
    return (1 + weight) * denoised - weight * previous

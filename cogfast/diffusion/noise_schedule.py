"""Noise schedules: the tables that the loss, the denoiser and the samplers share.

A schedule is alpha_bar_t, the fraction of the signal's variance left at timestep t. All functions
here use alpha_sqrt = sqrt(alpha_bar) (upstream's "sigma" of the video classes), so a noised latent
is alpha_sqrt * x0 + sqrt(1 - alpha_sqrt^2) * noise. The schedule has zero terminal SNR as in
"Common Diffusion Noise Schedules and Sample Steps are Flawed" (arXiv 2305.08891): the last
timestep keeps no signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import Range

Beta = Annotated[float, Range(1e-8, 0.999)]
NumTimesteps = Annotated[int, Range(2, 10**5)]

# sat: SAT's table of num_steps entries. The rest are diffusers' spacings of the whole table.
TimestepSpacing = Literal["sat", "trailing", "leading", "linspace"]


# The noise on the first frame of image-to-video training, which the network gets as a condition: CogVideoX,
# arXiv 2408.06072; CogVideo's sat/diffusion_video.py (`add_noise_to_first_frame`).
LOG_STRENGTH_MEAN, LOG_STRENGTH_STD = -3.0, 0.5


@dataclass(frozen=True, slots=True)
class SamplingSteps:
    """A sampler's steps, noisy first: the timestep passed to the network, alpha_sqrt before and after
    the step, and whether the step ends the schedule."""

    timesteps: list[int]
    alpha_sqrt: list[float]
    next_alpha_sqrt: list[float]
    is_end: list[bool]


@runtime_checkable
class Schedule(Protocol):
    """A discretization: noise levels by timestep, clean first."""

    num_timesteps: int

    def table(self) -> Tensor: ...


class DeviceTable:
    """The float32 table [n] of a schedule, copied to each device once so that look-ups never sync."""

    def __init__(self, discretization: Schedule, num_idx: int, section: str) -> None:
        # SAT's configs give the table's length twice; two lengths would be two schedules.
        if num_idx != discretization.num_timesteps:
            text = f"{section} num_idx={num_idx} must be the discretization's "
            text += f"num_timesteps={discretization.num_timesteps}; set one of them to the other"
            raise ValueError(text)
        self.values = discretization.table()
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device | str) -> Tensor:
        device = torch.device(device)
        if device not in self._copies:
            self._copies[device] = self.values.to(device)
        return self._copies[device]

    def nearest(self, value: Tensor) -> Tensor:
        """Return the index [B] of the entry closest to each value [B]; of equals the first."""
        return (value[None, :] - self.on(value.device)[:, None]).abs().argmin(dim=0)


class ZeroSNRDDPMDiscretization:
    """The scaled-linear DDPM schedule, shifted towards noise and stretched to zero terminal SNR.

    `keep_start` shifts linear_start the other way; it has no effect with `post_shift`.
    """

    def __init__(
        self,
        # beta of the first timestep
        linear_start: Beta = 0.00085,
        # beta of the last timestep
        linear_end: Beta = 0.0120,
        # number of timesteps
        num_timesteps: NumTimesteps = 1000,
        # divides the SNR at every timestep: 3.0 for CogVideoX-2B, else 1.0
        shift_scale: Annotated[float, Range(1e-6, 1000)] = 1.0,
        # keep the SNR of the first timestep in spite of the shift
        keep_start: bool = False,
        # shift after the stretch to zero terminal SNR, not before it
        post_shift: bool = False,
    ) -> None:
        # Undoes _shift at the first timestep.
        if keep_start and not post_shift:
            linear_start = linear_start / (shift_scale + (1 - shift_scale) * linear_start)
        self.num_timesteps = num_timesteps
        self.shift_scale = shift_scale
        self.post_shift = post_shift
        # Betas with evenly spaced square roots, in float64: a float32 product of 1000 factors differs from
        # upstream's in its last digits.
        ends = linear_start**0.5, linear_end**0.5
        roots = torch.linspace(*ends, num_timesteps, dtype=torch.float64)
        alphas_cumprod = (1 - roots**2).cumprod(dim=0)
        if not post_shift:
            alphas_cumprod = _shift(alphas_cumprod, shift_scale)
        self.alphas_cumprod = alphas_cumprod  # [num_timesteps] float64, before the stretch

    def table(self) -> Tensor:
        """Return alpha_sqrt [num_timesteps] float32 by timestep: clean first, exactly 0 last."""
        return self._stretched(self.alphas_cumprod)

    def sampling_steps(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """Return alpha_sqrt [num_steps] float32 and timesteps [num_steps] int64, clean first.

        A subset of the table is stretched from its own first entry, as upstream does, so its levels
        differ by up to 8e-4 from those of the full table.
        """
        timesteps = spaced_timesteps(num_steps, self.num_timesteps)
        return self._stretched(self.alphas_cumprod[timesteps]), timesteps

    def steps_of_sat(self, num_steps: int) -> SamplingSteps:
        """Return the steps of `sampling_steps`; after the last one no noise is left."""
        clean_first = self.sampling_steps(num_steps)
        levels, timesteps = (x.flip(0).tolist() for x in clean_first)  # sync: none, CPU tables
        is_end = [False] * (num_steps - 1) + [True]
        # Level 1.0 after the last step: the sampler returns its estimate of the clean latents.
        return SamplingSteps(timesteps, levels, [*levels[1:], 1.0], is_end)

    def steps_of_diffusers(
        self,
        num_steps: int,
        spacing: Literal["trailing", "leading", "linspace"],
        set_alpha_to_one: bool = True,
        steps_offset: int = 0,
    ) -> SamplingSteps:
        """Return the steps of diffusers' CogVideoX schedulers; the arguments have their names.

        The level after a step is num_timesteps // num_steps entries further, which is not always the
        level of the next timestep. set_alpha_to_one false: the schedule ends at entry 0, not at 1.
        """
        count, table = self.num_timesteps, self.table().tolist()  # sync: none, a CPU table
        if not 1 <= num_steps <= count:
            raise ValueError(f"num_steps={num_steps} must be from 1 to {count}; use 50")
        if spacing == "linspace":
            falling = np.linspace(0, count - 1, num_steps).round()[::-1]
        elif spacing == "leading":
            # The noisiest timestep is used only with an offset: 50 steps without one start at 980.
            falling = np.arange(num_steps)[::-1] * (count // num_steps) + steps_offset
        else:
            # At 61 and some other counts a rounding error gives diffusers one timestep more, -1.
            falling = np.arange(count, 0, -count / num_steps)[:num_steps].round() - 1
        timesteps = falling.astype(int).tolist()  # sync: none, a NumPy array
        if not 0 <= timesteps[-1] <= timesteps[0] < count:
            text = f"steps_offset={steps_offset} with num_steps={num_steps}: timesteps go from {timesteps[-1]} to "
            raise ValueError(f"{text}{timesteps[0]}, which must be 0 to {count - 1}; use 0")
        following = [t - count // num_steps for t in timesteps]
        end = 1.0 if set_alpha_to_one else table[0]
        return SamplingSteps(
            timesteps,
            [table[t] for t in timesteps],
            [table[t] if t >= 0 else end for t in following],
            [t < 0 for t in following],
        )

    def _stretched(self, alphas_cumprod: Tensor) -> Tensor:
        """Return alpha_sqrt float32 of alpha_bar float64, the first entry kept, the last moved to 0."""
        # Round once, at the end: a float32 sqrt differs between machines (MKL's is not exact).
        alpha_sqrt = alphas_cumprod.sqrt()
        # Algorithm 1 of arXiv 2305.08891: subtract the last entry, then restore the first by a factor.
        first, last = alpha_sqrt[0], alpha_sqrt[-1]
        alpha_sqrt = (alpha_sqrt - last) * (first / (first - last))
        if self.post_shift:
            alpha_sqrt = _shift(alpha_sqrt**2, self.shift_scale).sqrt()
        return alpha_sqrt.float()


def spaced_timesteps(num_steps: int, num_timesteps: int) -> Tensor:
    """Return num_steps timesteps [num_steps] int64, rising, the last of them num_timesteps - 1.

    They are spaced from the noisy end and truncated to whole numbers: 50 of 1000 are 19, ..., 999.
    """
    if not 1 <= num_steps <= num_timesteps:
        raise ValueError(f"num_steps={num_steps} must be from 1 to {num_timesteps}; use 50")
    if num_steps == num_timesteps:
        return torch.arange(num_timesteps)
    # SAT's generate_roughly_equally_spaced_steps uses np.linspace(..., endpoint=False).
    spacing = -(num_timesteps - 1) / num_steps
    falling = torch.arange(num_steps, dtype=torch.float64) * spacing + (num_timesteps - 1)
    return falling.long().flip(0)


def _shift(alphas_cumprod: Tensor, scale: float) -> Tensor:
    """Return alpha_bar with its SNR alpha_bar / (1 - alpha_bar) divided by `scale`."""
    return alphas_cumprod / (scale + (1 - scale) * alphas_cumprod)


def add_first_frame_noise(frame: Tensor, rng: SlotRandom) -> Tensor:
    """Add Gaussian noise of one log-normal strength per sample to frames [B, 3, 1, H, W] in [-1, 1]."""
    draw = rng.normal("image_noise_strength", (len(frame), 1, 1, 1, 1))
    sigma = torch.exp(LOG_STRENGTH_MEAN + LOG_STRENGTH_STD * draw)
    return frame + sigma * rng.normal("image_noise", frame.shape)

"""How much signal is left at each timestep: the tables that noise, denoiser and samplers share.

A schedule is alpha_bar_t, the share of the signal's variance left at timestep t. Everything here
speaks of alpha_sqrt = sqrt(alpha_bar) (upstream's "sigma" of the video classes), so that a noised
latent is alpha_sqrt * x0 + sqrt(1 - alpha_sqrt^2) * noise. Zero terminal SNR as in
"Common Diffusion Noise Schedules and Sample Steps are Flawed" (arXiv 2305.08891): the last
timestep keeps exactly no signal.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceTable:
    """A small float32 table [n] that is copied to each device once, so that look-ups never sync."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device | str) -> Tensor:
        device = torch.device(device)
        if device not in self._copies:
            self._copies[device] = self.values.to(device)
        return self._copies[device]

    def nearest(self, value: Tensor) -> Tensor:
        """Index [B] of the entry closest to each of value [B]; the first of equals."""
        return (value[None, :] - self.on(value.device)[:, None]).abs().argmin(dim=0)


class ZeroSNRDDPMDiscretization:
    """The scaled-linear DDPM schedule, shifted towards noise and stretched to zero terminal SNR.

    shift_scale s divides the SNR by s at every timestep (3.0 for CogVideoX-2B, else 1.0), before
    the stretch or, with `post_shift`, after it. `keep_start` shifts linear_start as well, so that
    the first timestep keeps the SNR it has without a shift; it does nothing with `post_shift`.
    """

    def __init__(
        self,
        linear_start: float = 0.00085,
        linear_end: float = 0.0120,
        num_timesteps: int = 1000,
        shift_scale: float = 1.0,
        keep_start: bool = False,
        post_shift: bool = False,
    ) -> None:
        if shift_scale <= 0:
            raise ValueError(f"shift_scale={shift_scale} must be above 0; 1.0 leaves the SNR as is")
        if keep_start and not post_shift:
            linear_start = linear_start / (shift_scale + (1 - shift_scale) * linear_start)
        self.num_timesteps = num_timesteps
        self.shift_scale = shift_scale
        self.post_shift = post_shift
        alphas_cumprod = _scaled_linear(linear_start, linear_end, num_timesteps)
        if not post_shift:
            alphas_cumprod = _shift(alphas_cumprod, shift_scale)
        self.alphas_cumprod = alphas_cumprod  # [num_timesteps] float64, before the stretch

    def table(self) -> Tensor:
        """alpha_sqrt [num_timesteps] float32 by timestep: clean first, exactly 0 last."""
        return self._stretched(self.alphas_cumprod)

    def sampling_steps(self, num_steps: int) -> tuple[Tensor, Tensor]:
        """alpha_sqrt [num_steps] float32 and timesteps [num_steps] int64, clean first.

        Fewer steps than the table has are stretched with their own first entry, as upstream does,
        which sets them up to 8e-4 off the full table.
        """
        timesteps = spaced_timesteps(num_steps, self.num_timesteps)
        return self._stretched(self.alphas_cumprod[timesteps]), timesteps

    def _stretched(self, alphas_cumprod: Tensor) -> Tensor:
        """alpha_sqrt float32 of alpha_bar float64, its first entry kept and its last moved to 0.

        Rounded once, at the end: a float32 sqrt differs between machines (MKL's is not exact).
        """
        alpha_sqrt = alphas_cumprod.sqrt()
        first, last = alpha_sqrt[0], alpha_sqrt[-1]
        alpha_sqrt = (alpha_sqrt - last) * (first / (first - last))
        if self.post_shift:
            alpha_sqrt = _shift(alpha_sqrt**2, self.shift_scale).sqrt()
        return alpha_sqrt.float()


def spaced_timesteps(num_steps: int, num_timesteps: int) -> Tensor:
    """num_steps timesteps [num_steps] int64, rising, the last of them num_timesteps - 1.

    50 of 1000 are 19, 39, ..., 999: spaced from the noisy end and cut to whole numbers.
    """
    if not 1 <= num_steps <= num_timesteps:
        raise ValueError(f"num_steps={num_steps} must be from 1 to {num_timesteps}; use 50")
    if num_steps == num_timesteps:
        return torch.arange(num_timesteps)
    spacing = -(num_timesteps - 1) / num_steps
    falling = torch.arange(num_steps, dtype=torch.float64) * spacing + (num_timesteps - 1)
    return falling.long().flip(0)


def _scaled_linear(start: float, end: float, num_timesteps: int) -> Tensor:
    """alpha_bar [num_timesteps] float64 for betas whose square roots are evenly spaced."""
    betas = torch.linspace(start**0.5, end**0.5, num_timesteps, dtype=torch.float64) ** 2
    return (1 - betas).cumprod(dim=0)


def _shift(alphas_cumprod: Tensor, scale: float) -> Tensor:
    """alpha_bar with its SNR alpha_bar / (1 - alpha_bar) divided by `scale`."""
    return alphas_cumprod / (scale + (1 - scale) * alphas_cumprod)

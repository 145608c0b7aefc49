"""How a network's output becomes an estimate of the clean latents.

denoised = c_skip * noised + c_out * network(c_in * noised, c_noise), the preconditioning of
"Elucidating the Design Space of Diffusion-Based Generative Models" (arXiv 2206.00364). All
coefficients are [B] float32. CogVideoX trains and samples with VideoScaling: the network predicts
v = alpha_sqrt * noise - sqrt(1 - alpha_sqrt^2) * x0. The others take sigma = noise / signal of a
noised latent x0 + sigma * noise, and no video loss or sampler works with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Coefficients:
    """c_skip, c_out, c_noise [B]; c_in [B], or None where the input goes in unscaled."""

    c_skip: Tensor
    c_out: Tensor
    c_in: Tensor | None
    c_noise: Tensor


class VideoScaling:
    """v prediction over alpha_sqrt; the network is told the timestep's index."""

    def __call__(self, level: Tensor, idx: Tensor) -> Coefficients:
        """level = alpha_sqrt [B]."""
        return Coefficients(c_skip=level, c_out=-((1 - level**2) ** 0.5), c_in=None, c_noise=idx)


class EpsScaling:
    """Noise prediction; c_noise is sigma."""

    def __call__(self, level: Tensor, idx: Tensor) -> Coefficients:
        """level = sigma [B]."""
        return Coefficients(
            c_skip=level.new_ones(level.shape),
            c_out=-level,
            c_in=(level**2 + 1) ** -0.5,
            c_noise=level,
        )


class VScaling:
    """v prediction over sigma; c_noise is sigma."""

    def __call__(self, level: Tensor, idx: Tensor) -> Coefficients:
        """level = sigma [B]."""
        variance = level**2 + 1
        return Coefficients(
            c_skip=1 / variance, c_out=-level * variance**-0.5, c_in=variance**-0.5, c_noise=level
        )


class VScalingWithEDMcNoise:
    """v prediction over sigma; c_noise is log(sigma) / 4."""

    def __call__(self, level: Tensor, idx: Tensor) -> Coefficients:
        """level = sigma [B]."""
        variance = level**2 + 1
        return Coefficients(
            c_skip=1 / variance,
            c_out=-level * variance**-0.5,
            c_in=variance**-0.5,
            c_noise=level.log() / 4,
        )


class EDMScaling:
    """EDM's preconditioning for data of standard deviation sigma_data; c_noise = log(sigma) / 4."""

    def __init__(self, sigma_data: float = 0.5) -> None:
        self.sigma_data = sigma_data

    def __call__(self, level: Tensor, idx: Tensor) -> Coefficients:
        """level = sigma [B]."""
        variance = level**2 + self.sigma_data**2
        return Coefficients(
            c_skip=self.sigma_data**2 / variance,
            c_out=level * self.sigma_data * variance**-0.5,
            c_in=variance**-0.5,
            c_noise=level.log() / 4,
        )

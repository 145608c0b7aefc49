"""The denoiser: from noised latents to an estimate of the clean ones, through the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from cogfast.diffusion.denoiser_scaling import Coefficients, VideoScaling
from cogfast.diffusion.noise_schedule import DeviceTable


@dataclass(frozen=True, slots=True)
class Conditioning:
    """What the network is told besides the latents.

    text: [B, L, E]; image_latents: [B, C', T, h, w] of image-to-video models; ofs: [B] or [1] of
    CogVideoX1.5 image-to-video.
    """

    text: Tensor
    image_latents: Tensor | None = None
    ofs: Tensor | None = None


class Network(Protocol):
    """The transformer, or anything that is called like it."""

    def __call__(
        self,
        latents: Tensor,
        timesteps: Tensor,
        text: Tensor,
        image_latents: Tensor | None = None,
        ofs: Tensor | None = None,
    ) -> Tensor: ...


class Schedule(Protocol):
    """A discretization: noise levels by timestep, clean first."""

    num_timesteps: int

    def table(self) -> Tensor: ...


def broadcast_over(values: Tensor, like: Tensor) -> Tensor:
    """values [B] as [B, 1, 1, ...], ready to multiply `like` [B, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


class DiscreteDenoiser:
    """denoised = c_skip * noised + c_out * network(noised), at the noise levels of a table.

    A level between two entries is moved to the nearest one. quantize_c_noise does the same to
    what the network is told as timestep: for the scalings whose c_noise is a sigma.
    """

    def __init__(
        self,
        scaling: Callable[[Tensor, Tensor], Coefficients],
        weighting: Callable[[Tensor], Tensor],
        discretization: Schedule,
        num_idx: int = 1000,
        quantize_c_noise: bool = False,
    ) -> None:
        if num_idx != discretization.num_timesteps:
            raise ValueError(
                f"denoiser_config num_idx={num_idx} must be the discretization's "
                f"num_timesteps={discretization.num_timesteps}; set one of them to the other"
            )
        if quantize_c_noise and isinstance(scaling, VideoScaling):
            raise ValueError(
                "denoiser_config quantize_c_noise=true looks a timestep up in a table of noise "
                "levels, so the network would always see the same one; use false with VideoScaling"
            )
        self.scaling = scaling
        self.weighting = weighting
        self.table = DeviceTable(discretization.table())
        self.quantize_c_noise = quantize_c_noise

    def denoise(
        self,
        network: Network,
        noised: Tensor,
        alpha_sqrt: Tensor,
        conditioning: Conditioning,
        idx: Tensor | None = None,
    ) -> Tensor:
        """The clean latents [B, C, T, h, w] float32 that the network sees in `noised`.

        noised: [B, C, T, h, w] float32; alpha_sqrt: [B]; idx: [B], the timestep that the network
        is told, by default the one nearest to alpha_sqrt. The network casts to its own dtype;
        what is around it stays float32.
        """
        assert noised.dtype == torch.float32, f"{noised.dtype=}: noise is added in float32"
        nearest = self.table.nearest(alpha_sqrt)
        level = self.table.on(noised.device)[nearest]
        c = self.scaling(level, nearest if idx is None else idx)
        c_noise = self.table.nearest(c.c_noise) if self.quantize_c_noise else c.c_noise
        network_input = noised if c.c_in is None else noised * broadcast_over(c.c_in, noised)
        output = network(
            network_input,
            c_noise,
            conditioning.text,
            image_latents=conditioning.image_latents,
            ofs=conditioning.ofs,
        )
        c_skip, c_out = broadcast_over(c.c_skip, noised), broadcast_over(c.c_out, noised)
        return output.float() * c_out + noised * c_skip

    def weight(self, level: Tensor) -> Tensor:
        """The weighting's loss weight [B] at noise levels [B]."""
        return self.weighting(level)

    def require_video_scaling(self, user: str) -> None:
        """Refuse a scaling over sigma where `user` noises with alpha_sqrt."""
        if not isinstance(self.scaling, VideoScaling):
            raise ValueError(
                f"denoiser_config scaling_config={type(self.scaling).__name__}: {user} noises "
                "latents with sqrt(alpha_bar); use VideoScaling"
            )

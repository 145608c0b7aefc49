"""The denoiser: from noised latents to an estimate of the clean ones, through the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from cogfast.diffusion.noise_schedule import DeviceTable, NumTimesteps, Schedule


@dataclass(frozen=True, slots=True)
class Conditioning:
    """Inputs of the network besides the latents.

    text: [B, L, E]; condition_latents: [B, C', T, h, w], the channels of model.conditions, such as the
    first frame of image-to-video; ofs: [B] or [1], for CogVideoX1.5 image-to-video; tensors: those of
    data.params.tensors by name, [B, ...], for networks that users derive.
    """

    text: Tensor
    condition_latents: Tensor | None = None
    ofs: Tensor | None = None
    tensors: Mapping[str, Tensor] = field(default_factory=dict)


class Network(Protocol):
    """The transformer, or any callable with the same signature."""

    def __call__(
        self,
        latents: Tensor,
        timesteps: Tensor,
        text: Tensor,
        condition_latents: Tensor | None = None,
        ofs: Tensor | None = None,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> Tensor: ...


def broadcast_over(values: Tensor, like: Tensor) -> Tensor:
    """values [B] as [B, 1, 1, ...], ready to multiply `like` [B, ...]."""
    return values.reshape(-1, *(1,) * (like.ndim - 1))


class VideoScaling:
    """v prediction: the network predicts v = alpha_sqrt * noise - sqrt(1 - alpha_sqrt^2) * x0.

    SAT's other scalings take sigma = noise / signal; no CogVideoX model uses one.
    """

    def __call__(self, alpha_sqrt: Tensor) -> tuple[Tensor, Tensor]:
        """c_skip [B] and c_out [B] at alpha_sqrt [B]."""
        # x0 = a * x_t - sqrt(1 - a^2) * v, by inserting x_t = a x0 + sqrt(1 - a^2) noise.
        return alpha_sqrt, -((1 - alpha_sqrt**2) ** 0.5)


class DiscreteDenoiser:
    """denoised = c_skip * noised + c_out * network(noised), at the noise levels of a table.

    A level between two entries is rounded to the nearest one.
    """

    def __init__(
        self,
        # coefficients of the network's output
        scaling: VideoScaling,
        # the noise schedule
        discretization: Schedule,
        # number of timesteps: the discretization's num_timesteps
        num_idx: NumTimesteps = 1000,
    ) -> None:
        self.scaling = scaling
        self.table = DeviceTable(discretization, num_idx, "denoiser_config")

    def denoise(
        self,
        network: Network,
        noised: Tensor,
        alpha_sqrt: Tensor,
        conditioning: Conditioning,
        idx: Tensor | None = None,
    ) -> Tensor:
        """Estimate the clean latents [B, C, T, h, w] float32 from `noised`.

        noised: [B, C, T, h, w] float32; alpha_sqrt: [B]; idx: [B], the timestep passed to the
        network, by default the one nearest to alpha_sqrt. The network casts to its own dtype; the
        arithmetic around it stays float32.
        """
        assert noised.dtype == torch.float32, f"{noised.dtype=}: noise is added in float32"
        # The coefficients come from the table, so that rounding alpha_sqrt cannot change them.
        nearest = self.table.nearest(alpha_sqrt)
        c_skip, c_out = self.scaling(self.table.on(noised.device)[nearest])
        output = network(
            noised,
            nearest if idx is None else idx,
            conditioning.text,
            condition_latents=conditioning.condition_latents,
            ofs=conditioning.ofs,
            **({"tensors": conditioning.tensors} if conditioning.tensors else {}),
        )
        # v -> x0: a * x_t - sqrt(1 - a^2) * v. In bf16 the two terms would cancel to few bits.
        c_out, c_skip = broadcast_over(c_out, noised), broadcast_over(c_skip, noised)
        return output.float() * c_out + noised * c_skip

"""The training loss: draws timesteps and noise, noises the latents, weights the denoiser's error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from cogfast.core.shapes import (
    SPATIAL_COMPRESSION,
    TEMPORAL_COMPRESSION,
    PatchSize,
    pad_latent_frames,
)
from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import Range
from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser, Network, broadcast_over
from cogfast.diffusion.timestep_sampling import DiscreteSampling

NUM_BANDS = 4  # of timesteps, of equal width, whose losses are logged


@dataclass(frozen=True, slots=True)
class Noised:
    """Latents at the noise levels of a training step.

    clean, latents (noised), noise: [B, C, T, h, w] float32. timesteps: [B] int64. alpha_sqrt: [B] float32,
    the share of the clean latents: latents = alpha_sqrt * clean + sqrt(1 - alpha_sqrt^2) * noise.
    target: [B, C, T, h, w], what the estimate is compared with; None: clean. weights: of the error,
    [B, 1, T, h, w]; None: 1.
    """

    clean: Tensor
    latents: Tensor
    noise: Tensor
    timesteps: Tensor
    alpha_sqrt: Tensor
    target: Tensor | None = None
    weights: Tensor | None = None


class VideoDiffusionLoss:
    """Weighted error of the denoiser's estimate of the clean latents.

    With a = alpha_sqrt[idx], x_t = a x0 + sqrt(1 - a^2) noise, and SNR = a^2 / (1 - a^2):
        loss = w * mean((denoise(x_t) - x0)^2),  w = 1 / (1 - a^2) = SNR + 1,
    which equals the unweighted loss of the v that the network predicts.

    min_snr_value: gamma of Min-SNR (arXiv 2303.09556). The paper weights a v loss with
        min(SNR, gamma) / (SNR + 1); for the x0 loss here this is w = min(SNR, gamma). The last
        timestep then has SNR 0 and weight 0. (Upstream's option clamps w itself and fails on a
        batch above 1.)
    fixed_frames: a sampler with the same number continues such frames. (Upstream accepts the
        option and ignores it; its configs set 0.)
    """

    def __init__(
        self,
        # draws the timesteps
        sigma_sampler: DiscreteSampling,
        # squared (l2) or absolute error (l1)
        type: Literal["l2", "l1"] = "l2",
        # all noise of a sample is shifted by this times one normal number; 0: no shift
        offset_noise_level: Annotated[float, Range(0, 100)] = 0.0,
        # gamma of Min-SNR weighting; null: all timesteps count as in SAT
        min_snr_value: Annotated[float, Range(1e-6, 10**6)] | None = None,
        # leading latent frames that stay clean in the input and are not in the loss
        fixed_frames: Annotated[int, Range(0, 10**5)] = 0,
        # weight of the error where a sample's mask is black, 1 where it is white (docs/losses.md);
        # null: masks have no effect on the loss
        masked: Annotated[float, Range(0, 1)] | None = None,
        # weight of the loss of samples with `prior: true` in a manifest (docs/losses.md)
        prior_weight: Annotated[float, Range(0, 1000)] = 1.0,
    ) -> None:
        self.sigma_sampler = sigma_sampler
        self.is_squared = type == "l2"
        self.offset_noise_level = offset_noise_level
        self.min_snr_value = min_snr_value
        self.fixed_frames = fixed_frames
        self.masked, self.prior_weight = masked, prior_weight

    def add_noise(self, latents: Tensor, rng: SlotRandom, noise: Tensor | None = None) -> Noised:
        """Noise latents [B, C, T, h, w] at timesteps that `rng` draws for each sample, with noise of its
        shape, which `rng` draws if it is None."""
        # Every draw is keyed by sample slot: the layout of ranks does not change the loss.
        idx = self.sigma_sampler.sample(rng)
        if noise is None:
            noise = rng.normal("noise", latents.shape)
        if noise.shape != latents.shape:
            shapes = f"{list(noise.shape)} for latents {list(latents.shape)}"
            raise ValueError(f"a batch has noise of the shape {shapes}; give noise of their shape")
        # One number shifts all noise of a sample: plain noise averages out and leaves the mean visible.
        offset_noise = None
        if self.offset_noise_level > 0:
            offset_noise = rng.normal("offset noise", latents.shape[:1])
        return self._noised_at(latents, idx, noise, offset_noise)

    def at(
        self,
        network: Network,
        denoiser: DiscreteDenoiser,
        latents: Tensor,
        conditioning: Conditioning,
        idx: Tensor,
        noise: Tensor,
        offset_noise: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the loss per sample [B] float32 at timesteps idx [B] and noise [B, C, T, h, w].

        offset_noise: [B] normal numbers, needed where offset_noise_level is above 0. weights: of the error.
        """
        noised = replace(self._noised_at(latents, idx, noise, offset_noise), weights=weights)
        denoised = denoiser.denoise(network, noised.latents, noised.alpha_sqrt, conditioning, idx)
        return self.of(denoised, noised)

    def _noised_at(
        self, latents: Tensor, idx: Tensor, noise: Tensor, offset_noise: Tensor | None
    ) -> Noised:
        # float32 from here on: in bf16 timesteps 0 and 1 would get no noise at all.
        x0 = latents.float()
        alpha_sqrt = self.sigma_sampler.alpha_sqrt(idx)
        if self.offset_noise_level > 0:
            assert offset_noise is not None, "offset_noise_level > 0 needs offset_noise"
            noise = noise + broadcast_over(offset_noise, noise) * self.offset_noise_level
        return Noised(x0, self.noised(x0, noise, alpha_sqrt), noise, idx, alpha_sqrt)

    def of(self, denoised: Tensor, noised: Noised) -> Tensor:
        """Return the loss per sample [B] float32 of the denoiser's estimate [B, C, T, h, w]."""
        # Fixed frames are given to the network: their error says nothing.
        target = noised.clean if noised.target is None else noised.target
        error = (denoised - target)[:, :, self.fixed_frames :]
        error = error.square() if self.is_squared else error.abs()
        if noised.weights is not None:
            error = error * noised.weights[:, :, self.fixed_frames :]
        return self.weight(noised.alpha_sqrt) * error.flatten(1).mean(dim=1)

    def for_samples(
        self, noised: Noised, mask: Tensor | None, base: Tensor | None, is_prior: Tensor | None
    ) -> Noised:
        """Return `noised` with the weights of masks [B, 1, T, h, w], and with the base model's estimate
        [B, C, T, h, w] as the target of the samples that is_prior [B] marks."""
        if base is None or is_prior is None:
            return noised if mask is None else replace(noised, weights=mask)
        target = torch.where(broadcast_over(is_prior, base), base, noised.clean)
        if self.prior_weight != 1:
            factors = torch.where(is_prior, self.prior_weight, 1.0)
            ones = torch.ones_like(base[:, :1]) if mask is None else mask
            mask = ones * broadcast_over(factors, ones)
        return replace(noised, target=target, weights=mask)

    def noised(self, x0: Tensor, noise: Tensor, alpha_sqrt: Tensor) -> Tensor:
        """Noise latents [B, C, T, h, w] to level alpha_sqrt [B]; fixed frames stay clean."""
        signal = broadcast_over(alpha_sqrt, x0)
        noised = x0 * signal + noise.float() * (1 - signal**2) ** 0.5
        if self.fixed_frames == 0:
            return noised
        if self.fixed_frames >= x0.shape[2]:
            text = f"loss_fn_config fixed_frames={self.fixed_frames} must be below the clip's {x0.shape[2]} latent "
            raise ValueError(f"{text}frames")
        clean, rest = x0[:, :, : self.fixed_frames], noised[:, :, self.fixed_frames :]
        return torch.cat([clean, rest], dim=2)

    def weight(self, alpha_sqrt: Tensor) -> Tensor:
        """Return the loss weight [B] at noise levels alpha_sqrt [B]."""
        # At most 1 / linear_start: 1176 at timestep 0 with the defaults, 393 with 2B's shift_scale.
        if self.min_snr_value is None:
            return 1 / (1 - alpha_sqrt**2)
        snr = alpha_sqrt**2 / (1 - alpha_sqrt**2)
        return snr.clamp(max=self.min_snr_value)


def mask_weights(loss: object, batch: Mapping[str, Any], patch: PatchSize) -> Tensor | None:
    """Return the weights of the error [B, 1, T, h, w] by the masks of a batch; None if `loss` uses none.

    batch: {"mask": [B, F, 1, H, W], 1 where it is white}. A latent position has the mean of the weights
    of its pixels, whose first frame is encoded apart from the groups of four that follow.
    """
    if not isinstance(loss, VideoDiffusionLoss) or loss.masked is None:
        return None
    if "mask" not in batch:
        text = f"loss_fn_config.params.masked={loss.masked:g}, but the batch has no mask; use a data set that "
        raise ValueError(f"{text}returns one for each sample, or remove the key")
    mask, side = batch["mask"], SPATIAL_COMPRESSION
    tiles = mask.unflatten(4, (-1, side)).unflatten(3, (-1, side))  # [B, F, 1, h, 8, w, 8]
    white = tiles.mean(dim=(4, 6), dtype=torch.float32).transpose(1, 2)  # [B, 1, F, h, w]
    groups = (white.shape[2] - 1) // TEMPORAL_COMPRESSION, TEMPORAL_COMPRESSION
    later = white[:, :, 1:].unflatten(2, groups).mean(dim=3)
    white = pad_latent_frames(torch.cat([white[:, :, :1], later], dim=2), patch)
    # lerp gives exactly 1 where all is white: samples without a mask have the loss of no mask.
    return torch.lerp(torch.full_like(white, loss.masked), torch.ones_like(white), white)

"""Draws the timestep that each sample of the global batch trains at."""

from __future__ import annotations

import math
from typing import Annotated

import torch
from torch import Tensor

from cogfast.core.slot_random import SlotRandom
from cogfast.core.values import Range
from cogfast.diffusion.noise_schedule import DeviceTable, NumTimesteps, Schedule


class DiscreteSampling:
    """Draws timesteps 0..num_idx-1 uniformly.

    With uniform_sampling the range is split into equal strata that are distributed over the slots
    of the global batch, so every step covers all noise levels on any number of ranks. group_num
    (SAT's name) is the number of strata, at most one per slot; None or 0: one per slot. A rotation,
    drawn once per step, moves each slot through all strata: a slot's own timesteps are uniform, too.
    """

    def __init__(
        self,
        # the noise schedule
        discretization: Schedule,
        # number of timesteps: the discretization's num_timesteps
        num_idx: NumTimesteps = 1000,
        # stratify: spread the timesteps of a step evenly over its samples
        uniform_sampling: bool = False,
        # number of strata; null or 0: one per sample of the global batch
        group_num: Annotated[int, Range(0, 10**6)] | None = None,
    ) -> None:
        self.num_idx = num_idx
        self.uniform_sampling = uniform_sampling
        self.group_num = group_num
        self.table = DeviceTable(discretization, num_idx, "sigma_sampler_config")

    def sample(self, rng: SlotRandom) -> Tensor:
        """Return the timesteps [B] int64 of the slots of `rng`, on its device."""
        within = rng.uniform("timestep")  # [B] float64 in [0, 1)
        if self.uniform_sampling:
            num_strata = min(self.group_num or rng.num_slots, rng.num_slots)
            within = (self.strata(rng, num_strata).to(torch.float64) + within) / num_strata
        # (stratum + within) may round up to the next stratum; in the last one that is out of range.
        idx = (within * self.num_idx).long().clamp_(max=self.num_idx - 1)
        return idx.to(rng.device, non_blocking=True)  # pageable and small: no wait for the stream

    def strata(self, rng: SlotRandom, num_strata: int) -> Tensor:
        """Return the stratum [B] int64 of each slot at this step, on the CPU."""
        # The rotation keeps a slot, and so a rank, from training at the same noise levels for ever.
        rotation = math.floor(rng.shared_unit("timestep rotation") * num_strata)
        # Neighbouring slots share a stratum, and each stratum gets as many slots, give or take one.
        slots = torch.tensor(list(rng.slots))
        return (slots * num_strata // rng.num_slots + rotation) % num_strata

    def alpha_sqrt(self, idx: Tensor) -> Tensor:
        """Return the table's alpha_sqrt [B] float32 at timesteps idx [B]."""
        return self.table.on(idx.device)[idx]

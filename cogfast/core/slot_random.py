"""Random draws keyed by the sample slot in the global batch, never by rank.

A slot is a sample's index in the global batch, 0 <= slot < num_slots. A draw is a function of
(seed, step, slot, purpose) alone. So every layout of processes with the same global batch sees the
same noise, timesteps and dropouts, and a resumed run draws what an uninterrupted one draws.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def random_bits(*key: int | str) -> int:
    """Return 63 random bits that depend on `key` alone, equal on every machine and process."""
    # Python's hash() is salted per process; blake2b is not. The separator keeps 1, 23 and 12, 3 apart.
    text = "\x1f".join(map(str, key)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def random_unit(*key: int | str) -> float:
    """Return a uniform number in [0, 1) that depends on `key` alone."""
    # A double has 53 bits; more of them would round some numbers up to 1.
    return (random_bits(*key) >> 10) * 2.0**-53


@dataclass(frozen=True, slots=True)
class SlotRandom:
    """Random draws for the samples of one micro-batch.

    seed: the run's seed; step: the optimizer step; slots: the B slots of this micro-batch, in
    order; num_slots: the size of the global batch; device: the device of drawn tensors.
    """

    seed: int
    step: int
    slots: Sequence[int]
    num_slots: int
    device: torch.device | str = "cpu"

    def normal(self, purpose: str, shape: Sequence[int]) -> Tensor:
        """Draw standard normal float32 numbers [B, ...]; shape[0] is the number of slots."""
        assert shape[0] == len(self.slots), f"{shape=} does not start with {len(self.slots)} slots"
        out = torch.empty(tuple(shape), device=self.device)
        for row, slot in zip(out, self.slots, strict=True):
            # One generator per slot: a row must not depend on which slots share the micro-batch.
            generator = torch.Generator(self.device)
            generator.manual_seed(random_bits(self.seed, self.step, slot, purpose))
            row.normal_(generator=generator)
        return out

    def seed_generators(self, purpose: str) -> None:
        """Seed the global generators of PyTorch, NumPy and Python, for dropout and a user's own methods.

        The seed is a function of all slots of the micro-batch together.
        """
        bits = random_bits(self.seed, self.step, *self.slots, purpose)
        torch.manual_seed(bits)
        np.random.seed(bits % 2**32)
        random.seed(bits)

    def uniform(self, purpose: str) -> Tensor:
        """Draw one uniform float64 number in [0, 1) per slot, [B], on the CPU."""
        # Not drawn by the device, whose generators differ from those of other devices.
        draws = [random_unit(self.seed, self.step, slot, purpose) for slot in self.slots]
        return torch.tensor(draws, dtype=torch.float64)

    def generators(self, purpose: str) -> list[torch.Generator]:
        """Return a generator of the CPU for each slot, for draws of which there is no fixed number."""
        seeds = [random_bits(self.seed, self.step, slot, purpose) for slot in self.slots]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def shared_unit(self, purpose: str) -> float:
        """Draw one uniform number in [0, 1) that all slots of the step share."""
        return random_unit(self.seed, self.step, purpose)

"""Which sample each slot of the global batch reads, whatever the ranks, workers or restarts."""

from __future__ import annotations

import math

import numpy as np

from cogfast.slot_random import random_bits

_EPOCHS_KEPT = 3  # permutations in memory; a step touches more only where the data set is tiny


class GlobalOrder:
    """An endless shuffled sequence over epochs, cut into steps of `global_batch` slots.

    Position p = step * global_batch + slot reads entry p % n of the permutation of epoch p // n,
    which depends on (seed, epoch) alone. Epochs follow each other without a gap, also within a
    step, so no sample is dropped and data sets smaller than the batch work.
    """

    def __init__(self, num_samples: int, seed: int, global_batch: int) -> None:
        if num_samples <= 0:
            raise ValueError("the data set has no sample; check args.train_data")
        assert global_batch > 0, f"{global_batch=}"
        self.num_samples = num_samples
        self.seed = seed
        self.global_batch = global_batch
        self._permutations: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_permutations": {}}  # workers make their own

    def epoch(self, step: int) -> int:
        """The epoch that the first slot of `step` belongs to."""
        return step * self.global_batch // self.num_samples

    def num_steps(self, epochs: float) -> int:
        """Steps after which every sample was read `epochs` times."""
        return math.ceil(epochs * self.num_samples / self.global_batch)

    def index(self, step: int, slot: int, attempt: int = 0) -> int:
        """The sample that `slot` of `step` reads; attempt > 0: its replacement where it is bad.

        num_samples attempts name every sample once: they walk the epoch's permutation in a
        stride of their own, so that neighbours do not all take over the same one.
        """
        assert 0 <= slot < self.global_batch and attempt >= 0, f"{slot=} {attempt=}"
        n = self.num_samples
        epoch, entry = divmod(step * self.global_batch + slot, n)
        if attempt:
            stride = 1 + random_bits(self.seed, "replacement", step, slot) % max(1, n - 1)
            while math.gcd(stride, n) != 1:
                stride += 1
            entry = (entry + attempt * stride) % n
        return int(self._permutation(epoch)[entry])

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            while len(self._permutations) >= _EPOCHS_KEPT:
                del self._permutations[min(self._permutations)]
            start = random_bits(self.seed, "order", epoch)
            keys = _mix(np.arange(self.num_samples, dtype=np.uint64) + np.uint64(start))
            self._permutations[epoch] = np.argsort(keys, kind="stable").astype(np.int64)
        return self._permutations[epoch]


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function: random 64-bit keys that no library version changes."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

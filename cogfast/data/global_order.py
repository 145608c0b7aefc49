"""Which sample each slot of the global batch reads, whatever the ranks, workers or restarts."""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np

from cogfast.slot_random import random_bits, random_unit

_EPOCHS_KEPT = 3  # permutations in memory; a step touches more only where the data set is tiny
_GOLDEN = (math.sqrt(5) - 1) / 2


class ShuffledSamples:
    """Some samples in an endless sequence over epochs; an epoch depends on (seed, epoch) alone.

    samples: their numbers, int64 [n]. weights: float64 [n], how often an epoch reads each: with 2.5
    twice or three times, and over many epochs 2.5 times on average; None: once. The length of an
    epoch is their sum, rounded. key: tells sequences of one seed apart.
    """

    def __init__(
        self, seed: int, samples: np.ndarray, weights: np.ndarray | None, key: tuple[int, ...] = ()
    ) -> None:
        self.seed, self.key, self.samples = seed, key, samples
        self.length = len(samples)
        self._edges: np.ndarray | None = None
        if weights is not None:
            self.length = max(1, round(float(weights.sum())))
            # In an order that has nothing to do with that of the files, each sample has an interval
            # of its weight's length; an epoch reads it once for every whole number within, after
            # all have moved on by the golden section: none waits longer than need be.
            self._places = np.argsort(_random_keys(len(samples), seed, "weights", *key))
            edges = np.cumsum(weights[self._places])
            if self.length != edges[-1]:
                edges *= self.length / edges[-1]
            edges[-1] = self.length
            self._edges = np.concatenate([[0.0], edges])
        self._epochs: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_epochs": {}}  # workers make their own

    def at(self, epoch: int, entry: int) -> int:
        """The sample that stands at `entry`, 0 <= entry < length, in an epoch."""
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._shuffled(epoch)
        return int(self._epochs[epoch][entry])

    def _shuffled(self, epoch: int) -> np.ndarray:
        keys = _random_keys(self.length, self.seed, "order", epoch, *self.key)
        order = np.argsort(keys, kind="stable")
        if self._edges is None:
            return self.samples[order]
        moved = (random_unit(self.seed, "weights") + epoch * _GOLDEN) % 1
        counts = np.diff(np.floor(self._edges - min(max(moved, 1e-6), 1 - 1e-6)))
        return np.repeat(self.samples[self._places], counts.astype(np.int64))[order]


class GlobalOrder:
    """An endless shuffled sequence over epochs, cut into steps of `global_batch` slots.

    Position p = step * global_batch + slot reads entry p % n of the permutation of epoch p // n,
    which depends on (seed, epoch) alone. Epochs follow each other without a gap, also within a
    step, so no sample is dropped and data sets smaller than the batch work.

    buckets: int [num_samples], the bucket of each sample, below 0 for those that are left out. All
    slots of a step read from one bucket, whose samples have an endless sequence of their own; an
    epoch has as many steps of each as it takes to have read all of it once more, the last of them
    filled up from its next round, and they come shuffled. weights: as in ShuffledSamples.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        global_batch: int,
        weights: np.ndarray | None = None,
        buckets: np.ndarray | None = None,
    ) -> None:
        assert global_batch > 0, f"{global_batch=}"
        self.num_samples = num_samples
        self.seed = seed
        self.global_batch = global_batch
        groups = np.zeros(num_samples, np.int64) if buckets is None else np.asarray(buckets)
        if weights is not None:
            groups = np.where(weights > 0, groups, -1)
        self.buckets = [int(b) for b in np.unique(groups) if b >= 0]
        if not self.buckets:
            raise ValueError("the data set has no sample; check args.train_data")
        self._sequences = []
        for bucket in self.buckets:
            samples = np.flatnonzero(groups == bucket)
            parts = None if weights is None else np.asarray(weights, np.float64)[samples]
            key = () if len(self.buckets) == 1 else (bucket,)
            self._sequences.append(ShuffledSamples(seed, samples, parts, key))
        self._lengths = np.array([sequence.length for sequence in self._sequences])
        self.epoch_size = int(self._lengths.sum())  # samples read in an epoch
        self._deck = lru_cache(maxsize=_EPOCHS_KEPT)(self._shuffled_steps)

    def __getstate__(self) -> dict:
        return {k: v for k, v in self.__dict__.items() if k != "_deck"}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._deck = lru_cache(maxsize=_EPOCHS_KEPT)(self._shuffled_steps)

    @property
    def fingerprint(self) -> str:
        """The same for orders that read the same samples, by their numbers, one after the other."""
        digest = hashlib.blake2b(digest_size=8)
        for sequence in self._sequences:
            digest.update(sequence.samples.astype(np.int64).tobytes())
            if sequence._edges is not None:
                digest.update(sequence._edges.tobytes())
            digest.update(repr((sequence.seed, sequence.key)).encode())
        return digest.hexdigest()

    def epoch(self, step: int) -> int:
        """The epoch that the first slot of `step` belongs to."""
        epoch = step * self.global_batch // self.epoch_size  # where no bucket's step is filled up
        while self.num_steps(epoch) > step:
            epoch -= 1
        while self.num_steps(epoch + 1) <= step:
            epoch += 1
        return epoch

    def num_steps(self, epochs: float) -> int:
        """Steps after which every sample was read `epochs` times."""
        return sum(self._steps_of(epochs))

    def bucket(self, step: int) -> int:
        """The bucket that all slots of `step` read from."""
        return self.buckets[self._place(step)[0]]

    def is_in_first_epoch(self, step: int, slot: int) -> bool:
        """Whether the slot reads a sample for the first time."""
        number, position = self._place(step)
        return position + slot < self._lengths[number]

    def num_candidates(self, step: int) -> int:
        """Attempts of `index` that name every sample that can stand in for one of `step`."""
        sequence = self._sequences[self._place(step)[0]]
        return sequence.length + (0 if sequence._edges is None else len(sequence.samples))

    def index(self, step: int, slot: int, attempt: int = 0) -> int:
        """The sample that `slot` of `step` reads; attempt > 0: its replacement where it is bad.

        Attempts walk the epoch's permutation in a stride of their own, so that neighbours do not all
        take over the same one. With weights an epoch need not read all: those of the bucket follow.
        """
        assert 0 <= slot < self.global_batch and attempt >= 0, f"{slot=} {attempt=}"
        number, position = self._place(step)
        sequence = self._sequences[number]
        n = sequence.length
        epoch, entry = divmod(position + slot, n)
        if attempt >= n:
            return int(sequence.samples[attempt - n])
        if attempt:
            stride = 1 + random_bits(self.seed, "replacement", step, slot) % max(1, n - 1)
            while math.gcd(stride, n) != 1:
                stride += 1
            entry = (entry + attempt * stride) % n
        return sequence.at(epoch, entry)

    def _steps_of(self, epochs: float) -> list[int]:
        """Each bucket's steps after which its samples were read `epochs` times."""
        return [math.ceil(epochs * int(n) / self.global_batch) for n in self._lengths]

    def _place(self, step: int) -> tuple[int, int]:
        """The sequence that a step reads, and the position of its first slot in it."""
        if len(self._sequences) == 1:
            return 0, step * self.global_batch
        epoch = self.epoch(step)
        numbers, rounds = self._deck(epoch)
        card = step - self.num_steps(epoch)
        return int(numbers[card]), int(rounds[card]) * self.global_batch

    def _shuffled_steps(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Each step of an epoch: which sequence it reads, and how many steps that had before."""
        before, after = self._steps_of(epoch), self._steps_of(epoch + 1)
        counts = [b - a for a, b in zip(before, after, strict=True)]
        numbers = np.repeat(np.arange(len(counts)), counts)
        numbers = numbers[np.argsort(_random_keys(len(numbers), self.seed, "buckets", epoch))]
        rounds = np.empty(len(numbers), np.int64)
        for number, first in enumerate(before):
            here = numbers == number
            rounds[here] = first + np.arange(here.sum())
        return numbers, rounds


def _random_keys(number: int, *key: int | str) -> np.ndarray:
    """uint64 [number] that depend on `key` alone."""
    start = random_bits(*key)
    return _mix(np.arange(number, dtype=np.uint64) + np.uint64(start))


def _mix(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function: random 64-bit keys that no library version changes."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

"""The global reading order: which sample each slot of each step's global batch reads.

It does not depend on the number of ranks or workers, or on restarts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

import numpy as np

from cogfast.core.slot_random import random_bits, random_unit

_EPOCHS_KEPT = 3  # permutations in memory; one step needs more only if the data set is tiny
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread most evenly modulo 1


class ShuffledSamples:
    """An endless sequence of samples over epochs; each epoch depends on (seed, epoch) alone.

    samples: their numbers, int64 [n]. weights: float64 [n], how often an epoch reads each, on
    average over many epochs; 2.5 means two or three times. None means once. The length of an epoch
    is their rounded sum. key: distinguishes sequences with the same seed.
    """

    def __init__(
        self, seed: int, samples: np.ndarray, weights: np.ndarray | None, key: tuple[int, ...] = ()
    ) -> None:
        self.seed, self.key, self.samples = seed, key, samples
        self.length = len(samples)
        self._edges: np.ndarray | None = None
        if weights is not None:
            self.length = max(1, round(float(weights.sum())))
            # Systematic sampling: intervals as long as the weights lie side by side, in random
            # order. An epoch reads a sample once for every integer in its interval. Between epochs
            # all intervals move by the golden section, which spaces a sample's turns evenly.
            self._places = np.argsort(_random_keys(len(samples), seed, "weights", *key))
            edges = np.cumsum(weights[self._places])
            if self.length != edges[-1]:
                edges *= self.length / edges[-1]
            edges[-1] = self.length
            self._edges = np.concatenate([[0.0], edges])
        self._epochs: dict[int, np.ndarray] = {}

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_epochs": {}}  # large, and workers compute their own

    def at(self, epoch: int, entry: int) -> int:
        """The sample at position `entry` of an epoch, 0 <= entry < length."""
        if epoch not in self._epochs:
            while len(self._epochs) >= _EPOCHS_KEPT:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = self._shuffled(epoch)
        return int(self._epochs[epoch][entry])

    def _shuffled(self, epoch: int) -> np.ndarray:
        # Sorting random keys shuffles alike on every machine; equal keys keep their order.
        keys = _random_keys(self.length, self.seed, "order", epoch, *self.key)
        order = np.argsort(keys, kind="stable")
        if self._edges is None:
            return self.samples[order]
        # Kept away from 0 and 1, where rounding could make the counts differ from the length.
        moved = (random_unit(self.seed, "weights") + epoch * _GOLDEN) % 1
        counts = np.diff(np.floor(self._edges - min(max(moved, 1e-6), 1 - 1e-6)))
        return np.repeat(self.samples[self._places], counts.astype(np.int64))[order]


class GlobalOrder:
    """An endless shuffled sequence over epochs, cut into steps of `global_batch` slots.

    Position p = step * global_batch + slot reads entry p % n of the permutation of epoch p // n,
    which depends on (seed, epoch) alone. Epochs follow each other without a gap, even within a
    step, so no sample is dropped and data sets smaller than the batch work.

    buckets: int [num_samples], the bucket of each sample, negative for samples left out. All slots
    of a step read from one bucket, and each bucket has its own endless sequence. An epoch has as
    many steps of a bucket as are needed to read all of it once more; the last of them continues
    with the bucket's next epoch. The steps of an epoch are shuffled. weights: see ShuffledSamples.
    bucket_batch: for each bucket, by what the slots of its steps are multiplied; empty: by 1.
    """

    def __init__(
        self,
        num_samples: int,
        seed: int,
        global_batch: int,
        weights: np.ndarray | None = None,
        buckets: np.ndarray | None = None,
        bucket_batch: Sequence[int] = (),
    ) -> None:
        assert global_batch > 0, f"{global_batch=}"
        self.num_samples = num_samples
        self.seed = seed
        self.global_batch = global_batch
        groups = np.zeros(num_samples, np.int64) if buckets is None else np.asarray(buckets)
        # Samples of weight 0 are left out like those in no bucket.
        if weights is not None:
            groups = np.where(weights > 0, groups, -1)
        self.buckets = [int(b) for b in np.unique(groups) if b >= 0]
        if not self.buckets:
            raise ValueError("the data set has no sample; check args.train_data")
        self._sequences = []
        for bucket in self.buckets:
            samples = np.flatnonzero(groups == bucket)
            parts = None if weights is None else np.asarray(weights, np.float64)[samples]
            # A single bucket reads in the same order as a data set without buckets.
            key = () if len(self.buckets) == 1 else (bucket,)
            self._sequences.append(ShuffledSamples(seed, samples, parts, key))
        self._lengths = np.array([sequence.length for sequence in self._sequences])
        self.epoch_size = int(self._lengths.sum())  # samples read in an epoch
        times = [bucket_batch[b] for b in self.buckets] if bucket_batch else [1] * len(self.buckets)
        self._num_slots = [global_batch * n for n in times]  # of a step, for each sequence
        self._deck: tuple[int, np.ndarray, np.ndarray] | None = None  # epoch, and its steps

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for orders that read the same sample numbers in the same sequence."""
        digest = hashlib.blake2b(digest_size=8)
        for sequence in self._sequences:
            digest.update(sequence.samples.astype(np.int64).tobytes())
            if sequence._edges is not None:
                digest.update(sequence._edges.tobytes())
            digest.update(repr((sequence.seed, sequence.key)).encode())
        if self.most_slots > self.global_batch:
            digest.update(repr(self._num_slots).encode())
        return digest.hexdigest()

    def epoch(self, step: int) -> int:
        """The epoch that the first slot of `step` belongs to."""
        # A first guess: steps that are filled up from the next epoch make the true one earlier.
        epoch = int(step / sum(self._lengths / self._num_slots))
        while self.num_steps(epoch) > step:
            epoch -= 1
        while self.num_steps(epoch + 1) <= step:
            epoch += 1
        return epoch

    def num_steps(self, epochs: float) -> int:
        """The number of steps after which every sample has been read `epochs` times."""
        return sum(self._steps_of(epochs))

    def bucket(self, step: int) -> int:
        """The bucket that all slots of `step` read from."""
        return self.buckets[self._place(step)[0]]

    def num_slots(self, step: int) -> int:
        """The number of slots of `step`: the global batch, times bucket_batch of the step's bucket."""
        return self._num_slots[self._place(step)[0]]

    @property
    def most_slots(self) -> int:
        return max(self._num_slots)

    def share(self, buckets: Collection[int]) -> float:
        """The fraction of the steps that read from `buckets`."""
        steps = self._lengths / self._num_slots
        return float(steps[[b in buckets for b in self.buckets]].sum() / steps.sum())

    def is_in_first_epoch(self, step: int, slot: int) -> bool:
        """Whether the slot reads a sample for the first time."""
        number, position = self._place(step)
        return position + slot < self._lengths[number]

    def num_candidates(self, step: int) -> int:
        """The number of attempts of `index` that cover all possible replacements in `step`."""
        sequence = self._sequences[self._place(step)[0]]
        return sequence.length + (0 if sequence._edges is None else len(sequence.samples))

    def index(self, step: int, slot: int, attempt: int = 0) -> int:
        """The sample that `slot` of `step` reads. attempt: 1, 2, ... for its replacements if bad.

        Attempts walk the epoch's permutation with a stride that depends on the slot, so that
        neighbouring slots do not all get the same replacement. After the epoch's samples follow all
        samples of the bucket, because with weights an epoch need not contain each.
        """
        number, position = self._place(step)
        assert 0 <= slot < self._num_slots[number] and attempt >= 0, f"{slot=} {attempt=}"
        sequence = self._sequences[number]
        n = sequence.length
        epoch, entry = divmod(position + slot, n)
        if attempt >= n:
            return int(sequence.samples[attempt - n])
        if attempt:
            stride = 1 + random_bits(self.seed, "replacement", step, slot) % max(1, n - 1)
            # A stride coprime to n visits every entry.
            while math.gcd(stride, n) != 1:
                stride += 1
            entry = (entry + attempt * stride) % n
        return sequence.at(epoch, entry)

    def _steps_of(self, epochs: float) -> list[int]:
        """For each bucket, the number of steps after which it has been read `epochs` times."""
        pairs = zip(self._lengths, self._num_slots, strict=True)
        return [math.ceil(epochs * int(n) / slots) for n, slots in pairs]

    def _place(self, step: int) -> tuple[int, int]:
        """The number of the sequence that a step reads, and the position of its first slot in it."""
        if len(self._sequences) == 1:
            return 0, step * self._num_slots[0]
        epoch = self.epoch(step)
        if self._deck is None or self._deck[0] != epoch:
            self._deck = (epoch, *self._shuffled_steps(epoch))
        _, numbers, rounds = self._deck
        card = step - self.num_steps(epoch)
        number = int(numbers[card])
        return number, int(rounds[card]) * self._num_slots[number]

    def _shuffled_steps(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """For each step of an epoch: the sequence it reads, and that sequence's earlier steps."""
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
    """Random uint64 [number] that depend on `key` alone."""
    start = random_bits(*key)
    return _mix(np.arange(number, dtype=np.uint64) + np.uint64(start))


def _mix(x: np.ndarray) -> np.ndarray:
    """Apply splitmix64's output function; unlike NumPy's generators it never changes."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

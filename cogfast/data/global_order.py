"""The global reading order: which sample each slot of each step's global batch reads.

It does not depend on the number of ranks or workers, or on restarts.
"""

from __future__ import annotations

import hashlib
import math
import operator
from bisect import bisect_right
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np

from cogfast.core.slot_random import random_bits, random_unit

_ROUNDS = 10  # of the Feistel network; with fewer, small permutations are not uniform
_MASK = 2**64 - 1
_GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it are spread most evenly modulo 1


class ShuffledSamples:
    """An endless sequence of samples over epochs; each epoch depends on (seed, epoch) alone.

    Any position of any epoch is computed by itself, so that nothing is kept for an epoch.

    samples: their numbers. weights: float64 [n], how often an epoch reads each, on average over many
    epochs; 2.5 means two or three times. None means once. The length of an epoch is their rounded
    sum. key: distinguishes sequences with the same seed.
    """

    def __init__(
        self,
        seed: int,
        samples: range | np.ndarray,
        weights: np.ndarray | None,
        key: tuple[int, ...] = (),
    ) -> None:
        self.seed, self.key, self.samples = seed, key, samples
        self.length = len(samples)
        self.edges: np.ndarray | None = None
        if weights is not None:
            self.length = max(1, round(float(weights.sum())))
            # Systematic sampling: intervals as long as the weights lie side by side, in random
            # order. An epoch reads a sample once for every integer in its interval. Between epochs
            # all intervals move by the golden section, which spaces a sample's turns evenly.
            self._turn = random_unit(seed, "weights")
            edges = np.cumsum(weights[_permutation(len(samples), seed, "weights", *key)])
            if self.length != edges[-1]:
                edges *= self.length / edges[-1]
            edges[-1] = self.length
            self.edges = np.concatenate([[0.0], edges])

    def at(self, epoch: int, entry: int) -> int:
        """The sample at position `entry` of an epoch, 0 <= entry < length."""
        entry = shuffled(entry, self.length, self.seed, "order", epoch, *self.key)
        if self.edges is None:
            return int(self.samples[entry])
        # Kept away from 0 and 1, where rounding could make the counts differ from the length.
        moved = min(max((self._turn + epoch * _GOLDEN) % 1, 1e-6), 1 - 1e-6)
        place = int(self.edges.searchsorted(entry + moved)) - 1
        return int(
            self.samples[shuffled(place, len(self.samples), self.seed, "weights", *self.key)]
        )


class GlobalOrder:
    """An endless shuffled sequence over epochs, cut into steps of `global_batch` slots.

    Position p = step * global_batch + slot reads entry p % n of the permutation of epoch p // n,
    which depends on (seed, epoch) alone. Epochs follow each other without a gap, even within a
    step, so no sample is dropped and data sets smaller than the batch work.

    buckets: int [num_samples], the bucket of each sample, negative for samples left out. All slots
    of a step read from one bucket, and each bucket has its own endless sequence. An epoch has as
    many steps of a bucket as are needed to read all of it once more; the last of them continues
    with the bucket's next epoch. The steps of an epoch are shuffled, also those of one bucket.
    weights: see ShuffledSamples.
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
        self.buckets, members = [0], [range(num_samples)]
        if weights is not None or buckets is not None:
            groups = np.zeros(num_samples, np.int8) if buckets is None else buckets
            # Samples of weight 0 are left out like those in no bucket.
            groups = groups if weights is None else np.where(weights > 0, groups, -1)
            self.buckets = [int(b) for b in np.unique(groups) if b >= 0]
            members = [np.flatnonzero(groups == b).astype(np.uint32) for b in self.buckets]
        if not num_samples or not self.buckets:
            raise ValueError("the data set has no sample; check args.train_data")
        self._sequences = []
        for bucket, samples in zip(self.buckets, members, strict=True):
            parts = None if weights is None else np.asarray(weights, np.float64)[samples]
            # A single bucket reads in the same order as a data set without buckets.
            key = () if len(self.buckets) == 1 else (bucket,)
            chosen = range(num_samples) if len(samples) == num_samples else samples
            self._sequences.append(ShuffledSamples(seed, chosen, parts, key))
        self._lengths = np.array([sequence.length for sequence in self._sequences])
        self.epoch_size = int(self._lengths.sum())  # samples read in an epoch
        times = [bucket_batch[b] for b in self.buckets] if bucket_batch else [1] * len(self.buckets)
        self._num_slots = [global_batch * n for n in times]  # of a step, for each sequence

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for orders that read the same sample numbers in the same sequence."""
        digest = hashlib.blake2b(digest_size=8)
        for sequence in self._sequences:
            samples = sequence.samples
            digest.update(repr(samples).encode() if isinstance(samples, range) else samples)
            if sequence.edges is not None:
                digest.update(sequence.edges)
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
        return sequence.length + (0 if sequence.edges is None else len(sequence.samples))

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
        before, after = self._steps_of(epoch), self._steps_of(epoch + 1)
        # The steps of an epoch lie bucket by bucket, and a permutation deals them.
        ends = list(accumulate(map(operator.sub, after, before)))
        card = step - sum(before)
        card = shuffled(card, ends[-1], self.seed, "buckets", epoch)
        number = bisect_right(ends, card)
        return number, (after[number] - ends[number] + card) * self._num_slots[number]


def shuffled(index: int, number: int, *key: int | str) -> int:
    """Return the element at `index` of a random permutation of range(number), which depends on `key`
    alone. It never changes, and is equal on every machine."""
    side, round_keys = math.isqrt(number - 1) + 1, _round_keys(*key)
    index = _in_square(index, side, round_keys)
    # This walks along a cycle of the permutation of a square, and the cycle began below `number`.
    while index >= number:
        index = _in_square(index, side, round_keys)
    return index


def _permutation(number: int, *key: int | str) -> np.ndarray:
    """Return the whole permutation whose elements `shuffled` returns, uint64 [number]."""
    side, round_keys = math.isqrt(number - 1) + 1, _round_keys(*key)
    indices = _in_square(np.arange(number, dtype=np.uint64), side, round_keys)
    while len(outside := np.flatnonzero(indices >= number)):
        indices[outside] = _in_square(indices[outside], side, round_keys)
    return indices


@lru_cache(maxsize=256)
def _round_keys(*key: int | str) -> tuple[int, ...]:
    return tuple(random_bits(*key, turn) for turn in range(_ROUNDS))


def _in_square(index: Any, side: int, round_keys: Sequence[int]) -> Any:
    """Permute range(side * side) by a Feistel network: index is an int, or a uint64 array of them."""
    # The rounds of an odd side are even permutations; with this swap odd ones are as likely.
    if round_keys[0] & 1:
        index = index ^ (index < 2)
    left, right = index // side, index % side
    for key in round_keys:
        # The multipliers are splitmix64's. An int needs the masks; uint64 wraps by itself.
        mixed = (right + key) * 0xBF58476D1CE4E5B9 & _MASK
        mixed = (mixed ^ (mixed >> 32)) * 0x94D049BB133111EB & _MASK
        left, right = right, (left + (mixed >> 32)) % side
    return left * side + right

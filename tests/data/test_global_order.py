"""GlobalOrder as a pure function of seed, step and slot, with weights, buckets and replacements."""

import itertools
import math
import pickle
from collections import Counter

import numpy as np
import pytest

from cogfast.core.slot_random import random_unit
from cogfast.data.global_order import GlobalOrder, shuffled
from tests.support.refusals import assert_refused

BUCKETS = np.array([0] * 11 + [1] * 5 + [-1] * 2 + [2] * 2)


def _read(order: GlobalOrder, steps: range) -> list[int]:
    return [order.index(step, slot) for step in steps for slot in range(order.global_batch)]


@pytest.mark.parametrize("num_samples, global_batch", [(12, 4), (10, 4), (3, 8), (1, 5)])
def test_every_epoch_reads_every_sample_once(num_samples, global_batch):
    order = GlobalOrder(num_samples, seed=7, global_batch=global_batch)
    read = _read(order, range(order.num_steps(epochs=6)))
    for epoch in range(6):
        part = read[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples)), epoch


def test_epochs_and_seeds_differ():
    order, other = GlobalOrder(100, 1, 10), GlobalOrder(100, 2, 10)
    first, second = _read(order, range(10)), _read(order, range(10, 20))
    assert first != second and first != _read(other, range(10))
    assert [order.epoch(step) for step in (0, 9, 10, 25)] == [0, 0, 1, 2]


def test_the_order_does_not_depend_on_the_batch_size():
    small, large = GlobalOrder(17, 3, 2), GlobalOrder(17, 3, 8)
    assert _read(small, range(40)) == _read(large, range(10))


@pytest.mark.parametrize("has_buckets", [False, True], ids=["plain", "weights, buckets"])
def test_any_step_at_any_time_and_in_any_process(has_buckets):
    given = (np.linspace(0.2, 3, 20), BUCKETS) if has_buckets else ()
    order = GlobalOrder(20, 5, 6, *given)
    straight = [_read(order, range(step, step + 1)) for step in range(60)]
    copy = pickle.loads(pickle.dumps(order))
    for step in (59, 3, 31, 0):
        assert _read(copy, range(step, step + 1)) == straight[step]


def test_pinned_numbers():
    """A run must be resumable with another version of cogfast, so the order is fixed for good."""
    pinned = [7, 1, 3, 9, 0, 8, 6, 2, 5, 4, 0, 8, 1, 2, 9]
    assert _read(GlobalOrder(10, 1234, 5), range(3)) == pinned
    large = [22194498, 10296094, 3750478, 21239444, 93190043]
    assert _read(GlobalOrder(10**8, 1234, 5), range(10**9, 10**9 + 1)) == large
    order = GlobalOrder(6, 1234, 5, np.array([1, 0.5, 2, 1, 1, 3]), np.array([0, 0, 0, 1, 1, 1]))
    assert _read(order, range(2)) == [2, 0, 2, 1, 2, 4, 5, 5, 5, 3]


def test_replacements_try_every_sample_once():
    order = GlobalOrder(12, 0, 4)
    for slot in range(4):
        tried = [order.index(5, slot, attempt) for attempt in range(12)]
        assert sorted(tried) == list(range(12))
        assert tried[0] == order.index(5, slot)


def test_slots_of_a_step_have_replacements_at_distances_of_their_own():
    order = GlobalOrder(12, 0, 12)
    place = {order.index(0, slot): slot for slot in range(12)}
    assert len(place) == 12
    distances = {(place[order.index(0, slot, 1)] - slot) % 12 for slot in range(12)}
    assert distances <= {1, 5, 7, 11} and len(distances) > 1  # coprime to 12


def test_shuffle_is_uniform():
    """Mean and spread of a sample's position are uniform over 2,000 epochs to 4 standard errors."""
    order = GlobalOrder(20, 9, 20)
    places = np.array([[order.index(e, s) for s in range(20)] for e in range(2000)])
    where = np.argsort(places, axis=1)  # [epochs, samples]
    assert np.abs(where.mean(axis=0) - 9.5).max() < 4 * np.sqrt((20**2 - 1) / 12 / 2000)
    follows = (where[:, 1] - where[:, 0]) % 20 == 1
    assert abs(follows.mean() - 1 / 19) < 4 * np.sqrt(1 / 19 / 2000)


@pytest.mark.parametrize("start", [1, 2**31 - 1, 10**11])
def test_a_shuffle_has_every_element_once(start):
    """Small ranges have each of their elements; of large ones no two positions have the same."""
    for number in range(start, start + 300 if start == 1 else start + 3):
        read = [shuffled(i, number, "key", number) for i in range(min(number, 2000))]
        assert len(set(read)) == len(read) and min(read) >= 0 and max(read) < number


@pytest.mark.parametrize("number", [3, 4, 5])
def test_all_permutations_are_as_likely(number):
    """Chi-square over all permutations of small ranges, whose cycles leave the square of the network."""
    found = Counter(tuple(shuffled(i, number, 1, e) for i in range(number)) for e in range(4800))
    kinds = math.factorial(number)
    expected = 4800 / kinds
    squares = sum((found[p] - expected) ** 2 for p in itertools.permutations(range(number)))
    assert abs(squares / expected - (kinds - 1)) < 4 * math.sqrt(2 * (kinds - 1))


def test_positions_in_a_large_range_are_uniform():
    """Chi-square over 100 parts of 100 million elements, of consecutive positions and of epochs."""
    for read in ([shuffled(i, 10**8, 1) for i in range(10000)],
                 [shuffled(7, 10**8, e) for e in range(10000)]):  # fmt: skip
        counts = np.bincount(np.array(read) // 10**6, minlength=100)
        assert abs(((counts - 100) ** 2 / 100).sum() - 99) < 4 * math.sqrt(2 * 99)


def test_empty_data_set():
    assert_refused(lambda: GlobalOrder(0, 0, 4), "no sample; check args.train_data")


WEIGHTS = np.array([1.0] * 6 + [2.0] * 3 + [0.5] * 4 + [0.0] * 2 + [0.3] * 5)


def test_weights_are_how_often_an_epoch_reads_a_sample():
    """Every epoch reads a sample floor(weight) or ceil(weight) times, and on average exactly."""
    order = GlobalOrder(20, 3, 5, WEIGHTS)
    assert order.epoch_size == 16 and order.num_steps(1) == 4  # 15.5 rounded
    read = np.array(_read(order, range(order.num_steps(200))))[: 200 * 16].reshape(200, 16)
    counts = np.stack([np.bincount(epoch, minlength=20) for epoch in read])  # [epochs, samples]
    wanted = WEIGHTS * 16 / 15.5
    # Systematic sampling: the integers in intervals that lie side by side, moved by the golden section.
    used = np.flatnonzero(WEIGHTS)
    places = used[[shuffled(i, len(used), 3, "weights") for i in range(len(used))]]
    edges = np.concatenate([[0], np.cumsum(wanted[places])])
    for epoch in range(200):
        moved = (random_unit(3, "weights") + epoch * (5**0.5 - 1) / 2) % 1
        in_each = np.diff(
            np.floor(edges - moved + 1e-9 * (np.arange(len(edges)) == len(edges) - 1))
        )
        assert counts[epoch, places].tolist() == in_each.tolist()
    assert (counts >= np.floor(wanted)).all() and (counts <= np.ceil(wanted)).all()
    assert np.abs(counts.mean(axis=0) - wanted).max() < 0.02
    waits = [np.diff(np.flatnonzero(counts[:, i])).max() for i in range(15, 20)]
    assert max(waits) <= 8  # 0.3 of an epoch: on average after 3.2


def test_every_step_is_of_one_bucket_and_nothing_is_dropped():
    order = GlobalOrder(20, 8, 4, buckets=BUCKETS)
    # 11, 5 and 2 samples in steps of 4
    assert order.num_steps(1) == 3 + 2 + 1 and order.num_steps(4) == 11 + 5 + 2
    seen = Counter()
    for step in range(order.num_steps(8)):
        read = _read(order, range(step, step + 1))
        assert {BUCKETS[i] for i in read} == {order.bucket(step)}
        seen.update(read)
        for epoch in range(1, 9):
            if step == order.num_steps(epoch) - 1:
                assert min(seen[i] for i in range(20) if BUCKETS[i] >= 0) >= epoch
    assert set(seen) == {i for i in range(20) if BUCKETS[i] >= 0}
    assert all(
        8 <= seen[i] <= 9 for i in seen
    )  # samples that fill up a step count for the next epoch
    epochs = [[order.bucket(s) for s in range(20) if order.epoch(s) == e] for e in range(3)]
    assert epochs[0] != sorted(epochs[0]) or epochs[1] != sorted(epochs[1])


def test_a_step_is_replaced_from_its_bucket():
    order = GlobalOrder(20, 8, 4, buckets=BUCKETS)
    for step in range(6):
        number = order.num_candidates(step)
        tried = {order.index(step, 1, attempt) for attempt in range(number)}
        assert tried == set(np.flatnonzero(order.bucket(step) == BUCKETS))


def test_with_weights_any_sample_of_the_bucket_can_stand_in():
    """An epoch may repeat one bad sample or have only one; samples of weight 0 never stand in."""
    buckets = np.array([0] * 4 + [1] * 4)
    weights = np.array([6, 0.25, 0.25, 0] + [0.2] * 4)
    order = GlobalOrder(8, 8, 4, weights, buckets)
    assert {order.bucket(step) for step in range(6)} == {0, 1}
    for step in range(6):
        number = order.num_candidates(step)
        tried = {order.index(step, 1, attempt) for attempt in range(number)}
        assert tried == set(np.flatnonzero((order.bucket(step) == buckets) & (weights > 0)))


def test_one_bucket_is_the_plain_order():
    plain, one = GlobalOrder(10, 1234, 5), GlobalOrder(10, 1234, 5, buckets=np.zeros(10))
    assert _read(plain, range(9)) == _read(one, range(9))
    assert plain.fingerprint == one.fingerprint != GlobalOrder(10, 1235, 5).fingerprint
    assert plain.fingerprint != GlobalOrder(10, 1234, 5, np.full(10, 2.0)).fingerprint


def test_each_sample_counts_once_in_the_first_epoch():
    """An evaluation that counts each sample once must ignore what fills up the last step."""
    order = GlobalOrder(20, 8, 4, buckets=BUCKETS)
    counted = [
        order.index(step, slot)
        for step in range(order.num_steps(1))
        for slot in range(4)
        if order.is_in_first_epoch(step, slot)
    ]
    assert sorted(counted) == [i for i in range(20) if BUCKETS[i] >= 0]


def test_steps_of_a_bucket_may_have_more_slots():
    """Each bucket is read once in an epoch, in steps of its own size."""
    times, global_batch = (1, 1, 5), 2
    groups = np.array([0] * 7 + [1] * 3 + [2] * 40)
    order = GlobalOrder(50, 3, global_batch, buckets=groups, bucket_batch=times)
    plain = GlobalOrder(50, 3, global_batch, buckets=groups)
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    num_steps = order.num_steps(4)
    assert num_steps == 4 * 7 // 2 + 4 * 3 // 2 + 4 * 40 // 10
    for step in range(num_steps):
        bucket = order.bucket(step)
        assert order.num_slots(step) == global_batch * times[bucket]
        found[bucket] += [order.index(step, slot) for slot in range(order.num_slots(step))]
    for bucket, read in found.items():
        members = np.flatnonzero(groups == bucket).tolist()
        assert sorted(read) == sorted(4 * members)
        # Two epochs fill a whole number of steps of each bucket.
        assert sorted(read[: 2 * len(members)]) == sorted(2 * members)
        steps = (s for s in range(plain.num_steps(4)) if plain.bucket(s) == bucket)
        alone = [plain.index(step, slot) for step in steps for slot in range(global_batch)]
        assert sorted(read) == sorted(alone)
    # Epochs of one step each: of 3.5, 1.5 and 4 steps
    assert order.share([2]) == pytest.approx(4 / 9) and order.share([0, 1, 2]) == 1
    assert [order.epoch(step) for step in (0, 9, 10, num_steps - 1)] == [0, 0, 1, 3]
    copy = pickle.loads(pickle.dumps(order))
    assert [copy.index(s, 1) for s in (20, 3)] == [order.index(s, 1) for s in (20, 3)]
    assert order.fingerprint != plain.fingerprint
    same = GlobalOrder(50, 3, global_batch, buckets=groups, bucket_batch=(1, 1, 1))
    assert same.fingerprint == plain.fingerprint
    # A slot's replacements are all samples of its bucket.
    step = next(s for s in range(num_steps) if order.bucket(s) == 2)
    assert sorted(order.index(step, 9, a) for a in range(40)) == list(range(10, 50))

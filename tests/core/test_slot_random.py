"""Draws by sample slot: the same on every layout, different between keys, rightly distributed."""

import pytest
import torch

from cogfast.core.slot_random import SlotRandom, random_bits, random_unit

SHAPE = (3, 5)


def rng(slots, *, seed=1, step=2, num_slots=8) -> SlotRandom:
    return SlotRandom(seed=seed, step=step, slots=slots, num_slots=num_slots)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
def test_draws_do_not_depend_on_the_layout(num_ranks):
    whole = rng(range(8))
    noise, uniform = whole.normal("noise", (8, *SHAPE)), whole.uniform("timestep")
    per_rank = 8 // num_ranks
    for rank in range(num_ranks):
        slots = list(range(rank * per_rank, (rank + 1) * per_rank))
        part = rng(slots)
        assert torch.equal(part.normal("noise", (per_rank, *SHAPE)), noise[slots])
        assert torch.equal(part.uniform("timestep"), uniform[slots])
        assert part.shared_unit("rotation") == whole.shared_unit("rotation")


def test_order_of_calls_and_slots_does_not_matter():
    first = rng([5, 0])
    noise = first.normal("noise", (2, *SHAPE))
    second = rng([0, 5])
    second.uniform("timestep")
    second.normal("image noise", (2, *SHAPE))
    assert torch.equal(second.normal("noise", (2, *SHAPE)), noise.flip(0))


@pytest.mark.parametrize(
    "other", [rng([0], seed=2), rng([0], step=3), rng([1])], ids=["seed", "step", "slot"]
)
def test_every_key_changes_every_draw(other):
    one = rng([0])
    assert not torch.equal(one.normal("noise", (1, *SHAPE)), other.normal("noise", (1, *SHAPE)))
    assert one.uniform("timestep") != other.uniform("timestep")
    assert not torch.equal(one.normal("noise", (1, *SHAPE)), one.normal("offset", (1, *SHAPE)))
    assert one.uniform("timestep") != one.uniform("dropout")
    assert one.shared_unit("rotation") != rng([0], step=3).shared_unit("rotation")


def test_keys_do_not_run_into_each_other():
    """(1, 23) and (12, 3) are different keys, and no key depends on the micro-batch."""
    assert (
        len({random_bits(1, 23), random_bits(12, 3), random_bits(123), random_bits("1", 2, 3)}) == 4
    )
    assert rng([3]).uniform("x") == rng([3], num_slots=64).uniform("x")


def test_a_seed_gives_the_same_numbers_in_every_process_and_version():
    assert random_bits(1, 2, 3, "noise") == 6085052039370493334


def test_normal_moments():
    """200 slots of 5,000 numbers: mean, variance, skew, kurtosis within five standard errors."""
    x = rng(range(200), num_slots=200).normal("noise", (200, 5000)).double()
    n = x.numel()
    bounds = {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}  # moment: (value, variance of x^k)
    for power, (value, variance) in bounds.items():
        assert abs(x.pow(power).mean() - value) < 5 * (variance / n) ** 0.5, power
    correlation = torch.corrcoef(x).fill_diagonal_(0).abs().max()
    assert correlation < 5.5 / 5000**0.5  # the largest of 19,900 pairs


def test_uniform_is_uniform():
    """Chi-square over 20 bins of 20,000 draws: 19 degrees of freedom, 43.8 at 0.1 percent."""
    draws = torch.tensor([random_unit(0, step, 0, "timestep") for step in range(20_000)])
    assert draws.min() >= 0 and draws.max() < 1
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8

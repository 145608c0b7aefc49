"""Timesteps by slot: strata covered, layouts alike, uniform over time."""

from collections import Counter

import pytest
import torch

from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.diffusion.timestep_sampling import DiscreteSampling

SCHEDULE = ZeroSNRDDPMDiscretization()


def draw(sampling: DiscreteSampling, step: int, slots, num_slots: int) -> torch.Tensor:
    return sampling.sample(SlotRandom(seed=5, step=step, slots=slots, num_slots=num_slots))


@pytest.mark.parametrize("num_slots", [1, 3, 40])
def test_each_stratum_is_drawn_exactly_once(num_slots):
    """Stratum k holds the timesteps from 1000 k / n to 1000 (k + 1) / n, shared at the borders."""
    sampling = DiscreteSampling(SCHEDULE, uniform_sampling=True)
    for step in range(20):
        idx = sorted(draw(sampling, step, range(num_slots), num_slots).tolist())
        for stratum, t in enumerate(idx):
            assert 1000 * stratum // num_slots <= t <= 1000 * (stratum + 1) / num_slots, (step, idx)
            assert t <= 999


@pytest.mark.parametrize(
    ("group_num", "num_slots", "expected"),
    [(40, 8, [1] * 8), (40, 64, [1, 2]), (8, 16, [2] * 8), (4, 6, [1, 2]), (0, 8, [1] * 8)],
)
def test_group_num_sets_the_number_of_strata(group_num, num_slots, expected):
    sampling = DiscreteSampling(SCHEDULE, uniform_sampling=True, group_num=group_num)
    rng = SlotRandom(seed=0, step=3, slots=range(num_slots), num_slots=num_slots)
    num_strata = min(group_num or num_slots, num_slots)
    counts = Counter(sampling.strata(rng, num_strata).tolist())
    assert sorted(counts) == list(range(num_strata))
    assert set(counts.values()) == set(expected)


@pytest.mark.parametrize(("uniform_sampling", "num_ranks"), [(True, 2), (True, 8), (False, 4)])
def test_draws_do_not_depend_on_the_layout(num_ranks, uniform_sampling):
    sampling = DiscreteSampling(SCHEDULE, uniform_sampling=uniform_sampling)
    for step in range(5):
        whole = draw(sampling, step, range(8), 8)
        per_rank = 8 // num_ranks
        for rank in range(num_ranks):
            slots = list(range(rank * per_rank, (rank + 1) * per_rank))
            assert torch.equal(draw(sampling, step, slots, 8), whole[slots])


@pytest.mark.parametrize(
    ("uniform_sampling", "num_slots", "group_num"),
    [(False, 1, None), (True, 8, None), (True, 6, 4)],
    ids=["plain", "eight", "uneven groups"],
)
def test_a_slot_sees_all_timesteps_evenly(uniform_sampling, num_slots, group_num):
    """Chi-square over 50 bins of 20 timesteps: 49 degrees of freedom, 85.4 at 0.1 percent."""
    sampling = DiscreteSampling(SCHEDULE, uniform_sampling=uniform_sampling, group_num=group_num)
    slot = num_slots - 1
    idx = torch.cat([draw(sampling, step, [slot], num_slots) for step in range(10_000)])
    counts = torch.bincount(idx // 20, minlength=50).double()
    assert ((counts - 200) ** 2 / 200).sum() < 85.4
    assert idx.min() == 0 and idx.max() == 999


def test_rounding_up_at_the_top_stays_inside():
    """u just below 1 in the last stratum: (39 + u) / 40 rounds to 1 in float64."""

    class AlmostOne(SlotRandom):
        def uniform(self, purpose):
            return torch.tensor([1 - 2**-53] * len(self.slots), dtype=torch.float64)

    sampling = DiscreteSampling(SCHEDULE, uniform_sampling=True)
    rng = AlmostOne(seed=0, step=0, slots=range(40), num_slots=40)
    assert sampling.sample(rng).max() == 999


def test_number_of_indices_must_be_the_schedules():
    text = r"num_idx=500 must be the discretization's num_timesteps=1000"
    with pytest.raises(ValueError, match=text):
        DiscreteSampling(SCHEDULE, num_idx=500)

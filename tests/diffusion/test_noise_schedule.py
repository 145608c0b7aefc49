"""Noise tables against upstream's and float64 arithmetic. test_sampler.py compares with diffusers' schedulers."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.noise_schedule import (
    DeviceTable,
    ZeroSNRDDPMDiscretization,
    spaced_timesteps,
)

SHIFTS = [1.0, 3.0]
# Upstream computes in float32 with MKL's sqrt, so its own code gives other last bits on another
# machine: up to 1.2e-7, post_shift 2.4e-7. Ours is float64 rounded once.
UPSTREAM_ROUNDING = 1.3e-7
POST_SHIFT_ROUNDING = 2.5e-7


@pytest.fixture(scope="module")
def tables(golden):
    return load_file(golden / "diffusion" / "tables.safetensors")


@pytest.mark.parametrize("shift", SHIFTS)
def test_training_table_equals_upstream(tables, shift):
    schedule = ZeroSNRDDPMDiscretization(shift_scale=shift)
    expected_f64 = tables[f"shift{shift}.alphas_cumprod_f64"]
    torch.testing.assert_close(schedule.alphas_cumprod, expected_f64, rtol=0, atol=1e-15)
    expected = tables[f"shift{shift}.n1000_flip"]
    torch.testing.assert_close(schedule.table(), expected, rtol=0, atol=1e-7)
    assert schedule.table()[-1] == 0.0
    torch.testing.assert_close(expected.flip(0), tables[f"shift{shift}.n1000"])


@pytest.mark.parametrize("option", ["post_shift", "keep_start"])
@pytest.mark.parametrize("shift", SHIFTS)
def test_variants_equal_upstream(tables, shift, option):
    schedule = ZeroSNRDDPMDiscretization(shift_scale=shift, **{option: True})
    expected = tables[f"shift{shift}.{option}.n1000"].flip(0)
    atol = POST_SHIFT_ROUNDING if option == "post_shift" else UPSTREAM_ROUNDING
    torch.testing.assert_close(schedule.table(), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("num_steps", [50, 51, 25, 10])
@pytest.mark.parametrize("shift", SHIFTS)
def test_sampling_steps_equal_upstream(tables, shift, num_steps):
    alpha_sqrt, timesteps = ZeroSNRDDPMDiscretization(shift_scale=shift).sampling_steps(num_steps)
    key = f"shift{shift}.n{num_steps}"
    assert torch.equal(timesteps, tables[f"{key}.idx"])
    expected = tables[key].flip(0)
    torch.testing.assert_close(alpha_sqrt, expected, rtol=0, atol=UPSTREAM_ROUNDING)


@pytest.mark.parametrize("num_steps", [1000, 50, 51, 25, 10])
@pytest.mark.parametrize("shift", SHIFTS)
def test_tables_are_float64_arithmetic_rounded_once(tables, shift, num_steps):
    """The stretch by hand from upstream's float64 alpha_bar: within half a float32 spacing."""
    schedule = ZeroSNRDDPMDiscretization(shift_scale=shift)
    alpha_sqrt, timesteps = schedule.sampling_steps(num_steps)
    root = tables[f"shift{shift}.alphas_cumprod_f64"][timesteps] ** 0.5
    exact = (root - root[-1]) * root[0] / (root[0] - root[-1])
    torch.testing.assert_close(alpha_sqrt.double(), exact, rtol=0, atol=3.1e-8)


def test_nearest_is_the_first_of_the_closest():
    levels = torch.tensor([0.9, 0.5, 0.5, 0.0])
    table = DeviceTable(SimpleNamespace(num_timesteps=4, table=lambda: levels), 4, "")
    idx = table.nearest(torch.tensor([1.0, 0.52, 0.2, -3.0]))
    assert idx.tolist() == [0, 1, 3, 3]


@pytest.mark.parametrize("num_steps", [0, 1001, -3])
def test_step_count_out_of_range(num_steps):
    with pytest.raises(ValueError, match=rf"num_steps={num_steps} must be from 1 to 1000"):
        spaced_timesteps(num_steps, 1000)

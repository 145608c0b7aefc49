"""The denoiser and its scaling against upstream's numbers and exact results."""

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser, VideoScaling
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from tests.diffusion.parts import Recorded, ours, video_denoiser

TEXT = Conditioning(text=torch.zeros(3, 5, 8))


@pytest.mark.parametrize("level", ["sigma", "sigma_off_table"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_denoised_equals_upstream(golden, shift, level):
    stored = load_file(golden / "diffusion" / "denoiser.safetensors")
    case = {k.removeprefix(f"shift{shift}."): v for k, v in stored.items() if str(shift) in k}
    network = Recorded(lambda *_: ours(case["network_output"]))
    denoiser = video_denoiser(shift)
    out = denoiser.denoise(network, ours(case["input"]), case[level], TEXT, case["idx"])
    expected = case["denoised" if level == "sigma" else "denoised_off_table"]
    torch.testing.assert_close(out, ours(expected), rtol=0, atol=1e-5)
    (seen,) = network.calls
    torch.testing.assert_close(seen.x, ours(case["network_input"]), rtol=0, atol=0)
    assert torch.equal(seen.timesteps, case["network_t"])
    assert seen.text is TEXT.text
    nearest = denoiser.table.values[denoiser.table.nearest(case["sigma_off_table"])]
    torch.testing.assert_close(nearest, case["sigma_off_table_quantized"], rtol=0, atol=1e-7)


def test_timestep_is_the_nearest_one_when_none_is_given():
    denoiser = video_denoiser()
    network = Recorded(lambda x, *_: torch.zeros_like(x))
    level = denoiser.table.values[torch.tensor([3, 500, 999])] + 1e-6
    denoiser.denoise(network, torch.randn(3, 2, 1, 2, 2), level, TEXT)
    assert network.calls[0].timesteps.tolist() == [3, 500, 999]


def test_network_dtype_does_not_touch_the_arithmetic():
    """If a bf16 network returns v = 0, the result is alpha_sqrt * noised, exactly in float32."""
    denoiser = video_denoiser()
    noised = torch.randn(2, 4, 1, 2, 2)
    level = denoiser.table.values[torch.tensor([0, 400])]
    network = Recorded(lambda x, *_: torch.zeros_like(x).bfloat16())
    out = denoiser.denoise(network, noised, level, TEXT)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, noised * level.view(2, 1, 1, 1, 1), rtol=0, atol=0)


def test_conditioning_reaches_the_network():
    image, ofs = torch.randn(3, 2, 1, 2, 2), torch.tensor([2.0])
    given = Conditioning(text=TEXT.text, condition_latents=image, ofs=ofs)
    network = Recorded(lambda x, *_: torch.zeros_like(x))
    video_denoiser().denoise(network, torch.randn(3, 2, 1, 2, 2), torch.full((3,), 0.5), given)
    (seen,) = network.calls
    assert seen.condition_latents is image and seen.ofs is ofs


def test_number_of_indices_must_be_the_schedules():
    with pytest.raises(ValueError, match=r"num_idx=500 must be .* num_timesteps=1000"):
        DiscreteDenoiser(VideoScaling(), ZeroSNRDDPMDiscretization(), num_idx=500)

"""The denoiser against upstream's numbers, and its scalings against what they are for."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser
from cogfast.diffusion.denoiser_scaling import (
    EDMScaling,
    EpsScaling,
    VideoScaling,
    VScaling,
    VScalingWithEDMcNoise,
)
from cogfast.diffusion.denoiser_weighting import (
    EDMWeighting,
    EpsWeighting,
    UnitWeighting,
    VWeighting,
)
from cogfast.diffusion.noise_schedule import LegacyDDPMDiscretization, ZeroSNRDDPMDiscretization

TEXT = Conditioning(text=torch.zeros(3, 5, 8))


def ours(t: torch.Tensor) -> torch.Tensor:
    """[B, T, C, h, w] of the stored files as [B, C, T, h, w]."""
    return t.transpose(1, 2).contiguous()


def video_denoiser(shift: float = 1.0) -> DiscreteDenoiser:
    schedule = ZeroSNRDDPMDiscretization(shift_scale=shift)
    return DiscreteDenoiser(VideoScaling(), EpsWeighting(), schedule)


@pytest.mark.parametrize("level", ["sigma", "sigma_off_table"])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_denoised_equals_upstream(golden, shift, level):
    stored = load_file(golden / "diffusion" / "denoiser.safetensors")
    case = {k.removeprefix(f"shift{shift}."): v for k, v in stored.items() if str(shift) in k}
    seen = {}

    def network(x, timesteps, text, image_latents=None, ofs=None):
        seen.update(x=x, t=timesteps, text=text)
        return ours(case["network_output"])

    denoiser = video_denoiser(shift)
    out = denoiser.denoise(network, ours(case["input"]), case[level], TEXT, case["idx"])
    expected = case["denoised" if level == "sigma" else "denoised_off_table"]
    torch.testing.assert_close(out, ours(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(seen["x"], ours(case["network_input"]), rtol=0, atol=0)
    assert torch.equal(seen["t"], case["network_t"])
    assert seen["text"] is TEXT.text
    nearest = denoiser.table.values[denoiser.table.nearest(case["sigma_off_table"])]
    torch.testing.assert_close(nearest, case["sigma_off_table_quantized"], rtol=0, atol=1e-7)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_eps_weighting_equals_upstream(golden, shift):
    stored = load_file(golden / "diffusion" / "denoiser.safetensors")
    sigma = stored[f"shift{shift}.sigma"][1:]  # w is stored for the last two: 0.5 or so, and 0
    weight = video_denoiser(shift).weight(sigma)
    torch.testing.assert_close(weight, stored[f"shift{shift}.w"], rtol=1e-6, atol=0)


def test_timestep_is_the_nearest_one_when_none_is_given():
    denoiser = video_denoiser()
    seen = []

    def network(x, timesteps, text, image_latents=None, ofs=None):
        seen.append(timesteps)
        return torch.zeros_like(x)

    level = denoiser.table.values[torch.tensor([3, 500, 999])] + 1e-6
    denoiser.denoise(network, torch.randn(3, 2, 1, 2, 2), level, TEXT)
    assert seen[0].tolist() == [3, 500, 999]


def test_network_dtype_does_not_touch_the_arithmetic():
    """A bf16 network that answers v = 0 leaves alpha_sqrt * noised, exactly in float32."""
    denoiser = video_denoiser()
    noised = torch.randn(2, 4, 1, 2, 2)
    level = denoiser.table.values[torch.tensor([0, 400])]
    network = lambda x, t, text, image_latents=None, ofs=None: torch.zeros_like(x).bfloat16()
    out = denoiser.denoise(network, noised, level, TEXT)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, noised * level.view(2, 1, 1, 1, 1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("scaling", "target"),
    [
        (EpsScaling(), "eps"),
        (VScaling(), "v"),
        (VScalingWithEDMcNoise(), "v"),
        (VideoScaling(), "video v"),
    ],
    ids=["eps", "v", "v-edm", "video"],
)
def test_perfect_network_gives_the_clean_latents(scaling, target):
    """Whatever a scaling has the network predict, the true value must lead back to x0."""
    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(4, 2, 1, 3, 3, generator=generator)
    noise = torch.randn(x0.shape, generator=generator)
    is_video = target == "video v"
    schedule = ZeroSNRDDPMDiscretization() if is_video else LegacyDDPMDiscretization()
    denoiser = DiscreteDenoiser(scaling, UnitWeighting(), schedule)
    level = denoiser.table.values[torch.tensor([1, 300, 700, 990])]
    s = level.view(-1, 1, 1, 1, 1)
    if is_video:
        noised, truth = s * x0 + (1 - s**2).sqrt() * noise, s * noise - (1 - s**2).sqrt() * x0
    else:
        noised = x0 + s * noise
        # v of the variance-preserving form: alpha = 1 / sqrt(1 + s^2), its noise share s * alpha
        truth = noise if target == "eps" else (noise - s * x0) / (1 + s**2).sqrt()
    network = lambda x, t, text, image_latents=None, ofs=None: truth
    out = denoiser.denoise(network, noised, level, TEXT)
    torch.testing.assert_close(out, x0, rtol=0, atol=2e-5)


def test_edm_scaling_keeps_unit_variance():
    """Definition of arXiv 2206.00364: the input and the target of the network have variance 1."""
    sigma = torch.tensor([0.05, 0.7, 9.0], dtype=torch.float64)
    data = 0.5
    c = EDMScaling(sigma_data=data)(sigma, torch.zeros(3))
    torch.testing.assert_close(c.c_in**2 * (data**2 + sigma**2), torch.ones_like(sigma))
    target = ((1 - c.c_skip) ** 2 * data**2 + c.c_skip**2 * sigma**2) / c.c_out**2
    torch.testing.assert_close(target, torch.ones_like(sigma))
    torch.testing.assert_close(c.c_noise, sigma.log() / 4)


@pytest.mark.parametrize(
    ("weighting", "expected"),
    [
        (UnitWeighting(), [1.0, 1.0]),
        (EDMWeighting(sigma_data=0.5), [8.0, 4.25]),
        (VWeighting(), [5.0, 1.25]),
        (EpsWeighting(), [4.0, 0.25]),
    ],
    ids=["unit", "edm", "v", "eps"],
)
def test_weightings_by_hand(weighting, expected):
    weight = weighting(torch.tensor([0.5, 2.0]))
    torch.testing.assert_close(weight, torch.tensor(expected))


def test_quantized_timesteps_for_a_sigma():
    schedule = LegacyDDPMDiscretization()
    denoiser = DiscreteDenoiser(EpsScaling(), UnitWeighting(), schedule, quantize_c_noise=True)
    seen = []

    def network(x, timesteps, text, image_latents=None, ofs=None):
        seen.append(timesteps)
        return torch.zeros_like(x)

    level = denoiser.table.values[torch.tensor([0, 17, 999])]
    denoiser.denoise(network, torch.randn(3, 1, 1, 2, 2), level, TEXT)
    assert seen[0].tolist() == [0, 17, 999]


def test_conditioning_reaches_the_network():
    image, ofs = torch.randn(3, 2, 1, 2, 2), torch.tensor([2.0])
    given = Conditioning(text=TEXT.text, image_latents=image, ofs=ofs)
    seen = {}

    def network(x, timesteps, text, image_latents=None, ofs=None):
        seen.update(image=image_latents, ofs=ofs)
        return torch.zeros_like(x)

    video_denoiser().denoise(network, torch.randn(3, 2, 1, 2, 2), torch.full((3,), 0.5), given)
    assert seen["image"] is image and seen["ofs"] is ofs


def test_quantized_timesteps_are_refused_with_video_scaling():
    with pytest.raises(ValueError, match=r"quantize_c_noise=true .* use false with VideoScaling"):
        DiscreteDenoiser(
            VideoScaling(), EpsWeighting(), ZeroSNRDDPMDiscretization(), quantize_c_noise=True
        )


def test_number_of_indices_must_be_the_schedules():
    with pytest.raises(ValueError, match=r"num_idx=500 must be .* num_timesteps=1000"):
        DiscreteDenoiser(VideoScaling(), EpsWeighting(), ZeroSNRDDPMDiscretization(), num_idx=500)


def test_other_scalings_are_refused_by_the_video_classes():
    denoiser = DiscreteDenoiser(EpsScaling(), UnitWeighting(), LegacyDDPMDiscretization())
    with pytest.raises(ValueError, match=r"scaling_config=EpsScaling: .* use VideoScaling"):
        denoiser.require_video_scaling("VideoDiffusionLoss")

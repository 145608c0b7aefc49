"""Samplers against upstream's trajectories, the paper's algorithm in float64 and diffusers' schedulers."""

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.guidance import DynamicCFG, VanillaCFG
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.diffusion.sampler import VideoDDIMSampler, VPODEDPMPP2MSampler, VPSDEDPMPP2MSampler
from tests.diffusion.parts import Recorded, ours, video_denoiser
from tests.support.refusals import assert_refused

ALL = [VPSDEDPMPP2MSampler, VPODEDPMPP2MSampler, VideoDDIMSampler]
SHIFT = 3.0
SCHEDULE = ZeroSNRDDPMDiscretization(shift_scale=SHIFT)
TEXT = Conditioning(torch.zeros(1, 2, 3))


def golden_network(x, timesteps, text, condition_latents=None, ofs=None):
    by_sample = 0.05 * torch.sin(timesteps / 100) + 0.1 * text.mean((1, 2))
    return torch.tanh(x) * 0.3 + by_sample.view(-1, 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("sampler", "case", "num_noises"),
    [
        (VPSDEDPMPP2MSampler(SCHEDULE, 10, DynamicCFG(6, 5, 10)), "dyn", 17),
        (VideoDDIMSampler(SCHEDULE, 10, VanillaCFG(6)), "vanilla", 0),
    ],
    ids=["VPSDEDPMPP2M-dynamic", "VideoDDIM-vanilla"],
)
def test_trajectory_equals_upstream(golden, sampler, case, num_noises):
    stored = load_file(golden / "diffusion" / "samplers.safetensors")
    key = f"{type(sampler).__name__}.shift3.0.{case}.n10"
    denoiser, noises = video_denoiser(SHIFT), iter(ours(stored["noises"]))
    seen = {"sigma": [], "denoised": []}
    denoise, network = denoiser.denoise, Recorded(golden_network)

    def recorded(network, noised, alpha_sqrt, conditioning, idx=None):
        seen["sigma"].append(alpha_sqrt)
        seen["denoised"].append(denoise(network, noised, alpha_sqrt, conditioning, idx))
        return seen["denoised"][-1]

    denoiser.denoise = recorded
    cond, uncond = (Conditioning(stored[f"{side}.crossattn"]) for side in ("cond", "uncond"))
    out = sampler(denoiser, network, ours(stored["x_init"]), cond, uncond, lambda x: next(noises))

    torch.testing.assert_close(out, ours(stored[f"{key}.out"]), rtol=0, atol=1e-5)
    seen["net_in"] = [call.x[:2] for call in network.calls]
    for name in ("net_in", "denoised"):
        expected = ours(stored[f"{key}.{name}"])
        torch.testing.assert_close(torch.stack(seen[name]), expected, rtol=0, atol=1e-5)
    timesteps = torch.stack([call.timesteps.float() for call in network.calls])
    assert torch.equal(timesteps, stored[f"{key}.idx"])
    torch.testing.assert_close(
        torch.stack(seen["sigma"]), stored[f"{key}.sigma"], rtol=0, atol=1e-7
    )
    assert len(list(noises)) == len(stored["noises"]) - num_noises


def test_vpode_is_algorithm_2_of_dpm_solver_plus_plus():
    """arXiv 2211.01095, algorithm 2, in float64: x = (s/s') x - a (e^-h - 1) D."""
    x = torch.randn(1, 2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    out = VPODEDPMPP2MSampler(SCHEDULE, 10)(video_denoiser(SHIFT), golden_network, x, TEXT)

    levels, timesteps = SCHEDULE.sampling_steps(10)
    alphas, table = levels.flip(0).double(), SCHEDULE.table().double()
    sigmas = (1 - alphas**2).sqrt()
    lambdas = alphas.log() - sigmas.log()
    y, before = x.double(), None
    for i, t in enumerate(timesteps.flip(0)):
        level = table[(table - alphas[i]).abs().argmin()]  # the denoiser's, on the full table
        v = golden_network(y, t[None], TEXT.text)
        denoised = level * y - (1 - level**2).sqrt() * v
        if i == 9:
            y = denoised
            break
        h, direction = lambdas[i + 1] - lambdas[i], denoised
        if i > 0:
            r = (lambdas[i] - lambdas[i - 1]) / h
            direction = (1 + 1 / (2 * r)) * denoised - 1 / (2 * r) * before
        y = sigmas[i + 1] / sigmas[i] * y - alphas[i + 1] * ((-h).exp() - 1) * direction
        before = denoised
    torch.testing.assert_close(out.double(), y, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sampler_class", ALL)
def test_fixed_frames_stay(sampler_class):
    x = torch.randn(1, 2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    network = Recorded(golden_network)
    sampler = sampler_class(SCHEDULE, 4, fixed_frames=1)
    generator = torch.Generator().manual_seed(0)
    out = sampler(video_denoiser(SHIFT), network, x, TEXT, generator=generator)
    assert torch.equal(out[:, :, :1], x[:, :, :1])
    assert all(torch.equal(call.x[:, :, :1], x[:, :, :1]) for call in network.calls)


def test_sdedit_noises_the_fixed_frames_to_the_level_of_each_step():
    x = torch.randn(1, 2, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    network = Recorded(golden_network)
    sampler = VideoDDIMSampler(SCHEDULE, 4, fixed_frames=1, sdedit=True)
    out = sampler(video_denoiser(SHIFT), network, x, TEXT, generator=torch.ones_like)
    levels, _ = SCHEDULE.sampling_steps(4)
    for call, a in zip(network.calls, levels.flip(0).tolist(), strict=True):
        torch.testing.assert_close(call.x[:, :, :1], a * x[:, :, :1] + (1 - a**2) ** 0.5)
    assert torch.equal(out[:, :, :1], x[:, :, :1])


def test_with_num_steps_changes_the_guiders_ramp_as_well():
    sampler = VPSDEDPMPP2MSampler(SCHEDULE, 50, DynamicCFG(6, 5, 50), fixed_frames=1, sdedit=True)
    ten = sampler.with_num_steps(10)
    assert type(ten) is VPSDEDPMPP2MSampler
    assert ten.steps.timesteps[0] == 999 and len(ten.steps.timesteps) == 10
    assert ten.guider.num_steps == 10 and sampler.guider.num_steps == 50
    assert (ten.fixed_frames, ten.sdedit) == (1, True)
    other = VPSDEDPMPP2MSampler(SCHEDULE, 50, DynamicCFG(6, 5, 30)).with_num_steps(10)
    assert other.guider.num_steps == 30


def test_sampling_makes_no_gradients():
    weight = torch.ones(1, requires_grad=True)
    network = Recorded(lambda x, *_: x * weight)
    out = VideoDDIMSampler(SCHEDULE, 2)(
        video_denoiser(SHIFT), network, torch.randn(1, 1, 1, 2, 2), TEXT
    )
    assert not out.requires_grad


def test_bad_options():
    assert_refused(lambda: VideoDDIMSampler(SCHEDULE, 0), "num_steps=0 must be from 1 to 1000")


SPACINGS = [
    ("DPM", 50, {"timestep_spacing": "trailing"}),
    ("DDIM", 7, {"timestep_spacing": "trailing"}),
    ("DDIM", 50, {"timestep_spacing": "leading"}),
    ("DPM", 7, {"timestep_spacing": "leading"}),
    ("DPM", 30, {"timestep_spacing": "leading", "steps_offset": 5, "set_alpha_to_one": False}),
    ("DDIM", 10, {"timestep_spacing": "trailing", "set_alpha_to_one": False}),
    ("DDIM", 7, {"timestep_spacing": "linspace"}),
    ("DPM", 30, {"timestep_spacing": "linspace"}),
    ("DPM", 1, {"timestep_spacing": "linspace"}),
]


@pytest.mark.parametrize(("kind", "num_steps", "spacing"), SPACINGS, ids=str)
def test_a_pipelines_timesteps_give_diffusers_latents(kind, num_steps, spacing, monkeypatch):
    """The loop of CogVideoXPipeline.__call__ around diffusers' schedulers, with the same noise."""
    from diffusers import CogVideoXDDIMScheduler, CogVideoXDPMScheduler
    from diffusers.schedulers import scheduling_dpm_cogvideox as dpm

    scheduler = {"DDIM": CogVideoXDDIMScheduler, "DPM": CogVideoXDPMScheduler}[kind](
        prediction_type="v_prediction", rescale_betas_zero_snr=True, snr_shift_scale=3.0, **spacing
    )
    scheduler.set_timesteps(num_steps)
    shape = (1, 2, 3, 4, 4)
    random = torch.Generator().manual_seed(0)
    start, *noises = torch.randn(1 + 2 * num_steps, *shape, generator=random)
    theirs, mine = iter(noises), iter(noises)
    monkeypatch.setattr(dpm, "randn_tensor", lambda *_, **__: next(theirs))
    x, old, timesteps = start, None, scheduler.timesteps
    for i, t in enumerate(timesteps):
        v = golden_network(x, t[None], torch.zeros(1, 2, 3))
        if kind == "DDIM":
            x = scheduler.step(v, t, x, eta=0.0, return_dict=False)[0]
        else:
            back = timesteps[i - 1] if i > 0 else None
            x, old = scheduler.step(v, old, t, back, x, return_dict=False)

    sampler = {"DDIM": VideoDDIMSampler, "DPM": VPSDEDPMPP2MSampler}[kind]
    sampler = sampler(SCHEDULE, 3, **spacing).with_num_steps(num_steps)
    found = sampler(video_denoiser(SHIFT), golden_network, start, TEXT, None, lambda _: next(mine))
    torch.testing.assert_close(found, x, rtol=0, atol=1e-5)


def test_timesteps_are_diffusers_at_every_number_of_steps():
    from diffusers import CogVideoXDDIMScheduler

    for spacing in ("trailing", "leading", "linspace"):
        scheduler = CogVideoXDDIMScheduler(timestep_spacing=spacing)
        for num_steps in (*range(1, 70), *range(70, 1001, 31)):
            scheduler.set_timesteps(num_steps)
            found = SCHEDULE.steps_of_diffusers(num_steps, spacing).timesteps
            # at 61 and some other counts diffusers has one more, -1, by a rounding error
            wanted = scheduler.timesteps[:num_steps].tolist()
            assert found == wanted and len(found) == num_steps, f"{spacing} {num_steps}"


def test_options_of_a_spacing_that_does_not_take_them_are_refused():
    with pytest.raises(ValueError, match="timestep_spacing=sat has no such options"):
        VideoDDIMSampler(SCHEDULE, 10, steps_offset=1)
    with pytest.raises(ValueError, match="steps_offset=100 with num_steps=50"):
        VideoDDIMSampler(SCHEDULE, 50, timestep_spacing="leading", steps_offset=100)

"""The training loss against upstream's numbers and float64 arithmetic."""

import pytest
import torch
from safetensors.torch import load_file

from cogfast.core.slot_random import SlotRandom
from cogfast.diffusion.denoiser import Conditioning, DiscreteDenoiser
from cogfast.diffusion.loss import VideoDiffusionLoss
from cogfast.diffusion.noise_schedule import ZeroSNRDDPMDiscretization
from cogfast.diffusion.timestep_sampling import DiscreteSampling
from tests.diffusion.parts import Recorded, ours, video_denoiser
from tests.support.refusals import assert_refused

SHAPE = (4, 3, 2, 4, 4)  # B C T h w
TEXT = Conditioning(text=torch.zeros(4, 5, 8))
IDX = torch.tensor([0, 120, 600, 999])


def parts(shift: float = 1.0, **options) -> tuple[VideoDiffusionLoss, DiscreteDenoiser]:
    schedule = ZeroSNRDDPMDiscretization(shift_scale=shift)
    return VideoDiffusionLoss(DiscreteSampling(schedule), **options), video_denoiser(shift)


def draws() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SHAPE, generator=generator), torch.randn(SHAPE, generator=generator)


def toy_network(x, timesteps, text, condition_latents=None, ofs=None):
    return torch.tanh(x) * 0.3 + 0.05 * torch.sin(timesteps / 100).view(-1, 1, 1, 1, 1)


def float64_loss(x0, noise, idx, loss, weight=None, power=2):
    """The formula of the docstring in float64, sample by sample."""
    out = []
    for i, t in enumerate(idx.tolist()):
        a = loss.sigma_sampler.table.values[t].double()
        b = (1 - a**2).sqrt()
        clean, eps = x0[i : i + 1].double(), noise[i : i + 1].double()
        noised = a * clean + b * eps
        denoised = a * noised - b * toy_network(noised, idx[i : i + 1], None)
        w = 1 / (1 - a**2) if weight is None else weight(a**2 / (1 - a**2))
        out.append(w * ((denoised - clean).abs() ** power).mean())
    return torch.stack(out)


@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_loss_equals_upstream(golden, shift, offset):
    stored = load_file(golden / "diffusion" / "loss.safetensors")
    prefix = f"shift{shift}.off{offset}."
    case = {k.removeprefix(prefix): v for k, v in stored.items() if k.startswith(prefix)}
    loss, denoiser = parts(shift, offset_noise_level=offset)
    network = Recorded(lambda *_: ours(case["network_output"]))
    given = Conditioning(text=case["crossattn"])
    x0, noise = ours(case["x0"]), ours(case["noise"])
    per_sample = loss.at(network, denoiser, x0, given, case["idx"], noise, case["offset_noise"])
    torch.testing.assert_close(per_sample, case["loss"], rtol=1e-6, atol=0)
    (seen,) = network.calls
    torch.testing.assert_close(seen.x, ours(case["noised_input"]), rtol=0, atol=1e-5)
    assert torch.equal(seen.timesteps, case["network_t"])


@pytest.mark.parametrize(("kind", "power"), [("l2", 2), ("l1", 1)])
def test_loss_equals_float64(kind, power):
    loss, denoiser = parts(type=kind)
    x0, noise = draws()
    per_sample = loss.at(toy_network, denoiser, x0, TEXT, IDX, noise)
    expected = float64_loss(x0, noise, IDX, loss, power=power)
    # At t = 0, 1 - a^2 is 8.5e-4 and holds four digits in float32.
    torch.testing.assert_close(per_sample[:1].double(), expected[:1], rtol=1e-3, atol=0)
    torch.testing.assert_close(per_sample[1:].double(), expected[1:], rtol=3e-6, atol=0)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 5.0])
def test_min_snr_is_the_papers(gamma):
    """arXiv 2303.09556, x0 prediction: min(SNR, gamma), sample by sample."""
    loss, denoiser = parts(min_snr_value=gamma)
    x0, noise = draws()
    per_sample = loss.at(toy_network, denoiser, x0, TEXT, IDX, noise)
    weight = lambda snr: min(float(snr), gamma)
    expected = float64_loss(x0, noise, IDX, loss, weight=weight)
    torch.testing.assert_close(per_sample.double(), expected, rtol=2e-5, atol=0)
    assert per_sample[-1] == 0.0  # SNR 0


@pytest.mark.parametrize("t", [0, 1])
def test_bf16_network_and_latents_really_get_noise(t):
    """bf16 has no number between 0.9961 and 1: noising there would add none at t = 0 and 1."""
    loss, denoiser = parts()
    x0, noise = draws()
    x0 = x0.bfloat16().float()
    idx = torch.full((4,), t)
    network = Recorded(lambda x, *given: toy_network(x.bfloat16(), *given))
    per_sample = loss.at(network, denoiser, x0.bfloat16(), TEXT, idx, noise)
    exact = float64_loss(x0, noise, idx, loss)
    level = loss.sigma_sampler.table.values[t].double()
    (seen,) = network.calls
    added = (seen.x.double() - level * x0.double()).std()
    assert per_sample.dtype == seen.x.dtype == torch.float32
    torch.testing.assert_close(
        added, (1 - level**2).sqrt() * noise.double().std(), rtol=0.01, atol=0
    )
    torch.testing.assert_close(per_sample.double(), exact, rtol=0.01, atol=0)


def test_fixed_frames_stay_clean_and_do_not_count():
    loss, denoiser = parts(fixed_frames=1)
    plain, _ = parts()
    x0, noise = draws()
    network = Recorded(toy_network)
    per_sample = loss.at(network, denoiser, x0, TEXT, IDX, noise)
    assert torch.equal(network.calls[0].x[:, :, :1], x0[:, :, :1])
    # The toy network sees every frame alone, so the other frame's loss is that of a clip without it.
    rest = plain.at(toy_network, denoiser, x0[:, :, 1:], TEXT, IDX, noise[:, :, 1:])
    torch.testing.assert_close(per_sample, rest, rtol=1e-6, atol=0)


def test_noise_is_drawn_by_slot():
    """The loss is that of the draws of its slots, whatever micro-batch they come in."""
    loss, denoiser = parts(offset_noise_level=0.1)
    x0, _ = draws()

    def with_draws(latents: torch.Tensor, rng: SlotRandom) -> torch.Tensor:
        noised = loss.add_noise(latents, rng)
        given = noised.latents, noised.alpha_sqrt, TEXT, noised.timesteps
        return loss.of(denoiser.denoise(toy_network, *given), noised)

    whole = SlotRandom(seed=3, step=7, slots=[0, 1, 2, 3], num_slots=4)
    together = with_draws(x0, whole)
    for slot in range(4):
        one = SlotRandom(seed=3, step=7, slots=[slot], num_slots=4)
        alone = with_draws(x0[slot : slot + 1], one)
        torch.testing.assert_close(alone, together[slot : slot + 1], rtol=1e-6, atol=0)
    idx = loss.sigma_sampler.sample(whole)
    noise, offset = whole.normal("noise", SHAPE), whole.normal("offset noise", (4,))
    same = loss.at(toy_network, denoiser, x0, TEXT, idx, noise, offset)
    torch.testing.assert_close(together, same, rtol=0, atol=0)


def test_all_frames_fixed_is_refused():
    loss, denoiser = parts(fixed_frames=2)
    x0, noise = draws()
    line = "fixed_frames=2 must be below the clip's 2 latent frames"
    assert_refused(lambda: loss.at(toy_network, denoiser, x0, TEXT, IDX, noise), line)

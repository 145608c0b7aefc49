"""Guiders and thresholding against upstream's numbers."""

import json

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.denoiser import Conditioning
from cogfast.diffusion.guidance import (
    DynamicCFG,
    IdentityGuider,
    NoDynamicThresholding,
    StaticThresholding,
    VanillaCFG,
)
from tests.diffusion.parts import ours


@pytest.mark.parametrize(
    ("name", "thresholding"),
    [
        ("NoDynamicThresholding", NoDynamicThresholding()),
        ("StaticThresholding", StaticThresholding()),
    ],
    ids=["none", "static"],
)
def test_thresholding_equals_upstream(golden, name, thresholding):
    stored = load_file(golden / "diffusion" / "guiders.safetensors")
    uncond, cond = ours(stored["x_u"]), ours(stored["x_c"])
    expected = ours(stored[f"thresh.{name}"])
    torch.testing.assert_close(thresholding(uncond, cond, 6.0), expected, rtol=0, atol=1e-5)
    guider = VanillaCFG(6.0, thresholding)
    out = guider(torch.cat([uncond, cond]), timestep=999, num_steps=50)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_dynamic_scale_by_timestep_equals_upstream(golden):
    """The scale does not rise evenly: it is 2.29 at the first step, then 2.54, 6.97, ..., as upstream's."""
    meta = json.loads((golden / "diffusion" / "meta.json").read_text())
    guider = DynamicCFG(scale=6, exp=5, num_steps=50)
    for t, expected in meta["DynamicCFG_scale_by_timestep_num_steps50"].items():
        assert guider.scale_at(int(t), num_steps=50) == pytest.approx(expected, abs=1e-9)
    stored = meta["samplers"]["VPSDEDPMPP2MSampler.shift3.0.dyn.n10"]["guidance_scales"]
    ten = guider.with_num_steps(50, 10)
    timesteps = range(999, 0, -100)
    for t, expected in zip(timesteps, stored, strict=True):
        assert ten.scale_at(t, num_steps=10) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("guider", [VanillaCFG(6.0), DynamicCFG(6, 5, 50)], ids=["cfg", "dynamic"])
def test_inputs_put_the_unconditional_first(guider):
    one, two = torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0)
    image, noise = torch.full((2, 1, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1, 1), 4.0)
    cond = Conditioning(text=one, condition_latents=image, ofs=torch.tensor([2.0]))
    uncond = Conditioning(text=two, condition_latents=noise, ofs=torch.tensor([5.0, 6.0]))
    given = guider.inputs(cond, uncond)
    assert given.text[:, 0, 0].tolist() == [2, 2, 1, 1]
    assert given.condition_latents.flatten().tolist() == [4, 4, 3, 3]
    assert given.ofs.tolist() == [5, 6, 2, 2]
    bare = guider.inputs(Conditioning(one), Conditioning(two))
    assert bare.condition_latents is None and bare.ofs is None
    assert guider.batch_factor == 2


def test_identity_guider_leaves_everything_as_it_is():
    guider = IdentityGuider()
    cond = Conditioning(torch.ones(2, 3, 4))
    assert guider.inputs(cond, None) is cond
    assert guider.inputs(cond, Conditioning(torch.zeros(2, 3, 4))) is cond
    x = torch.randn(2, 1, 1, 1, 1)
    assert guider(x, timestep=999, num_steps=50) is x
    assert guider.batch_factor == 1


def test_guidance_without_the_empty_caption():
    with pytest.raises(ValueError, match=r"unconditional conditioning .* use IdentityGuider"):
        VanillaCFG(6.0).inputs(Conditioning(torch.ones(1, 2, 3)), None)


def test_a_broken_exponent_is_refused():
    with pytest.raises(ValueError, match=r"exp=2.5 must be a whole number"):
        DynamicCFG(scale=6, exp=2.5, num_steps=50)

"""Guiders and thresholding against upstream's numbers."""

from __future__ import annotations

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


def ours(t: torch.Tensor) -> torch.Tensor:
    """[B, T, C, h, w] of the stored files as [B, C, T, h, w]."""
    return t.transpose(1, 2).contiguous()


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
    out = guider(torch.cat([uncond, cond]), timestep=999, step=0, num_steps=50)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


def test_dynamic_scale_by_timestep_equals_upstream(golden):
    """The scale does not rise evenly: it is 2.29 at the first step, then 2.54, 6.97, ..., as upstream's."""
    meta = json.loads((golden / "diffusion" / "meta.json").read_text())
    guider = DynamicCFG(scale=6, exp=5, num_steps=50)
    for t, expected in meta["DynamicCFG_scale_by_timestep_num_steps50"].items():
        assert guider.scale_at(int(t), step=0, num_steps=50) == pytest.approx(expected, abs=1e-9)
    stored = meta["samplers"]["VPSDEDPMPP2MSampler.shift3.0.dyn.n10"]["guidance_scales"]
    ten = guider.with_num_steps(50, 10)
    timesteps = range(999, 0, -100)
    for t, expected in zip(timesteps, stored, strict=True):
        assert ten.scale_at(t, step=0, num_steps=10) == pytest.approx(expected, abs=1e-9)


def test_dynamic_scale_by_step_rises_from_1():
    guider = DynamicCFG(scale=6, exp=2.5, num_steps=50, ramp="step")
    scales = [guider.scale_at(999 - 20 * i, step=i, num_steps=50) for i in range(51)]
    assert scales == sorted(scales)
    assert scales[0] == 1 and scales[50] == pytest.approx(7)
    # Computed by hand: (25 / 50)^2.5 = 0.1767767, 1 + 6 (1 - cos(0.1767767 pi)) / 2 = 1.4509
    assert scales[25] == pytest.approx(1.45091, abs=1e-4)


def test_dynamic_guider_applies_its_scale():
    guider = DynamicCFG(scale=6, exp=5, num_steps=50)
    uncond, cond = torch.zeros(2, 1, 1, 1, 1), torch.ones(2, 1, 1, 1, 1)
    out = guider(torch.cat([uncond, cond]), timestep=999, step=0, num_steps=50)
    torch.testing.assert_close(out, torch.full((2, 1, 1, 1, 1), 2.291487174551452))


@pytest.mark.parametrize("guider", [VanillaCFG(6.0), DynamicCFG(6, 5, 50)], ids=["cfg", "dynamic"])
def test_inputs_put_the_unconditional_first(guider):
    one, two = torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0)
    image, noise = torch.full((2, 1, 1, 1, 1), 3.0), torch.full((2, 1, 1, 1, 1), 4.0)
    cond = Conditioning(text=one, image_latents=image, ofs=torch.tensor([2.0]))
    uncond = Conditioning(text=two, image_latents=noise, ofs=torch.tensor([5.0, 6.0]))
    given = guider.inputs(cond, uncond)
    assert given.text[:, 0, 0].tolist() == [2, 2, 1, 1]
    assert given.image_latents.flatten().tolist() == [4, 4, 3, 3]
    assert given.ofs.tolist() == [5, 6, 2, 2]
    bare = guider.inputs(Conditioning(one), Conditioning(two))
    assert bare.image_latents is None and bare.ofs is None
    assert guider.batch_factor == 2


def test_identity_guider_leaves_everything_as_it_is():
    guider = IdentityGuider()
    cond = Conditioning(torch.ones(2, 3, 4))
    assert guider.inputs(cond, None) is cond
    assert guider.inputs(cond, Conditioning(torch.zeros(2, 3, 4))) is cond
    x = torch.randn(2, 1, 1, 1, 1)
    assert guider(x, timestep=999, step=0, num_steps=50) is x
    assert guider.batch_factor == 1


def test_guidance_without_the_empty_caption():
    with pytest.raises(ValueError, match=r"unconditional conditioning .* use IdentityGuider"):
        VanillaCFG(6.0).inputs(Conditioning(torch.ones(1, 2, 3)), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"exp": 2.5}, r"exp=2.5 must be a whole number"),
        ({"exp": 5, "num_steps": 0}, r"num_steps=0 must be 1 or more; use 50"),
        ({"exp": 5, "ramp": "index"}, r"ramp='index' must be 'timestep' or 'step'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DynamicCFG(**{"scale": 6, "num_steps": 50} | options)

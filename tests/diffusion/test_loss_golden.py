"""One training step's loss and gradients, model and all, against upstream's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cogfast.diffusion.denoiser import Conditioning
from cogfast.extensions.formats.sat_names import sat_name
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.train.assembly import assemble_diffusion
from tests.support.runs import run_of

WEIGHTS = {"t2v_5b": "t2v_5b_mp2", "t2v_2b": "t2v_2b", "i2v_1.5_5b": "i2v_1.5_5b"}


@pytest.mark.parametrize("case", WEIGHTS)
def test_training_step_equals_upstream(case: str, golden: Path) -> None:
    io = load_file(golden / case / "io.safetensors")
    sampled = load_file(golden / case / "every_13th.safetensors")
    config = run_of(golden / case / "config.yaml").config()
    transformer = build_transformer(config.model)
    load_transformer(transformer, golden / WEIGHTS[case])
    diffusion = assemble_diffusion(config)

    ours = lambda name: io[name].transpose(1, 2) if name in io else None  # [B, C, T, h, w]
    conditioning = Conditioning(io["context"], ours("concat_images"), io.get("ofs"))
    per_sample = diffusion.loss.at(
        transformer,
        diffusion.denoiser,
        ours("x"),
        conditioning,
        io["train.idx"],
        ours("train.noise"),
    )
    torch.testing.assert_close(per_sample, io["train.loss_per_sample"], rtol=1e-6, atol=0)

    per_sample.mean().backward()
    stored = {k: v.flatten() for k, v in (io | sampled).items() if k.startswith("train.grad.")}
    assert len(stored) >= 3 and stored.keys() & sampled.keys()
    gradients = {f"train.grad.{sat_name(n)}": p.grad for n, p in transformer.named_parameters()}
    for key, expected in stored.items():
        found = gradients[key].flatten()[:: 13 if key in sampled else 1]
        atol = 1e-5 * expected.abs().max().item() + 1e-8
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)

"""One training step's loss and gradients, model and all, against upstream's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from cogfast.config import load_config
from cogfast.diffusion.denoiser import Conditioning
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.formats.sat_names import sat_name
from cogfast.model.weights.load import load_transformer
from cogfast.train.assembly import assemble_diffusion
from conftest import COMPLETE, SUBSET

WEIGHTS = {"t2v_5b": "t2v_5b_mp2", "t2v_2b": "t2v_2b", "i2v_1.5_5b": "i2v_1.5_5b"}
# The project's own part of the golden files holds the training step of one model.
CASES = list(WEIGHTS) if COMPLETE.is_dir() else ["t2v_5b"]


@pytest.mark.parametrize("case", CASES)
def test_training_step_equals_upstream(case):
    golden: Path = COMPLETE if COMPLETE.is_dir() else SUBSET
    io = load_file(golden / case / "io.safetensors")
    config = load_config([golden / case / "config.yaml"])
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
    stored = {k.removeprefix("train.grad."): v for k, v in io.items() if "train.grad." in k}
    assert stored
    compared = 0
    for name, parameter in transformer.named_parameters():
        key = sat_name(name)
        if key in stored:
            expected = stored[key].view_as(parameter).float()
            atol = 1e-5 * expected.abs().max().item() + 1e-8
            torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=atol)
            compared += 1
    assert compared == len(stored)

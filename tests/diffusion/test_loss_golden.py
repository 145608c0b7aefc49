"""One training step's loss and gradients, model and all, against upstream's numbers."""

from pathlib import Path

import pytest
import torch

from cogfast.diffusion.denoiser import Conditioning
from cogfast.model.weights.names import sat_name
from tests.model.test_transformer_golden import CASES, load_golden
from tests.support.runs import diffusion_of


@pytest.mark.parametrize("case", CASES)
def test_training_step_equals_upstream(case: str, golden: Path) -> None:
    config, transformer, io = load_golden(golden, case)
    diffusion = diffusion_of(config)

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
    whole = {key: x.flatten() for key, x in io.items() if key.startswith("train.grad.")}
    sampled = {key: x for key, x in io.items() if key.startswith("every_13th.train.grad.")}
    assert len(whole | sampled) >= 3 and sampled
    gradients = {f"train.grad.{sat_name(n)}": p.grad for n, p in transformer.named_parameters()}
    for key, expected in (whole | sampled).items():
        found = gradients[key.removeprefix("every_13th.")].flatten()
        found = found if key in whole else found[::13]
        atol = 1e-5 * expected.abs().max().item() + 1e-8
        torch.testing.assert_close(found, expected, rtol=0, atol=atol)

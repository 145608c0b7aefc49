"""The transformer against what upstream's own code computed: outputs, losses, gradients.

Of the gradients of large tensors, every 13th number is stored. The 5B weights are stored as two
model-parallel files (in the second one, tensors that are the same in both are NaN).
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cogfast.config import Config
from cogfast.model.embeddings import sinusoid
from cogfast.model.transformer import DiffusionTransformer, build_transformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.names import sat_name
from tests.support.runs import run_of

CASES = ("t2v_2b", "t2v_5b", "i2v_1.5_5b")


def to_ours(video: Tensor | None) -> Tensor | None:
    """Swap the layouts of SAT, [B, T, C, h, w], and cogfast, [B, C, T, h, w]."""
    return None if video is None else video.transpose(1, 2)


def load_golden(golden: Path, name: str) -> tuple[Config, DiffusionTransformer, dict[str, Tensor]]:
    """Return a case's configuration, its network with upstream's weights, and the stored numbers."""
    config = run_of(golden / name / "config.yaml").config()
    transformer = build_transformer(config.model)
    report = load_transformer(transformer, golden / name)
    assert not report.missing and not report.unexpected, report
    io = load_file(golden / name / "io.safetensors")
    sampled = load_file(golden / name / "every_13th.safetensors")
    return config, transformer, io | {f"every_13th.{key}": x for key, x in sampled.items()}


@pytest.fixture(scope="module", params=CASES)
def case(request, golden: Path) -> tuple[str, DiffusionTransformer, dict[str, Tensor]]:
    _, transformer, io = load_golden(golden, request.param)

    def use_stored_sinusoid(_: torch.nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        # float32 exp rounds by machine, and the gradient of fc1 has its input as a factor; what
        # ours differs by is bounded in test_sinusoid
        return (io["act.time_embed_in"],)

    transformer.time_embedding.fc1.register_forward_pre_hook(use_stored_sinusoid)
    return request.param, transformer, io


def run(transformer: DiffusionTransformer, io: dict[str, Tensor], **changes: Tensor) -> Tensor:
    given = {"x": io["x"], "context": io["context"], "concat_images": io.get("concat_images")}
    given |= changes
    return transformer(
        to_ours(given["x"]),
        io["timesteps"],
        given["context"],
        to_ours(given["concat_images"]),
        io.get("ofs"),
    )


def test_sinusoid(case) -> None:
    _, _, io = case
    # 863 turns the last bit of a frequency (3e-8) into 2.6e-5
    torch.testing.assert_close(
        sinusoid(io["timesteps"], 128), io["act.time_embed_in"], atol=4e-5, rtol=0
    )


def test_output_and_activations(case) -> None:
    _, transformer, io = case
    seen = {}
    hooks = [
        transformer.time_embedding.register_forward_hook(
            lambda _, __, out: seen.update({"act.time_embed_out": out})
        ),
        transformer.blocks[-1].register_forward_hook(
            lambda _, __, out: seen.update({"act.hidden_before_final_layernorm": out})
        ),
    ]
    with torch.no_grad():
        output = run(transformer, io)
    for hook in hooks:
        hook.remove()
    torch.testing.assert_close(to_ours(output), io["output"], atol=1e-5, rtol=0)
    for name in seen.keys() & io.keys():
        scale = io[name].abs().max().item()
        torch.testing.assert_close(seen[name], io[name], atol=1e-5 * max(1.0, scale), rtol=0)


def test_other_sizes(case) -> None:
    name, transformer, io = case
    with torch.no_grad():
        image = io.get("concat_images")
        image = None if image is None else image[:, :2]
        output = run(transformer, io, x=io["short.x"], concat_images=image)
        torch.testing.assert_close(to_ours(output), io["short.output"], atol=1e-5, rtol=0)
        if name == "i2v_1.5_5b":
            image = io["reshaped.concat_images"]
            output = run(transformer, io, x=io["reshaped.x"], concat_images=image)
            torch.testing.assert_close(to_ours(output), io["reshaped.output"], atol=1e-5, rtol=0)


def test_loss_and_every_gradient(case) -> None:
    name, transformer, io = case
    x, context = io["x"].clone().requires_grad_(), io["context"].clone().requires_grad_()
    parameters = dict(transformer.named_parameters())
    for parameter in parameters.values():
        parameter.requires_grad_(True)
        parameter.grad = None
    loss = run(transformer, io, x=x, context=context).square().mean()
    loss.backward()
    assert loss.item() == pytest.approx(io["loss"].item(), rel=1e-6)

    ours = {f"grad.{sat_name(n)}": p.grad for n, p in parameters.items()}
    ours |= {"grad.input.x": x.grad, "grad.input.context": context.grad}
    ours = {key: gradient for key, gradient in ours.items() if gradient is not None}
    stored = {k for k in io if k.removeprefix("every_13th.").startswith("grad.")}
    # 2B's table of sines is no parameter upstream.
    table = f"grad.{sat_name('position_table.weight')}"
    assert {k.removeprefix("every_13th.") for k in stored} == ours.keys() - {table}
    ours |= {f"every_13th.{key}": gradient.flatten()[::13] for key, gradient in ours.items()}
    for key in stored:
        expected = io[key].float()
        relative = 2**-8 if io[key].dtype == torch.bfloat16 else 1e-5
        error = (ours[key].reshape(expected.shape) - expected).abs().max().item()
        assert error <= relative * expected.abs().max().item() + 1e-8, f"{name} {key}: {error}"
    without = {n for n, p in parameters.items() if p.grad is None}
    assert without == set(transformer.unused_parameter_names())

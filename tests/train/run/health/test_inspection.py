"""Inspection: numbers that are not finite, planted at known places, are named there."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cogfast.model.transformer import DiffusionTransformer
from cogfast.train.memory.activation_checkpointing import apply_policies
from cogfast.train.run.health.inspection import Finding, damaged_weights, inspect
from tests.support.ranks.nonfinite_ranks import Overflows
from tests.support.tiny_transformers import inputs, tiny

SAMPLES = ["a.mp4", "b.mp4"]


def model() -> DiffusionTransformer:
    return tiny("5b", num_layers=6).train()


def found(transformer: DiffusionTransformer, given: dict[str, Tensor] | None = None) -> Finding:
    given = inputs("5b") if given is None else given
    loss_of = lambda: transformer(**given).square().mean()
    damaged = damaged_weights(transformer.named_parameters())
    return inspect(transformer, given, loss_of, damaged)[0]


def test_finite_passes_have_no_places_and_change_nothing() -> None:
    transformer = model()
    before = {n: p.detach().clone() for n, p in transformer.named_parameters()}
    finding = found(transformer)
    assert finding.places == []
    with torch.no_grad():
        loss = transformer(**inputs("5b")).square().mean().item()
    assert finding.loss == loss
    assert finding.timesteps == inputs("5b")["timesteps"].tolist()
    assert all(
        torch.equal(p, before[n]) and p.grad is None for n, p in transformer.named_parameters()
    )
    hooks = [m for m in transformer.modules() if m._forward_hooks or m._forward_pre_hooks]
    assert hooks == []


def test_the_largest_activation_is_that_of_the_forward_pass() -> None:
    """Against plain hooks on the linears of a model whose fourth block has large weights."""
    transformer = model()
    with torch.no_grad():
        transformer.blocks[3].fc1.weight *= 1000
    peaks: dict[str, float] = {}
    for name, module in transformer.named_modules():
        if isinstance(module, torch.nn.Linear):
            note = lambda _, __, out, name=name: peaks.update({name: out.abs().max().item()})
            module.register_forward_hook(note)
    finding = found(transformer)
    assert max(peaks, key=peaks.__getitem__) == "blocks.3.fc1"
    assert finding.largest >= peaks["blocks.3.fc1"]
    assert finding.largest_at.startswith("blocks.3")


@pytest.mark.parametrize("policy", ["none", "pointwise", "full"])
def test_a_weight_of_block_3_is_named_with_the_op_behind_it(policy: str) -> None:
    transformer = model()
    apply_policies(transformer, [policy] * 6)
    with torch.no_grad():
        transformer.blocks[3].fc1.weight[5, 7] = math.inf
    weight, op = found(transformer).places
    assert weight == f"weights blocks.3.fc1.weight (1 inf of {4 * 128 * 128} values)"
    assert op.startswith("blocks.3.fc1: output of aten.")


def test_an_overflow_in_block_3_is_named_where_it_begins() -> None:
    """All weights are finite: the product of the attention's output projection overflows."""
    transformer = model()
    with torch.no_grad():
        transformer.blocks[3].attention.out.weight.fill_(3e38)
    (op,) = found(transformer).places
    assert op.startswith("blocks.3.attention.out: output of aten.")


def test_a_sample_with_a_nan_is_named() -> None:
    given = inputs("5b")
    given["latents"][1, 0, 0, 0, 0] = math.nan
    finding = found(model(), given)
    assert finding.places == [f"the batch's latents (1 NaN of {given['latents'].numel()} values)"]
    assert finding.bad_samples == [1]
    step = given["timesteps"][1].item()
    assert finding.text(SAMPLES).startswith(
        f"samples: b.mp4 at timestep {step}; not finite: the batch"
    )


def test_a_text_embedding_that_the_encoder_returns_is_an_input() -> None:
    given = inputs("5b")
    batch = {key: value.clone() for key, value in given.items()}
    given["text"][0] = math.inf
    transformer = model()
    loss_of = lambda: transformer(**given).square().mean()
    finding, seen = inspect(transformer, batch, loss_of)
    assert finding.places == ["the network's input text (320 inf of 640 values)"]
    assert finding.bad_samples == [0]
    assert torch.equal(seen["text"], given["text"])


def test_a_gradient_that_overflows_is_named() -> None:
    """A finite loss whose gradient overflows in the backward pass of block 2."""

    transformer = model()
    transformer.blocks[2].register_forward_hook(lambda _, __, out: Overflows.apply(out))
    finding = found(transformer)
    assert math.isfinite(finding.loss)
    (place,) = finding.places
    assert place.startswith("the gradient of ")
    assert "blocks.2." in place
    assert not finding.bad_samples

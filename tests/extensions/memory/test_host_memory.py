"""Encoders that wait in host memory: their weights are on the device only while they encode."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cogfast.core.device_memory import HostWeights
from cogfast.core.shapes import PatchSize
from cogfast.core.slot_random import SlotRandom
from cogfast.extensions.plan.memory import GIB
from cogfast.model.keys import ModelKeys
from cogfast.train.encode import Encoder
from cogfast.train.frozen_encoders import EncodeOverrides
from tests.extensions.plan.test_memory import CACHED, plan_of

# On the CPU itself the copies are made, too.
CPU = torch.device("cpu")
OFFLOADED = ("args.offload_encoders=true",)


def module() -> nn.Module:
    layer = nn.BatchNorm1d(8)  # has parameters and buffers
    nn.init.normal_(layer.weight)
    return layer


def addresses(layer: nn.Module) -> list[int]:
    return [t.data_ptr() for t in (*layer.parameters(), *layer.buffers())]


def test_weights_come_and_go_without_a_change() -> None:
    layer = module()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    weights, first = HostWeights(layer, CPU), addresses(layer)
    weights.leave()
    waiting = addresses(layer)
    assert not set(waiting) & set(first)
    for _ in range(2):
        weights.fetch()
        assert not set(waiting) & set(addresses(layer))
        weights.leave()
        assert addresses(layer) == waiting  # the host's copies are made once
    found = layer.state_dict()
    assert all(torch.equal(found[name], value) for name, value in before.items())


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))
        self.seen: list[int] = []

    def forward(self, captions: list[str]) -> Tensor:
        self.seen.append(self.weight.data_ptr())
        return torch.zeros(len(captions), 3, 4)


@pytest.mark.parametrize("fails", [False, True])
def test_an_encoder_is_on_the_device_while_it_encodes(fails: bool) -> None:
    text = Text()

    def own(encoder: Encoder, rng: object, caption: str) -> Tensor:
        embedding = encoder.text_encoder([caption])
        if fails:
            raise OSError("no embedding")
        return embedding

    build: Any = lambda: text
    given = {"device": CPU, "is_brief": True, "overrides": EncodeOverrides(encode_text=own)}
    encoder = Encoder(lambda: None, build, ModelKeys(), PatchSize(1, 2, 2), **given)
    encoder.encode_text(["first"])
    waiting, rng = text.weight.data_ptr(), SlotRandom(0, 0, [0], 1, CPU)
    for encode in (lambda: encoder.encode_captions(["a"], rng), lambda: encoder.encode_text(["b"])):
        with pytest.raises(OSError) if fails and len(text.seen) == 1 else nullcontext():
            encode()
        assert text.weight.data_ptr() == waiting != text.seen[-1]
    assert len(text.seen) == 3


def test_what_only_an_evaluation_uses_leaves_with_it() -> None:
    text = Text()
    build: Any = lambda: text
    encoder = Encoder(lambda: None, build, ModelKeys(), PatchSize(1, 2, 2), device=CPU)
    with encoder.visit():
        encoder.encode_text(["a"])
        used = text.weight.data_ptr()
    assert text.weight.data_ptr() != used, "it waits in host memory"
    values = text.weight.clone()
    # A training step uses it: from now on it stays, through evaluations, too.
    encoder.encode_text(["b"])
    here = text.weight.data_ptr()
    with encoder.visit():
        encoder.encode_text(["c"])
    assert text.weight.data_ptr() == here == text.seen[-1] and torch.equal(text.weight, values)


def test_the_plan_has_encoders_in_their_own_phases_alone() -> None:
    words = (*CACHED, "args.eval_interval=5", "args.eval_prompts=[a]")
    for given in (("args.activation_checkpointing=full",), words):
        plain, offloaded = (plan_of("_5b", *given, *more) for more in ((), OFFLOADED))
        parts = {phase.name: phase.parts for phase in offloaded.phases}
        t5, vae = plain.setup.encoders.text_bytes, plain.setup.encoders.stage_bytes
        assert parts["training"]["encoders"] == parts["optimizer step"]["encoders"] == 0
        assert parts["encoding captions"]["encoders"] == t5 > 8 * GIB
        clips = "decoding" if given is words else "encoding clips"
        assert parts[clips]["encoders"] == vae
        assert offloaded.setup.host_parts(offloaded.policies)["encoders"] == t5 + vae
        assert plain.setup.host_parts(plain.policies)["encoders"] == 0

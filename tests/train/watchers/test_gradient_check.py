"""LoRA that can learn nothing is refused, by an answer of all ranks of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import torch

from cogfast.model.transformer import assemble_transformer
from cogfast.train.watchers.gradient_check import lora_cannot_learn
from tests.support.tiny_transformers import FAMILY


def test_the_modulation_of_all_ranks_counts() -> None:
    """A rank whose part of the modulation is zero does not refuse what another rank has trained."""
    transformer = assemble_transformer(replace(FAMILY["5b"], num_layers=1, lora_rank=2))
    with torch.no_grad():
        transformer.output.weight.fill_(1.0)
        for name, parameter in transformer.blocks.named_parameters():
            if ".modulation." in name:
                parameter.zero_()
    own = []
    others = SimpleNamespace(decide=lambda flag: own.append(flag) or True)
    assert lora_cannot_learn(transformer, others) is None
    alone = SimpleNamespace(decide=lambda flag: flag)
    assert lora_cannot_learn(transformer, alone) == "the blocks' modulation is zero"
    assert own == [False]

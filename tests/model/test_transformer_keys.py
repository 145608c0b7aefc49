"""Names, shapes, counts and trainable sets of upstream's eight training configs, on meta."""

import json
from pathlib import Path

import pytest
import torch

from cogfast.extensions.formats.sat import merge_model_parallel, to_sat_state_dict
from cogfast.model.transformer import build_transformer
from cogfast.model.weights.names import from_sat_name, sat_name
from tests.support.runs import run_of

NAMES = "_2b _2b_lora _5b _5b_lora _5b_i2v _5b_i2v_lora 1.5_5b 1.5_5b_i2v"
CONFIGS = [f"cogvideox{name}" for name in NAMES.split()]


@pytest.mark.parametrize("name", CONFIGS)
def test_state_dict_is_upstreams(name: str, golden: Path, sat_configs: Path) -> None:
    upstream = json.loads((golden / "keys" / f"{name}.json").read_text())
    with torch.device("meta"):
        transformer = build_transformer(run_of(sat_configs / f"{name}.yaml").config().model)
    state = to_sat_state_dict(transformer)
    parameters = {sat_name(n): p for n, p in transformer.named_parameters()}

    assert {key: list(t.shape) for key, t in state.items()} == upstream["keys"]
    assert set(state) - set(parameters) == set(upstream["buffers"])
    assert sum(p.numel() for p in parameters.values()) == upstream["total_params"]
    ours = {from_sat_name(key) for key in upstream["keys"] if key not in upstream["buffers"]}
    assert ours == {n for n, _ in transformer.named_parameters()}

    trainable = {key for key, p in parameters.items() if p.requires_grad}
    if upstream["trainable_parameters"] is None:
        assert set(parameters) - trainable == set(upstream["frozen_parameters"])
    else:
        assert trainable == set(upstream["trainable_parameters"])
    assert sum(parameters[k].numel() for k in trainable) == upstream["trainable_params"]


# SAT splits qkv and fc1 by their outputs, with the B of an adapter, and out and fc2 by their inputs, with A.
@pytest.mark.parametrize(
    ("linear", "split", "dim"),
    [
        ("attention.qkv", "matrix_B", 0),
        ("fc1", "matrix_B", 0),
        ("attention.out", "matrix_A", 1),
        ("fc2", "matrix_A", 1),
    ],
)
def test_adapters_of_two_files_are_joined_as_their_linears(
    linear: str, split: str, dim: int
) -> None:
    whole = torch.randn(4, 6)
    for name in ("matrix_A", "matrix_B"):
        files = list(whole.chunk(2, dim)) if name == split else [whole, whole]
        joined = merge_model_parallel(f"blocks.1.{linear}.{name}.0", files)
        assert torch.equal(joined, whole)

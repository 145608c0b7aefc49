"""SAT's network_config in both its forms, and the tables of names."""

import copy
from pathlib import Path

import pytest
import yaml

from cogfast.config.components import resolve
from cogfast.config.sat_network import transformer_arguments
from cogfast.core.shapes import PatchSize
from tests.support.refusals import assert_refused, refusals

# Hidden size, layers, heads, in channels, text length, patch, position, interpolation, ofs, LoRA:
# read off the published model cards and files by hand.
FAMILY = {
    "cogvideox_2b": (1920, 30, 30, 16, 226, (1, 2, 2), "sincos", 1.875, None, None),
    "cogvideox_2b_lora": (1920, 30, 30, 16, 226, (1, 2, 2), "sincos", 1.875, None, 128),
    "cogvideox_5b": (3072, 42, 48, 16, 226, (1, 2, 2), "rotary", None, None, None),
    "cogvideox_5b_lora": (3072, 42, 48, 16, 226, (1, 2, 2), "rotary", None, None, 128),
    "cogvideox_5b_i2v": (3072, 42, 48, 32, 226, (1, 2, 2), "rotary", None, None, None),
    "cogvideox_5b_i2v_lora": (3072, 42, 48, 32, 226, (1, 2, 2), "rotary", None, None, 256),
    "cogvideox1.5_5b": (3072, 42, 48, 16, 224, (2, 2, 2), "rotary", None, None, None),
    "cogvideox1.5_5b_i2v": (3072, 42, 48, 32, 224, (2, 2, 2), "rotary", None, 512, None),
}


@pytest.fixture
def network(sat_configs):
    def params(model: str) -> dict:
        config = yaml.safe_load((sat_configs / f"{model}.yaml").read_text())
        return copy.deepcopy(config["model"]["network_config"]["params"])

    return params


@pytest.mark.parametrize("model", FAMILY)
def test_the_family(network, model):
    fields = transformer_arguments(network(model))
    width, layers, heads, channels, length, patch, position, interpolation, ofs, rank = FAMILY[
        model
    ]
    assert (fields["hidden_size"], fields["num_layers"]) == (width, layers)
    assert (fields["num_attention_heads"], fields["in_channels"]) == (heads, channels)
    assert (fields["text_length"], fields["out_channels"]) == (length, 16)
    assert fields["patch_size"] == PatchSize(*patch)
    assert fields["position"] == position
    assert fields.get("height_interpolation") == interpolation
    assert fields.get("ofs_embed_dim") == ofs
    assert fields.get("lora_rank") == rank
    assert fields.get("lora_alpha", 1.0) == 1.0  # lora2's default: the scale is 1/r
    assert fields.get("learnable_position", False) == ("5b_i2v" in model and "1.5" not in model)
    assert "checkpoint_activations" not in fields  # the trainer's, not the network's


def test_patch_size_as_number_or_list(network):
    params = network("cogvideox_5b")
    number = transformer_arguments(params)["patch_size"]
    assert transformer_arguments(params | {"patch_size": [1, 2, 2]})["patch_size"] == number
    line = "patch_size=[2, 2] must be a whole number from 1 to 64 or a list"
    assert_refused(lambda: transformer_arguments(params | {"patch_size": [2, 2]}), line)


def test_interpolation_at_either_place(network):
    inside = network("cogvideox_2b")
    outside = network("cogvideox_2b")
    position = outside["modules"]["pos_embed_config"]["params"]
    for name in ("height_interpolation", "width_interpolation"):
        outside[name] = position.pop(name)
    assert transformer_arguments(outside) == transformer_arguments(inside)
    both = inside | {"height_interpolation": 2.0}
    line = "height_interpolation=1.875 but <...>=2.0; keep one"
    assert_refused(lambda: transformer_arguments(both), line)


def test_rotary_ignores_interpolation_as_sat_does_and_says_so(network):
    unused: dict[str, str] = {}
    params = network("cogvideox1.5_5b") | {"width_interpolation": 2.0}
    fields = transformer_arguments(params, "net", unused)
    assert "width_interpolation" not in fields
    assert "ignores" in unused["net.width_interpolation"]


def test_time_embedding_is_as_wide_as_the_model_by_default(network):
    params = network("cogvideox_5b")
    del params["time_embed_dim"]
    assert transformer_arguments(params)["time_embed_dim"] == 3072


def change(params: dict, key: str, value: object) -> dict:
    *path, last = key.split(".")
    node = params
    for name in path:
        node = node.setdefault(name, {})
    node[last] = value
    return params


def test_sats_own_default_counts_where_a_key_is_left_out():
    node = {"target": "data_video.SFTDataset", "params": {"fps": 8}}
    assert resolve(node)[1] == {"fps": 8, "skip_frms_num": 3}
    node["params"]["skip_frms_num"] = 0
    assert resolve(node)[1] == {"fps": 8, "skip_frms_num": 0}


@refusals(Path(__file__).with_name("refusals_network.txt"))
def test_bad_network_keys(network, refusal):
    key, _, value = refusal.words[0].partition("=")
    params = change(network(refusal.base), key, yaml.safe_load(value))
    assert_refused(lambda: transformer_arguments(params, "net"), refusal.line)

"""Adapters as weights: merged against the libraries' forward, refused where they do not fit, and
trained on."""

import json
from dataclasses import replace
from pathlib import Path

import torch

from cogfast.extensions.formats.adapters import (
    adapters_of,
    check_config,
    check_fits,
    merge_lora,
    only_adapters,
    with_adapters,
    without_adapters,
)
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from tests.extensions.formats.test_peft import source_of
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_transformers import FAMILY, inputs, tiny


def test_adapters_of_any_linear_merge_as_the_library_applies_them(tmp_path: Path) -> None:
    from peft import LoraConfig

    theirs = diffusers_model("1.5_5b_i2v")
    theirs.norm_out.norm.eps = 1e-6  # SAT's
    theirs.save_pretrained(tmp_path / "base")
    targets = ["to_q", "to_v", "ff.net.0.proj", "ff.net.2", "norm1.linear", "norm2.linear"]
    targets += ["norm_out.linear", "proj_out", "linear_1", "text_proj", "patch_embed.proj"]
    torch.manual_seed(0)
    rest = {"init_lora_weights": False, "alpha_pattern": {"proj_out": 7}}
    theirs.add_adapter(LoraConfig(r=4, lora_alpha=1, target_modules=targets, **rest))
    theirs.save_lora_adapter(tmp_path / "lora")
    theirs.set_adapters(["default"], [0.5])

    adapter = open_source(tmp_path / "lora")
    assert adapters_of(adapter).targets == ("to_q", "to_v", "ff.net.0.proj", "ff.net.2")
    base = open_source(tmp_path / "base")
    ours = tiny("1.5_5b_i2v")
    load_transformer(ours, tmp_path / "base")
    given = inputs("1.5_5b_i2v")
    with torch.no_grad():
        plain = ours(**given)
        merged = merge_lora(base, adapter, scale=0.5)
        for name in merged.shapes:
            ours.get_parameter(name).copy_(merged.read(name, None))
        output, expected = ours(**given), run_diffusers("1.5_5b_i2v", theirs, given)
    assert (plain - expected).abs().max() > 1e-1
    assert (output - expected).abs().max() < 1e-5
    line = "also adapts linear, linear_1, norm1.linear, <...>adapters of <...>, ff.net.2 only; merge it"
    assert_refused(lambda: check_config(adapter, FAMILY["1.5_5b_i2v"]), line)


def test_merging_rounds_when_it_is_written() -> None:
    model = tiny("2b", seed=5, lora_rank=4, lora_alpha=3.0)
    source = source_of(model, 3.0, torch.bfloat16)
    merged = merge_lora(without_adapters(source), only_adapters(source))
    name = "blocks.1.attention.qkv.weight"
    qkv = dict(model.blocks[1].attention.qkv.bfloat16().double().named_parameters())
    change = torch.cat([qkv[f"matrix_B.{i}"] @ qkv[f"matrix_A.{i}"] for i in range(3)])
    expected = qkv["original.weight"] + 0.75 * change
    found = merged.read(name, None)
    assert found.dtype == torch.float32 and merged.dtypes[name] == torch.bfloat16
    assert (found - expected).abs().max() < 1e-6
    written = merged.as_written(None).read(name, None)
    left = (written.double() - qkv["original.weight"]).flatten()
    error = (left - 0.75 * change.flatten()).norm() / (0.75 * change.norm())
    assert 0 < error < 0.1  # bfloat16 has 8 bits


def test_adapters_and_their_base_are_distinguished_and_joined() -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4, lora_targets=("to_q", "to_out.0")), 3.0)
    joined = with_adapters(without_adapters(source), only_adapters(source))
    assert joined.shapes == source.shapes and joined.lora_alpha == 3.0
    assert all(torch.equal(joined.read(n, None), source.read(n, None)) for n in source.shapes)


def test_an_adapter_of_another_model_is_refused() -> None:
    five = only_adapters(source_of(tiny("5b", lora_rank=2, num_layers=3), 1.0))
    shapes = source_of(tiny("5b"), None).shapes
    line = "has 2 layers <...> 24 LoRA tensors of 3 layers of width 128"
    assert_refused(lambda: check_fits(five, shapes), line)
    block = "blocks.{}.attention.qkv.matrix_A.0"
    real = {block.format(i): (128, 3072) for i in range(42)}
    real |= {n.replace("_A", "_B"): (3072, 128) for n in real}
    blocks = {f"blocks.{i}.attention.qkv.weight": (5760, 1920) for i in range(30)}
    of_5b = replace(five, shapes=real, dtypes=dict.fromkeys(real, torch.float32))
    line = "has 30 <...> of width 1920: <...> 42 layers of width 3072 are a 5B adapter;"
    assert_refused(lambda: check_fits(of_5b, blocks | {"patch_embedding.weight": (1920, 64)}), line)
    assert_refused(lambda: only_adapters(source_of(tiny("5b"), None)), "has no LoRA tensors")


@refusals(Path(__file__).with_name("refusals.txt"), "a config of adapters")
def test_a_config_that_does_not_fit_gets_its_line(refusal: Refusal) -> None:
    given = json.loads(refusal.words[0])
    changes = {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}
    config = replace(FAMILY["5b"], lora_rank=2, lora_alpha=6.0, lora_targets=("to_q", "to_v"))
    adapter = only_adapters(source_of(tiny("5b", lora_rank=2, lora_targets=("to_q", "to_v")), 6.0))
    check_config(adapter, config)
    check_config(adapter, replace(config, lora_targets=("to_q", "to_k", "to_v")))
    check_config(replace(adapter, lora_alpha=None), config)  # SAT's files do not say
    assert_refused(lambda: check_config(adapter, replace(config, **changes)), refusal.line)

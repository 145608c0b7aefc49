"""Adapters as weights: merged against the libraries' forward, extracted, refused where they do not
fit, and trained on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.formats.peft import write_peft
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.lora.adapters import (
    MergeRounding,
    adapters_of,
    check_config,
    check_fits,
    merge_lora,
    only_adapters,
    with_adapters,
    without_adapters,
)
from cogfast.model.weights.lora.extract import extract_lora
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.model.weights.test_peft import source_of
from tests.support.tiny_transformers import FAMILY, inputs, tiny


def fill(transformer: DiffusionTransformer, source: WeightSource) -> DiffusionTransformer:
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            parameter.copy_(source.read(name, None).reshape(parameter.shape))
    return transformer


def test_merged_weights_give_the_adapted_output() -> None:
    targets = ("to_k", "to_out.0", "ff.net.0.proj", "ff.net.2")
    adapted = tiny("5b_i2v", seed=5, lora_rank=4, lora_alpha=3.0, lora_targets=targets)
    source = source_of(adapted, 3.0)
    merged = merge_lora(without_adapters(source), only_adapters(source))
    assert merged.shapes.keys() == dict(tiny("5b_i2v").named_parameters()).keys()
    given = inputs("5b_i2v")
    with torch.no_grad():
        expected = adapted(**given)
        assert (fill(tiny("5b_i2v"), merged)(**given) - expected).abs().max() < 1e-5
        plain = fill(tiny("5b_i2v"), without_adapters(source))(**given)
    assert (plain - expected).abs().max() > 1e-2


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
    with pytest.raises(
        ValueError,
        match=r"also adapts [^;]*norm1.linear, .*adapters of .*, ff.net.2 only; merge it",
    ):
        check_config(adapter, FAMILY["1.5_5b_i2v"])


def test_merging_rounds_when_it_is_written() -> None:
    model = tiny("2b", seed=5, lora_rank=4, lora_alpha=3.0)
    source = source_of(model, 3.0, torch.bfloat16)
    rounding = MergeRounding(None)
    merged = merge_lora(without_adapters(source), only_adapters(source), rounding=rounding)
    name = "blocks.1.attention.qkv.weight"
    qkv = dict(model.blocks[1].attention.qkv.bfloat16().double().named_parameters())
    change = torch.cat([qkv[f"matrix_B.{i}"] @ qkv[f"matrix_A.{i}"] for i in range(3)])
    expected = qkv["original.weight"] + 0.75 * change
    found = merged.read(name, None)
    assert found.dtype == torch.float32 and merged.dtypes[name] == torch.bfloat16
    assert (found - expected).abs().max() < 1e-6
    written = merged.as_written(None).read(name, None)
    left = (written.double() - qkv["original.weight"]).flatten()
    kept = left @ change.flatten() / (0.75 * change.square().sum())
    error = (left - 0.75 * change.flatten()).norm() / (0.75 * change.norm())
    assert 0 < error < 0.1  # bfloat16 has 8 bits
    assert f"keeps {kept:.1%} of the adapters' change" in rounding.report()
    assert f"an error of {error:.1%} of the change's norm" in rounding.report()


def test_a_change_below_half_a_step_does_not_survive_rounding() -> None:
    """1 + 2^-9 is 1 in bfloat16 and itself in float16, which has 11 bits."""
    weight, merged = torch.ones(4, 4, dtype=torch.bfloat16), torch.full((4, 4), 1 + 2.0**-9)
    for dtype, kept in ((None, 0), (torch.bfloat16, 0), (torch.float16, 100)):
        rounding = MergeRounding(dtype)
        rounding.add("a", weight, merged)
        assert f"keeps {kept}.0% of" in rounding.report()
        assert f"an error of {100 - kept}.0%" in rounding.report()
    exact = MergeRounding(torch.float32)
    exact.add("a", weight, merged)
    assert exact.report() is None


def test_adapters_and_their_base_are_distinguished_and_joined() -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4, lora_targets=("to_q", "to_out.0")), 3.0)
    joined = with_adapters(without_adapters(source), only_adapters(source))
    assert joined.shapes == source.shapes and joined.lora_alpha == 3.0
    assert all(torch.equal(joined.read(n, None), source.read(n, None)) for n in source.shapes)


def test_an_adapter_of_another_model_is_refused() -> None:
    five = only_adapters(source_of(tiny("5b", lora_rank=2, num_layers=3), 1.0))
    shapes = source_of(tiny("5b"), None).shapes
    with pytest.raises(
        ValueError, match=r"24 LoRA tensors belong to 3 layers of width 128: .* 2 of"
    ):
        check_fits(five, shapes)
    wide = only_adapters(
        source_of(tiny("5b", lora_rank=2, hidden_size=256, num_attention_heads=4), 1.0)
    )
    with pytest.raises(ValueError, match=r"16 LoRA .* 2 layers of width 256: .* 2 of width 128"):
        merge_lora(source_of(tiny("5b"), None), wide)
    block = "blocks.{}.attention.qkv.matrix_A.0"
    real = {block.format(i): (128, 3072) for i in range(42)}
    real |= {n.replace("_A", "_B"): (3072, 128) for n in real}
    blocks = {f"blocks.{i}.attention.qkv.weight": (5760, 1920) for i in range(30)}
    with pytest.raises(
        ValueError, match=r"42 layers of width 3072: this is a 5B adapter, the m.* 30"
    ):
        of_5b = replace(five, shapes=real, dtypes=dict.fromkeys(real, torch.float32))
        check_fits(of_5b, blocks | {"patch_embedding.weight": (1920, 64)})
    with pytest.raises(ValueError, match="has no LoRA tensors"):
        only_adapters(source_of(tiny("5b"), None))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"lora_rank": None},
            r"8 LoRA tensors, but .*; add .*lora_config with params r: 2, lora_alpha: 6",
        ),
        ({"lora_rank": 4}, r"rank 2 and alpha 6, the config has r=4 .* set r: 2, lora_alpha: 6"),
        ({"lora_alpha": 1.0}, r"lora_alpha=1; set r: 2, lora_alpha: 6 in model.network_config"),
        ({"lora_targets": ("to_q",)}, r"set target_modules: \[to_q, to_v\]"),
        ({"lora_layers": (0,)}, r"adapters in layers \[0, 1\], the .* set layer_range: \[0, 1\]"),
        ({"num_layers": 1}, r"8 LoRA tensors belong to 2 layers of width 128: .* the model has 1"),
        (
            {"hidden_size": 64},
            r"2 layers of width 128: .* the model has 2 of width 64; use the base",
        ),
    ],
    ids=["none", "rank", "alpha", "targets", "layers", "depth", "width"],
)
def test_a_config_that_does_not_fit_gets_its_line(changes: dict, match: str) -> None:
    config = replace(FAMILY["5b"], lora_rank=2, lora_alpha=6.0, lora_targets=("to_q", "to_v"))
    adapter = only_adapters(source_of(tiny("5b", lora_rank=2, lora_targets=("to_q", "to_v")), 6.0))
    check_config(adapter, config)
    check_config(adapter, replace(config, lora_targets=("to_q", "to_k", "to_v")))
    check_config(replace(adapter, lora_alpha=None), config)  # SAT's files do not say
    with pytest.raises(ValueError, match=match):
        check_config(adapter, replace(config, **changes))


def test_a_merged_lora_is_found_again(tmp_path: Path) -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4, lora_alpha=3.0), 3.0)
    base = without_adapters(source)
    tuned = merge_lora(base, only_adapters(source))
    extraction = extract_lora(tuned, base, rank=4)
    write_peft(extraction.source, tmp_path / "lora")
    assert min(extraction.kept.values()) > 0.99999 and len(extraction.kept) == 8
    assert not extraction.lost
    again = merge_lora(base, open_source(tmp_path / "lora"))
    for name in base.shapes:
        torch.testing.assert_close(
            again.read(name, None), tuned.read(name, None), rtol=0, atol=2e-6
        )


def test_extraction_is_the_best_of_its_rank_and_says_what_it_loses() -> None:
    base, tuned = source_of(tiny("5b", seed=1), None), source_of(tiny("5b", seed=2), None)
    with torch.no_grad():
        extraction = extract_lora(tuned, base, rank=24)
    source = extraction.source
    name = "blocks.1.attention.qkv.matrix_A.2"
    a, b = source.read(name, None), source.read(name.replace("_A", "_B"), None)
    weight = "blocks.1.attention.qkv.weight"
    change = (tuned.read(weight, None) - base.read(weight, None))[256:].double()
    singular = torch.linalg.svdvals(change)
    left = (change - b.double() @ a.double()).norm()
    best = singular[24:].norm()
    assert best <= left <= 1.001 * best
    kept = math.sqrt(1 - (left / change.norm()) ** 2)
    assert extraction.kept["blocks.1 to_v"] == pytest.approx(kept, abs=1e-4)
    # everything but the weights of QKV and `out` of two blocks
    assert set(extraction.lost) == set(base.shapes) - {
        f"blocks.{i}.attention.{linear}.weight" for i in range(2) for linear in ("qkv", "out")
    }
    assert f"lost are the changes of {len(extraction.lost)} other tensors" in extraction.report()
    with pytest.raises(ValueError, match="--rank 129 must be from 1 to 128"):
        extract_lora(tuned, base, rank=129)
    with pytest.raises(
        ValueError, match=r"not of one model: patch_embedding.weight has shapes \[128"
    ):
        extract_lora(tuned, source_of(tiny("5b_i2v"), None), rank=4)

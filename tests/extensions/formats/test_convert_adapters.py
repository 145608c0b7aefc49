"""`cogfast convert` with LoRA adapters, through files of every kind."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from cogfast.extensions.formats.convert import convert
from cogfast.model.lora import is_lora_parameter
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from cogfast.model.weights.tensor_files import Outgoing
from tests.model.test_lora import save_as_sat
from tests.support.tiny_transformers import inputs, tiny

HEADS = {"num_attention_heads": 4}  # 4 model-parallel files have one each


def save_pair(family: str, folder: Path, **lora: object) -> tuple[torch.nn.Module, Path, Path]:
    """A model with adapters, its SAT checkpoint, and that of its base."""
    adapted = tiny(family, seed=5, lora_rank=4, **lora, **HEADS).bfloat16()
    save_as_sat(adapted, folder / "lora")
    plain = tiny(family, **HEADS).bfloat16()
    state = {n.replace(".original.", "."): p for n, p in adapted.named_parameters()}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(state[name])
    save_as_sat(plain, folder / "base")
    return adapted, folder / "lora", folder / "base"


def module_of(file: Path) -> dict[str, torch.Tensor]:
    return torch.load(file, weights_only=True)["module"]


def header_of(file: Path) -> str:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()["lora_adapter_metadata"]


def alpha_of(peft: Path) -> float:
    header = json.loads(header_of(peft / "pytorch_lora_weights.safetensors"))
    return header["transformer.lora_alpha"]


@pytest.mark.parametrize("family", ["2b", "5b_i2v", "1.5_5b_i2v"])
def test_sat_lora_to_peft_to_sat_lora_is_bit_exact(family: str, tmp_path: Path) -> None:
    """Every tensor of every file, at model-parallel sizes 1 and 4, including the base's. Both ways the strength
    is a power of two, which changes no digit."""
    _, lora, base = save_pair(family, tmp_path)
    for size in (1, 4):
        first, peft, again = (tmp_path / f"{what} {size}" for what in ("first", "peft", "again"))
        convert(lora, first, "sat", model_parallel_size=size)
        convert(first, peft, "peft")
        assert alpha_of(peft) == 4  # the rank: alpha / r is in the matrices
        assert open_source(peft).lora_alpha == 4
        convert(base, again, "sat", add_lora=str(peft), model_parallel_size=size)
        files = sorted(first.rglob("*.pt"))
        assert len(files) == size
        for file in files:
            expected, found = module_of(file), module_of(again / file.relative_to(first))
            assert expected.keys() == found.keys()
            assert sum(map(is_lora_parameter, expected)) == 16
            for key, tensor in expected.items():
                assert tensor.dtype == found[key].dtype and torch.equal(tensor, found[key]), key


def test_the_strength_of_a_sat_checkpoint_is_what_its_config_says(tmp_path: Path, log) -> None:
    """alpha is in none of SAT's files: 1, or --lora-alpha; and merging gives the same output."""
    adapted, lora, base = save_pair("5b_i2v", tmp_path, lora_alpha=3.0)
    adapted.float()
    given = inputs("5b_i2v")
    convert(lora, tmp_path / "peft", "peft", lora_alpha=3.0, dtype="float32", verify=True)
    assert alpha_of(tmp_path / "peft") == 4
    assert "rank 4, alpha 3.0, 2 layers, to_q, to_k, to_v, to_out.0" in log.text
    assert "16 tensors read back, all equal to the source's bit for bit" in log.text
    sources = {
        "own": {"src": lora, "merge_lora": "", "lora_alpha": 3.0},
        "file": {"src": base, "merge_lora": str(tmp_path / "peft")},
    }
    with torch.no_grad():
        expected = adapted(**given)
        for name, options in sources.items():
            for dtype, tolerance in (("float32", 1e-5), (None, 3e-2)):  # None: bfloat16
                target = tmp_path / f"{name} {dtype}"
                convert(dst=target, to="diffusers", dtype=dtype, **options)
                merged = tiny("5b_i2v", **HEADS)
                load_transformer(merged, target)
                assert (merged(**given) - expected).abs().max() < tolerance


@pytest.mark.parametrize(("alpha", "dtype"), [(1.0, None), (7.0, "float16")])
def test_verify_reads_adapters_back(
    alpha: float, dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts what is written, and refuses another number."""
    _, lora, _ = save_pair("5b", tmp_path)
    convert(lora, tmp_path / "peft", "peft", lora_alpha=alpha, dtype=dtype, verify=True)
    plain = Outgoing.bytes
    monkeypatch.setattr(
        Outgoing,
        "bytes",
        lambda t: plain(t) if "1.attn1.to_v.lora_B" not in t.name else bytes(t.nbytes),
    )
    with pytest.raises(ValueError, match=r"blocks.1.attention.qkv.matrix_B.2 differs from the so"):
        convert(lora, tmp_path / "wrong", "peft", lora_alpha=alpha, dtype=dtype, verify=True)


def test_adapters_alone_have_their_targets(tmp_path: Path) -> None:
    _, lora, _ = save_pair("2b", tmp_path)
    convert(lora, tmp_path / "peft", "peft")
    alone = tmp_path / "peft"
    cases = {
        "or give their base: cogfast convert BASE .* --merge-lora": {"to": "diffusers"},
        "has adapters only; use --to peft, .* --add-lora": {"to": "sat"},
        "adapters only; give the base": {"to": "sat", "merge_lora": ""},
        "of its own, but --add-lora": {"to": "sat", "add_lora": str(alone)},
        "leave one of them out": {"to": "sat", "add_lora": "x", "merge_lora": ""},
    }
    for match, options in cases.items():
        with pytest.raises(ValueError, match=match):
            convert(alone, tmp_path / "none", **options)
    assert not (tmp_path / "none").exists()

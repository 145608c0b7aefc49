"""The strength of LoRA files, alpha / r, in every loader, and back in cogfast."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.convert import convert
from cogfast.model.weights.formats.peft import FILE_NAME, open_peft, write_peft
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.lora.adapters import check_config, merge_lora, open_adapter
from cogfast.model.weights.lora.strength import HEADER_KEY
from cogfast.model.weights.open import open_source
from cogfast.train.sampling.lora_overlay import LoraOverlay, add_loras, open_loras
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.model.weights.test_peft import adapters, pipeline, set_adapters, source_of
from tests.support.tiny_transformers import inputs, tiny

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# alpha, dtype; the rank is 128
STRENGTHS = [(1, "fp32"), (1, "bf16"), (1, "fp16"), (64, "fp32"), (64, "bf16"), (256, "fp16")]


def load_file_by_pipeline(theirs: torch.nn.Module, file: Path) -> None:
    pipeline("5b", theirs).load_lora_weights(str(file))


def load_folder_by_pipeline(theirs: torch.nn.Module, file: Path) -> None:
    pipeline("5b", theirs).load_lora_weights(str(file.parent))


def load_folder_by_model(theirs: torch.nn.Module, file: Path) -> None:
    theirs.load_lora_adapter(str(file.parent), weight_name=FILE_NAME)


def load_file_by_model(theirs: torch.nn.Module, file: Path) -> None:
    """The call that reads no header."""
    theirs.load_lora_adapter(str(file))


def load_without_header(theirs: torch.nn.Module, file: Path) -> None:
    bare = file.parent / "bare"
    bare.mkdir(exist_ok=True)
    save_file(load_file(file), bare / FILE_NAME)
    pipeline("5b", theirs).load_lora_weights(str(bare))


HEADER_LOADERS = (load_file_by_pipeline, load_folder_by_pipeline, load_folder_by_model)
LOADERS = (*HEADER_LOADERS, load_file_by_model, load_without_header)


@pytest.fixture(scope="module")
def theirs() -> torch.nn.Module:
    model = diffusers_model("5b")
    model.norm_out.norm.eps = 1e-6  # SAT's
    return model


@pytest.fixture(scope="module")
def base(theirs: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    theirs.save_pretrained(folder)
    return folder


def adapted(base: Path, alpha: float, rank: int, dtype: torch.dtype) -> DiffusionTransformer:
    """A model on the base with adapters whose values have the dtype, in float32."""
    ours = tiny("5b", seed=4, lora_rank=rank, lora_alpha=alpha)
    load_transformer(ours, base)  # the adapters stay
    set_adapters(ours, source_of(ours, alpha, dtype))
    return ours


def output(theirs: torch.nn.Module, load: Callable, file: Path) -> torch.Tensor:
    load(theirs, file)
    try:
        with torch.no_grad():
            return run_diffusers("5b", theirs, inputs("5b"))
    finally:
        theirs.unload_lora()


@pytest.mark.parametrize(("alpha", "dtype"), STRENGTHS)
def test_every_loader_gives_the_strength_that_was_trained(
    alpha: int, dtype: str, theirs: torch.nn.Module, base: Path, tmp_path: Path
) -> None:
    kind = DTYPES[dtype]
    ours = adapted(base, alpha, 128, kind)
    file = write_peft(source_of(ours, alpha, kind), tmp_path / "lora")
    with torch.no_grad():
        expected = ours(**inputs("5b"))
        plain = run_diffusers("5b", theirs, inputs("5b"))
    assert (expected - plain).abs().max() > 1e-3
    for load in LOADERS:
        found = output(theirs, load, file)
        assert (found - expected).abs().max() < 1e-5 * max(1, expected.abs().max()), load.__name__


def test_another_strength_is_in_the_header_and_a_warning_says_so(
    theirs: torch.nn.Module, base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ours = adapted(base, 3.0, 4, torch.float32)
    source = write_peft(source_of(ours, 3.0), tmp_path / "first")
    assert HEADER_KEY not in header_of(source)
    with caplog.at_level(logging.WARNING):
        convert(source, tmp_path / "lora", "peft")
    assert "lora_alpha / r = 3 / 4 is not a power of two" in caplog.text
    assert "VideoX-Fun ignore the header and take strength 1; give them 0.75" in caplog.text
    with torch.no_grad():
        expected = ours(**inputs("5b"))
    for load in HEADER_LOADERS:
        found = output(theirs, load, tmp_path / "lora" / FILE_NAME)
        assert (found - expected).abs().max() < 1e-5, load.__name__
    caplog.clear()
    convert(source, tmp_path / "other", "peft", lora_alpha=2.0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def header_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return opened.metadata()


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_reader_gets_every_bit_back(dtype: str, tmp_path: Path) -> None:
    """In float16, elements of 1e-3 and strength 1/128: B alone would become subnormal."""
    source = source_of(tiny("5b", seed=5, lora_rank=128), 1.0, DTYPES[dtype])
    generator = torch.Generator().manual_seed(0)
    values = {
        name: (values.float().sign() * (0.2 + torch.rand(values.shape, generator=generator)))
        .mul(1e-3 if "matrix_B" in name else 0.05)
        .to(values.dtype)
        for name, values in adapters(source).items()
    }
    source = source_of_values(values, 1.0)
    file = write_peft(source, tmp_path / "lora")
    stored = load_file(file)
    assert all(t.dtype == DTYPES[dtype] for t in stored.values())
    if dtype == "fp16":
        assert min(t.abs().min() for t in stored.values()) >= torch.finfo(torch.float16).tiny
    back = open_peft(file)
    assert back.lora_alpha == 1.0
    for name, value in values.items():
        assert torch.equal(back.read(name, None), value), name
    again = load_file(write_peft(back, tmp_path / "again"))
    assert again.keys() == stored.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in stored.items())


def source_of_values(values: dict[str, torch.Tensor], alpha: float) -> object:
    whole = source_of(torch.nn.Module(), alpha)
    whole.shapes.update({n: tuple(t.shape) for n, t in values.items()})
    whole.dtypes.update({n: t.dtype for n, t in values.items()})
    object.__setattr__(whole, "read", lambda n, shard: values[n])
    return whole


def test_cogfast_reads_the_strength_with_and_without_the_header(base: Path, tmp_path: Path) -> None:
    """load_lora, sample --lora and --merge-lora."""
    ours = adapted(base, 1.0, 8, torch.float32)
    file = write_peft(source_of(ours, 1.0), tmp_path / "lora")
    save_file(load_file(file), tmp_path / "bare.safetensors")
    with torch.no_grad():
        expected = ours(**inputs("5b"))
    config: TransformerConfig = ours.config
    check_config(open_adapter(file), config)  # as args.load_lora: alpha 1 is back
    with pytest.raises(ValueError, match="alpha 8, .* set r: 8, lora_alpha: 8 in"):
        check_config(open_adapter(tmp_path / "bare.safetensors"), config)
    plain = open_source(base)
    for path in (file, tmp_path / "bare.safetensors"):
        sampled, merged = tiny("5b"), tiny("5b")
        load_transformer(sampled, base)
        add_loras(sampled, open_loras([LoraOverlay(str(path))], ema=False))
        source = merge_lora(plain, open_adapter(path))
        with torch.no_grad():
            for name in source.shapes:
                merged.get_parameter(name).copy_(source.read(name, None))
            for model in (sampled, merged):
                assert (model(**inputs("5b")) - expected).abs().max() < 1e-5


def test_an_alpha_that_another_tool_writes_counts(tmp_path: Path) -> None:
    """It changes the strength that the matrices have; ours no longer says what they are."""
    source = source_of(tiny("5b", seed=5, lora_rank=4), 1.0)
    file = write_peft(source, tmp_path / "lora")
    header = header_of(file)
    settings = json.loads(header["lora_adapter_metadata"])
    assert settings["transformer.lora_alpha"] == settings["transformer.r"] == 4
    settings["transformer.lora_alpha"] = 2
    tensors = load_file(file)
    save_file(tensors, file, header | {"lora_adapter_metadata": json.dumps(settings)})
    back = open_peft(file)
    assert back.lora_alpha == 2.0
    name = "blocks.0.attention.qkv.matrix_B.1"
    assert torch.equal(back.read(name, None), source.read(name, None) / 4)
    save_file(tensors, file, header | {HEADER_KEY: '{"lora_alpha": "much"}'})
    with pytest.raises(ValueError, match=f"{FILE_NAME}: {HEADER_KEY}.*lora_alpha"):
        open_peft(file)


def test_each_of_several_ranks_has_its_strength(tmp_path: Path) -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4), 2.0)
    name = "blocks.0.attention.out.matrix_{}.0"
    more = {name.format("A"): torch.randn(8, 128), name.format("B"): torch.randn(128, 8)}
    source = source_of_values(adapters(source) | more, 2.0)
    file = write_peft(source, tmp_path / "lora")
    theirs = diffusers_model("5b")
    pipeline("5b", theirs).load_lora_weights(str(file))
    a, b = more.values()
    for layer, change in (
        (theirs.transformer_blocks[0].attn1.to_out[0], b @ a * (2 / 8)),
        (
            theirs.transformer_blocks[1].attn1.to_k,
            source.read("blocks.1.attention.qkv.matrix_B.1", None)
            @ source.read("blocks.1.attention.qkv.matrix_A.1", None)
            * (2 / 4),
        ),
    ):
        assert layer.scaling == {"default_0": 1.0}
        torch.testing.assert_close(layer.get_delta_weight("default_0"), change)
    back = open_peft(file)
    assert back.lora_alpha == 2.0
    assert all(torch.equal(back.read(n, None), source.read(n, None)) for n in source.shapes)

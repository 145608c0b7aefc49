"""The strength of LoRA files, alpha / r, in every loader, and back in cogfast."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cogfast.extensions.formats.adapters import check_config, merge_lora, open_adapter
from cogfast.extensions.formats.peft import FILE_NAME, open_peft, write_peft
from cogfast.extensions.sample.lora_overlay import LoraOverlay, add_loras, open_loras
from cogfast.model.config import TransformerConfig
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.open import open_source
from tests.extensions.formats.test_peft import adapters, pipeline, set_adapters, source_of
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.support.tiny_transformers import inputs, tiny

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# alpha, dtype; the rank is 128. A strength that is no power of two is rounded, as in float32 here.
STRENGTHS = [(1, "bf16"), (64, "fp32"), (256, "fp16"), (20, "fp32")]


def load_file_by_pipeline(theirs: torch.nn.Module, file: Path) -> None:
    pipeline("5b", theirs).load_lora_weights(str(file))


def load_file_by_model(theirs: torch.nn.Module, file: Path) -> None:
    """The call that reads no header."""
    theirs.load_lora_adapter(str(file))


def load_without_header(theirs: torch.nn.Module, file: Path) -> None:
    bare = file.parent / "bare"
    bare.mkdir(exist_ok=True)
    save_file(load_file(file), bare / FILE_NAME)
    pipeline("5b", theirs).load_lora_weights(str(bare))


LOADERS = (load_file_by_pipeline, load_file_by_model, load_without_header)


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
    for path in (file, tmp_path / "bare.safetensors"):  # as args.load_lora
        with pytest.raises(ValueError, match="alpha 1, .* set args.lora_rank=8 args.lora_alpha=8 "):
            check_config(open_adapter(path), config)
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


def test_each_of_several_ranks_has_its_strength(tmp_path: Path) -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4), 2.0)
    name = "blocks.0.attention.out.matrix_{}.0"
    more = {name.format("A"): torch.randn(8, 128), name.format("B"): torch.randn(128, 8)}
    source = source_of_values(adapters(source) | more, 2.0)
    file = write_peft(source, tmp_path / "lora")
    with safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["lora_adapter_metadata"])
    assert header["transformer.r"] == 4 and header["transformer.lora_alpha"] == 4
    assert header["transformer.rank_pattern"] == {"^transformer_blocks.0.attn1.to_out.0": 8}
    assert header["transformer.alpha_pattern"] == header["transformer.rank_pattern"]
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
    merged, expected = (_change(x, "blocks.0.attention.out", 0) for x in (back, source))
    torch.testing.assert_close(merged, expected)


def _change(source: object, module: str, part: int) -> torch.Tensor:
    a, b = (source.read(f"{module}.matrix_{side}.{part}", None) for side in "AB")
    return b @ a * (source.lora_alpha / len(a))

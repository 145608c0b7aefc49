"""PEFT's LoRA files: cogfast's files in the real library, and files of PEFT and other tools in cogfast."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cogfast.extensions.formats.adapters import open_adapter
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.peft import FILE_NAME, open_peft, peft_name, write_peft
from cogfast.model.lora import is_lora_parameter
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.load import load_transformer
from cogfast.model.weights.shard import Shard
from cogfast.model.weights.source import WeightSource
from tests.model.test_transformer_diffusers import diffusers_model, run_diffusers
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_transformers import inputs, tiny

TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def source_of(
    transformer: DiffusionTransformer, alpha: float | None, dtype: torch.dtype = torch.float32
) -> WeightSource:
    """All weights of a model in memory."""
    state = {n: p.detach().to(dtype) for n, p in transformer.named_parameters()}
    return WeightSource(
        description="a model",
        shapes={n: tuple(t.shape) for n, t in state.items()},
        read=lambda name, shard: state[name] if shard is None else shard.of(state[name]),
        dtypes={n: t.dtype for n, t in state.items()},
        lora_alpha=alpha,
    )


def adapters(source: WeightSource) -> dict[str, torch.Tensor]:
    return {n: source.read(n, None) for n in source.shapes if is_lora_parameter(n)}


def set_adapters(transformer: DiffusionTransformer, source: WeightSource) -> None:
    with torch.no_grad():
        for name, values in adapters(source).items():
            transformer.get_parameter(name).copy_(values)


def pipeline(name: str, theirs: torch.nn.Module) -> object:
    from diffusers import CogVideoXImageToVideoPipeline, CogVideoXPipeline

    kind = CogVideoXImageToVideoPipeline if "i2v" in name else CogVideoXPipeline
    none = dict.fromkeys(("tokenizer", "text_encoder", "vae", "scheduler"))
    return kind(transformer=theirs, **none)


def test_adapters_of_the_mlp_are_the_librarys(tmp_path: Path) -> None:
    """Outputs, and gradients of every adapter: in training, and in diffusers with the file's."""
    theirs, targets = diffusers_model("5b"), ("to_q", "ff.net.0.proj", "ff.net.2")
    theirs.norm_out.norm.eps = 1e-6
    theirs.save_pretrained(tmp_path / "base")
    ours = tiny("5b", seed=4, lora_rank=4, lora_alpha=3.0, lora_targets=targets)
    load_transformer(ours, tmp_path / "base")
    write_peft(source_of(ours, 3.0), tmp_path / "lora")
    theirs.load_lora_adapter(tmp_path / "lora", use_safetensors=True)
    given = inputs("5b")
    output, expected = ours(**given), run_diffusers("5b", theirs, given)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-5)
    output.square().mean().backward()
    expected.square().mean().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if "lora_" in n}
    assert len(gradients) == 2 * 2 * len(targets)
    for name, parameter in ours.named_parameters():
        if is_lora_parameter(name):
            key = peft_name(name).removeprefix("transformer.")
            key = key.replace(".weight", ".default_0.weight")
            wanted = gradients.pop(key)
            if "lora_B" in key:
                wanted = wanted * (3 / 4)  # the file's B has the strength as a factor
            most = 1e-5 * wanted.abs().max().item()
            torch.testing.assert_close(parameter.grad, wanted, rtol=0, atol=most)
    assert not gradients


def test_the_library_writes_and_we_read(tmp_path: Path) -> None:
    """A small copy of the diffusers trainer's LoRA (alpha 64 of rank 128), with and without PEFT's
    settings in the header; without them diffusers itself takes strength 1."""
    from diffusers import CogVideoXPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    theirs = diffusers_model("5b")
    theirs.norm_out.norm.eps = 1e-6
    theirs.save_pretrained(tmp_path / "base")
    theirs.add_adapter(LoraConfig(r=4, lora_alpha=2, target_modules=TARGETS))
    generator = torch.Generator().manual_seed(0)
    for key, parameter in theirs.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.2, generator=generator)
    layers = get_peft_model_state_dict(theirs)
    CogVideoXPipeline.save_lora_weights(tmp_path / "plain", transformer_lora_layers=layers)
    theirs.save_lora_adapter(tmp_path / "settings")
    given = inputs("5b")
    with torch.no_grad():
        trained = run_diffusers("5b", theirs, given)
        for folder, alpha in (("settings", 2.0), ("plain", 4.0)):
            source = open_peft(tmp_path / folder)
            assert source.lora_alpha == alpha and not source.unexpected
            ours = tiny("5b", lora_rank=4, lora_alpha=alpha)
            load_transformer(ours, tmp_path / "base")
            set_adapters(ours, source)
            if folder == "plain":
                theirs.unload_lora()
                pipeline("5b", theirs).load_lora_weights(str(tmp_path / "plain"))
            difference = ours(**given) - run_diffusers("5b", theirs, given)
            assert difference.abs().max() < 1e-5
    assert (trained - run_diffusers("5b", theirs, given)).abs().max() > 1e-2
    assert "strength 1" in source.description


def test_names_and_settings_of_pefts_own_folder(tmp_path: Path) -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4), 4.0)
    tensors = load_file(write_peft(source, tmp_path / "ours"))
    theirs = {
        key.replace("transformer.", "base_model.model.", 1).replace(".weight", ".default.weight"): t
        for key, t in tensors.items()
    }
    (tmp_path / "theirs").mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 16, "use_rslora": True}
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(settings))
    save_file(theirs, tmp_path / "theirs" / "adapter_model.safetensors")
    for path in (tmp_path / "theirs", tmp_path / "theirs" / "adapter_model.safetensors"):
        read = open_peft(path)
        assert read.lora_alpha == 32.0 and not read.unexpected  # 16 sqrt(4)
        assert all(torch.equal(t, source.read(n, None)) for n, t in adapters(read).items())
        assert len(read.shapes) == 16


def test_pairs_of_other_strength_come_with_it(tmp_path: Path) -> None:
    """Ranks and alphas by pattern: what merging adds is what the library adds."""
    from peft import LoraConfig

    theirs = diffusers_model("5b")
    special = "transformer_blocks.1.attn1.to_v"
    patterns = {"rank_pattern": {special: 8}, "alpha_pattern": {special: 12}}
    given = {"r": 4, "lora_alpha": 2, "target_modules": TARGETS, "init_lora_weights": False}
    theirs.add_adapter(LoraConfig(**given, **patterns))
    theirs.save_lora_adapter(tmp_path)
    source = open_peft(tmp_path)
    assert source.lora_alpha == 2.0
    for block, part in ((1, 2), (0, 2)):
        layer = theirs.transformer_blocks[block].attn1.to_v
        name = f"blocks.{block}.attention.qkv.matrix_A.{part}"
        a, b = source.read(name, None), source.read(name.replace("_A", "_B"), None)
        expected = layer.get_delta_weight("default")
        torch.testing.assert_close(b @ a * (2.0 / a.shape[0]), expected)


def test_other_linears_are_read_and_foreign_names_listed(tmp_path: Path) -> None:
    pair = {"lora_A": torch.zeros(2, 128), "lora_B": torch.zeros(512, 2)}
    copies = {s: t.clone() for s, t in pair.items()}
    block = "transformer.transformer_blocks.0"
    tensors = {f"{block}.ff.net.0.proj.{s}.weight": t for s, t in pair.items()}
    other = {f"text_encoder.encoder.block.0.q.{s}.weight": t for s, t in copies.items()}
    save_file(tensors | other, tmp_path / FILE_NAME)
    source = open_peft(tmp_path)
    assert source.shapes == {
        "blocks.0.fc1.matrix_A.0": (2, 128),
        "blocks.0.fc1.matrix_B.0": (512, 2),
    }
    assert source.unexpected == list(other)
    assert_refused(lambda: open_adapter(tmp_path), "2 tensors with unknown names, first text_enc")
    convert(tmp_path, tmp_path / "known", "peft", allow_unexpected=True)
    assert open_adapter(tmp_path / "known").shapes == source.shapes


def test_a_share_of_a_matrix_is_read(tmp_path: Path) -> None:
    source = source_of(tiny("5b", seed=5, lora_rank=4), 4.0)
    write_peft(source, tmp_path / "lora")
    name = "blocks.1.attention.qkv.matrix_B.2"
    share = open_peft(tmp_path / "lora").read(name, Shard((128, 4), 0, 1, index=1, count=2))
    assert torch.equal(share, source.read(name, None)[64:])


def test_incomplete_lora_files_are_refused(tmp_path: Path) -> None:
    source = source_of(tiny("5b", lora_rank=4), 1.0)
    folder = tmp_path / "lora"
    file = write_peft(source, folder)
    assert list(folder.iterdir()) == [file]
    tensors = load_file(file)
    key = "transformer.transformer_blocks.0.attn1.to_q.lora_A.weight"
    cases = {
        "has no partner": {k: t for k, t in tensors.items() if k != key},
        "not [3, 128] and [128, 4]": tensors | {key: torch.zeros(3, 128)},
        "DoRA": tensors | {key.replace("lora_A.weight", "lora_magnitude_vector"): torch.ones(128)},
        "none of 1 tensor is": {"unet.to_q.lora_A.weight": torch.zeros(2, 2)},
    }
    for line, state in cases.items():
        save_file(state, folder / FILE_NAME)
        assert_refused(lambda: open_peft(folder), line)
    file.write_bytes(file.read_bytes()[:-5])
    line = "pytorch_lora_weights.safetensors: truncated or damaged"
    assert_refused(lambda: open_peft(folder), line)
    assert_refused(lambda: open_peft(tmp_path), "0 .safetensors files, none named")
    assert_refused(lambda: write_peft(source, folder), "the target is not empty")


QUERY = "transformer_blocks.0.attn1.to_q"


@refusals(Path(__file__).with_name("refusals.txt"), "settings of PEFT")
def test_settings_that_the_file_contradicts_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    """In adapter_config.json and in the header. The file has 4 targets and rank 4."""
    settings = json.loads(refusal.words[0])
    file = write_peft(source_of(tiny("5b", lora_rank=4), 4.0), tmp_path / "ours")
    tensors = load_file(file)
    # Names that the model does not have are harmless, as in PEFT.
    plain = {"r": 4, "lora_alpha": 4, "target_modules": [*TARGETS, "add_k_proj"], "bias": "none"}
    (tmp_path / "in config").mkdir()
    (tmp_path / "in header").mkdir()
    for given, line in ((plain, None), (plain | settings, refusal.line)):
        (tmp_path / "in config" / "adapter_config.json").write_text(json.dumps(given))
        save_file(tensors, tmp_path / "in config" / FILE_NAME)
        stored = json.dumps({f"transformer.{key}": value for key, value in given.items()})
        save_file(tensors, tmp_path / "in header" / FILE_NAME, {"lora_adapter_metadata": stored})
        for folder in ("in config", "in header"):
            if line is None:
                assert open_peft(tmp_path / folder).lora_alpha == 4
            else:
                assert_refused(lambda folder=folder: open_peft(tmp_path / folder), line)


def test_a_module_that_the_header_lists_and_two_adapters(tmp_path: Path) -> None:
    source = source_of(tiny("5b", lora_rank=4), 4.0)
    file = write_peft(source, tmp_path / "ours")
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    save_file({k: t for k, t in tensors.items() if QUERY not in k}, file, metadata)
    line = f"target_modules that include {QUERY}, which the file lacks"
    assert_refused(lambda: open_peft(file), line)
    again = {k.replace("lora_A", "lora_A.second"): t.clone() for k, t in tensors.items()}
    save_file(tensors | again, file)
    line = "lora_A<...> belong to the same linear, <...> several adapters"
    assert_refused(lambda: open_peft(file), line)

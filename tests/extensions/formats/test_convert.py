"""Weights from any format to any other: names, numbers, configs, and the stock tools' readers."""

import hashlib
import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors import safe_open
from safetensors.torch import load_file

from cogfast.config.sat_network import transformer_arguments
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.sat import sat_tensors, to_sat_state_dict
from cogfast.extensions.formats.vae import renamed
from cogfast.model.config import TransformerConfig
from cogfast.model.weights import tensor_files
from cogfast.model.weights.diffusers import (
    diffusers_config,
    diffusers_tensors,
)
from cogfast.model.weights.identify import check_complete, identify
from cogfast.model.weights.names import PREFIX, diffusers_names, from_sat_name, our_names
from cogfast.model.weights.open import open_source
from cogfast.model.weights.source import WeightSource, with_flat_patches
from cogfast.model.weights.tensor_files import write_safetensors_folder, write_torch_file
from tests.model.test_transformer_diffusers import run_diffusers
from tests.model.weights.test_weights_load import seal, write_run
from tests.support.pipelines import Pipelines
from tests.support.refusals import assert_refused
from tests.support.runs import run_of
from tests.support.tiny_run import assert_same
from tests.support.tiny_transformers import FAMILY, inputs, tiny

UNUSED = f"{PREFIX}transformer.position_embeddings.weight"  # which diffusers has no place for
NOT_HELD = {"text_length", "num_frames", "latent_height", "latent_width"}  # by shapes alone


def of_four_heads(name: str) -> TransformerConfig:
    return replace(FAMILY[name], hidden_size=256, num_attention_heads=4)


def sat_state(folder: Path, index: int = 0) -> dict[str, torch.Tensor]:
    file = folder / "1" / f"mp_rank_{index:02d}_model_states.pt"
    return torch.load(file, weights_only=True)["module"]


@pytest.fixture(scope="module")
def sat_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A SAT folder of each family, bf16 with a float32 table, written by torch.save."""
    folders = {}
    for name in FAMILY:
        folder = folders[name] = tmp_path_factory.mktemp(name)
        config = of_four_heads(name)
        model = tiny(name, hidden_size=config.hidden_size, num_attention_heads=4)
        state = {
            key: value.clone() if "pos_embed." in key else value.bfloat16()
            for key, value in to_sat_state_dict(model).items()
        }
        (folder / "1").mkdir()
        (folder / "latest").write_text("1")
        torch.save({"module": state}, folder / "1" / "mp_rank_00_model_states.pt")
    return folders


@pytest.mark.parametrize(("name", "count"), zip(FAMILY, (1, 2, 4, 2, 4), strict=True))
def test_round_trips_keep_every_bit(name: str, count: int, sat_folders, tmp_path: Path) -> None:
    """SAT -> diffusers -> SAT and SAT -> SAT, through `count` model-parallel files."""
    before = sat_state(sat_folders[name])
    convert(sat_folders[name], tmp_path / "cut", "sat", model_parallel_size=count)
    cut = [sat_state(tmp_path / "cut", i) for i in range(count)]
    for key in (k for k in before if count > 1 and "dense_h_to_4h.weight" in k):
        assert torch.equal(torch.cat([c[key] for c in cut]), before[key])
    convert(tmp_path / "cut", tmp_path / "one", "sat")
    assert_same(sat_state(tmp_path / "one"), before)

    convert(tmp_path / "cut", tmp_path / "theirs", "diffusers")
    convert(tmp_path / "theirs", tmp_path / "cut back", "sat", model_parallel_size=count)
    convert(tmp_path / "cut back", tmp_path / "back", "sat")
    after = sat_state(tmp_path / "back")
    assert not after.pop(UNUSED, torch.zeros(1)).any()
    before.pop(UNUSED, None)
    assert_same(after, before)


@pytest.mark.parametrize(("name", "count"), [("2b", 1), ("5b_i2v", 2), ("1.5_5b", 4)])
def test_lora_checkpoints_keep_every_bit(name: str, count: int, tmp_path: Path) -> None:
    """SAT's, base and adapters in one file: through `count` files and back."""
    model = tiny(name, hidden_size=256, num_attention_heads=4, lora_rank=4)
    before = {key: value.clone() for key, value in to_sat_state_dict(model).items()}
    (tmp_path / "1").mkdir()
    torch.save({"module": before}, tmp_path / "1" / "mp_rank_00_model_states.pt")
    convert(tmp_path / "1", tmp_path / "cut", "sat", model_parallel_size=count, verify=count == 2)
    convert(tmp_path / "cut", tmp_path / "back", "sat", verify=count == 4)
    assert_same(sat_state(tmp_path / "back"), before)
    if count == 1:
        with pytest.raises(ValueError, match=r"LoRA rank=4 must go: merge it \(--merge-lora\)"):
            convert(tmp_path / "back", tmp_path / "theirs", "diffusers")


@pytest.mark.parametrize("name", FAMILY)
def test_a_model_is_identified_from_its_tensors(name: str, sat_folders) -> None:
    config, found = of_four_heads(name), identify(open_source(sat_folders[name]))
    differing = {f for f in config.__slots__ if getattr(config, f) != getattr(found, f)}
    # 1.0's tables say for which video they are; 1.5 has none, there the published size stands
    expected = {"2b": set(), "5b": {"text_length"}, "5b_i2v": set()}
    assert differing == expected.get(name, NOT_HELD)


@pytest.mark.parametrize("name", FAMILY)
def test_diffusers_loads_it_and_computes_the_same(name: str, sat_folders, tmp_path: Path) -> None:
    from diffusers import CogVideoXTransformer3DModel

    ours = tiny(name, hidden_size=256, num_attention_heads=4)
    sat = {k: v.clone() for k, v in to_sat_state_dict(ours).items()}
    (tmp_path / "sat/1").mkdir(parents=True)
    torch.save({"module": sat}, tmp_path / "sat/1/mp_rank_00_model_states.pt")
    convert(tmp_path / "sat/1", tmp_path / "theirs", "diffusers")
    theirs, report = CogVideoXTransformer3DModel.from_pretrained(
        tmp_path / "theirs", output_loading_info=True
    )
    assert not any(report.values()), report
    theirs.norm_out.norm.eps = 1e-6  # theirs is 1e-5, SAT's and ours 1e-6
    given = inputs(name)
    with torch.no_grad():
        expected = ours(**given)
        found = run_diffusers(name, theirs.eval(), given)
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()

    # and back, from files that diffusers wrote
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="1MB")
    assert len(list((tmp_path / "saved").glob("*.safetensors"))) > 1
    convert(tmp_path / "saved", tmp_path / "back", "sat")
    convert(tmp_path / "back", tmp_path / "twice", "diffusers")
    state = theirs.state_dict()
    again = CogVideoXTransformer3DModel.from_pretrained(tmp_path / "twice").state_dict()
    assert_same(again, state)


# what differs among the published config.json files; the rest is the class's defaults
PUBLISHED = {
    "2b": {"num_attention_heads": 30, "num_layers": 30, "use_rotary_positional_embeddings": False},
    "5b": {},
    "5b_i2v": {"in_channels": 32, "use_learned_positional_embeddings": True},
    "1.5_5b": {},
    "1.5_5b_i2v": {"in_channels": 32, "ofs_embed_dim": 512},
}
OF_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}
OF_15 = {"patch_bias": False, "patch_size_t": 2, "sample_frames": 81}
OF_15 |= {"sample_height": 300, "sample_width": 300}
GOLDEN_NAMES = {"2b": "cogvideox_2b", "5b": "cogvideox_5b", "5b_i2v": "cogvideox_5b_i2v"}
GOLDEN_NAMES |= {"1.5_5b": "cogvideox1.5_5b", "1.5_5b_i2v": "cogvideox1.5_5b_i2v"}


def real_size(name: str, golden: Path) -> WeightSource:
    """The published model as SAT's code has it: names and shapes, bf16 weights on meta."""
    keys = json.loads((golden / "keys" / f"{GOLDEN_NAMES[name]}.json").read_text())["keys"]
    shapes = {from_sat_name(key): tuple(shape) for key, shape in keys.items()}
    shapes.pop(None, None)  # the rotary tables
    source = WeightSource(
        description=name,
        shapes=shapes,
        read=lambda name, shard: torch.empty(shapes[name], device="meta"),
        dtypes=dict.fromkeys(shapes, torch.bfloat16),
    )
    return with_flat_patches(source)


@pytest.mark.parametrize("name", FAMILY)
def test_plans_of_real_sizes(name: str, golden: Path) -> None:
    """Names and shapes of the published models, without their weights."""
    from diffusers import CogVideoXTransformer3DModel

    source = real_size(name, golden)
    config = identify(source)
    check_complete(source, config)
    section = run_of(f"{GOLDEN_NAMES[name]}.yaml").config().model
    ours = TransformerConfig(**transformer_arguments(section["network_config"]["params"]))
    # SAT trained 1.5 with 224 rows of text; diffusers' published config has 226
    assert config == replace(ours, text_length=226)
    keys = json.loads((golden / "keys" / f"{GOLDEN_NAMES[name]}.json").read_text())["keys"]
    sat = {t.name: list(t.shape) for t in sat_tensors(source, config)}
    assert sat == keys
    cut = [{t.name: t.shape for t in sat_tensors(source, config, i, 2)} for i in (0, 1)]
    assert cut[0] == cut[1] and cut[0].keys() == keys.keys()

    about = diffusers_config(config)
    with torch.device("meta"):
        class_ = CogVideoXTransformer3DModel.from_config(about)
    given = {**(OF_5B if name != "2b" else {}), **(OF_15 if "1.5" in name else {})}
    assert about == {**class_.config, **about, **given, **PUBLISHED[name]}
    tensors = list(diffusers_tensors(source, config))
    wanted = {n: tuple(p.shape) for n, p in class_.state_dict().items()}
    assert {t.name: t.shape for t in tensors} == wanted


def test_names_are_those_of_the_golden_maps(golden: Path) -> None:
    """The table, both ways, against maps that upstream's converter and diffusers agreed on."""
    path = golden / "keys" / "sat_to_diffusers.json"
    for mapped in json.loads(path.read_text())["verified_full_maps_tiny"].values():
        held = {from_sat_name(key): theirs for key, theirs in mapped.items()}
        held = {name: theirs for name, theirs in held.items() if theirs != ["(dropped)"]}
        for name, theirs in held.items():
            assert sorted(diffusers_names(name)) == sorted(theirs), name
        inverse = our_names([name for theirs in held.values() for name in theirs])
        assert {name: sorted(parts) for name, parts in inverse.items()} == {
            name: sorted(theirs) for name, theirs in held.items()
        }


@pytest.mark.parametrize("case", ["t2v_2b", "t2v_5b", "i2v_1.5_5b"])
def test_upstreams_own_checkpoints(case: str, golden: Path, tmp_path: Path) -> None:
    """Its folders through diffusers' format and back: tensors, shares and outputs are upstream's."""
    folder = golden / case
    count = 2 if case == "t2v_5b" else 1
    convert(folder, tmp_path / "theirs", "diffusers", verify=True)
    convert(tmp_path / "theirs", tmp_path / "back", "sat", model_parallel_size=count)
    for i in range(count):
        after, before = sat_state(tmp_path / "back", i), sat_state(folder, i)
        assert not after.pop(UNUSED, torch.zeros(1)).any()
        before.pop(UNUSED, None)
        assert after.keys() == before.keys()
        for key, value in before.items():
            computed = ".pos_embed." in key  # by us, in upstream's float32
            assert torch.allclose(after[key], value, atol=1e-6 if computed else 0, rtol=0), key


def test_two_shards_join_to_upstreams_one_file(golden: Path, tmp_path: Path) -> None:
    """The project has the hashes of the tensors of one file of the same model."""
    convert(golden / "t2v_5b", tmp_path / "theirs", "diffusers")
    convert(tmp_path / "theirs", tmp_path / "one", "sat")
    joined = sat_state(tmp_path / "one")
    wanted = json.loads((golden / "t2v_5b" / "sha256.json").read_text())
    found = {
        key: hashlib.sha256(joined[key].contiguous().view(torch.uint8).numpy()).hexdigest()
        for key in wanted
    }
    assert found == wanted
    assert all(key == UNUSED or ".pos_embed." in key for key in joined.keys() - wanted.keys())


def test_the_vae_both_ways(tmp_path: Path) -> None:
    from diffusers import AutoencoderKLCogVideoX

    model = tiny_vae()
    state = renamed(model.state_dict(), 4, 3, "sat")
    torch.save({"state_dict": {**state, "loss.logvar": torch.zeros(())}}, tmp_path / "any.pt")
    convert(tmp_path / "any.pt", tmp_path / "vae", "diffusers", verify=True, scaling_factor=1.15)
    loaded, report = AutoencoderKLCogVideoX.from_pretrained(
        tmp_path / "vae", output_loading_info=True
    )
    assert not any(report.values()), report
    assert_same(loaded.state_dict(), model.state_dict())
    for key, value in model.config.items():
        expected = 1.15 if key == "scaling_factor" else value
        assert key.startswith("_") or loaded.config[key] == (
            list(expected) if isinstance(expected, tuple) else expected
        )
    convert(tmp_path / "vae", tmp_path / "sat", "sat", verify=True)
    assert_same(torch.load(tmp_path / "sat/3d-vae.pt")["state_dict"], state)
    with pytest.raises(ValueError, match="a VAE converts --to sat or diffusers, not peft"):
        convert(tmp_path / "vae", tmp_path / "x", "peft")
    config = json.loads((tmp_path / "vae/config.json").read_text())
    # layers_per_block: a download of which a part is missing; the others decide what it computes.
    for key, value in {"layers_per_block": 2, "norm_num_groups": 16, "norm_eps": 1e-5}.items():
        (tmp_path / "vae/config.json").write_text(json.dumps(config | {key: value}))
        with pytest.raises(ValueError, match=f"its config.json has {key}={value}, its tensors are"):
            convert(tmp_path / "vae", tmp_path / "x", "sat")
    del state["decoder.conv_in.conv.bias"]
    torch.save({"state_dict": state}, tmp_path / "any.pt")
    with pytest.raises(ValueError, match="1 tensor missing, .* decoder.conv_in.conv.bias"):
        convert(tmp_path / "any.pt", tmp_path / "x", "diffusers")


def tiny_vae() -> torch.nn.Module:
    from diffusers import AutoencoderKLCogVideoX

    torch.manual_seed(0)
    return AutoencoderKLCogVideoX(block_out_channels=(32, 64, 64, 128)).eval()


def test_a_run_and_its_average(tmp_path: Path) -> None:
    """A run's slices are converted with the model that its manifest's configuration describes."""
    trained = tiny("1.5_5b_i2v")
    folder = write_run(tmp_path / "run", trained)
    config = run_of("cogvideox1.5_5b_i2v.yaml").config()
    network = OmegaConf.to_container(config.model.network_config)
    network["params"] |= {"num_layers": 2, "hidden_size": 128, "num_attention_heads": 2}
    network["params"] |= {"time_embed_dim": 64, "ofs_embed_dim": 64}
    network["params"]["modules"]["patch_embed_config"]["params"]["text_hidden_size"] = 32
    manifest = json.loads((folder / "manifest.json").read_text())
    seal(folder, manifest | {"config": {"model": {"network_config": network}}})
    state = to_sat_state_dict(trained)
    for ema, path in ((False, tmp_path / "run"), (True, folder)):
        convert(path, tmp_path / f"sat-{ema}", "sat", ema=ema, model_parallel_size=2, verify=True)
        convert(tmp_path / f"sat-{ema}", tmp_path / f"one-{ema}", "sat")
        found = sat_state(tmp_path / f"one-{ema}")
        assert_same(found, {key: value.detach() + ema for key, value in state.items()})
    convert(tmp_path / "run", tmp_path / "theirs", "diffusers", dtype="bfloat16", verify=True)
    about = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert (about["max_text_seq_length"], about["sample_width"]) == (224, 300)


def test_verify_sees_a_tensor_that_differs(
    sat_folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = tensor_files.Outgoing.bytes

    def one_wrong(self: tensor_files.Outgoing) -> memoryview:
        if "norm1.linear.bias" not in self.name and "adaLN_modulations.1.1.bias" not in self.name:
            return plain(self)
        return memoryview(bytes(self.nbytes))

    monkeypatch.setattr(tensor_files.Outgoing, "bytes", one_wrong)
    for to in ("diffusers", "sat"):
        line = "blocks.<...>.modulation.linear.bias differs from the source's; delete"
        assert_refused(
            lambda to=to: convert(sat_folders["5b"], tmp_path / to, to, verify=True), line
        )


def test_files_are_those_of_the_libraries(tmp_path: Path) -> None:
    """Written files are readable by torch (in three ways), by zip and by safetensors."""
    state = {
        "matrix": torch.randn(5, 7).bfloat16(),
        "number": torch.tensor(3.0),
        "half": torch.randn(3, 1, 2).half(),
        "double": torch.arange(6, dtype=torch.float64),
    }
    tensors = [
        tensor_files.Outgoing(k, tuple(v.shape), v.dtype, lambda v=v: v) for k, v in state.items()
    ]
    file = tmp_path / "x.pt"
    write_torch_file(file, "module", tensors)
    for how in ({"weights_only": False}, {"weights_only": True}, {"mmap": True}):
        assert_same(torch.load(file, **how)["module"], state)
    assert zipfile.ZipFile(file).testzip() is None
    loaded = torch.load(file, mmap=True)["module"]
    assert all(value.untyped_storage().data_ptr() % 64 == 0 for value in loaded.values())
    write_safetensors_folder(tmp_path, tensors, most_bytes=90)
    files, stem = sorted(tmp_path.glob("*.safetensors")), "diffusion_pytorch_model"
    assert [path.name for path in files] == [f"{stem}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert_same({k: v for path in files for k, v in load_file(path).items()}, state)
    assert safe_open(files[0], "pt").metadata() == {"format": "pt"}


def test_a_rounded_table_of_2b(sat_folders, tmp_path: Path) -> None:
    """2B's table is unchanged by --dtype; diffusers computes its own."""
    state = sat_state(sat_folders["2b"])
    table = f"{PREFIX}mixins.pos_embed.pos_embedding"
    convert(sat_folders["2b"], tmp_path / "half", "sat", dtype="float16")
    half = sat_state(tmp_path / "half")
    assert torch.equal(half[table], state[table]) and half[table].dtype == torch.float32
    assert {v.dtype for k, v in half.items() if k != table} == {torch.float16}
    (tmp_path / "bf16/1").mkdir(parents=True)
    file = tmp_path / "bf16/1/mp_rank_00_model_states.pt"
    torch.save({"module": {k: v.bfloat16() for k, v in state.items()}}, file)
    convert(file, tmp_path / "theirs", "diffusers", verify=True)
    assert identify(open_source(file)) == of_four_heads("2b")


@pytest.mark.parametrize("family", ["2b", "5b", "5b_i2v", "1.5_5b", "1.5_5b_i2v"])
def test_networks_are_compared_with_those_of_diffusers(
    family: str, pipelines: Pipelines, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    convert(pipelines.path(family), tmp_path / "out", "diffusers", verify=True)
    (found,) = re.findall(r"networks differ by at most (\S+) of", caplog.text)
    assert (
        1e-9 < float(found) < 1e-5
    )  # another implementation, and another epsilon of the last norm

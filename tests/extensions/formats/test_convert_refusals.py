"""Errors of `cogfast convert` for weights that it cannot convert; it leaves no files behind."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cogfast.__main__ import main
from cogfast.extensions.formats.convert import convert
from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.model.weights import tensor_files
from cogfast.model.weights.names import PREFIX
from tests.support.refusals import Refusal, assert_line, assert_refused, refusals
from tests.support.tiny_run import assert_same
from tests.support.tiny_transformers import tiny

FILE = "1/mp_rank_00_model_states.pt"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sat, sat2 (cut in two) and diffusers: the same 5B; other: a deeper one, cut in two."""
    folder = tmp_path_factory.mktemp("made")
    for name, model in (("sat", tiny("5b")), ("deep", tiny("5b", num_layers=3))):
        (folder / name / "1").mkdir(parents=True)
        (folder / name / "latest").write_text("1")
        state = {k: v.clone() for k, v in to_sat_state_dict(model).items()}
        torch.save({"module": state}, folder / name / FILE)
    convert(folder / "sat", folder / "sat2", "sat", model_parallel_size=2)
    convert(folder / "deep", folder / "other", "sat", model_parallel_size=2)
    convert(folder / "sat", folder / "diffusers", "diffusers")
    return folder


def copied(made: Path, name: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / name, tmp_path / name))


def assert_left(path: Path, line: str, to: str = "sat", **more: object) -> None:
    """A conversion is refused, and leaves nothing."""
    assert_refused(lambda: convert(path, path.parent / "target", to, **more), line)
    assert not list(path.parent.glob("target*"))


def test_shares_of_different_models(made: Path, tmp_path: Path) -> None:
    folder = copied(made, "sat2", tmp_path)
    second = folder / "1/mp_rank_01_model_states.pt"
    shutil.copy(made / "other/1/mp_rank_01_model_states.pt", second)
    assert_left(folder, "mp_rank_01<...>: <...> tensors not as in <...>shards of different models")
    second.rename(folder / "1/mp_rank_02_model_states.pt")
    assert_left(folder, "has mp_rank_02_model_states.pt but no mp_rank_01_model_states.pt")


def test_a_diffusers_folder_of_two_models(made: Path, tmp_path: Path) -> None:
    from diffusers import CogVideoXTransformer3DModel

    model = CogVideoXTransformer3DModel.from_pretrained(made / "diffusers")
    model.save_pretrained(tmp_path / "cut", max_shard_size="1MB")
    folder = tmp_path / "cut"
    files = sorted(folder.glob("*.safetensors"))
    first, last = files[0], files[-1]
    whole = first.read_bytes()
    shutil.copy(last, first)
    assert_left(folder, "mixes two models")
    first.unlink()
    assert_left(folder, f"{first.name}, one of {len(files)} files, is missing or no regular")
    first.write_bytes(whole)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sample_frames": 49, "patch_size": 4}))
    assert_left(folder, "its config has patch_size=<...> its tensors")
    for number in (1, 3):
        (folder / "config.json").write_text(json.dumps(config | {"num_layers": number}))
        assert_left(folder, f"its config has num_layers={number}, its tensors 2; use the config")
    (folder / "config.json").write_text("{")
    assert_left(folder, "config.json: damaged")


def test_tensors_missing_or_of_another_size(made: Path, tmp_path: Path) -> None:
    folder = copied(made, "diffusers", tmp_path)
    file = next(folder.glob("*.safetensors"))
    state = load_file(file)
    key = "transformer_blocks.1.ff.net.2.weight"
    save_file(state | {key: state[key][:, :100].contiguous()}, file)
    line = "blocks.1.fc2.weight has shape [128, 100] instead of [128, 512], which 2 blocks of width 128"
    assert_left(folder, line)
    save_file({k: v for k, v in state.items() if k != key}, file)
    line = "lacks 1 of the model's <...> tensors, first blocks.1.fc2.weight; convert from"
    assert_left(folder, line)
    save_file({k: v for k, v in state.items() if "patch_embed" not in k}, file)
    assert_left(folder, "no patch_embedding.weight and no text_embedding.weight ")


def test_models_other_than_cogvideox_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    torch.save({"module": {"encoder.weight": torch.zeros(2)}}, tmp_path / "model/x.pt")
    assert_left(tmp_path / "model/x.pt", "no tensor named model.diffusion_model")
    (tmp_path / "model/config.json").write_text("{}")
    save_file({"conv.weight": torch.zeros(2)}, tmp_path / "model/model.safetensors")
    assert_left(tmp_path / "model", "no weights of diffusers' CogVideoXTransformer3DModel")
    assert_left(tmp_path / "nowhere", "nowhere: no such file or folder; give the path of")


def test_a_file_of_an_old_torch(made: Path, tmp_path: Path) -> None:
    state = torch.load(made / "sat" / FILE)
    torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    convert(tmp_path / "x.pt", tmp_path / "new", "sat")
    assert_same(torch.load(tmp_path / "new" / FILE)["module"], state["module"])
    for is_zip in (True, False):
        given = {"_use_new_zipfile_serialization": is_zip}
        torch.save(state | {"args": Hostile()}, tmp_path / "x.pt", **given)
        assert_left(tmp_path / "x.pt", "would run pickled code")
        assert not Path("/tmp/cogfast-was-here").exists()


class Hostile:
    def __reduce__(self):
        return (Path.touch, (Path("/tmp/cogfast-was-here"),))


def test_files_that_cannot_be_read_and_sparse_tensors(made: Path, tmp_path: Path) -> None:
    assert_left(copied(made, "sat", tmp_path), "no LoRA tensors", "peft")
    line = "/proc/self/mem: cannot be read <...>; check its rights"
    assert_refused(lambda: convert("/proc/self/mem", tmp_path / "target", "sat"), line)
    state = torch.load(tmp_path / "sat" / FILE)
    key = next(iter(state["module"]))
    state["module"][key] = state["module"][key].to_sparse()
    torch.save(state, tmp_path / "sat" / FILE)
    assert_left(tmp_path / "sat", f"00_model_states.pt: {key} is not a plain tensor (sparse")


def test_numbers_beyond_the_range_of_the_target(made: Path, tmp_path: Path) -> None:
    folder = copied(made, "sat", tmp_path)
    state = torch.load(folder / FILE)
    state["module"][f"{PREFIX}transformer.layers.1.mlp.dense_h_to_4h.bias"][3] = -70_000
    torch.save(state, folder / FILE)
    line = "has numbers from -70000 to <...>, but float16 ends at 65504; use a --dtype"
    assert_left(folder, line, "diffusers", dtype="float16")
    convert(folder, tmp_path / "bf16", "sat", dtype="bfloat16")


def test_unknown_names(made: Path, tmp_path: Path) -> None:
    folder = copied(made, "sat", tmp_path)
    state = torch.load(folder / FILE)
    key = f"{PREFIX}mixins.swiglu.w2.0.weight"
    torch.save({"module": state["module"] | {key: torch.zeros(2)}}, folder / FILE)
    assert_left(folder, f"1 tensor with unknown names: {key}; cogfast convert skips them with --al")
    convert(folder, tmp_path / "target", "sat", allow_unexpected=True)
    assert key not in torch.load(tmp_path / "target" / FILE)["module"]


def test_a_target_that_is_there_and_a_source_without_an_average(made: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    convert(made / "sat", target, "diffusers")  # empty: taken
    line = "target: the target is not empty; give a folder"
    assert_refused(lambda: convert(made / "sat", target, "diffusers"), line)
    call = lambda: convert(made / "diffusers", tmp_path / "other", "sat", ema=True)
    assert_refused(call, "has no EMA weights")  # only SAT folders and runs have one


def test_a_disk_too_small_is_foreseen(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    line = "GiB are needed, but 0.00 GiB are free there; free"
    assert_refused(lambda: convert(made / "sat", tmp_path / "target", "diffusers"), line)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_conversion_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user stops it at the 30th tensor."""
    plain, calls = tensor_files.Outgoing.bytes, []

    def failing(self: tensor_files.Outgoing) -> memoryview:
        calls.append(self.name)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return plain(self)

    monkeypatch.setattr(tensor_files.Outgoing, "bytes", failing)
    with pytest.raises(KeyboardInterrupt):
        convert(made / "sat", tmp_path / "target", "diffusers")
    assert len(calls) == 30 and not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_conversion_are_no_obstacle(made: Path, tmp_path: Path) -> None:
    (tmp_path / "target.incomplete").mkdir()
    (tmp_path / "target.incomplete/weights.safetensors").write_bytes(b"half")
    convert(made / "sat", tmp_path / "target", "diffusers")
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


@refusals(Path(__file__).with_name("refusals.txt"), "convert sat")
def test_options_that_do_not_fit(
    refusal: Refusal, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    target = tmp_path / "target"
    assert main(["convert", str(made / "sat"), str(target), *refusal.words]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("cogfast: ")
    assert_line(line, refusal.line)
    assert not target.exists()


@pytest.mark.parametrize(("to", "limit"), [("sat", 20_000), ("diffusers", 5)])
def test_a_real_limit_on_files_ends_in_one_line(
    made: Path, tmp_path: Path, to: str, limit: int, file_limit, capsys: pytest.CaptureFixture[str]
) -> None:
    """The system enforces a limit as a quota does, in the first small file and in the tensors."""
    source = copied(made, "sat", tmp_path)
    with file_limit(limit):
        status = main(["convert", str(source), str(tmp_path / "target"), "--to", to])
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "target: the disk is full" in last and "source is unchanged; free disk space" in last
    assert [path.name for path in tmp_path.iterdir()] == ["sat"]

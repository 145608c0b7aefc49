"""Checkpoints of every kind load; the messages about those that do not fit."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cogfast.core.files import checksum_of
from cogfast.extensions.formats.sat import to_sat_state_dict
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.checkpoint_manifest import FORMAT, write_manifest
from cogfast.model.weights.load import load_transformer
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.tiny_run import read_run_weights
from tests.support.tiny_transformers import FAMILY, tiny


def sat_file(folder: Path, iteration: str = "7") -> Path:
    return folder / iteration / "mp_rank_00_model_states.pt"


def save_sat(folder: Path, content: dict, latest: str | None = "7") -> Path:
    sat_file(folder).parent.mkdir(parents=True, exist_ok=True)
    if latest:
        (folder / "latest").write_text(latest)
    torch.save(content, sat_file(folder))
    return folder


def sat_state(transformer: DiffusionTransformer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in to_sat_state_dict(transformer).items()}


def assert_same_weights(one: torch.nn.Module, two: torch.nn.Module) -> None:
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("name", FAMILY)
def test_a_training_checkpoint_with_generator_states_loads(name: str, tmp_path: Path) -> None:
    """SAT's training writes the whole engine and the states of four generators beside it."""
    saved, loaded = tiny(name, seed=1), tiny(name, seed=2)
    state = sat_state(saved) | {"first_stage_model.encoder.conv_in.weight": torch.zeros(3)}
    content = {
        "module": state,
        "iteration": 7,
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    report = load_transformer(loaded, save_sat(tmp_path, content))
    assert_same_weights(saved, loaded)
    assert report.missing == report.unexpected == []
    assert not report.unexpected
    assert f"{tmp_path}/7: {len(dict(saved.named_parameters()))} tensors loaded" in str(report)


def test_the_ema_folder_of_a_sat_checkpoint(tmp_path: Path) -> None:
    plain, average, loaded = tiny("5b", seed=1), tiny("5b", seed=2), tiny("5b", seed=3)
    save_sat(tmp_path, {"module": sat_state(plain)})
    sat_file(tmp_path, "7-ema").parent.mkdir()
    torch.save({"module": sat_state(average)}, sat_file(tmp_path, "7-ema"))
    load_transformer(loaded, tmp_path, ema=True)
    assert_same_weights(average, loaded)
    load_transformer(loaded, tmp_path)
    assert_same_weights(plain, loaded)


@refusals(Path(__file__).with_name("refusals.txt"), "a config and a checkpoint")
def test_another_family_is_named(refusal: Refusal, tmp_path: Path) -> None:
    config, checkpoint = refusal.words
    save_sat(tmp_path, {"module": sat_state(tiny(checkpoint))})
    transformer = tiny(config, seed=9)
    before = transformer.blocks[0].fc1.weight.clone()
    assert_refused(lambda: load_transformer(transformer, tmp_path), refusal.line)
    assert torch.equal(transformer.blocks[0].fc1.weight, before)


def test_another_size_is_named(tmp_path: Path) -> None:
    save_sat(tmp_path, {"module": sat_state(tiny("5b", num_layers=3))})
    line = "3 blocks of width 128, the config num_layers=2"
    assert_refused(lambda: load_transformer(tiny("5b"), tmp_path), line)


def test_the_fixed_table_is_computed_for_another_video_size(tmp_path: Path) -> None:
    save_sat(tmp_path, {"module": sat_state(tiny("2b"))})
    wider = tiny("2b", latent_width=16)
    table = wider.position_table.weight.clone()
    load_transformer(wider, tmp_path)
    assert torch.equal(wider.position_table.weight, table)
    save_sat(tmp_path, {"module": sat_state(tiny("5b_i2v"))})
    line = "position_table.weight has shape <...> learned position table its num_fr"
    assert_refused(lambda: load_transformer(tiny("5b_i2v", latent_width=16), tmp_path), line)


def test_a_checkpoints_own_table_wins(tmp_path: Path) -> None:
    saved, loaded = tiny("2b"), tiny("2b")
    with torch.no_grad():
        saved.position_table.weight.mul_(0.5)
    load_transformer(loaded, save_sat(tmp_path, {"module": sat_state(saved)}))
    assert torch.equal(saved.position_table.weight, loaded.position_table.weight)


def test_missing_tensors_are_listed(tmp_path: Path) -> None:
    state = sat_state(tiny("5b"))
    gone = [k for k in state if ".mlp." in k]
    for key in gone:
        del state[key]
    save_sat(tmp_path, {"module": state})
    line = "8 tensors of the model are not in the checkpoint, first blocks.0.fc1.bias, <...>, ..."
    text = assert_refused(lambda: load_transformer(tiny("5b"), tmp_path), line)
    assert text.count("blocks.") == 5
    assert len(load_transformer(tiny("5b"), tmp_path, allow_missing=True).missing) == 8


def test_folders_that_are_none(tmp_path: Path) -> None:
    read = lambda: load_transformer(tiny("5b"), tmp_path)
    line = "nowhere: no such folder; set args.load"
    assert_refused(lambda: load_transformer(tiny("5b"), tmp_path / "nowhere"), line)
    assert_refused(read, "has no mp_rank_00_model_states.pt of SAT, <...> check its name")
    save_sat(tmp_path, {"module": sat_state(tiny("5b"))}, latest=None)
    assert_refused(read, "has no mp_rank_00<...>; check its name, write 7 into its file latest")
    (tmp_path / "latest").write_text("8")
    assert_refused(read, "8: has no mp_rank_00_model_states")
    load_transformer(tiny("5b"), tmp_path / "7")  # an iteration's folder is a checkpoint too


def test_truncated_file(tmp_path: Path) -> None:
    save_sat(tmp_path, {"module": sat_state(tiny("5b"))})
    whole = sat_file(tmp_path).read_bytes()
    for size in (len(whole) // 2, 100, 0):
        sat_file(tmp_path).write_bytes(whole[:size])
        assert_refused(lambda: load_transformer(tiny("5b"), tmp_path), "truncated or damaged")


def write_run(run: Path, transformer: DiffusionTransformer, kinds=("master", "shadow")) -> Path:
    """A checkpoint as two ranks write it: the flat parameters one after the other, cut in the
    middle, so that one parameter lies in both files; the shadow is the master plus one."""
    folder = run / "checkpoints" / "00000040"
    folder.mkdir(parents=True)
    named = {n: p.detach().flatten() for n, p in transformer.named_parameters() if p.requires_grad}
    frozen = {n: p.detach() for n, p in transformer.named_parameters() if not p.requires_grad}
    middle = sum(p.numel() for p in named.values()) // 2
    tensors: list[dict] = [{}, {}]
    slices: list[dict] = [{}, {}]
    begin = 0
    for name, flat in named.items():
        cut = min(max(middle - begin, 0), flat.numel())
        for rank, (start, stop) in enumerate(((0, cut), (cut, flat.numel()))):
            for kind in kinds if stop > start else ():
                key = f"{kind}/{name}/{start}"
                tensors[rank][key] = flat[start:stop] + (kind == "shadow")
                slices[rank][key] = {"parameter": name, "kind": kind, "start": start}
                slices[rank][key]["numel"] = stop - start
        begin += flat.numel()
    for name, p in frozen.items():
        tensors[0][f"frozen/{name}/0"] = p.flatten().clone()
        slices[0][f"frozen/{name}/0"] = {"parameter": name, "kind": "frozen", "start": 0}
        slices[0][f"frozen/{name}/0"]["numel"] = p.numel()
    for rank in (0, 1):
        save_file(tensors[rank], folder / f"rank-{rank:05d}.safetensors")
    about = {True: {}, False: {}}
    for name, p in transformer.named_parameters():
        about[p.requires_grad][name] = {"shape": list(p.shape), "dtype": "float32"}
    manifest = {"step": 40, "parameters": about[True], "frozen": about[False]}
    manifest["slices"] = {f"rank-{r:05d}.safetensors": slices[r] for r in (0, 1)}
    seal(folder, manifest)
    (folder.parent / "latest").write_text("00000040")
    return folder


def seal(folder: Path, manifest: dict) -> dict:
    """Write the manifest of a checkpoint whose files are there, with their sizes and checksums."""
    files = [folder / name for name in manifest["slices"]]
    manifest = {"format": FORMAT, "frozen": {}, "config": {}} | manifest
    manifest |= {"bytes": {file.name: file.stat().st_size for file in files}}
    manifest |= {"checksums": {file.name: checksum_of(file) for file in files}}
    manifest.pop("checksum", None)
    write_manifest(folder, manifest)
    return manifest


def test_a_run_and_its_average(tmp_path: Path) -> None:
    trained = tiny("2b", seed=1)
    folder = write_run(tmp_path, trained)
    for path in (tmp_path, folder.parent, folder):
        loaded = tiny("2b", seed=2)
        report = load_transformer(loaded, path)
        assert_same_weights(trained, loaded)
        assert report.missing == [] and "weights of step 40" in str(report)
    load_transformer(loaded, tmp_path, ema=True)
    assert torch.equal(loaded.blocks[1].fc2.weight, trained.blocks[1].fc2.weight + 1)
    # 2B's fixed table has no average.
    table = read_run_weights(folder, ema=True)["position_table.weight"]
    assert torch.equal(table, trained.position_table.weight.detach())


def test_config_refuses_what_cannot_be_built() -> None:
    for family, sizes, line in (
        ("5b", {"num_attention_heads": 3}, "num_attention_heads=3 must divide hidden_size=128"),
        ("5b", {"num_attention_heads": 16}, "heads=8: a rotary head needs a multiple of 16"),
        ("1.5_5b_i2v", {"ofs_embed_dim": 32}, "ofs_embed_dim=32 must equal time_embed_dim=64"),
    ):
        assert_refused(lambda f=family, s=sizes: replace(FAMILY[f], **s), line)


def test_bf16_weights_do_not_go_into_fp16_unasked(tmp_path: Path) -> None:
    saved, loaded = tiny("5b", seed=1).bfloat16(), tiny("5b", seed=2).half()
    folder = save_sat(tmp_path, {"module": sat_state(saved)})
    line = "has bf16 weights, <...> number is 65504<...>force_train"
    assert_refused(lambda: load_transformer(loaded, folder), line)
    load_transformer(loaded, folder, allow_missing=True)
    assert torch.equal(loaded.output.weight, saved.output.weight.half())
    load_transformer(tiny("5b", seed=3).bfloat16(), folder)
    half = save_sat(tmp_path / "half", {"module": sat_state(tiny("2b", seed=1).half())})
    load_transformer(tiny("2b", seed=2).half(), half)

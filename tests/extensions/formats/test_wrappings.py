"""Weights of a transformer in the files of other programs: what is read, and what is named and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from cogfast.extensions.formats.convert import convert
from cogfast.model.weights.open import open_source
from tests.support.pipelines import Pipelines
from tests.support.refusals import assert_refused

Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def base(pipelines: Pipelines) -> Path:
    return pipelines.path("5b") / "transformer"


def assert_equal(folder: Path, base: Path) -> None:
    found, expected = open_source(folder), open_source(base)
    assert found.shapes == expected.shapes and not found.unexpected
    for name in expected.shapes:
        assert torch.equal(found.read(name, None), expected.read(name, None))


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("model.gguf", b"GGUF", "quantized weights (GGUF), which cogfast does not read; use the model's"),
        ("__0_0.distcp", b"", "a checkpoint of torch.distributed.checkpoint (FSDP)"),
        ("pytorch_model/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", b"", "python zero_to_fp32.py"),
        ("pytorch_model-00001-of-00002.bin", b"", "weights without a config.json of diffusers"),
        ("model.safetensors", b"", "weights without a config.json of diffusers"),
        ("diffusion_pytorch_model.bin", b"", "weights without a config.json of diffusers"),
    ],
)  # fmt: skip
def test_weights_in_other_wrappings_are_named(
    file: str, content: bytes, line: str, tmp_path: Path
) -> None:
    path = tmp_path / "x" / file
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    if path.suffix == ".safetensors":
        save_file({"blocks.weight": torch.ones(2)}, path)
    if path.suffix == ".pt":
        (tmp_path / "x" / "latest").write_text("pytorch_model")
    assert_refused(lambda: convert(tmp_path / "x", tmp_path / "out", "sat"), line)


def test_a_pointer_of_git_lfs_is_named(base: Path, tmp_path: Path) -> None:
    pointer = "version https:" + "//git-lfs/spec/v1\noid sha256:0\nsize 9\n"
    for name in ("diffusion_pytorch_model.safetensors", "config.json"):
        folder = tmp_path / name
        shutil.copytree(base, folder)
        (folder / name).write_text(pointer)
        line = f"{name}: is a pointer of Git LFS, not the file itself; run git lfs pull"
        assert_refused(lambda folder=folder: convert(folder, tmp_path / "out", "sat"), line)


def test_weights_of_torch_save_are_read(base: Path, tmp_path: Path) -> None:
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    weights = load_file(base / "diffusion_pytorch_model.safetensors")
    torch.save(weights, tmp_path / "diffusion_pytorch_model.bin")
    assert_equal(tmp_path, base)


def one_file(weights: Weights, folder: Path) -> None:
    torch.save(weights, folder / "pytorch_model.bin")


def of_accelerate(weights: Weights, folder: Path) -> None:
    one_file(weights, folder)
    torch.save({"scale": torch.ones(1)}, folder / "scaler.bin")
    torch.save({"last": torch.optim.SGD}, folder / "scheduler.bin")


def of_zero_to_fp32(weights: Weights, folder: Path) -> None:
    files = [f"pytorch_model-0000{i}-of-00002.bin" for i in (1, 2)]
    index = {name: files[i % 2] for i, name in enumerate(weights)}
    for file in files:
        torch.save({k: v for k, v in weights.items() if index[k] == file}, folder / file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "pytorch_model.bin.index.json").write_text(text)


def of_fsdp(weights: Weights, folder: Path) -> None:
    parts = folder / "parts"
    checkpoint.save({"model": weights, "step": 3}, checkpoint_id=parts, no_dist=True)
    dcp_to_torch_save(parts, folder / "pytorch_model.bin")
    shutil.rmtree(parts)


def wrapped(name: str, inner: str = "") -> Callable[[Weights, Path], None]:
    renamed = lambda key: name + key.replace(".attn1.", f".{inner}attn1.")
    return lambda weights, folder: one_file({renamed(k): v for k, v in weights.items()}, folder)


WRITERS: dict[str, Callable[[Weights, Path], None]] = {
    "accelerate": of_accelerate,
    "zero_to_fp32": of_zero_to_fp32,
    "FSDP": of_fsdp,
    "DDP": wrapped("module."),
    "torch.compile": wrapped("module._orig_mod.", "_orig_mod."),
    "checkpointing": wrapped("_fsdp_wrapped_module.", "_checkpoint_wrapped_module."),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_weights_beside_a_config_are_read(writer: str, base: Path, tmp_path: Path) -> None:
    """The refusals of other wrappings advise it."""
    shutil.copyfile(base / "config.json", tmp_path / "config.json")
    WRITERS[writer](load_file(base / "diffusion_pytorch_model.safetensors"), tmp_path)
    assert_equal(tmp_path, base)


@pytest.mark.parametrize("file", ["diffusion_pytorch_model.bin", "pytorch_model_fsdp.bin"])
def test_two_models_in_a_folder_are_refused(file: str, base: Path, tmp_path: Path) -> None:
    """Trained weights that were put beside those of the base."""
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    weights = load_file(base / "diffusion_pytorch_model.safetensors")
    torch.save(weights, folder / file)
    line = (
        f"has weights in diffusion_pytorch_model.safetensors and in {file}, which may be two models"
    )
    for path in (folder, folder / file):
        assert_refused(lambda path=path: convert(path, tmp_path / "out", "sat"), line)
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model_1.bin")
    assert_refused(lambda: convert(folder, tmp_path / "out", "sat"), "is in another file, too")

"""Models and runs with block-sparse attention: exact where nothing is left out, resumed, sampled, refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.formats.checkpoint_manifest import newest_checkpoint, read_manifest
from cogfast.train.memory.activation_checkpointing import LADDER, apply_policies
from cogfast.train.preflight.sparse_attention import check_sparse, use_attention
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import losses, read_run_weights, run_folder, write_clips, write_config
from tests.support.tiny_transformers import FAMILY, tiny

# 768 video tokens: 8 text rows in the first block, 5 blocks to choose from
WORDS = ("data.params.video_size=[256,256]",) + tuple(
    f"model.network_config.params.latent_{side}=32" for side in ("height", "width")
)
SPARSE = "args.attention=sparse:0.6"


def gradients(transformer: DiffusionTransformer) -> dict[str, Tensor]:
    """Output and gradients for 4 frames of 12 x 12 tokens."""
    config, draw = transformer.config, torch.Generator().manual_seed(0)
    frames = 4 * config.patch_size.t
    shape = (2, config.in_channels, frames, 24, 24)
    whole, text = torch.randn(shape, generator=draw), torch.randn(2, 10, 32, generator=draw)
    latents, image = whole.split((16, config.in_channels - 16), 1)
    transformer.zero_grad()
    out = transformer(latents, torch.tensor([3, 700]), text, image if image.shape[1] else None)
    (out * torch.randn(out.shape, generator=draw)).sum().backward()
    return {"out": out.detach()} | {
        n: p.grad for n, p in transformer.named_parameters() if p.grad is not None
    }


@pytest.mark.parametrize("family", FAMILY)
def test_a_share_of_0_is_dense_attention(family: str) -> None:
    transformer = tiny(family, num_frames=29, latent_height=24, latent_width=24).train()
    wanted = gradients(transformer)
    transformer.use_sparse_attention(0.0)
    found = gradients(transformer)
    most = max(x.norm() for name, x in wanted.items() if name != "out")
    for name, value in wanted.items():
        # The error of a gradient that is zero but for rounding counts against the other gradients.
        assert (found[name] - value).norm() <= 1e-5 * (value.norm() + 1e-2 * most), name
    transformer.use_sparse_attention(0.6)
    assert (gradients(transformer)["out"] - wanted["out"]).norm() > 1e-3 * wanted["out"].norm()
    transformer.use_sparse_attention(None)
    assert all(torch.equal(x, wanted[name]) for name, x in gradients(transformer).items())


def test_all_policies_have_the_same_gradients() -> None:
    transformer = tiny("5b", latent_height=24, latent_width=24).train()
    transformer.use_sparse_attention(0.6)
    wanted = gradients(transformer)
    for policy in LADDER:
        apply_policies(transformer, [policy] * 2)
        assert all(torch.equal(x, wanted[n]) for n, x in gradients(transformer).items()), policy


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    return write_config(folder / "base.yaml", write_clips(folder / "data"), train_iters=4)


def train(base: Path, save: Path, *words: str) -> tuple[Trainer, Path]:
    trainer = Trainer(load_config([base], [f"args.save={save}", *WORDS, *words]))
    trainer.train()
    return trainer, run_folder(save)


def test_a_run_resumes_samples_and_fine_tunes_sparse(
    base: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.INFO)
    warm = (SPARSE, "args.sparse_warmup=3")
    trainer, whole = train(base, tmp_path / "whole", *warm)
    assert trainer.engine.transformer.sparse_share == 0.6
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    kept = [line["attention_kept"] for line in lines if "attention_kept" in line]
    # Step 1 leaves out nothing, steps 2 and 3 a part of the share.
    assert kept[0] == pytest.approx(1) and kept[0] > kept[1] > kept[3] > 0.4
    layers = [lines[3][f"attention_kept_layer_0{i}"] for i in range(2)]
    assert sum(layers) / 2 == pytest.approx(kept[3])
    _, dense = train(base, tmp_path / "dense")
    assert losses(dense)[0] == pytest.approx(losses(whole)[0], rel=1e-5)
    # The blocks' gates begin at zero, so that losses differ by their last bits only, or not at all.
    weights = [read_run_weights(newest_checkpoint(run)) for run in (dense, whole)]
    assert any(not torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

    train(base, tmp_path / "cut", *warm, "args.train_iters=2")
    _, cut = train(base, tmp_path / "cut", *warm, "args.resume=latest")
    assert losses(cut) == losses(whole)
    checkpoint = newest_checkpoint(whole)
    assert read_manifest(checkpoint)["attention"] == "sparse:0.6"

    caplog.clear()
    further, _ = train(base, tmp_path / "further", f"args.load={checkpoint}", "args.train_iters=1")
    assert further.engine.transformer.sparse_share == 0.6
    assert f"attention: sparse:0.6, as {checkpoint} was trained" in caplog.text
    assert further.config.args.attention == "sparse:0.6"
    with pytest.raises(ValueError, match="args.attention: sparse:0.6 -> None"):
        train(base, tmp_path / "cut", "args.resume=latest", "args.train_iters=5")
    options = ["--prompt", "a bar", "args.only_save_latents=true", "--out"]
    latents = []
    for name, word in (("a", []), ("b", ["args.attention=dense"])):
        out = tmp_path / name
        assert main(["sample", str(whole), *options, str(out), *word]) == 0
        latents.append(next(out.glob("*.safetensors")).read_bytes())
        is_logged = (
            "attention: dense instead of the checkpoint's sparse:0.6" in capsys.readouterr().err
        )
        assert is_logged == (name == "b")
    assert latents[0] != latents[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("args.attention=sparse:0.96", "from 0 to 0.95, such as sparse:0.8"),
        ("args.attention=sparse", "must be dense or sparse:SHARE"),
        ("args.attention=sparse:-0.1", "must be dense or sparse:SHARE"),
        ("args.attention=flex", "must be dense or sparse:SHARE"),
        ("args.sparse_warmup=5", "args.sparse_warmup=5 needs args.attention=sparse:SHARE"),
        (f"{SPARSE} args.compile=true args.sparse_warmup=2", "set one of the two to its default"),
        (
            f"{SPARSE} args.attention_backend=math",
            "math has no block-sparse kernels; set it to auto",
        ),
    ],
)
def test_what_cannot_run_is_refused(base: Path, words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config = load_config([base], words.split())
        check_sparse(config, TrainArguments.from_config(config), FAMILY["5b"], is_training=True)


class Own(DiffusionTransformer):
    def block_arguments(self, tensors, grid):
        return [()] * len(self.blocks)


def test_rows_of_a_subclass_are_refused() -> None:
    with torch.device("meta"), pytest.raises(ValueError, match="does not work with Own.block_arg"):
        use_attention(Own(FAMILY["5b"]), "sparse:0.5")


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({}, (9, 0), "gains nothing below 4,096 video tokens, and the largest clip has"),
        ({"hidden_size": 48}, (9, 0), "multiples of 16 up to 256, not 24"),
        ({}, (7, 5), "needs a GPU of compute capability 8.0, this is 7.5"),
    ],
)
def test_a_gpu_that_gains_nothing_is_refused(
    base: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict,
    capability: tuple[int, int],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    config = load_config([base], [SPARSE])
    model = replace(FAMILY["2b"], **changes)
    with pytest.raises(ValueError, match=message):
        check_sparse(config, TrainArguments.from_config(config), model, is_training=True)

"""Models and runs with block-sparse attention: exact where nothing is left out, resumed, sampled, refused."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from cogfast.__main__ import main
from cogfast.core.keys import with_origins
from cogfast.extensions.sparse.check import check_sparse, use_attention
from cogfast.model.transformer import DiffusionTransformer
from cogfast.model.weights.checkpoint_manifest import read_manifest
from cogfast.train.activation_checkpointing import LADDER, apply_policies
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run
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


def test_a_run_resumes_samples_and_fine_tunes_sparse(
    run: Run, tmp_path: Path, log: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run.with_words(*WORDS)
    warm = run.with_words(SPARSE, "args.sparse_warmup=3")
    whole = warm.into(tmp_path / "whole").train()
    trainer, lines = whole.last, whole.lines
    assert trainer.engine.transformer.sparse_share == 0.6
    kept = whole.logged("attention_kept")
    # Step 1 leaves out nothing, steps 2 and 3 a part of the share.
    assert kept[0] == pytest.approx(1) and kept[0] > kept[1] > kept[3] > 0.4
    layers = [lines[3][f"attention_kept_layer_0{i}"] for i in range(2)]
    assert sum(layers) / 2 == pytest.approx(kept[3])
    dense = run.into(tmp_path / "dense").train()
    assert dense.losses[0] == pytest.approx(whole.losses[0], rel=1e-5)
    # The blocks' gates begin at zero, so that losses differ by their last bits only, or not at all.
    weights = [dense.weights(), whole.weights()]
    assert any(not torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())

    cut = warm.into(tmp_path / "cut")
    cut.train(steps=2)
    assert cut.resume().losses == whole.losses
    checkpoint = whole.checkpoint
    assert read_manifest(checkpoint)["attention"] == "sparse:0.6"

    log.clear()
    further = run.into(tmp_path / "further").train(f"args.load={checkpoint}", steps=1).last
    assert further.engine.transformer.sparse_share == 0.6
    assert f"attention: sparse:0.6, as {checkpoint} was trained" in log.text
    assert further.args.attention == "sparse:0.6"
    other = run.into(tmp_path / "cut")
    assert_refused(lambda: other.resume(steps=5), "args.attention: sparse:0.6 -> None")
    options = ["--prompt", "a bar", "args.only_save_latents=true", "--out"]
    latents = []
    for name, word in (("a", []), ("b", ["args.attention=dense"])):
        out = tmp_path / name
        assert main(["sample", str(whole.path), *options, str(out), *word]) == 0
        latents.append(next(out.glob("*.safetensors")).read_bytes())
        line = "attention: dense instead of the checkpoint's sparse:0.6"
        assert (line in capsys.readouterr().err) == (name == "b")
    assert latents[0] != latents[1]


@refusals(Path(__file__).with_name("refusals.txt"))
def test_what_cannot_run_is_refused(run: Run, refusal: Refusal) -> None:
    def check() -> None:
        made = run.config(*refusal.words).run
        with with_origins(made.origins):
            check_sparse(made.args, FAMILY["5b"], made.data_arguments, is_training=True)

    assert_refused(check, refusal.line)


class Own(DiffusionTransformer):
    def block_arguments(self, tensors, grid):
        return [()] * len(self.blocks)


def test_rows_of_a_subclass_are_refused(run: Run) -> None:
    args, unused = run.config(SPARSE).run.args, cast(Any, None)
    with torch.device("meta"), pytest.raises(ValueError, match="does not work with Own.block_arg"):
        use_attention(Own(FAMILY["5b"]), args, {}, unused, True)


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({}, (9, 0), "gains nothing below 4,096 video tokens, and the largest clip has"),
        ({"hidden_size": 48}, (9, 0), "multiples of 16 up to 256, not 24"),
        ({}, (7, 5), "needs a GPU of compute capability 8.0, this is 7.5"),
    ],
)
def test_a_gpu_that_gains_nothing_is_refused(
    run: Run, monkeypatch: pytest.MonkeyPatch, changes: dict, capability: tuple, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    made, model = run.config(SPARSE).run, replace(FAMILY["2b"], **changes)
    check = partial(check_sparse, made.args, model, made.data_arguments, is_training=True)
    assert_refused(check, message)

"""The network and the tensors of docs/extending.md: a trajectory fuser and noise from files, on one and two
ranks, resumed; what is trained, saved, sampled and refused."""

from __future__ import annotations

import json
import logging
import re
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest
import torch

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.model.transformer import build_transformer
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    CHANNELS,
    ROOT,
    SIDE,
    launch_ranks,
    losses,
    read_run_weights,
    run_folder,
    write_config,
)
from tests.train.run.test_extending import EXAMPLES, example

DOCS = ROOT / "docs" / "extending.md"
SHAPES = {"noise": [CHANNELS, 3, 4, 4], "flow": [2, 3, 4, 4]}
OWN = [
    "model.network_config.target=mymodel.TrajectoryTransformer",
    "model.trainable_modules=[fuser, traj_extractor]",
]
NAMES = {f"traj_extractor.{kind}" for kind in ("weight", "bias")}
NAMES |= {f"blocks.{i}.fuser.{kind}" for i in range(2) for kind in ("weight", "bias")}


class World:
    """A folder with the module and the script of the examples, a manifest, and a base model."""

    def __init__(self, folder: Path, data: Path) -> None:
        self.folder = folder
        text = next(code for code in EXAMPLES if "class TrajectoryTransformer" in code)
        (folder / "mymodel.py").write_text(text + "\n\nclass Other(nn.Module):\n    pass\n")
        text = next(code for code in EXAMPLES if "class WarpedNoise" in code)
        (folder / "my_trainer.py").write_text(text)
        yaml = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
        text = next(block for block in yaml if "trainable_modules" in block)
        (folder / "trajectory.yaml").write_text(text)
        rows = []
        for i in range(6):
            row = {"path": str(data / "videos" / f"{i}.mp4"), "caption": f"bar number {i} moves"}
            for name, shape in SHAPES.items():
                values = np.random.default_rng([i, len(name)]).standard_normal(shape)
                np.save(folder / f"{name}{i}.npy", values.astype(np.float16))
                row[name] = f"{name}{i}.npy"
            rows.append(row)
        (folder / "clips.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        params = {"video_size": [SIDE, SIDE], "fps": 8, "max_num_frames": 9, "tensors": SHAPES}
        dataset = {"target": "cogfast.data.datasets.VideoManifest", "params": params}
        manifest = [str(folder / "clips.jsonl")]
        self.base = write_config(
            folder / "base.yaml", data, dataset=dataset, train_data=manifest, eval_iters=1
        )

    @cached_property
    def weights(self) -> Path:
        return self.run(Trainer, "base", "args.train_iters=3").writer.path(3)

    def words(self, name: str) -> list[str]:
        load = [] if name.startswith("base") else [f"args.load={self.weights}"]
        return [f"args.save={self.folder / name}", *load]

    def run(self, kind: type[Trainer], name: str, *words: str) -> Trainer:
        trainer = kind(load_config([self.base], [*self.words(name), *words], ["mymodel"]))
        trainer.train()
        return trainer

    def warped(self, processes: int, name: str, *words: str) -> Path:
        """Run the script of the examples and return its run: of two ranks as a user starts it."""
        words = (f"deepspeed.train_micro_batch_size_per_gpu={4 // processes}", *words)
        if processes == 1:
            self.run(example("WarpedNoise"), name, *OWN, *words)
        else:
            script = str(self.folder / "my_trainer.py")
            base = ["--base", str(self.base), str(self.folder / "trajectory.yaml")]
            given = [*base, "--allow-import", "mymodel", *self.words(name)]
            launch_ranks(processes, script, *given, *words)
        return run_folder(self.folder / name)


@pytest.fixture(scope="module")
def world(data: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("own")
        patch.syspath_prepend(folder)
        yield World(folder, data)


def test_the_first_loss_is_the_base_s_and_only_the_named_modules_train(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        own = world.run(Trainer, "own", *OWN)
    plain = world.run(Trainer, "plain")
    assert losses(own.folder)[0] == losses(plain.folder)[0]  # bit for bit: the fuser is zero
    assert losses(own.folder)[1] != losses(plain.folder)[1]
    assert (
        "6 tensors, which start from their own initial values: blocks.*.fuser.bias" in caplog.text
    )
    base, saved = read_run_weights(world.weights), read_run_weights(own.writer.path(4))
    assert saved.keys() == NAMES
    torch.manual_seed(0)  # changes nothing
    fresh = build_transformer(
        own.config.model, own.args.seed, own.config.allow_import
    ).named_parameters()
    initial = {name: parameter for name, parameter in fresh if name in NAMES}
    for name, parameter in own.engine.transformer.named_parameters():
        if name in base:
            assert torch.equal(parameter, base[name]), name
        else:
            assert not torch.equal(parameter, initial[name]), name
    # The constructor's values, not those that cogfast gives to its own linears.
    assert not initial["blocks.0.fuser.weight"].any()
    bound = (
        1 / (2 * 2 * 2) ** 0.5
    )  # of PyTorch's convolutions: one over the root of a patch's numbers
    assert 0.8 * bound < initial["traj_extractor.weight"].abs().max() <= bound


def test_the_noise_is_that_of_the_files(world: World) -> None:
    seen = []

    class Recorded(example("WarpedNoise")):
        def losses(self, batch, noised, conditioning):
            for path, noise, flow in zip(
                batch["paths"], noised.noise, conditioning.tensors["flow"], strict=True
            ):
                number = Path(path).stem
                for name, values in (("noise", noise), ("flow", flow)):
                    file = np.load(world.folder / f"{name}{number}.npy")
                    assert np.array_equal(values.numpy(), file.astype(np.float32))
                seen.append(number)
            return super().losses(batch, noised, conditioning)

    world.run(Recorded, "noise", "args.train_iters=2")
    assert len(seen) == 8 and len(set(seen)) == 6


@pytest.mark.parametrize("processes", [1, 2])
def test_resumed_bit_for_bit(world: World, processes: int) -> None:
    whole = world.warped(processes, f"whole{processes}")
    parts = world.warped(processes, f"parts{processes}", "args.exit_interval=2")
    assert len(losses(parts)) == 2
    world.warped(processes, parts.parent.name, f"args.resume={parts}")
    assert losses(parts) == losses(whole)
    weights = [read_run_weights(run / "checkpoints" / "00000004") for run in (parts, whole)]
    assert weights[0].keys() == NAMES
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in NAMES)
    if processes == 2:
        one = run_folder(world.folder / "whole1")
        assert losses(whole) == pytest.approx(losses(one), rel=1e-5)


def test_other_commands_take_the_option(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [*OWN, "model.trainable_modules=[fuser]", "args.train_iters=1"]
    trainer = world.run(Trainer, "commands", *words)
    run, saved = str(trainer.folder), read_run_weights(trainer.writer.path(1))
    # No other file has the modules that are added and not trained.
    assert saved.keys() == NAMES
    frozen = trainer.engine.transformer.get_parameter("traj_extractor.weight")
    assert not frozen.requires_grad and torch.equal(saved["traj_extractor.weight"], frozen)
    sample = ["sample", run, "--prompt", "a bar", "--steps", "2", "--out", str(tmp_path / "out")]
    sample += [
        word for name in SHAPES for word in ("--tensor", f"{name}={world.folder / name}0.npy")
    ]
    plan = ["plan", "--base", str(world.base), *OWN, *world.words("commands"), "--gpu", "24"]
    own, convert = (
        ["--allow-import", "mymodel"],
        ["convert", run, str(tmp_path / "sat"), "--to", "sat"],
    )
    for command, reason in (
        (
            sample,
            "only dit_video_concat.DiffusionTransformer is supported; use it; classes of your own",
        ),
        (plan, "of your own package need --allow-import mymodel"),
        (convert, "has only tensors of a network of its own, which no"),
    ):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert reason in line
    assert main([*sample, *own]) == 0
    assert list((tmp_path / "out").glob("*.mp4"))
    assert main([*plan, *own]) == 0
    assert "GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    {
        "another class": (
            ["model.network_config.target=mymodel.Other"],
            "target=mymodel.Other is not a subclass of cogfast.model.transformer.DiffusionTransformer",
        ),
        "another package": (
            ["model.network_config.target=othermodel.Network"],
            "only dit_video_concat.DiffusionTransformer is supported; use it; classes of your own package "
            "need --allow-import othermodel",
        ),
        "no such class": (
            ["model.network_config.target=mymodel.Trajectory"],
            "mymodel has no Traj",
        ),
        "no such file": (
            ["model.network_config.target=mymodel.x.Y"],
            "importing it failed: No module",
        ),
        "ranks": (
            [*OWN, "args.model_parallel_size=2"],
            "args.model_parallel_size=2 splits the work",
        ),
        "exports": ([*OWN, "args.export=last"], "has no class for what mymodel.Trajectory"),
        "a misspelt module": (
            [*OWN, "model.trainable_modules=[fusser]"],
            "no module is called 'fusser'; did you mean fuser?",
        ),
        "a frozen module": (
            [*OWN, "model.not_trainable_prefixes=[traj]"],
            r"trains traj_extractor.weight, which model.not_trainable_prefixes freezes; remove one",
        ),
        "no tensors": (
            [*OWN, "data.params.tensors=null"],
            "none of model.trainable_modules took part in it; give the samples what",
        ),
        "lora alone": (
            [*OWN, "model.lora_train=true"],
            "which model.lora_train freezes; remove one",
        ),
    }.values(),
)
def test_refused(
    world: World, words: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError) as raised:
        world.run(Trainer, "refused", *words)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_adapters_and_modules_together(world: World, tmp_path: Path) -> None:
    """LoRA beside the added modules, under a policy that recomputes blocks, and from a latent cache."""
    lora = [*OWN, "args.lora_rank=2", "args.train_iters=2"]
    runs = [
        world.run(Trainer, f"lora-{policy}", *lora, f"args.activation_checkpointing={policy}")
        for policy in ("none", "full", "pointwise")
    ]
    names = read_run_weights(runs[0].writer.path(2)).keys()
    assert names > NAMES and all("matrix_" in name for name in names - NAMES)
    assert len({tuple(losses(run.folder)) for run in runs}) == 1
    cache = [f"args.latent_cache={tmp_path}", "args.encode_first=true"]
    cached = world.run(Trainer, "cached", *lora, *cache)
    assert losses(cached.folder) == pytest.approx(losses(runs[0].folder), rel=1e-5)

"""A `target` names only the classes of its place; nothing else is imported or called."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.components import PLACES, import_target
from cogfast.config.sat_classes import TARGETS
from cogfast.train.optimizer import build_optimizer
from tests.support.refusals import assert_command_refused, assert_refused
from tests.support.runs import Run

NODES = {  # place -> its dotted key in a configuration
    "network": "model.network_config",
    "denoiser": "model.denoiser_config",
    "scaling": "model.denoiser_config.params.scaling_config",
    "discretization": "model.sampler_config.params.discretization_config",
    "loss_fn": "model.loss_fn_config",
    "sigma_sampler": "model.loss_fn_config.params.sigma_sampler_config",
    "sampler": "model.sampler_config",
    "guider": "model.sampler_config.params.guider_config",
    "dyn_thresh": "model.sampler_config.params.guider_config.params.dyn_thresh_config",
    "first_stage": "model.first_stage_config",
    "emb_models": "model.conditioner_config.params.emb_models[0]",
    "data": "data",
}
HOSTILE = ["torch.os.system", "torch.__loader__.load_module", "torch.nn.Linear", "os.system"]
HOSTILE += ["torch.nn.Identity.__class__", "cogfast.train.trainer.Trainer", "this.x", "a..b", "x."]
HOSTILE += ["cogfast.train.run.folder.subprocess.run", "data_video.SFTDataset.find"]
HOSTILE += ["cogfast.model.transformer.DiffusionTransformer.__init__"]


@pytest.mark.parametrize("path", HOSTILE)
def test_each_place_refuses_what_its_list_lacks(run: Run, path: str) -> None:
    """The message names the key, the path and what the place takes; no module is imported."""
    before = set(sys.modules)
    # A fifth of the places for each path, so that each place meets several.
    for key in list(NODES.values())[HOSTILE.index(path) % 5 :: 5]:
        text = assert_refused(lambda key=key: run.config(f"{key}.target={path}"), f"{key}.target=")
        assert f"{key}.target={path}" in text.replace("'", "")
        assert "; use " in text or "did you mean" in text
    root = path.partition(".")[0]
    new = {name for name in set(sys.modules) - before if name.split(".")[0] == root}
    assert not new or root in ("torch", "cogfast")


def test_a_class_of_one_place_does_not_go_to_another(run: Run) -> None:
    paths = {name: place.paths[0] for name, place in PLACES.items()}
    for i, (place, key) in enumerate(NODES.items()):
        for path in [paths[list(NODES)[i - 1]], paths["optimizer"]]:
            if path not in PLACES[place].paths:
                what = "only dit_video" if place == "network" else f"unknown {PLACES[place].what}"
                with pytest.raises(ValueError, match=rf"{path}'?: {what}"):
                    run.config(f"{key}.target={path}")


def test_every_listed_class_exists_and_is_ours_or_torchs() -> None:
    for name, place in PLACES.items():
        for path in place.paths:
            found = import_target(path, "target", place=name)
            assert inspect.isclass(found) or inspect.isfunction(found), path
            assert found.__module__.split(".")[0] in ("cogfast", "torch"), path
    for sat in TARGETS.values():
        assert any(sat.path in place.paths for place in PLACES.values()), sat.path


def test_listed_optimizers_are_built() -> None:
    for name in PLACES["optimizer"].names:
        weight = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = build_optimizer({"type": f"torch.optim.{name}"}, [{"params": [weight]}])
        weight.grad = torch.ones(2, 2)
        optimizer.step()
        assert torch.isfinite(weight).all() and (weight != 0).all(), name


MINE = """
import os
import os.path
from subprocess import run
from pathlib import Path
from .clips import Clips
from . import clips
instance = Clips
size = 3
"""
CLIPS = (
    "import os\nclass Clips:\n    def __init__(self, data_dir, size: int = 1): self.size = size\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder = tmp_path / "my_clips_package"
    folder.mkdir()
    (folder / "__init__.py").write_text(MINE)
    (folder / "clips.py").write_text(CLIPS)
    (folder / "__main__.py").write_text("raise SystemExit('the package was run')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return folder.name


OTHERS = ["os.system", "clips.os.system", "run", "__loader__.load_module", "instance.__class__"]


@pytest.mark.parametrize("name", [*OTHERS, "__builtins__.eval"])
def test_an_allowed_package_gives_only_what_it_defines(run: Run, package: str, name: str) -> None:
    path = f"{package}.{name}"
    words = [f"data={{target: {path}, params: null}}"]
    assert_refused(lambda: load_config([run.base], words, [package]), f"data.target={path}")


def test_an_allowed_package_by_its_modules(run: Run, package: str) -> None:
    base = run.base
    OmegaConf.save(OmegaConf.merge(OmegaConf.load(base), {"data": None}), base)
    for path in (f"{package}.Clips", f"{package}.clips.Clips"):
        arguments = [f"data={{target: {path}, params: {{size: 3}}}}"]
        assert load_config([base], arguments, [package]).data.target == path
        for allowed in ((), (package.removesuffix("_package"),)):
            call = lambda words=arguments, allowed=allowed: load_config([base], words, allowed)
            assert_refused(call, "a class that you wrote needs --allow-import with the name")
    arguments = ["data={target: my_clips_package.clips.Clips}"]
    assert load_config([base], arguments, [f"{package}.clips"]).data.target.endswith("Clips")


def test_a_file_cannot_allow_an_import(run: Run, package: str, capsys) -> None:
    """A run's own training_config.yaml, say: only the command line of the call counts."""
    base = run.base
    base.write_text(base.read_text().replace("data_video.SFTDataset", f"{package}.Clips"))
    for extra in ("allow_import", "args.allow_import", "data.allow_import"):
        arguments = ["train", "--dry-run", "--base", str(base), f"{extra}=[{package}]"]
        assert main(arguments) == 2
        assert "unknown key" in capsys.readouterr().err or extra == "data.allow_import"
    assert main(["train", "--dry-run", "--base", str(base), "--allow-import", package]) == 2
    assert "unknown key data.params" in capsys.readouterr().err


def test_a_downloaded_run_does_not_run_commands(run: Run, tmp_path: Path, capsys) -> None:
    """`cogfast sample RUN` reads the run's own configuration: a command in it is not executed."""
    folder, mark = tmp_path / "run", tmp_path / "mark"
    folder.mkdir()
    config = OmegaConf.load(run.base)
    command = {"target": "torch.os.system", "params": {"command": f"touch {mark}"}}
    for key in ("sampler_config", "denoiser_config.params.scaling_config"):
        hostile = OmegaConf.create(OmegaConf.to_yaml(config))
        OmegaConf.update(hostile, f"model.{key}", command, merge=False)
        (folder / "training_config.yaml").write_text(OmegaConf.to_yaml(hostile))
        words = ["sample", folder, "--prompt", "x", "--out", tmp_path / "out"]
        line = f"training_config.yaml: model.{key}.target=torch.os.system: unknown s"
        assert_command_refused(capsys, words, line)
    assert not mark.exists()


@pytest.mark.parametrize(
    "name", ["subprocess", "os.path", "torch", "transformers", "PIL", "cogfast", "yaml"]
)
def test_packages_of_others_are_not_allowed(run: Run, name: str, capsys) -> None:
    """A received file could name any of their functions: subprocess.Popen runs a command."""
    words = ["data={target: subprocess.Popen, params: {args: [touch, x]}}", "--allow-import", name]
    assert main(["train", *run.command(*words)[1:]]) == 2
    line = (
        f"--allow-import {name} is not a package that you wrote: it is part of Python, or cogfast"
    )
    assert line in capsys.readouterr().err
    assert main(["train", *run.command("--allow-import", f"mine,{name}")[1:]]) == 2
    assert "repeat the option for each package" in capsys.readouterr().err


def test_no_message_names_the_package_of_a_file(run: Run) -> None:
    words = ["data={target: subprocess.Popen, params: {args: [touch, x]}}"]
    with pytest.raises(ValueError) as caught:
        load_config([run.base], words)
    assert "--allow-import subprocess" not in str(caught.value)

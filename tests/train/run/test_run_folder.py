"""Finding and naming run folders, and what is written down there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from cogfast.config import load_config
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.run.folder import (
    check_changes,
    describe_run,
    open_run_folder,
    plain_sections,
)
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import run_folder, write_clips, write_config

ALONE = ProcessGroups(0, 1, 0, torch.device("cpu"), None, False)


def make_run(save: Path, name: str, *steps: int) -> Path:
    run = save / name
    for step in steps:
        (run / "checkpoints" / f"{step:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"{step:08d}" / "manifest.json").write_text("{}")
        (run / "checkpoints" / "latest").write_text(f"{step:08d}")
    run.mkdir(parents=True, exist_ok=True)
    return run


@pytest.mark.parametrize("resume", ["latest", "auto"])
def test_the_newest_run_of_the_experiment_is_resumed(tmp_path: Path, resume: str) -> None:
    """Runs of experiments with the same prefix and runs without a checkpoint are skipped."""
    make_run(tmp_path, "a-2026-01-01-00-00-00", 1)
    newest = make_run(tmp_path, "a-2026-01-02-00-00-00", 1, 2)
    make_run(tmp_path, "a-2026-01-03-00-00-00")
    make_run(tmp_path, "a-big-2026-01-04-00-00-00", 5)
    folder, checkpoint = open_run_folder(str(tmp_path), "a", resume, ALONE)
    assert (folder, checkpoint) == (newest, newest / "checkpoints" / "00000002")


def test_two_runs_of_one_second_get_two_folders(tmp_path: Path) -> None:
    found = [open_run_folder(str(tmp_path), "a", None, ALONE)[0] for _ in range(2)]
    assert found[0] != found[1]


def test_a_run_or_a_checkpoint_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a-2026-01-01-00-00-00", 1, 2)
    first = run / "checkpoints" / "00000001"
    assert open_run_folder("", "a", str(first), ALONE) == (run, first)
    assert open_run_folder("", "a", str(run), ALONE)[1].name == "00000002"
    monkeypatch.chdir(run / "checkpoints")
    assert open_run_folder("", "a", "00000001", ALONE) == (run, first)


def test_what_cannot_be_found_or_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; refusing to start from scratch"):
        open_run_folder("", "a", str(tmp_path / "nowhere"), ALONE)
    with pytest.raises(ValueError, match="it has no checkpoints/latest"):
        open_run_folder("", "a", str(make_run(tmp_path, "empty")), ALONE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"args.save=.*file: cannot create a run's folder there"):
        open_run_folder(str(tmp_path / "file"), "a", None, ALONE)


def test_a_run_writes_down_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    base = write_config(tmp_path / "base.yaml", write_clips(tmp_path / "data"), train_iters=2)
    Trainer(load_config([base])).train()
    run = run_folder(tmp_path / "runs")
    first = (run / "training_config.yaml").read_text()
    assert load_config([run / "training_config.yaml"]).args.train_iters == 2
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["world_size"] == 1

    Trainer(load_config([base], ["args.resume=latest", "args.train_iters=3"])).train()
    assert (run / "training_config.yaml").read_text() == first
    changed = load_config([run / "training_config-from-00000002.yaml"])
    assert changed.args.train_iters == 3
    assert (run / "environment-from-00000002.json").is_file()
    assert "the configuration has changed: args.train_iters: 2 -> 3" in caplog.text
    caplog.clear()
    Trainer(load_config([base], ["args.resume=latest"]))
    assert "the configuration" not in caplog.text


def test_another_projects_git_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed into some project's .venv, cogfast must not write that project's changes down."""
    from cogfast.train.run import folder as module

    os.system(f"git init -q {tmp_path}")
    monkeypatch.setattr(
        module, "__file__", str(tmp_path / "site" / "cogfast" / "train" / "run" / "x.py")
    )
    describe_run(tmp_path, None, "args: {}", 1)
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] is None
    assert not (tmp_path / "changes.diff").exists()


def test_a_description_that_cannot_be_written(tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "sft-1"
    with pytest.raises(
        ValueError,
        match=r"args.save=.*runs: .*/sft-1/training_config.yaml cannot be written \(No such file",
    ):
        describe_run(gone, None, "args: {}", 1)


def test_keys_that_the_checkpoint_is_too_old_for_count_as_their_defaults(tmp_path: Path) -> None:
    """A checkpoint of an earlier version still resumes."""
    before = plain_sections(load_config([]))
    del before["args"]["lr_first_step"], before["model"]["noised_image_dropout"]
    manifest = {"global_batch": 4, "config": before}
    check_changes(tmp_path, manifest, load_config([]), 4)
    with pytest.raises(ValueError, match=r"args\.lr_first_step: 1 -> 0; change it back"):
        check_changes(tmp_path, manifest, load_config([], ["args.lr_first_step=0"]), 4)

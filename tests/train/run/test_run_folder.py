"""Finding and naming run folders, and what is written down there."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.config.arguments import TrainArguments
from cogfast.core.run_lock import RunLock
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.model.weights.convert import convert
from cogfast.model.weights.formats.checkpoint_manifest import find_run_checkpoint, newest_checkpoint
from cogfast.train.run.folder import check_changes, describe_run, plain_sections, wandb_id
from cogfast.train.run.folder import open_run_folder as open_folder
from cogfast.train.run.run_log import RunLog
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import (
    losses,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)

ALONE = ProcessGroups(0, 1, 0, torch.device("cpu"), None, False)


def open_run_folder(
    save: str, experiment: str, resume: str | None, groups: ProcessGroups
) -> tuple[Path, Path | None]:
    args = TrainArguments(save=save, experiment_name=experiment, resume=resume)
    return open_folder(args, groups, ExitStack())[:2]


def make_run(save: Path, name: str, *steps: int) -> Path:
    run = save / name
    for step in steps:
        (run / "checkpoints" / f"{step:08d}").mkdir(parents=True)
        (run / "checkpoints" / f"{step:08d}" / "manifest.json").write_text("{}")
        (run / "checkpoints" / "latest").write_text(f"{step:08d}")
    run.mkdir(parents=True, exist_ok=True)
    (run / "training_config.yaml").write_text("args: {}")
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


def test_auto_starts_a_new_run_and_latest_refuses_to(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="args.resume=latest: no run of 'a' with a checkpoint"):
        open_run_folder(str(tmp_path), "a", "latest", ALONE)
    folder, checkpoint = open_run_folder(str(tmp_path), "a", "auto", ALONE)
    assert folder.is_dir() and checkpoint is None


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


def test_a_copied_checkpoint_does_not_make_a_run_of_the_folder_around_it(tmp_path: Path) -> None:
    """The checkpoints that lie there would be pruned as if they were older ones of the run."""
    run, other = make_run(tmp_path, "run", 1), tmp_path / "other"
    (other / "copies").mkdir(parents=True)
    copied = (run / "checkpoints" / "00000001").rename(other / "copies" / "one")
    with pytest.raises(ValueError, match=r"not in the folder of its run.* set args.run_folder to"):
        open_run_folder("", "a", str(copied), ALONE)
    assert [path.name for path in other.iterdir()] == ["copies"]


def test_folders_that_cannot_be_found_or_created_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; refusing to start from scratch"):
        open_run_folder("", "a", str(tmp_path / "nowhere"), ALONE)
    with pytest.raises(ValueError, match="it has no checkpoint of cogfast"):
        open_run_folder("", "a", str(make_run(tmp_path, "empty")), ALONE)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"args.save=.*file: cannot create a run's folder there"):
        open_run_folder(str(tmp_path / "file"), "a", None, ALONE)


def test_a_run_writes_down_what_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "cogfast")
    base = write_config(tmp_path / "base.yaml", write_clips(tmp_path / "data"), train_iters=2)
    monkeypatch.setattr(sys, "argv", ["/somewhere/cogfast", "train", "--base", "my file.yaml"])
    Trainer(load_config([base])).train()
    run = run_folder(tmp_path / "runs")
    first = (run / "training_config.yaml").read_text()
    assert load_config([run / "training_config.yaml"]).args.train_iters == 2
    environment = json.loads((run / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["world_size"] == 1
    assert environment["command"] == "cogfast train --base 'my file.yaml'"
    start, *logged = (run / "log.txt").read_text().strip().splitlines()
    assert start.endswith("  cogfast train --base 'my file.yaml'")
    # From before the folder was there to the last line
    assert logged == [line for record in caplog.records for line in record.getMessage().split("\n")]

    Trainer(load_config([base], ["args.resume=latest", "args.train_iters=3"])).train()
    assert (run / "training_config.yaml").read_text() == first
    changed = load_config([run / "training_config-from-00000002.yaml"])
    assert changed.args.train_iters == 3
    assert (run / "environment-from-00000002.json").is_file()
    assert "the configuration has changed: args.train_iters: 2 -> 3" in caplog.text
    caplog.clear()
    # The comparison is with the checkpoint, not with the run's first start.
    Trainer(load_config([base], ["args.resume=latest", "args.train_iters=3"]))
    assert "the configuration" not in caplog.text
    Trainer(load_config([base], ["args.resume=latest"]))
    assert "the configuration has changed: args.train_iters: 3 -> 2" in caplog.text
    left = "the checkpoint is at step 3, and the run ends at step 2: nothing is left to train; set"
    assert left in caplog.text


def test_the_log_of_a_run_has_its_error(tmp_path: Path) -> None:
    base = write_config(tmp_path / "base.yaml", write_clips(tmp_path / "data"), train_iters=2)
    trainer = Trainer(load_config([base]))
    trainer.compute_loss = lambda batch: (_ for _ in ()).throw(ValueError("first\nand second"))
    with pytest.raises(ValueError, match="first"):
        trainer.train()
    last = (run_folder(tmp_path / "runs") / "log.txt").read_text().splitlines()[-1]
    assert last == "cogfast: first and second"
    logs = lambda: [
        each for each in logging.getLogger("cogfast").handlers if isinstance(each, RunLog)
    ]
    assert not logs()
    # A run that is built and not trained takes no line of the next one.
    for _ in range(2):
        Trainer(load_config([base]))
    assert len(logs()) == 1


def test_another_projects_git_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Installed into some project's .venv, cogfast must not write that project's changes down."""
    from cogfast.train.run import folder as module

    os.system(f"git init -q {tmp_path}")
    monkeypatch.setattr(
        module, "__file__", str(tmp_path / "site" / "cogfast" / "train" / "run" / "x.py")
    )
    describe_run(tmp_path, None, {}, load_config([]), 1)
    assert json.loads((tmp_path / "environment.json").read_text())["commit"] is None
    assert not (tmp_path / "changes.diff").exists()


def test_a_description_that_cannot_be_written(tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "sft-1"
    with pytest.raises(
        ValueError,
        match=r"/sft-1/training_config.yaml cannot be written \(No such file.* set args.save or",
    ):
        describe_run(gone, None, {}, load_config([]), 1)


def test_keys_that_the_checkpoint_is_too_old_for_count_as_their_defaults(tmp_path: Path) -> None:
    """A checkpoint of an earlier version still resumes."""
    before = plain_sections(load_config([]))
    del before["args"]["lr_first_step"], before["model"]["noised_image_dropout"]
    manifest = {"global_batch": 4, "config": before}
    check_changes(tmp_path, manifest, load_config([]), 4)
    with pytest.raises(ValueError, match=r"args\.lr_first_step: 1 -> 0; change it back"):
        check_changes(tmp_path, manifest, load_config([], ["args.lr_first_step=0"]), 4)


def test_a_rate_that_a_checkpoint_has_in_the_deepspeed_section_is_that_of_args(
    tmp_path: Path,
) -> None:
    """Earlier versions kept it in both places."""
    words = ["deepspeed.optimizer={type: AdamW, params: {eps: 1e-6}}", "args.lr=0.5"]
    before = plain_sections(load_config([], words))
    before["deepspeed"]["optimizer"]["params"]["lr"] = 0.5
    manifest = {"global_batch": 4, "config": before}
    check_changes(tmp_path, manifest, load_config([], words), 4)
    assert before["deepspeed"]["optimizer"]["params"]["lr"] == 0.5  # the manifest stays as it is
    with pytest.raises(ValueError, match=r"checkpoint's: args\.lr: 0\.5 -> 0\.25; change it back"):
        check_changes(tmp_path, manifest, load_config([], [words[0], "args.lr=0.25"]), 4)


def open_exact(run: Path, **args: str) -> tuple[Path, Path | None]:
    return open_folder(TrainArguments(run_folder=str(run), **args), ALONE, ExitStack())[:2]


def make_finetune_run(run: Path, *steps: int) -> Path:
    for step in steps:
        (run / f"checkpoint-{step}").mkdir(parents=True)
        (run / f"checkpoint-{step}" / "manifest.json").write_text("{}")
        (run / "latest").write_text(f"checkpoint-{step}")
    return run


def test_a_run_folder_is_used_as_it_is_named(tmp_path: Path) -> None:
    run = tmp_path / "a" / "output"
    assert open_exact(run) == (run, None) and run.is_dir()
    assert open_exact(run) == (run, None)  # an attempt that failed early leaves no run
    assert open_exact(run, resume="auto") == (run, None)
    with pytest.raises(
        ValueError, match="args.resume=latest: args.run_folder=.* has no checkpoint"
    ):
        open_exact(run, resume="latest")
    make_finetune_run(run, 100, 20)
    found = {"resume": "latest", "folder_layout": "finetune"}
    assert open_exact(run, **found) == (run, run / "checkpoint-20")
    found["resume"] = str(run / "checkpoint-100")
    assert open_exact(run, **found) == (run, run / "checkpoint-100")
    assert open_exact(tmp_path / "other", resume=found["resume"])[1] == run / "checkpoint-100"


def test_a_run_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    run = make_finetune_run(tmp_path / "output", 20)
    with pytest.raises(
        ValueError,
        match=f"args.run_folder={run} has a run of 20 steps; resume it with --resume latest, or",
    ):
        open_exact(run)
    with pytest.raises(ValueError, match="folder_layout=cogfast, but .* has the names of finetune"):
        open_exact(run, resume="latest")
    begun, foreign = tmp_path / "begun", tmp_path / "foreign"
    for folder in (begun, foreign / "checkpoint-200"):
        folder.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has a run without a checkpoint; .* --resume auto"):
        open_exact(begun)
    assert open_exact(begun, resume="auto") == (begun, None)
    with pytest.raises(ValueError, match="has checkpoints that cogfast did not write"):
        open_exact(foreign, resume="auto")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="args.run_folder=.*file is a file; set it to a folder"):
        open_exact(tmp_path / "file")
    with pytest.raises(ValueError, match="args.run_folder=.*cannot be created"):
        open_exact(tmp_path / "file" / "below")


def test_folders_of_other_tools_are_no_runs(tmp_path: Path) -> None:
    """SAT, DeepSpeed and accelerate name their folders alike."""
    sat, accelerate = tmp_path / "sat", tmp_path / "accelerate"
    for folder in (sat / "500", accelerate / "checkpoint-500"):
        folder.mkdir(parents=True)
    (sat / "latest").write_text("500")
    (accelerate / "latest").write_text("checkpoint-500")
    for folder in (sat, accelerate, accelerate / "checkpoint-500"):
        assert find_run_checkpoint(folder) is None and newest_checkpoint(folder) is None


def test_w_and_b_tells_two_run_folders_of_one_name_apart(tmp_path: Path) -> None:
    one, other = tmp_path / "a" / "out put", tmp_path / "b" / "out put"
    for folder in (one, other):
        folder.mkdir(parents=True)
    assert wandb_id(one) != wandb_id(other) and wandb_id(one) == wandb_id(one)
    assert wandb_id(one).startswith("out-put-")
    assert wandb_id(tmp_path / "a-2026-01-01-00-00-00") == "a-2026-01-01-00-00-00"


@pytest.fixture(scope="module")
def finetune(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """The configuration of a run with the other layout, the run, and one that stopped and resumed."""
    folder = tmp_path_factory.mktemp("finetune")
    base = write_config(
        folder / "base.yaml",
        write_clips(folder / "data"),
        train_iters=5,
        save_interval=2,
        folder_layout="finetune",
        eval_prompts=["A bar, it moves!", "a second one"],
        eval_interval=4,
    )
    whole, cut = folder / "whole", folder / "cut"
    Trainer(load_config([base], [f"args.run_folder={whole}"])).train()
    arguments = [f"args.run_folder={cut}"]
    Trainer(load_config([base], [*arguments, "args.exit_interval=3"])).train()
    (cut / "checkpoint-1.incomplete").mkdir()  # of a killed run
    (cut / "123").mkdir()  # the user's
    Trainer(load_config([base], [*arguments, "args.resume=latest"])).train()
    return base, whole, cut


def test_the_finetune_layout_has_the_other_trainers_names(finetune: tuple) -> None:
    _, whole, cut = finetune
    folders = {"checkpoint-4", "checkpoint-5", "logs", "validation_res"}
    assert {p.name for p in whole.iterdir() if p.is_dir()} == folders
    assert (whole / "latest").read_text() == "checkpoint-5"
    assert list((whole / "logs").glob("events.out.tfevents.*"))
    names = {p.name.rpartition("-")[0] for p in (whole / "validation_res").glob("*.mp4")}
    assert names == {"validation-4-0-a-bar-it-moves", "validation-4-1-a-second-one"}
    assert (whole / "validation_res" / "validation-4-contact_sheet.png").is_file()
    assert {p.name for p in cut.iterdir() if p.is_dir()} == folders | {"123"}


def test_a_run_resumes_bit_for_bit_in_the_finetune_layout(finetune: tuple) -> None:
    base, whole, cut = finetune
    assert losses(whole) == losses(cut) and len(losses(whole)) == 5
    one, other = (read_run_weights(newest_checkpoint(run)) for run in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one) and one.keys() == other.keys()
    with pytest.raises(ValueError, match=r"command line: args.run_folder=.* has a run of 5 steps"):
        Trainer(load_config([base], [f"args.run_folder={whole}"]))


def test_sample_and_convert_find_checkpoints_in_the_finetune_layout(
    finetune: tuple, tmp_path: Path
) -> None:
    base, whole, _ = finetune
    for number, source in enumerate((whole, whole / "checkpoint-5")):
        convert(source, tmp_path / f"{number}", "diffusers")
    words = [
        "sample",
        str(whole / "checkpoint-5"),
        "--prompt",
        "a bar",
        "--out",
        str(tmp_path / "o"),
    ]
    assert main(words) == 0
    settings = json.loads((tmp_path / "o" / "settings.json").read_text())
    assert settings["weights"] == str(whole / "checkpoint-5")
    files = [tmp_path / name / "diffusion_pytorch_model.safetensors" for name in "01"]
    assert files[0].read_bytes() == files[1].read_bytes()
    convert(whole / "checkpoint-4", tmp_path / "earlier", "diffusers")
    file = tmp_path / "earlier" / "diffusion_pytorch_model.safetensors"
    assert file.read_bytes() != files[0].read_bytes()
    (whole / "checkpoint-5" / "manifest.json").rename(tmp_path / "manifest.json")
    try:
        with pytest.raises(ValueError, match=r"checkpoint-5: .*step 4: --resume .*checkpoint-4$"):
            Trainer(load_config([base], [f"args.resume={whole}", f"args.run_folder={whole}"]))
    finally:
        (tmp_path / "manifest.json").rename(whole / "checkpoint-5" / "manifest.json")


def test_a_full_disk_hides_no_error_of_a_run(tmp_path):
    """The lock's own line cannot be written, nor when its file is closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        with pytest.raises(ValueError, match="of the run"), RunLock(tmp_path):
            raise ValueError("of the run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

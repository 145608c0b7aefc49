"""Finding and naming run folders, and what is written down there."""

import json
import logging
import os
import platform
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import deepspeed
import diffusers
import pytest
import torch
import transformers

import cogfast
from cogfast.__main__ import main
from cogfast.core.run_lock import RunLock
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.formats.convert import convert
from cogfast.model.weights.checkpoint_manifest import find_run_checkpoint, newest_checkpoint
from cogfast.train.keys import TrainKeys
from cogfast.train.run import folder as module
from cogfast.train.run.folder import (
    check_changes,
    check_creatable,
    describe_run,
    open_run_folder,
    plain_sections,
    wandb_id,
)
from cogfast.train.run.trackers import RunLog
from tests.support.refusals import assert_line, assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import assert_same, launch_ranks

# Two machines, each with a folder of its own, start three runs: on one disk, which the second one sees late, on
# one disk, and on two.
TWO_MACHINES = """
import os, sys, threading
from contextlib import ExitStack
from pathlib import Path
from cogfast.core import files
from cogfast.train.run.folder import open_run_folder
from cogfast.train.keys import TrainKeys
from cogfast.distributed.process_groups import start_processes

rank = os.environ["RANK"]
os.environ["LOCAL_RANK"] = "0"
groups = start_processes()
own = Path(sys.argv[1], rank)
own.mkdir()
os.chdir(own)
if rank == "1":
    threading.Timer(0.5, os.symlink, ("../0/late", "late")).start()
    os.symlink("../0/shared", "shared")
for save, files.SECONDS_OF_NFS in (("late", 60), ("shared", 0), ("own", 0)):
    try:
        with ExitStack() as held:
            args = TrainKeys(save=save, experiment_name="a")
            shown = open_run_folder(args, groups, held)[0].parent
            groups.gather(None)
    except (ValueError, RuntimeError) as error:
        shown = error
    os.write(1, f"{rank} {shown}\\n".encode())
groups.close()
"""

ALONE = ProcessGroups(0, 1, 0, torch.device("cpu"), None, False)


def opened(save: Path | str, resume: str | Path | None) -> tuple[Path, Path | None]:
    """The folder of a run of the experiment "a", and the checkpoint that it resumes."""
    resume = None if resume is None else str(resume)
    args = TrainKeys(save=str(save), experiment_name="a", resume=resume)
    return open_run_folder(args, ALONE, ExitStack())[:2]


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
    folder, checkpoint = opened(tmp_path, resume)
    assert (folder, checkpoint) == (newest, newest / "checkpoints" / "00000002")


def test_the_run_that_has_saved_last_is_resumed_whatever_its_name(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of older versions are in the time zone of their start."""
    make_run(tmp_path, "a-2026-01-02-09-00-00", 1)  # in Tokyo
    newest = make_run(tmp_path, "a-2026-01-01-20-00-00", 1)  # an hour later in New York
    assert opened(tmp_path, "latest")[0] == newest
    assert f"continues {newest}, which has saved last of 2 runs of 'a'" in log.text
    names = []
    for zone in ("Asia/Tokyo", "America/New_York"):
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        names.append(opened(tmp_path / "new", None)[0].name)
    monkeypatch.undo()
    time.tzset()
    assert names == sorted(names)


def test_auto_starts_a_new_run_and_latest_refuses_to(tmp_path: Path) -> None:
    line = "args.resume=latest: no run of 'a' with a checkpoint"
    assert_refused(lambda: opened(tmp_path, "latest"), line)
    folder, checkpoint = opened(tmp_path, "auto")
    assert folder.is_dir() and checkpoint is None
    assert opened(tmp_path, None)[0] != folder  # nor have two runs of one second one folder


def test_a_run_or_a_checkpoint_is_named_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, "a-2026-01-01-00-00-00", 1, 2)
    first = run / "checkpoints" / "00000001"
    assert opened("", first) == (run, first)
    assert opened("", run)[1].name == "00000002"
    monkeypatch.chdir(run / "checkpoints")
    assert opened("", "00000001") == (run, first)


def test_a_copied_checkpoint_does_not_make_a_run_of_the_folder_around_it(tmp_path: Path) -> None:
    """The checkpoints that lie there would be pruned as if they were older ones of the run."""
    run, other = make_run(tmp_path, "run", 1), tmp_path / "other"
    (other / "copies").mkdir(parents=True)
    copied = (run / "checkpoints" / "00000001").rename(other / "copies" / "one")
    line = "not in the folder of its run<...> set args.run_folder to"
    assert_refused(lambda: opened("", copied), line)
    assert [path.name for path in other.iterdir()] == ["copies"]


def test_folders_that_cannot_be_found_or_created_are_refused(tmp_path: Path) -> None:
    file, empty = tmp_path / "file", make_run(tmp_path, "empty")
    file.write_text("")
    nowhere, line = tmp_path / "nowhere", "no such folder; refusing to start from scratch"
    assert_refused(lambda: opened("", nowhere), line)
    assert_refused(lambda: opened("", empty), "it has no checkpoint of cogfast")
    line = "args.save=<...>file: cannot create a run's folder there"
    assert_refused(lambda: opened(file, None), line)


def test_a_run_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch) -> None:
    """The run's own folder, whatever args.save is on the machine from which it comes."""
    run = make_run(tmp_path, "run", 1)
    args = TrainKeys(save="/dev/null/runs", resume=str(run))
    check_creatable(args)
    monkeypatch.setattr(os, "access", lambda *_: False)
    line = (
        "args.resume=<...>run: cannot be written (<...>run is not writable); set args.run_folder to"
    )
    assert_refused(lambda: check_creatable(args), line)


def test_a_run_writes_down_what_it_is(
    run: Run, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run.with_args(train_iters=2)
    monkeypatch.setattr(sys, "argv", ["/somewhere/cogfast", "train", "--base", "my file.yaml"])
    folder = run.train().path
    written = folder / "training_config.yaml"
    first = written.read_text()
    assert run.of_files(written).config().args.train_iters == 2
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["torch"] == torch.__version__
    assert environment["world_size"] == 1
    assert environment["command"] == "cogfast train --base 'my file.yaml'"
    start, *logged = (folder / "log.txt").read_text().strip().splitlines()
    assert start.endswith("  cogfast train --base 'my file.yaml'")
    # From before the folder was there to the last line
    assert logged == [line for record in log.records for line in record.getMessage().split("\n")]

    run.resume(steps=3)
    assert written.read_text() == first
    changed = run.of_files(folder / "training_config-from-00000002.yaml").config()
    assert changed.args.train_iters == 3
    assert (folder / "environment-from-00000002.json").is_file()
    assert "the configuration has changed: args.train_iters: 2 -> 3" in log.text
    log.clear()
    # The comparison is with the checkpoint, not with the run's first start.
    run.trainer("args.resume=latest", "args.train_iters=3")
    assert "the configuration" not in log.text
    run.trainer("args.resume=latest")
    assert "the configuration has changed: args.train_iters: 3 -> 2" in log.text
    left = "the checkpoint is at step 3, and the run ends at step 2: nothing is left to train; set"
    assert left in log.text


def test_the_log_of_a_run_has_its_error(run: Run) -> None:
    trainer = run.trainer()
    trainer.compute_loss = lambda batch: (_ for _ in ()).throw(ValueError("first\nand second"))
    with pytest.raises(ValueError, match="first"):
        trainer.train()
    last = (trainer.folder / "log.txt").read_text().splitlines()[-1]
    assert last == "cogfast: first and second"
    logs = lambda: [
        each for each in logging.getLogger("cogfast").handlers if isinstance(each, RunLog)
    ]
    assert not logs()
    # A run that is built and not trained takes no line of the next one.
    for _ in range(2):
        run.trainer()
    assert len(logs()) == 1


def test_another_projects_git_is_not_asked(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Installed into some project's .venv, cogfast must not write that project's changes down."""
    os.system(f"git init -q {tmp_path}")
    monkeypatch.setattr(
        module, "__file__", str(tmp_path / "site" / "cogfast" / "train" / "run" / "x.py")
    )
    describe_run(tmp_path, None, {}, run.config().run.sections, {}, 1, {})
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["commit"] is None
    for package in (cogfast, deepspeed, diffusers, transformers):
        assert environment[package.__name__] == package.__version__
    assert not (tmp_path / "changes.diff").exists()


@pytest.mark.parametrize("text", ["1", "password=12345678"])
def test_the_changes_of_the_code(
    run: Run, tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch, text: str
) -> None:
    def git(*words: str) -> int:
        who = ("-c", "user.name=me", "-c", "user.email=me@localhost")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], capture_output=True).returncode

    monkeypatch.setattr(module, "__file__", str(tmp_path / "cogfast" / "train" / "run" / "x.py"))
    file = tmp_path / "a.py"
    file.write_text("one\ntwo\n\n")
    assert not git("init", "-q") and not git("add", ".") and not git("commit", "-qm", "a")
    file.write_text(f"{text}\ntwo\n\n")
    describe_run(tmp_path, None, {}, run.config().run.sections, {}, 1, {})
    # The last line of the changes is a blank: the empty line of the file.
    assert not git("checkout", "a.py") and not git("apply", "changes.diff")
    is_whole = text == "1"
    assert (file.read_text() == f"{text}\ntwo\n\n") == is_whole
    assert (
        "changes.diff does not restore the code: ... is in place of secrets" in log.text
    ) != is_whole


def test_a_description_that_cannot_be_written(run: Run, tmp_path: Path) -> None:
    gone = tmp_path / "runs" / "sft-1"
    line = "/sft-1/training_config.yaml cannot be written (No such file<...> set args.save or"
    assert_refused(lambda: describe_run(gone, None, {}, run.config().run.sections, {}, 1, {}), line)


def test_keys_that_the_checkpoint_is_too_old_for_count_as_their_defaults(run: Run) -> None:
    """A checkpoint of an earlier version still resumes."""
    before = plain_sections(run.config().run.sections)
    del before["args"]["lr_first_step"], before["model"]["noised_image_dropout"]
    manifest = {"global_batch": 4, "config": before}
    check_changes(run.folder, manifest, run.config().run.sections, 4, {})
    other, line = run.config("args.lr_first_step=0"), "args.lr_first_step: 1 -> 0; change it back"
    assert_refused(lambda: check_changes(run.folder, manifest, other.run.sections, 4, {}), line)


def test_a_rate_that_a_checkpoint_has_in_the_deepspeed_section_is_that_of_args(run: Run) -> None:
    """Earlier versions kept it in both places."""
    run = run.of_files().with_words("deepspeed.optimizer={type: AdamW, params: {eps: 1e-6}}")
    config = run.config("args.lr=0.5")
    before = plain_sections(config.run.sections)
    before["deepspeed"]["optimizer"]["params"]["lr"] = 0.5
    manifest = {"global_batch": 4, "config": before}
    check_changes(run.folder, manifest, config.run.sections, 4, {})
    assert before["deepspeed"]["optimizer"]["params"]["lr"] == 0.5  # the manifest stays as it is
    other, line = run.config("args.lr=0.25"), "checkpoint's: args.lr: 0.5 -> 0.25; change it back"
    assert_refused(lambda: check_changes(run.folder, manifest, other.run.sections, 4, {}), line)


def open_exact(run: Path, **args: str) -> tuple[Path, Path | None]:
    return open_run_folder(TrainKeys(run_folder=str(run), **args), ALONE, ExitStack())[:2]


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
    line = "args.resume=latest: args.run_folder=<...> has no checkpoint"
    assert_refused(lambda: open_exact(run, resume="latest"), line)
    make_finetune_run(run, 100, 20)
    found = {"resume": "latest", "folder_layout": "finetune"}
    assert open_exact(run, **found) == (run, run / "checkpoint-20")
    found["resume"] = str(run / "checkpoint-100")
    assert open_exact(run, **found) == (run, run / "checkpoint-100")
    assert open_exact(tmp_path / "other", resume=found["resume"])[1] == run / "checkpoint-100"


def test_a_run_folder_with_another_run_is_refused(tmp_path: Path) -> None:
    run = make_finetune_run(tmp_path / "output", 20)
    line = f"args.run_folder={run} has a run of 20 steps; resume it with --resume latest, or"
    assert_refused(lambda: open_exact(run), line)
    line = "folder_layout=cogfast, but <...> has the names of finetune"
    assert_refused(lambda: open_exact(run, resume="latest"), line)
    begun, foreign, file = (tmp_path / name for name in ("begun", "foreign", "file"))
    for folder in (begun, foreign / "checkpoint-200"):
        folder.mkdir(parents=True)
    (begun / "metrics.jsonl").write_text("")
    line = "has a run without a checkpoint; <...> --resume auto"
    assert_refused(lambda: open_exact(begun), line)
    assert open_exact(begun, resume="auto") == (begun, None)
    line = "has checkpoints that cogfast did not write"
    assert_refused(lambda: open_exact(foreign, resume="auto"), line)
    file.write_text("")
    line = "args.run_folder=<...>file is a file; set it to a folder"
    assert_refused(lambda: open_exact(file), line)
    assert_refused(lambda: open_exact(file / "below"), "args.run_folder=<...>cannot be created")


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
def finetune(shared_run: Run) -> tuple[Run, Run]:
    """A run with the other layout, and one that stopped and resumed."""
    run = shared_run.with_args(train_iters=5, save_interval=2, folder_layout="finetune")
    run = run.with_args(eval_prompts=["A bar, it moves!", "a second one"], eval_interval=4)
    whole = run.with_words(f"args.run_folder={run.folder / 'whole'}").train()
    cut = run.with_words(f"args.run_folder={run.folder / 'cut'}")
    stopped = cut.train("args.exit_interval=3").path
    (stopped / "checkpoint-1.incomplete").mkdir()  # of a killed run
    (stopped / "123").mkdir()  # the user's
    return whole, cut.resume()


def test_the_finetune_layout_has_the_other_trainers_names(finetune: tuple) -> None:
    whole, cut = (run.path for run in finetune)
    folders = {"checkpoint-4", "checkpoint-5", "logs", "validation_res"}
    assert {p.name for p in whole.iterdir() if p.is_dir()} == folders
    assert (whole / "latest").read_text() == "checkpoint-5"
    assert list((whole / "logs").glob("events.out.tfevents.*"))
    names = {p.name.rpartition("-")[0] for p in (whole / "validation_res").glob("*.mp4")}
    assert names == {"validation-4-0-a-bar-it-moves", "validation-4-1-a-second-one"}
    assert (whole / "validation_res" / "validation-4-contact_sheet.png").is_file()
    assert {p.name for p in cut.iterdir() if p.is_dir()} == folders | {"123"}


def test_a_run_resumes_bit_for_bit_in_the_finetune_layout(finetune: tuple) -> None:
    whole, cut = finetune
    assert whole.losses == cut.losses and len(whole.losses) == 5
    assert_same(cut.weights(), whole.weights())
    line = "command line: args.run_folder=<...> has a run of 5 steps"
    assert_refused(whole.trainer, line)


def test_sample_and_convert_find_checkpoints_in_the_finetune_layout(
    finetune: tuple, tmp_path: Path
) -> None:
    run, whole = finetune[0], finetune[0].path
    for number, source in enumerate((whole, whole / "checkpoint-5")):
        convert(source, tmp_path / f"{number}", "diffusers")
    words = [str(whole / "checkpoint-5"), "--prompt", "a bar", "--out", str(tmp_path / "o")]
    assert main(["sample", *words]) == 0
    settings = json.loads((tmp_path / "o" / "settings.json").read_text())
    assert settings["weights"] == str(whole / "checkpoint-5")
    files = [tmp_path / name / "diffusion_pytorch_model.safetensors" for name in "01"]
    assert files[0].read_bytes() == files[1].read_bytes()
    convert(whole / "checkpoint-4", tmp_path / "earlier", "diffusers")
    file = tmp_path / "earlier" / "diffusion_pytorch_model.safetensors"
    assert file.read_bytes() != files[0].read_bytes()
    (whole / "checkpoint-5" / "manifest.json").rename(tmp_path / "manifest.json")
    try:
        line = "checkpoint-5: <...>step 4: give <...>checkpoint-4 (training: with --resume)$"
        assert_refused(lambda: run.trainer(f"args.resume={whole}"), line)
    finally:
        (tmp_path / "manifest.json").rename(whole / "checkpoint-5" / "manifest.json")


def test_a_full_disk_hides_no_error_of_a_run(tmp_path, file_limit):
    """The lock's own line cannot be written, nor when its file is closed."""
    with file_limit(0), pytest.raises(ValueError, match="of the run"), RunLock(tmp_path):
        raise ValueError("of the run")


def test_machines_without_a_shared_disk_end_together(tmp_path: Path) -> None:
    lines = launch_ranks(2, "-c", TWO_MACHINES, str(tmp_path)).splitlines()
    of_rank = [[line[2:] for line in lines if line.startswith(f"{rank} ")] for rank in (0, 1)]
    assert [of[:2] for of in of_rank] == [["late", "shared"]] * 2
    host = platform.node()
    assert_line(
        of_rank[1][2], f"args.save=own: {host} does not see {tmp_path}/1/own/a-<...> as process "
    )
    assert of_rank[0][2] == f"rank 1 failed: ValueError: {of_rank[1][2]}"


def test_the_lock_of_a_folder_that_was_moved_is_lost(tmp_path: Path) -> None:
    """A user moves the folder of a run that seems dead, and starts it again."""
    run = tmp_path / "run"
    run.mkdir()
    with RunLock(run) as first:
        run.rename(tmp_path / "old")
        first.check()  # no other run is there
        run.mkdir()
        with RunLock(run) as second:
            assert_refused(
                first.check, "run.lock: process <...> has taken the folder", RuntimeError
            )
            second.check()

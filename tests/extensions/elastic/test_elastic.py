"""args.elastic: how many ranks train, with which accumulation, what the log says, and what it refuses."""

import itertools
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cogfast.__main__ import _line
from cogfast.core.keys import with_origins
from cogfast.core.run_lock import RunLock
from cogfast.door.merged_config import Config
from cogfast.extensions.elastic import elastic
from cogfast.extensions.elastic.elastic import Plan, follow_world, plan_world
from cogfast.model.weights.checkpoint_manifest import read_manifest, write_manifest
from cogfast.train.checkpoint.write import CheckpointWriter
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.mesh import divide
from cogfast.train.run.terminal import Hints
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.train.checkpoint.test_damaged import flip_bit


def test_a_batch_is_divided_by_the_most_ranks_and_the_largest_batch_size() -> None:
    """Against a search through all divisions."""
    for total, size, most in itertools.product(range(1, 25), range(1, 7), range(1, 10)):
        found = divide(total, size, most)
        fitting = [
            (copies, batch)
            for copies, batch in itertools.product(range(1, most + 1), range(1, size + 1))
            if total % (copies * batch) == 0
        ]
        assert found[:2] == max(fitting)
        assert math.prod(found) == total


@pytest.fixture
def run(run: Run) -> Run:
    return run.with_args(train_iters=1)


def planned(config: Config, num_ranks: int) -> Plan:
    return plan_world(config.run.args, config.run.deepspeed, num_ranks)


def followed(config: Config) -> tuple:
    with with_origins(config.origins):
        return follow_world(config.run.args, config.run.deepspeed, config.origins)


@pytest.fixture
def pairs(run: Run) -> Run:
    """A run of 2 samples on each rank."""
    return run.with_words("deepspeed.train_micro_batch_size_per_gpu=2")


def test_a_first_start_has_the_batch_of_the_configuration(pairs: Run) -> None:
    assert planned(pairs.config("args.elastic=shrink"), 2) == Plan("auto", "", 2, 2, 1)
    fours = pairs.with_words("deepspeed.train_batch_size=4")
    plan = planned(fours.config("args.elastic=shrink"), 3)
    assert (plan.num_ranks, plan.batch_size, plan.accumulation) == (2, 2, 1)
    assert plan.text.endswith("; 1 rank idles") and "before" not in plan.text
    waits = "args.elastic=wait"
    plan = planned(fours.config(waits), 3)
    assert plan.num_ranks == 0 and "waiting until 3 can train" in plan.text
    plan = planned(pairs.config(waits, "args.model_parallel_size=2", "args.batch_size=2"), 1)
    line = "1 rank is here, 0 of which divide the global batch 2; waiting until 2 can train"
    assert line in plan.text


def test_a_resumed_run_keeps_its_batch_and_its_folder_is_its_own(
    run: Run, pairs: Run, tmp_path: Path
) -> None:
    """A process that another one has replaced moves no `latest`."""
    folder = run.train().path  # a process with 4 samples
    shrinks = pairs.with_words("args.elastic=shrink")
    text = (
        "args.elastic=shrink: 4 ranks train, 1 before; global batch 4 = dp 4 x batch 1 x accumulation 1 "
        "(before: dp 1 x batch 4 x accumulation 1), since args.batch_size=2 does not divide 1; 1 rank "
        "idles"
    )
    assert planned(shrinks.config(), 5) == Plan("auto", text, 4, 1, 1)
    two = shrinks.config("args.model_parallel_size=2", "args.batch_size=2")
    plan = planned(two, 3)
    assert (plan.num_ranks, plan.batch_size, plan.accumulation) == (2, 2, 2)
    assert "(before: dp 1 x batch 4 x accumulation 1)" in plan.text  # it had model_parallel_size=1
    line = "shrink: 1 rank is left, but 2 share a model <...> raise MIN"
    assert_refused(lambda: planned(two, 1), line)
    # A checkpoint of a version without a key
    manifest = read_manifest(checkpoint := folder / "checkpoints/00000001")
    del manifest["config"]["args"]["context_parallel_size"], manifest["checksum"]
    write_manifest(checkpoint, manifest)
    assert planned(two, 3) == plan
    waiting = pairs.config("args.elastic=wait", "args.model_parallel_size=2")
    assert planned(waiting, 1).num_ranks == 0
    named = shrinks.config(f"args.resume={checkpoint}")
    assert_refused(lambda: planned(named, 4), "each restart would return to it")
    assert planned(shrinks.config(f"args.resume={folder}"), 4).resume == str(folder)
    # A run in a store begins from this one, and its own checkpoints count from then on.
    stored = [f"args.run_folder=file://{tmp_path}/stored", f"args.resume={folder}"]
    for resume in (str(folder), "auto"):
        plan = planned(shrinks.config(*stored), 4)
        assert (plan.resume, plan.num_ranks, plan.batch_size) == (resume, 4, 1)
        shutil.copytree(folder, tmp_path / "stored", dirs_exist_ok=True)

    trainer = run.trainer("args.resume=auto", "args.train_iters=2")
    trainer.writer.folder.check_owner()
    (folder / "run.lock").write_text("process 1 on another-machine\n")
    line = "process 1 on another-machine has taken the folder"
    assert_refused(trainer.train, line, RuntimeError)
    assert (folder / "checkpoints" / "latest").read_text() == "00000001"
    assert [path.name for path in (folder / "checkpoints").glob("0*")] == ["00000001"]


def test_the_check_keeps_the_lock(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    lock.check()
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    command = [sys.executable, "-c", take, str(tmp_path / "run.lock")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "BlockingIOError" in done.stderr


def test_it_needs_a_torchrun_that_restarts(pairs: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    config = pairs.config("args.elastic=wait")
    line = "command line: args.elastic=wait needs torchrun, with"
    assert_refused(lambda: followed(config), line)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    line = "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
    assert_refused(lambda: followed(config), line)
    assert followed(pairs.config()) == ({}, None)


def test_lines_after_a_lost_rank_name_the_last_checkpoint_and_no_source_of_gloo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "[/a/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47822"
    error = RuntimeError(f"{text}. This is typically caused by a remote worker crashing. GLHF!")

    def wait() -> None:
        raise error

    path = tmp_path / "checkpoints" / "00000002"
    writer: Any = SimpleNamespace(wait=wait, saved=path, folder=SimpleNamespace(unsent=None))
    CheckpointWriter.__exit__(writer, RuntimeError)
    assert f"another rank was lost; the last complete one: {path}" in caplog.text
    assert "gloo" not in caplog.text
    assert _line(error).endswith("(Connection closed by peer [127.0.0.1]:47822)")
    hints = Hints(TrainKeys(elastic="shrink"), {}, tmp_path, world_size=1)
    hints.writer = writer
    last = f"the last checkpoint is {path}; torchrun, or the same command, resumes from it"
    assert hints.how_to_resume() == last


DAMAGES = {
    "latest": lambda folder: (folder / "latest").write_text("00000009"),
    "no step": lambda folder: (folder / "latest").write_text("x"),
    "manifest": lambda folder: flip_bit(folder / "00000004/manifest.json", 999),
    "tensors": lambda folder: flip_bit(folder / "00000004/rank-00000.safetensors", 99_999),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_restart_continues_from_the_last_good_checkpoint(
    run: Run, what: str, log, monkeypatch
) -> None:
    """For a person the error names it; a run that has lost a machine restarts without one."""
    folder = run.train("args.save_interval=2", steps=4).path / "checkpoints"
    DAMAGES[what](folder)
    monkeypatch.setattr(elastic, "follow_world", lambda *_: ({}, "args.elastic", None))
    shrinks = "args.elastic=shrink", "args.resume=auto", "args.train_iters=5"
    line = f"the last good one is that of step {{}}: give {folder}"
    if what == "tensors":  # which are read when the run is built
        assert planned(run.config(*shrinks), 4).num_ranks == 4
        assert "the last good one" not in log.text
        assert_refused(lambda: run.trainer(*shrinks), line.format(2))
    assert planned(run.config(*shrinks), 4).num_ranks == 4
    step = 4 if what in ("latest", "no step") else 2
    assert line.format(step) in log.text and "; args.elastic continues from it" in log.text
    assert (folder / "latest").read_text() == f"{step:08d}"
    assert run.trainer(*shrinks).step == step
    # It is one of another run, or named by its path: its `latest` stays.
    (folder / "latest").write_text("00000009")
    named = f"args.resume={folder}/00000009", f"args.run_folder={run.folder}/new"
    assert_refused(lambda: planned(run.config(*shrinks, *named), 4), "no such folder")

"""args.elastic: how many ranks train, with which accumulation, what the log says, and what it refuses."""

from __future__ import annotations

import itertools
import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cogfast.__main__ import _line
from cogfast.config import Config, load_config
from cogfast.core.run_lock import RunLock
from cogfast.model.weights.formats.checkpoint_manifest import read_manifest, write_manifest
from cogfast.train.preflight.elastic import Plan, divide, follow_world, plan_world
from cogfast.train.run.checkpoint_writer import CheckpointWriter
from cogfast.train.run.parts import Parts
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import run_folder, write_clips, write_config


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


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("elastic")
    return write_config(folder / "base.yaml", write_clips(folder / "data", 2), train_iters=1)


def configured(base: Path, *words: str) -> Config:
    return load_config([base], ["deepspeed.train_micro_batch_size_per_gpu=2", *words])


def test_a_first_start_has_the_batch_of_the_configuration(base: Path) -> None:
    config = configured(base, "args.elastic=shrink", "args.save=none")
    assert plan_world(config, 2) == Plan("auto", "", 2, 2, 1)
    config = configured(base, "args.elastic=shrink", "deepspeed.train_batch_size=4")
    plan = plan_world(config, 3)
    assert (plan.num_ranks, plan.batch_size, plan.accumulation) == (2, 2, 1)
    assert plan.text.endswith("; 1 rank idles") and "before" not in plan.text
    plan = plan_world(configured(base, "args.elastic=wait", "deepspeed.train_batch_size=4"), 3)
    assert plan.num_ranks == 0 and "waiting until 3 can train" in plan.text
    words = ("args.elastic=wait", "args.model_parallel_size=2", "args.batch_size=2")
    plan = plan_world(configured(base, *words), 1)
    assert (
        "1 rank is here, 0 of which divide the global batch 2; waiting until 2 can train"
        in plan.text
    )


def test_a_resumed_run_keeps_its_batch_and_its_folder_is_its_own(
    base: Path, tmp_path: Path
) -> None:
    """A process that another one has replaced moves no `latest`."""
    config = load_config([base], [f"args.save={tmp_path}"])  # a process with 4 samples
    Trainer(config).train()
    words = [f"args.save={tmp_path}", "args.elastic=shrink"]
    plan = plan_world(configured(base, *words), 5)
    assert plan == Plan(
        "auto",
        "args.elastic=shrink: 4 ranks train, 1 before; global batch 4 = dp 4 x batch 1 x accumulation 1 "
        "(before: dp 1 x batch 4 x accumulation 1), since args.batch_size=2 does not divide 1; 1 rank "
        "idles",
        4,
        1,
        1,
    )
    pairs = configured(base, *words, "args.model_parallel_size=2", "args.batch_size=2")
    plan = plan_world(pairs, 3)
    assert (plan.num_ranks, plan.batch_size, plan.accumulation) == (2, 2, 2)
    assert "(before: dp 1 x batch 4 x accumulation 1)" in plan.text  # it had model_parallel_size=1
    with pytest.raises(
        ValueError, match=r"shrink: 1 rank is left, but 2 share a model .* raise MIN"
    ):
        plan_world(pairs, 1)
    # A checkpoint of a version without a key
    manifest = read_manifest(checkpoint := run_folder(tmp_path) / "checkpoints/00000001")
    del manifest["config"]["args"]["context_parallel_size"], manifest["checksum"]
    write_manifest(checkpoint, manifest)
    assert plan_world(pairs, 3) == plan
    waiting = configured(base, *words[:1], "args.elastic=wait", "args.model_parallel_size=2")
    assert plan_world(waiting, 1).num_ranks == 0
    run = run_folder(tmp_path)
    named = configured(base, *words, f"args.resume={run}/checkpoints/00000001")
    with pytest.raises(ValueError, match=r"each restart would return to it"):
        plan_world(named, 4)
    assert plan_world(configured(base, *words, f"args.resume={run}"), 4).resume == str(run)
    # A run in a store begins from this one, and its own checkpoints count from then on.
    stored = [f"args.run_folder=file://{tmp_path}/stored", f"args.resume={run}", words[1]]
    plan = plan_world(configured(base, *stored), 4)
    assert (plan.resume, plan.num_ranks, plan.batch_size) == (str(run), 4, 1)
    shutil.copytree(run, tmp_path / "stored")
    plan = plan_world(configured(base, *stored), 4)
    assert (plan.resume, plan.num_ranks, plan.batch_size) == ("auto", 4, 1)

    words = [f"args.save={tmp_path}", "args.resume=auto", "args.train_iters=2"]
    trainer = Trainer(load_config([base], words))
    trainer.writer.check_owner()
    (run / "run.lock").write_text("process 1 on another-machine\n")
    with pytest.raises(RuntimeError, match="process 1 on another-machine has taken the folder"):
        trainer.train()
    assert (run / "checkpoints" / "latest").read_text() == "00000001"
    assert [path.name for path in (run / "checkpoints").glob("0*")] == ["00000001"]


def test_the_check_keeps_the_lock(tmp_path: Path) -> None:
    import subprocess
    import sys

    lock = RunLock(tmp_path)
    lock.check()
    take = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'a'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    done = subprocess.run(
        [sys.executable, "-c", take, str(tmp_path / "run.lock")], capture_output=True, text=True
    )
    assert "BlockingIOError" in done.stderr


def test_it_needs_a_torchrun_that_restarts(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configured(base, "args.elastic=wait")
    with pytest.raises(ValueError, match=r"command line: args.elastic=wait needs torchrun, with"):
        follow_world(config)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(ValueError, match="set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"):
        follow_world(config)
    off = configured(base)
    assert follow_world(off) == (off, None)


def test_lines_after_a_lost_rank_name_the_last_checkpoint_and_no_source_of_gloo(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = "[/a/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:47822"
    error = RuntimeError(f"{text}. This is typically caused by a remote worker crashing. GLHF!")

    def wait() -> None:
        raise error

    path = tmp_path / "checkpoints" / "00000002"
    writer: Any = SimpleNamespace(wait=wait, saved=path, unsent=None)
    CheckpointWriter.__exit__(writer, RuntimeError)
    assert f"another rank was lost; the last complete one: {path}" in caplog.text
    assert "gloo" not in caplog.text
    assert _line(error).endswith("(Connection closed by peer [127.0.0.1]:47822)")
    parts: Any = SimpleNamespace(writer=writer, folder=tmp_path)
    parts.args = SimpleNamespace(elastic="shrink")
    parts.how_to_upload = lambda: Parts.how_to_upload(parts)
    last = f"the last checkpoint is {path}; torchrun, or the same command, resumes from it"
    assert Parts.how_to_resume(parts) == last

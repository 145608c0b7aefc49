"""A run that was killed resumes bit for bit, with the same data and noise."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from cogfast.__main__ import _line
from cogfast.core import run_lock
from cogfast.core.run_lock import RunLock
from cogfast.distributed.stop_signals import StopSignals
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint, read_manifest
from cogfast.train.trainer import Trainer
from tests.support.interrupted.kills import Kill, assert_same_run, run_with_kills
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT, wait_for
from tests.support.tiny_run import run as launch

STEPS = 24
SAVE_EVERY = 4
PAIRS = "deepspeed.train_micro_batch_size_per_gpu=2"


@pytest.fixture(scope="module")
def run(shared_run: Run) -> Run:
    return shared_run.with_args(train_iters=STEPS, save_interval=SAVE_EVERY, num_workers=1)


@pytest.mark.soak
def test_a_kill_of_two_ranks_during_a_save_changes_nothing(run: Run, tmp_path: Path) -> None:
    """The resumed run's final state equals the uninterrupted run's, bit for bit.

    Other kills (of one rank, of torchrun, in steps) are in `test_many_kills_change_nothing`, a soak.
    """
    run = run.with_words(PAIRS, "args.save_interval=2", "deepspeed.bf16={enabled: true}")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert launch(run.into(whole).command(), 2).returncode == 0
    run_with_kills(run.into(cut).command(), cut, [Kill("all", "save", STEPS // 4, 0.005)])
    assert_same_run(whole, cut, STEPS)


@pytest.mark.slow
@pytest.mark.soak
def test_a_signal_to_the_script_saves_on_every_rank(run: Run, tmp_path: Path) -> None:
    """SIGUSR1, as Slurm sends it, to finetune_multi_gpus.sh: no process of it stays."""
    run = run.into(tmp_path)
    words = [*run.words, "args.train_iters=100000", PAIRS, "args.save_interval=null"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"OMP_NUM_THREADS": "1", "NPROC": "2", "BASE": str(run.base), "PATH": path}
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = ["scripts/finetune_multi_gpus.sh", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | given, **streams)
    wait_for(lambda: list(tmp_path.glob("*/metrics.jsonl")), process)
    wait_for(lambda: run.losses, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    assert len(ranks) >= 2
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=60)
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    checkpoint = newest_checkpoint(run.path)
    assert checkpoint is not None, output
    assert len(read_manifest(checkpoint)["slices"]) == 2  # one file a rank
    assert f"stopped at step {int(checkpoint.name)}" in output


@pytest.fixture(scope="module")
def short_run(run: Run) -> Run:
    """A run of 8 steps with checkpoints 4 and 8; tests copy it."""
    return run.train("args.num_workers=0", steps=8)


@pytest.fixture
def copy(short_run: Run, tmp_path: Path) -> Run:
    """A copy of the short run, to resume."""
    shutil.copytree(short_run.path, tmp_path / short_run.path.name)
    return replace(short_run.into(tmp_path).with_words("args.num_workers=0"), last=None)


DECISIVE = {
    "args.seed=5": "args.seed: 1234 -> 5",
    "deepspeed.train_micro_batch_size_per_gpu=2": "global batch: 4 -> 2 (args.gradient_accumulation_steps=2 keeps it)",
    "model.network_config.params.num_layers=3": "num_layers: 2 -> 3",
    "model.scale_factor=0.5": "model.scale_factor: 0.7 -> 0.5",
    "data.params.fps=4": "data.params.fps: 8 -> 4",
    "deepspeed.optimizer.params.lr=0.5": "args.lr: 0.002 -> 0.5",
    "args.weight_decay=0.5": "args.weight_decay: 0.0001 -> 0.5",
    "deepspeed.gradient_clipping=2.0": "deepspeed.gradient_clipping: 1.0 -> 2.0",
    "deepspeed.bf16={enabled: true}": "args.bf16: False -> True",
    "args.lr_schedule=linear": "args.lr_schedule: constant -> linear",
    "model.conditioner_config.params.emb_models.0.ucg_rate=0.5": (
        "emb_models.0.ucg_rate: 0.1 -> 0.5"
    ),
}


def test_changes_of_what_is_trained_are_refused(copy: Run, short_run: Run) -> None:
    """The refusal comes before anything is written to the run's folder."""
    advice = "change it back, or resume anyway with args.accept_changes=true"
    for word, change in DECISIVE.items():
        assert_refused(lambda word=word: copy.resume(word, steps=12), f"{change}; {advice}")
    names = {path.name for path in copy.path.iterdir()}
    assert names == {path.name for path in short_run.path.iterdir()}


def test_accepted_and_free_changes_resume(
    copy: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wavelet = tmp_path / "moved.safetensors"
    shutil.copy(copy.data / "wavelet.safetensors", wavelet)
    free = (
        f"model.first_stage_config.params.ckpt_path={wavelet}",
        "model.sampler_config.params.num_steps=2",
        "data.params.trust_index=true",
        "args.log_interval=2",
        "deepspeed.zero_optimization.stage=1",
        "deepspeed.train_micro_batch_size_per_gpu=2",
        "deepspeed.gradient_accumulation_steps=2",
    )
    assert len(copy.resume(*free, steps=12).losses) == 8 + 2
    lr = "deepspeed.optimizer.params.lr=0.001"
    resumed = copy.resume("args.accept_changes=true", lr, steps=13)
    assert resumed.checkpoint.name == "00000013"
    assert "args.lr: 0.002 -> 0.001" in caplog.text


def test_the_time_limit_saves_and_ends(
    run: Run, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """The limit counts from the start of the process, which here has run other tests."""
    seconds = time.time() - psutil.Process().create_time() + 4
    run = run.into(tmp_path).with_words("args.num_workers=0", "args.save_interval=null")
    run.train(f"args.max_hours={seconds / 3600}", steps=100_000)
    step = int((run.path / "checkpoints" / "latest").read_text())
    assert 0 < step < 100_000
    assert len(run.losses) == step
    pattern = rf"stopped at step {step} of 100000 by args\.max_hours=\S+; the last "
    assert re.search(pattern, log.text)
    line = "args.max_hours=0.0 must be a number from 1e-06"
    assert_refused(lambda: run.train("args.max_hours=0.0"), line)


HOLD = """
import sys, time
from pathlib import Path
from cogfast.core.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]))
print("locked", flush=True)
time.sleep(120)
"""


def test_one_run_at_a_time_in_a_folder(
    copy: Run, short_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that another process trains is refused by name, until that process is gone."""
    monkeypatch.setattr(run_lock, "_PATIENCE", 0.1)
    folder = copy.path
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        who = f"process {holder.pid} on {platform.node()}"
        line = f"{folder}: {who} is training in it; wait for that"
        for words in (["args.resume=latest"], ["args.resume=auto", f"args.run_folder={folder}"]):
            assert_refused(lambda words=words: copy.train(*words, steps=12), line)
        before = {path.name for path in short_run.path.iterdir()}
        names = {path.name for path in folder.iterdir()} - before
        assert not names - {"run.lock"}
        assert holder.poll() is None
    finally:
        holder.kill()
        holder.communicate()
    assert copy.resume(steps=12).checkpoint.name == "00000012"
    # The end of a run ends its lock, also within one process.
    with RunLock(folder):
        pass


class FailingData(Trainer):
    """The data of step 6 cannot be read."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        if self.step == 5:
            raise RuntimeError("too many samples are bad")
        return super().compute_loss(batch)


@pytest.mark.parametrize("is_elsewhere", [False, True], ids=["own folder", "another folder"])
def test_an_error_names_the_last_checkpoint(
    run: Run, tmp_path: Path, short_run: Run, is_elsewhere: bool
) -> None:
    """A run that continues another one in a folder of its own has that one's until it saves."""
    run, last = run.into(tmp_path).with_words("args.num_workers=0", "args.save_interval=2"), None
    if is_elsewhere:
        last = short_run.path / "checkpoints" / "00000004"
        words = (
            "args.accept_changes=true",
            f"args.resume={last}",
            f"args.run_folder={tmp_path / 'new'}",
        )
        run = run.with_words(*words, "args.save_interval=null")
    trainer = run.by(FailingData).trainer()
    with StopSignals(lambda reason: reason, kept="before training began") as outer:
        with pytest.raises(RuntimeError, match="^too many samples are bad") as caught:
            trainer.train()
        kept = outer.kept
    last = last or trainer.folder / "checkpoints" / "00000004"
    resume = last if is_elsewhere else trainer.folder
    hint = f"the last checkpoint is {last}; run the same command with --resume {resume} to resume"
    assert _line(caught.value).endswith(f"; {hint}")
    assert kept == f"; {hint}"


@pytest.mark.parametrize(
    "batch, line", [(2, "4, so that 4 are read again"), (8, "16, so that 8 are left out")]
)
def test_another_global_batch_continues_elsewhere_in_the_data(
    run: Run, log, batch: int, line: str
) -> None:
    run.train(steps=2)
    words = "args.accept_changes=true", f"deepspeed.train_micro_batch_size_per_gpu={batch}"
    run.resume(*words, steps=3)
    assert (
        f"the global batch has changed: after 8 samples, the run continues at number {line}"
        in log.text
    )

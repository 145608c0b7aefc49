"""Metrics of a run: lines, means, TensorBoard, W&B, and a subclass's loss."""

import json
import math
import re
import resource
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor

from cogfast.distributed.process_groups import ProcessGroups
from cogfast.distributed.step_clock import StepClock
from cogfast.extensions.page import watch
from cogfast.train.checkpoint.snapshot import Snapshot
from cogfast.train.keys import TrainKeys
from cogfast.train.run.trackers import Trackers
from cogfast.train.trainer import Trainer
from cogfast.train.watchers.metrics import Metrics, memory_gib
from cogfast.train.watchers.model_flops import train_flops
from cogfast.train.watchers.training_losses import BandLosses
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT, launch_ranks
from tests.support.tiny_transformers import tiny
from tests.train.test_trainer import ENCODED

TIMES = ("step", "data_wait", "encode", "forward_backward", "optimizer")
KEYS = {f"{part}_ms" for part in TIMES} | {f"train_loss_band_{band}" for band in range(4)}
KEYS |= {"step", "loss", "loss_running", "lr", "grad_norm"}
KEYS |= {"samples_per_s", "tokens_per_s", "model_tflops", "mfu", "memory_rss_gib"}
KEYS |= {"skipped", "skipped_in_a_row", "nonfinite_losses", "save_wait_ms", "eval_seconds"}


def test_a_line_holds_everything(run: Run) -> None:
    done = run.train(steps=4)
    trainer, found = done.last, done.lines
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert all(line.keys() == KEYS for line in found)
    last = found[-1]
    assert last["lr"] == 2e-3
    assert last["mfu"] is None  # the peak of a CPU is unknown
    num_tokens = 8 + 3 * 2 * 2  # text; latent frames x rows x columns of patches
    assert trainer.parts.size.num_tokens == num_tokens
    assert last["samples_per_s"] == pytest.approx(4 * 1000 / last["step_ms"])
    assert last["tokens_per_s"] == pytest.approx(num_tokens * last["samples_per_s"])
    flops = train_flops(trainer.engine.transformer.config, num_tokens)
    assert last["model_tflops"] == pytest.approx(flops * last["samples_per_s"] / 1e12)
    assert 0 < last["data_wait_ms"] < last["step_ms"]
    split = [last[f"{part}_ms"] for part in ("encode", "forward_backward", "optimizer")]
    assert min(split) > 0
    # The rest is the line itself, and what lies between the parts.
    assert sum(split) + last["data_wait_ms"] < last["step_ms"]
    resident = memory_gib(torch.device("cpu"))["memory_rss_gib"]
    assert last["memory_rss_gib"] == pytest.approx(resident, rel=0.3)


def test_a_page_explains_every_number() -> None:
    page = (ROOT / "docs" / "diagnostics.md").read_text()
    cells = re.findall(r"^\| (`.+?) \|", page, re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    of_gpus = {"memory_allocated_gib", "memory_reserved_gib"}
    assert not {re.sub(r"_[1-3]$", "_0", key) for key in KEYS | of_gpus} - named


def test_the_wait_is_that_of_the_slowest_rank(tmp_path: Path, log) -> None:
    """Rank 1 of two waits for each of its batches, rank 0 for none but in the mean of both."""
    numbers = ("grad_norm", "num_skipped", "num_skipped_in_a_row")
    engine = SimpleNamespace(**dict.fromkeys(numbers, torch.zeros(())))
    engine.transformer, engine.clock = tiny("5b"), StepClock()
    engine.optimizer = SimpleNamespace(param_groups=[{"lr": 1e-3}])
    sent: list[Tensor] = []

    class TwoRanks(ProcessGroups):
        def sum(self, value: Tensor) -> Tensor:
            sent.append(value)
            return sent[-2] + value if len(sent) % 2 == 0 else value

    args, cpu = TrainKeys(log_interval=1), torch.device("cpu")
    size = SimpleNamespace(num_tokens=1, is_picture=False, has_both=False)
    groups = [TwoRanks(rank, 2, rank, cpu, None, False) for rank in (1, 0)]
    data = SimpleNamespace(num_steps=2, order=SimpleNamespace(num_slots=lambda _: 2))
    about = {"engine": engine, "data": data, "size": size, "bands": BandLosses(None, cpu)}
    both = []
    for each in groups:
        launch = SimpleNamespace(args=args, groups=each)
        parts: Any = SimpleNamespace(launch=launch, logged=None, **about)
        both.append(Metrics(parts, Trackers(args, tmp_path, 0, each.is_main)))
    for step in (1, 2):
        for metrics, seconds in zip(both, (0.05, 0.0), strict=True):
            engine.clock.data_seconds = seconds
            metrics.after_backward(torch.tensor(2.0 * metrics.groups.rank))
            line = metrics.after_step(step)
            assert line is not None
            metrics.after_log(line)
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in found] == [1.0, 1.0]
    assert [line["data_wait_ms"] for line in found] == pytest.approx([50, 50])
    assert log.messages[-1].endswith("waiting for data: raise args.num_workers")


def test_a_line_is_the_mean_since_the_last(run: Run, tmp_path: Path) -> None:
    run = run.with_args(train_iters=6)
    each = run.into(tmp_path / "each").train().lines
    third = run.into(tmp_path / "third").train("args.log_interval=3").lines
    losses = [line["loss"] for line in each]
    assert [line["step"] for line in third] == [3, 6]
    assert third[0]["loss"] == pytest.approx(sum(losses[:3]) / 3, rel=1e-6)
    assert third[1]["loss"] == pytest.approx(sum(losses[3:]) / 3, rel=1e-6)
    running = losses[0]
    for line in each:
        running = 0.98 * running + 0.02 * line["loss"]
        assert line["loss_running"] == pytest.approx(running)
    wanted = 0.98**3 * third[0]["loss"] + (1 - 0.98**3) * third[1]["loss"]
    assert third[1]["loss_running"] == pytest.approx(wanted)


def test_a_non_finite_loss_hides_no_other(run: Run, tmp_path: Path) -> None:
    """One bad sample of 8, at 2 per step: the line has the mean loss of 3 of 4 steps."""
    dataset = {"target": ENCODED, "params": {"bad_sample": 0}}
    run = run.with_words("deepspeed.train_micro_batch_size_per_gpu=2").by(Trainer, "tests")
    run = run.with_args(dataset=dataset, train_iters=4)
    lines = run.into(tmp_path / "each").train().lines
    (line,) = run.into(tmp_path / "four").train("args.log_interval=4").lines
    each = [line["loss"] for line in lines]
    assert each.count(None) == 1
    finite = [loss for loss in each if loss is not None]
    assert line["loss"] == pytest.approx(sum(finite) / 3, rel=1e-6)
    assert line["skipped"] == 1
    (bad,) = [line for line in lines if line["loss"] is None]
    assert bad["grad_norm"] is None


def test_history_is_cut_where_a_run_resumes(run: Run) -> None:
    """Lines after the checkpoint, and one that a crash cut short, leave the file."""
    done = run.with_args(save_interval=2, keep_last=0).train(steps=6)
    before = done.lines
    with open(done.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    found = run.train(f"args.resume={done.path}/checkpoints/00000004", steps=8).lines
    assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6, 7, 8]
    for line, expected in zip(found[:6], before, strict=True):
        assert line["loss"] == expected["loss"]
        assert line["loss_running"] == expected["loss_running"]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_gets_the_numbers(run: Run, data: Path) -> None:
    run = run.with_args(valid_data=[str(data)], eval_interval=2, eval_num_samples=0).train(steps=2)
    found, lines = scalars(run.path / "tensorboard"), run.lines
    assert found["loss"] == [
        (s, pytest.approx(line["loss"])) for s, line in enumerate(lines[:2], 1)
    ]
    assert found["valid_loss"] == [(2, pytest.approx(lines[2]["valid_loss"]))]
    assert "step" not in found


class WithFullDisk(Trainer):
    """No file may have more than 500 bytes during the third and fourth step and what follows them."""

    def compute_loss(self, batch: dict) -> Tensor:
        if self.step in (2, 4):
            self.writer.wait()
        if self.step == 2:
            self.limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, self.limits[1]))
        if self.step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, self.limits)
        return super().compute_loss(batch)


def test_a_full_disk_costs_nothing_that_can_follow(
    run: Run, data: Path, log: pytest.LogCaptureFixture
) -> None:
    """Lines, TensorBoard, page, samples and a checkpoint: one warning each, and all lines follow when
    there is space."""
    run = run.with_args(valid_data=[str(data)], eval_interval=4, eval_sampling_steps=1)
    run = run.by(WithFullDisk).with_args(save_interval=2, keep_last=0).train(steps=6)
    assert [line["step"] for line in run.lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in scalars(run.path / "tensorboard")["loss"]] == [1, 2, 5, 6]
    left = sorted(p.name for p in (run.path / "checkpoints").iterdir())
    assert left == ["00000002", "00000006", "latest"]
    assert "<dd>6 <small>of 6</small></dd>" in (run.path / "index.html").read_text()
    ours = [record for record in log.records if record.name.startswith("cogfast")]
    warnings = [r.message for r in ours if r.levelname in ("WARNING", "ERROR")]
    warnings = [text for text in warnings if "File too large" in text]
    about = ("log.txt", "metrics.jsonl", "sampling at step 4", "prompt 0 (", "reference/000")
    about += ("index.html", "checkpoint of step 4")
    for what in about:
        assert len([text for text in warnings if what in text]) == 1, (what, warnings)
    assert len(warnings) == len(about)
    assert "checkpoint of step 6 is written" in log.text
    assert "Traceback" not in log.text


class WithFullDiskToTheEnd(Trainer):
    """No file may have more than 500 bytes from the third step on."""

    def compute_loss(self, batch: dict) -> Tensor:
        if self.step == 2:
            self.writer.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
        return super().compute_loss(batch)


def test_a_disk_that_stays_full_ends_a_run_in_one_line(
    run: Run, data: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were complete stay as they are, and no part of another is left."""
    run = run.with_args(valid_data=[str(data)], eval_interval=2, eval_sampling_steps=1)
    run = run.with_args(save_interval=2, profiling=3).by(WithFullDiskToTheEnd)
    before, trainer = {}, run.trainer()
    loss = WithFullDiskToTheEnd.compute_loss

    def note_files(self: Trainer, batch: dict) -> Tensor:
        found = loss(self, batch)
        if self.step == 2:
            before.update(files(trainer.folder))
        return found

    monkeypatch.setattr(WithFullDiskToTheEnd, "compute_loss", note_files)
    line = "step 4 could not be saved <...>; the last checkpoint is"
    assert_refused(trainer.train, line, RuntimeError)
    del before["hang/rank-0.txt"]  # of a run that trains
    assert files(trainer.folder) == before and "checkpoints/00000002/manifest.json" in before
    ours = [r for r in log.records if r.name.startswith("cogfast")]
    failed = [r.message for r in ours if r.levelname in ("WARNING", "ERROR")]
    about = ("metrics.jsonl", "sampling at step 4", "index.html", "profile:")
    for what in about:
        assert len([text for text in failed if what in text]) == 1, failed
    assert "Traceback" not in log.text


def files(folder: Path) -> dict[str, bytes]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


class Halved(Trainer):
    """A user's loss, independent of cogfast's."""

    def compute_loss(self, batch: dict) -> Tensor:
        latents = torch.randn(4, 8, 3, 4, 4)
        text = torch.zeros(4, 8, 16)
        return self.engine(latents, torch.arange(4), text).square().mean() / 2


def test_a_subclass_may_bring_its_own_loss(run: Run, data: Path) -> None:
    run = run.with_args(valid_data=[str(data)], eval_interval=2, eval_sampling_steps=2)
    run = run.by(Halved).train(steps=2)
    found = run.lines
    for line in found[:2]:
        assert line["tokens_per_s"] == pytest.approx(20 * line["samples_per_s"])
    assert found[0]["train_loss_band_0"] is None  # its timesteps are unknown
    assert "valid_loss" in found[2]
    assert len(list(run.path.glob("samples/*/*.mp4"))) == 1


def test_missing_wandb_is_reported_before_training(run: Run, tmp_path: Path) -> None:
    line = "args.wandb=true, but wandb is not installed; pip install wandb"
    assert_refused(run.with_args(wandb=True).trainer, line)
    assert not (tmp_path / "runs").exists()


def test_wandb_resumes_its_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that records the calls: wandb itself needs an account."""
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "wandb.py").write_text(
        "received = []\n"
        "class Run:\n"
        "    def define_metric(self, *given, **named): received.append((given, named))\n"
        "    def log(self, numbers): received.append((numbers['step'], numbers['loss']))\n"
        "    def finish(self, exit_code): received.append(exit_code)\n"
        "def init(**named):\n"
        "    received.append(named)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(stub)
    run = run.with_args(wandb=True, wandb_project_name="clips").train(steps=1)
    received = sys.modules.pop("wandb").received
    assert received[0]["project"] == "clips"
    assert received[0]["id"] == received[0]["name"] == run.path.name
    assert received[0]["resume"] == "allow"
    # A step of its own: W&B's cannot go back to that of the checkpoint.
    assert received[1:3] == [(("step",), {}), (("*",), {"step_metric": "step"})]
    assert received[3:] == [(1, run.losses[0]), 0]


@pytest.mark.parametrize(
    ("seconds", "steps"), [(300.0, [1, 2, 4, 5, 5]), (-1.0, [1, 2, 2, 3, 4, 4, 5, 5, 5])]
)
def test_the_page_is_written_at_checkpoints_and_after_minutes(
    run: Run, monkeypatch: pytest.MonkeyPatch, seconds: float, steps: list[int]
) -> None:
    """Without evaluations; the end of the run saves and marks the page as complete."""
    written: list[int] = []
    monkeypatch.setattr(watch, "page_of", lambda records, *_: written.append(records[0].step))
    monkeypatch.setattr(watch, "write_page", lambda *_: None)
    monkeypatch.setattr(watch, "_SECONDS", seconds)
    run.with_args(save_interval=2).train(steps=5)
    assert written == steps


class Logs(Trainer):
    """Logs values that depend on the rank and the step, some of them on rank 1 alone."""

    def losses(self, batch, noised, conditioning):
        losses, rank = super().losses(batch, noised, conditioning), self.groups.rank
        self.log("loss", losses)
        self.log("odd/rank", 3.0 * rank)
        if rank == 1 and self.step == 2:
            self.log("rare", torch.tensor([1.0, 3.0]))
            self.log("not finite", math.nan)
        return losses


def test_a_trainer_logs_values_of_its_own(run: Run) -> None:
    """Each is the mean of the ranks and steps that logged it since the last line."""
    run = run.with_args(train_iters=4, log_interval=2)
    run = run.with_words("deepspeed.train_micro_batch_size_per_gpu=2")
    code = "import sys; from cogfast.__main__ import main; from tests.train.watchers import test_metrics"
    code += "; sys.exit(main(trainer=test_metrics.Logs))"
    launch_ranks(2, "-c", code, *run.command()[1:])
    first, second = run.lines
    for line in (first, second):
        assert line["log/loss"] == pytest.approx(line["loss"], rel=1e-6)
        assert line["log/odd/rank"] == 1.5
    assert not {"log/rare", "log/not finite"} & first.keys()
    assert second["log/rare"] == 2.0 and second["log/not finite"] is None
    assert scalars(run.path / "tensorboard")["log/rare"] == [(4, 2.0)]


@pytest.mark.soak
def test_memory_does_not_grow(run: Run) -> None:
    """Resident memory after 200 steps equals that after 20 within 2%."""
    run = run.with_args(train_iters=200, log_interval=20, num_workers=1)
    launch_ranks(1, "-m", "cogfast", *run.command())
    memory = {line["step"]: line["memory_rss_gib"] for line in run.lines}
    assert memory[200] <= 1.02 * memory[20], memory


class FailingEvaluation(Trainer):
    """An evaluation that ends the run."""

    def _evaluate(self, *given: object) -> None:
        raise RuntimeError("the evaluation ends the run")


def test_a_checkpoint_comes_before_the_evaluation_of_its_step(run: Run) -> None:
    run = run.with_args(eval_interval=2, save_interval=2).by(FailingEvaluation)
    with pytest.raises(RuntimeError, match="the evaluation ends the run"):
        run.train()
    assert run.checkpoint.name == "00000002"


class NothingFinite(Trainer):
    """No loss is finite."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        return super().compute_loss(batch) * math.nan


def test_a_run_that_skipped_every_step_ends_with_an_error(run: Run) -> None:
    line = "has trained nothing: all 3 steps had non-finite grad"
    assert_refused(lambda: run.by(NothingFinite).train(steps=3), line, RuntimeError)
    assert run.checkpoint.name == "00000003"


def test_saves_and_evaluations_that_hold_training_up_are_in_its_lines(
    run, log, monkeypatch
) -> None:
    """A save takes a second, so that the second one, after step 4, waits for the first."""
    write = Snapshot.write
    monkeypatch.setattr(Snapshot, "write", lambda *given: time.sleep(0.8) or write(*given))
    words = ["args.exit_interval=6", "args.eval_interval=5", "args.eval_iters=1"]
    words += ["args.split=1,1,0", "args.only_log_video_latents=true"]
    run = run.with_args(save_interval=2).with_words(*words).train(steps=100)
    waits = run.logged("save_wait_ms")
    assert [one > 0 for one in waits] == [step in (3, 5) for step in range(1, 7)]
    assert waits[4] > 400
    assert [one > 0 for one in run.logged("eval_seconds")] == [step == 6 for step in range(1, 7)]
    fifth, sixth = (one for one in log.messages if re.match("step [56]/100  loss", one))
    assert re.search(r"  \d{3,} ms/step in saves", fifth) and "evaluation" not in fifth
    assert re.search(r"  \d\.\d s of evaluation", sixth)
    # Each of 94 steps, and a sixth of the pauses
    pauses = sum(waits) / 1000 + run.logged("eval_seconds")[-1]
    minutes, seconds = map(int, re.search(r"  0:(\d\d):(\d\d) left", sixth).groups())
    wanted = 94 * (run.logged("step_ms")[-1] / 1000 + pauses / 6)
    assert 60 * minutes + seconds == pytest.approx(wanted, abs=1)

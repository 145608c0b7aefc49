"""Checkpoints: their content, which ones are kept, full disks, and a changed optimizer."""

import json
import math
import re
from pathlib import Path
from threading import Event

import pytest
import safetensors.torch
import torch

from cogfast.core import files
from cogfast.core.files import WriteError
from cogfast.distributed.zero_engine import ZeroEngine
from cogfast.extensions.exports import export
from cogfast.extensions.formats.convert import convert
from cogfast.model.weights.checkpoint_manifest import (
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from cogfast.train.checkpoint import folder as checkpoint_folder
from cogfast.train.checkpoint import snapshot as snapshots
from cogfast.train.checkpoint.snapshot import Snapshot
from cogfast.train.trainer import Trainer
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import assert_same, read_run_weights, write_clips


@pytest.fixture
def run(run: Run) -> Run:
    return run.with_args(save_interval=2)


def saved_steps(run: Run) -> list[int]:
    return sorted(int(p.name) for p in (run.path / "checkpoints").iterdir() if p.is_dir())


def state(run: Run, step: int) -> dict[str, torch.Tensor]:
    """Return what the first rank saved at a step."""
    checkpoint = run.path / "checkpoints" / f"{step:08d}"
    return safetensors.torch.load_file(checkpoint / "rank-00000.safetensors")


def test_the_newest_are_kept(run: Run, tmp_path: Path) -> None:
    assert saved_steps(run.into(tmp_path / "2").train(steps=8)) == [6, 8]
    assert saved_steps(run.into(tmp_path / "0").train("args.keep_last=0", steps=8)) == [2, 4, 6, 8]


def test_going_back_keeps_what_it_writes(run: Run, tmp_path: Path) -> None:
    """A run resumed at step 2, with step 8 on disk, keeps step 3 as its newest checkpoint."""
    done = run.train("args.keep_last=0", steps=8)
    back = f"args.resume={done.path}/checkpoints/00000002"
    run.train(back, "args.keep_last=1", "args.exit_interval=3", steps=8)
    assert (done.path / "checkpoints" / "latest").read_text() == "00000003"
    assert done.checkpoint.is_dir()
    assert saved_steps(done) == [3, 4, 6, 8]
    again = run.resume("args.keep_last=0", steps=8)
    assert again.losses == run.into(tmp_path / "whole").train(steps=8).losses


def test_a_kill_between_the_two_renames_loses_nothing(run: Run) -> None:
    """A checkpoint that replaces one of the same step renames the old one first."""
    newest = run.train(steps=2).checkpoint
    newest.rename(newest.with_name("00000002.incomplete.old"))
    (newest.parent / "00000003.incomplete").mkdir()  # of a save that was killed
    resumed = run.resume(steps=4)
    assert len(resumed.losses) == 4
    assert saved_steps(resumed) == [4]
    assert not list(newest.parent.glob("*.incomplete*"))


class SlowDisk:
    """A write_safetensors that waits until the test lets it continue."""

    def __init__(self) -> None:
        self.is_free, self.calls, self.write = Event(), [], snapshots.write_safetensors

    def __call__(self, path: Path, tensors: list) -> str:
        self.calls.append(str(path))
        assert self.is_free.wait(60)
        return self.write(path, tensors)


class Watching(Trainer):
    """Notes the step at which each micro-batch's loss is computed and frees the disk at step 3."""

    disk: SlowDisk

    def compute_loss(self, batch: dict) -> torch.Tensor:
        self.steps = [*getattr(self, "steps", []), self.step]
        if self.step == 3:
            assert len(self.disk.calls) == 1  # the checkpoint of step 2 is being written
            assert newest_checkpoint(self.folder) is None
            self.disk.is_free.set()
        return super().compute_loss(batch)


def test_training_continues_while_a_checkpoint_is_written(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 runs before the files of step 2 are written, which still hold step 2's state."""
    disk = SlowDisk()
    monkeypatch.setattr(snapshots, "write_safetensors", disk)
    monkeypatch.setattr(Watching, "disk", disk, raising=False)
    slow = run.into(tmp_path / "slow").by(Watching).train("args.keep_last=0")
    assert slow.last.steps == [0, 1, 2, 3]
    monkeypatch.undo()
    whole = run.into(tmp_path / "whole").train("args.keep_last=0")
    for step in (2, 4):
        assert_same(state(slow, step), state(whole, step))


def test_buffers_are_used_again(run: Run) -> None:
    """One host copy of the partitions, however many saves; a second save waits for the first."""
    done = run.train(steps=2)
    trainer = done.last
    writer = trainer.writer
    buffers = writer._snapshot.partitions
    before = {key: buffer.data_ptr() for key, buffer in buffers.items()}
    live = sum(part.nbytes for part in trainer.engine.parts) * 4  # weights, two moments, EMA
    assert sum(buffer.nbytes for buffer in buffers.values()) == live
    writer.folder.check_owner = lambda: None  # the run has ended, and its lock with it
    for step in (3, 4):
        writer.save(step, {})
    writer.wait()
    assert writer.saved_step == 4
    assert saved_steps(done) == [3, 4]
    assert {key: buffer.data_ptr() for key, buffer in buffers.items()} == before


class NotFinite(Trainer):
    """The loss of the first step is not finite, so that the step is skipped."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        return super().compute_loss(batch) * (math.nan if self.step == 0 else 1.0)


@pytest.mark.parametrize("optimizer", ["sat.ops.FusedEmaAdam", "AdamW"])
def test_a_save_before_the_first_update_costs_no_state(
    run: Run, tmp_path: Path, optimizer: str
) -> None:
    """Every checkpoint has the state that the optimizer has, and a resumed run equals a whole one."""
    words = (f"deepspeed.optimizer.type={optimizer}", "args.save_interval=1", "args.keep_last=0")
    run = run.by(NotFinite).with_words(*words)
    whole = run.into(tmp_path / "whole").train()
    kinds, counters = [], []
    for step in range(1, 5):
        manifest = read_manifest(whole.path / "checkpoints" / f"{step:08d}")
        kinds.append({s["kind"] for of in manifest["slices"].values() for s in of.values()})
        counters.append(manifest["counters"]["output.weight"].get("step", 0))
    own = {"exp_avg", "exp_avg_sq"} | ({"shadow"} if "Ema" in optimizer else set())
    at_first = own if "Ema" in optimizer else set()
    assert kinds == [{"master", "frozen"} | found for found in (at_first, own, own, own)]
    assert counters == [0, 1, 2, 3]
    run.train("args.exit_interval=1")
    assert_same(state(run.resume(), 4), state(whole, 4))


def test_a_checkpoint_without_moments_is_refused(run: Run) -> None:
    checkpoint = run.train(steps=2).checkpoint
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["checksum"]
    for name, slices in manifest["slices"].items():
        kept = {key: s for key, s in slices.items() if s["kind"] in ("master", "frozen", "exp_avg")}
        manifest["slices"][name] = kept
    write_manifest(checkpoint, manifest)
    line = ": the checkpoint has no exp_avg_sq, shadow of FusedEmaAdam; resume from"
    assert_refused(run.resume, line)


class Damaged(Trainer):
    """An element of the master weights, or of their average, becomes infinite after step 3."""

    kind = "weights"

    def compute_loss(self, batch: dict) -> torch.Tensor:
        if self.step == 3:
            average = self.engine.state(0)["shadow"]
            (self.engine.parts[0].detach() if self.kind == "weights" else average)[5] = math.inf
        return super().compute_loss(batch)


@pytest.mark.parametrize("kind", ["weights", "EMA weights"])
def test_damaged_weights_are_not_saved(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The good checkpoints stay, whatever is saved later, and the run ends with an error."""
    monkeypatch.setattr(Damaged, "kind", kind)
    run = run.by(Damaged).with_args(train_iters=8, save_interval=1, keep_last=2)
    wanted = (
        r"step 8 could not be saved .*the last checkpoint is \S+/00000003; run the same command"
    )
    with pytest.raises(RuntimeError, match=wanted):
        run.train()
    assert saved_steps(run) == [2, 3]
    assert run.checkpoint.name == "00000003"
    assert all(value.isfinite().all() for value in run.weights().values())
    wanted = rf"step 4 failed: its {kind} are not finite \(first: \S+\); the previous one"
    assert re.search(wanted, caplog.text)
    assert not list((run.path / "checkpoints").glob("*.incomplete"))


def test_a_latest_that_cannot_be_written_is_logged(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 is complete without it; the next save moves it."""
    write, calls = checkpoint_folder.write_text, []

    def write_text(path: Path, text: str) -> None:
        calls.append(text)
        if len(calls) == 1:
            raise WriteError(path, OSError(28, "No space left on device"))
        write(path, text)

    monkeypatch.setattr(checkpoint_folder, "write_text", write_text)
    done = run.train()
    assert calls == ["00000002", "00000004"]
    assert done.checkpoint.name == "00000004"
    wanted = (
        r"checkpoint of step 2 failed: \S+/latest cannot be .*; it is complete; resume from it with"
    )
    assert re.search(wanted, caplog.text)


def test_no_memory_for_the_copy_leaves_the_run_alone(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, calls = snapshots.host_buffer, []

    def host_buffer(like: torch.Tensor) -> torch.Tensor:
        calls.append(like)
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return make(like)

    monkeypatch.setattr(snapshots, "host_buffer", host_buffer)
    assert saved_steps(run.train(steps=4)) == [4]
    assert "checkpoint of step 2 failed: DefaultCPUAllocator" in caplog.text


def test_a_finished_run_is_left_as_it_is(run: Run) -> None:
    manifest = run.train(steps=3).checkpoint / "manifest.json"
    before = manifest.stat().st_mtime_ns
    run.resume(steps=3)
    assert manifest.stat().st_mtime_ns == before


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "torch.optim.NAdam"])
def test_every_optimizers_state_is_kept(run: Run, tmp_path: Path, optimizer: str) -> None:
    """3 steps and 3 resumed ones equal 6, bit for bit, including momentum, squares and counters."""
    params = {"torch.optim.SGD": "{lr: 0.01, momentum: 0.9}"}.get(optimizer, "{lr: 0.001}")
    run = run.with_words(f"deepspeed.optimizer={{type: {optimizer}, params: {params}}}")
    whole = run.into(tmp_path / "whole").train(steps=6)
    run.train("args.exit_interval=3", steps=6)
    cut = run.resume(steps=6)
    assert cut.losses == whole.losses
    assert_same(cut.weights(), whole.weights())


def test_the_loss_scale_is_saved_and_loaded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 needs a GPU: this tests that the engine gets its own numbers back."""
    scale, loaded = {"dynamic": True, "cur_scale": 4096.0, "cur_iter": 7}, []
    monkeypatch.setattr(ZeroEngine, "loss_scaler_state", lambda _: scale)
    monkeypatch.setattr(ZeroEngine, "load_loss_scaler_state", lambda _, s: loaded.append(s))
    run.train(steps=2)
    run.resume(steps=3)
    assert loaded == [scale]


def test_another_optimizer_and_another_model_are_refused_and_other_data_logged(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.train(steps=2)
    cases = {
        "deepspeed.optimizer.type=AdamW": "its optimizer is FusedEmaAdam, whose state does not fit AdamW",
        "model.network_config.params.num_layers=3": "the checkpoint is of another model: <...> trained parameters differ, first blocks.2",
    }
    for word, line in cases.items():
        assert_refused(lambda word=word: run.resume("args.accept_changes=true", word), line)
    more = write_clips(tmp_path / "data", num_clips=7)
    run.trainer(f"args.train_data=[{more}]", "args.resume=latest")
    assert "the data set has changed (7 samples, before 6)" in caplog.text


def files_of(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.glob("*")}


def assert_exported(checkpoint: Path, folder: Path) -> None:
    """The files in a checkpoint are what `cogfast convert` makes of it, and diffusers reads them."""
    from diffusers import CogVideoXTransformer3DModel

    for name, ema in (("transformer", False), ("transformer_ema", True)):
        convert(checkpoint, folder / name, "diffusers", ema=ema)
        assert files_of(checkpoint / name) == files_of(folder / name)
        model = CogVideoXTransformer3DModel.from_pretrained(checkpoint / name)
        trained = read_run_weights(checkpoint, ema)["output.weight"]
        assert torch.equal(model.proj_out.weight, trained)


def test_checkpoints_hold_what_diffusers_loads(run: Run, tmp_path: Path) -> None:
    every = run.into(tmp_path / "all").train("args.export=all", "args.keep_last=2", steps=5)
    assert saved_steps(every) == [4, 5]  # the older one is removed with its files
    assert_exported(every.path / "checkpoints" / "00000004", tmp_path / "4")
    # In the last checkpoint; with args.export_interval, in those of its multiples, too.
    words = ("args.export=last", "args.export_interval=4", "args.keep_last=0")
    last = run.into(tmp_path / "last").train(*words, steps=7)
    assert saved_steps(last) == [2, 4, 6, 7]
    has = {p.parts[-3] for p in (last.path / "checkpoints").glob("*/transformer/config.json")}
    assert has == {"00000004", "00000007"}


@pytest.mark.slow
def test_two_ranks_export_the_whole_model(run: Run, tmp_path: Path) -> None:
    words = ["deepspeed.train_micro_batch_size_per_gpu=2", "deepspeed.bf16={enabled: true}"]
    run.launch(2, *words, "args.export=last", "args.train_iters=2")
    checkpoint = run.checkpoint
    assert len(list(checkpoint.glob("rank-*.safetensors"))) == 2
    for name, ema in (("transformer", False), ("transformer_ema", True)):
        convert(checkpoint, tmp_path / name, "diffusers", ema=ema, dtype="bfloat16")
        assert files_of(checkpoint / name) == files_of(tmp_path / name)


def test_an_export_that_fails_costs_no_checkpoint(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full after the first of the two folders."""
    write, calls = export.write_diffusers, []

    def write_once(*given: object) -> None:
        calls.append(given)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        write(*given)

    monkeypatch.setattr(export, "write_diffusers", write_once)
    done = run.train("args.export=last")
    assert len(calls) == 2 and saved_steps(done) == [2, 4]
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert [line for line in lines if "without files for diffusers" in line] == [
        "args.export=last: checkpoint 00000004 is saved without files for diffusers ([Errno 28] No space left on device); write them with cogfast convert"
    ]
    found = {p.name for p in done.checkpoint.iterdir()}
    assert found == {"manifest.json", "rank-00000.safetensors"}


def test_a_model_that_cannot_be_exported_is_refused_before_training(run: Run) -> None:
    network, base = "model.network_config.params", run.into(run.folder / "base").train(steps=1)
    cases = {
        "args.export_interval=4": "args.export_interval=4 adds to args.export=last, but args.export=all",
        f"{network}.modules.adaln_layer_config.params.qk_ln=false": "args.export=all: qk_ln=False must",
        "model.not_trainable_prefixes=[model.diffusion_model.transformer]": (
            "args.export=all: checkpoints of this run lack <...> frozen tensors, first blocks.0"
        ),
    }
    run = run.with_words("args.export=all", f"args.load={base.path}")
    for word, line in cases.items():
        assert_refused(lambda word=word: run.train(word), line)


def test_a_file_that_another_machine_has_kept_makes_no_checkpoint(run, monkeypatch, log) -> None:
    write, num_saves = Snapshot.write, 0

    def write_elsewhere(snapshot: Snapshot, file: Path) -> object:
        nonlocal num_saves
        num_saves += 1
        report = write(snapshot, file)
        if num_saves == 2:
            monkeypatch.setattr(Path, "is_file", lambda path: path != file and path.exists())
        return report

    monkeypatch.setattr(Snapshot, "write", write_elsewhere)
    monkeypatch.setattr(files, "SECONDS_OF_NFS", 0.0)
    done = run.train(steps=6)
    line = "rank-00000.safetensors is not as its rank has written it; do all machines share it?"
    assert "checkpoint of step 4 failed: " in log.text and line in log.text
    assert saved_steps(done) == [2, 6]

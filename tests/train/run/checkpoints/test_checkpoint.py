"""Checkpoints: their content, which ones are kept, full disks, and a changed optimizer."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from threading import Event

import pytest
import safetensors.torch
import torch

from cogfast.config import load_config
from cogfast.core.files import WriteError
from cogfast.model.weights.convert import convert
from cogfast.model.weights.formats.checkpoint_manifest import (
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from cogfast.train.run import checkpoint_writer, export
from cogfast.train.trainer import Trainer
from tests.support.ranks.forked import run_forked
from tests.support.tiny_run import (
    free_port,
    losses,
    read_run_weights,
    run_folder,
    write_clips,
    write_config,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_config(folder / "base.yaml", write_clips(folder / "data"), save_interval=2)


def train(base: Path, save: Path, *overrides: str) -> Path:
    Trainer(load_config([base], [f"args.save={save}", *overrides])).train()
    return run_folder(save)


def saved_steps(run: Path) -> list[int]:
    return sorted(int(p.name) for p in (run / "checkpoints").iterdir() if p.is_dir())


def test_the_newest_are_kept(tmp_path: Path, base: Path) -> None:
    assert saved_steps(train(base, tmp_path / "2", "args.train_iters=8")) == [6, 8]
    keep_all = ("args.train_iters=8", "args.keep_last=0")
    assert saved_steps(train(base, tmp_path / "0", *keep_all)) == [2, 4, 6, 8]


def test_going_back_keeps_what_it_writes(tmp_path: Path, base: Path) -> None:
    """A run resumed at step 2, with step 8 on disk, keeps step 3 as its newest checkpoint."""
    run = train(base, tmp_path, "args.train_iters=8", "args.keep_last=0")
    train(
        base,
        tmp_path,
        "args.train_iters=8",
        "args.keep_last=1",
        f"args.resume={run}/checkpoints/00000002",
        "args.exit_interval=3",
    )
    assert (run / "checkpoints" / "latest").read_text() == "00000003"
    assert newest_checkpoint(run).is_dir()
    assert saved_steps(run) == [3, 4, 6, 8]
    again = train(base, tmp_path, "args.train_iters=8", "args.resume=latest", "args.keep_last=0")
    assert losses(again) == losses(train(base, tmp_path / "whole", "args.train_iters=8"))


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path, base: Path) -> None:
    """A checkpoint that replaces one of the same step renames the old one first."""
    run = train(base, tmp_path, "args.train_iters=2")
    newest = newest_checkpoint(run)
    newest.rename(newest.with_name("00000002.incomplete.old"))
    (newest.parent / "00000003.incomplete").mkdir()  # of a save that was killed
    train(base, tmp_path, "args.train_iters=4", "args.resume=latest")
    assert len(losses(run)) == 4
    assert saved_steps(run) == [4]
    assert not list((run / "checkpoints").glob("*.incomplete*"))


class SlowDisk:
    """A write_safetensors that waits until the test lets it continue."""

    def __init__(self) -> None:
        self.is_free, self.calls, self.write = Event(), [], checkpoint_writer.write_safetensors

    def __call__(self, path: Path, tensors: list) -> str:
        self.calls.append(str(path))
        assert self.is_free.wait(60)
        return self.write(path, tensors)


class Watching(Trainer):
    """Notes the step at which each micro-batch's loss is computed and frees the disk at step 3."""

    disk: SlowDisk
    steps: list[int]

    def compute_loss(self, batch: dict) -> torch.Tensor:
        self.steps.append(self.step)
        if self.step == 3:
            assert len(self.disk.calls) == 1  # the checkpoint of step 2 is being written
            assert newest_checkpoint(self.folder) is None
            self.disk.is_free.set()
        return super().compute_loss(batch)


def test_training_continues_while_a_checkpoint_is_written(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 3 runs before the files of step 2 are written, which still hold step 2's state."""
    disk = SlowDisk()
    monkeypatch.setattr(checkpoint_writer, "write_safetensors", disk)
    trainer = Watching(load_config([base], [f"args.save={tmp_path}/slow", "args.keep_last=0"]))
    trainer.disk, trainer.steps = disk, []
    trainer.train()
    assert trainer.steps == [0, 1, 2, 3]
    monkeypatch.undo()
    whole = train(base, tmp_path / "whole", "args.keep_last=0")
    for step in ("00000002", "00000004"):
        one, other = (
            safetensors.torch.load_file(run / "checkpoints" / step / "rank-00000.safetensors")
            for run in (trainer.folder, whole)
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_buffers_are_used_again(tmp_path: Path, base: Path) -> None:
    """One host copy of the partitions, however many saves; a second save waits for the first."""
    trainer = Trainer(load_config([base], [f"args.save={tmp_path}", "args.train_iters=2"]))
    trainer.train()
    writer = trainer.writer
    buffers = writer._snapshot.partitions
    before = {key: buffer.data_ptr() for key, buffer in buffers.items()}
    live = sum(part.nbytes for part in trainer.engine.parts) * 4  # weights, two moments, EMA
    assert sum(buffer.nbytes for buffer in buffers.values()) == live
    writer.check_owner = lambda: None  # the run has ended, and its lock with it
    for step in (3, 4):
        writer.save(step, {})
    writer.wait()
    assert writer.saved_step == 4
    assert saved_steps(trainer.folder) == [3, 4]
    assert {key: buffer.data_ptr() for key, buffer in buffers.items()} == before


class NotFinite(Trainer):
    """The loss of the first step is not finite, so that the step is skipped."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        return super().compute_loss(batch) * (math.nan if self.step == 0 else 1.0)


@pytest.mark.parametrize("optimizer", ["sat.ops.FusedEmaAdam", "AdamW"])
def test_a_save_before_the_first_update_costs_no_state(
    tmp_path: Path, base: Path, optimizer: str
) -> None:
    """Every checkpoint has the state that the optimizer has, and a resumed run equals a whole one."""
    words = [f"deepspeed.optimizer.type={optimizer}", "args.save_interval=1", "args.keep_last=0"]

    def finish(save: Path, *more: str) -> Path:
        config = load_config([base], [f"args.save={save}", *words, *more])
        NotFinite(config).train()
        return run_folder(save)

    whole = finish(tmp_path / "whole")
    kinds, counters = [], []
    for step in range(1, 5):
        manifest = read_manifest(whole / "checkpoints" / f"{step:08d}")
        kinds.append({s["kind"] for of in manifest["slices"].values() for s in of.values()})
        counters.append(manifest["counters"]["output.weight"].get("step", 0))
    state = {"exp_avg", "exp_avg_sq"} | ({"shadow"} if "Ema" in optimizer else set())
    at_first = state if "Ema" in optimizer else set()
    assert kinds == [{"master", "frozen"} | found for found in (at_first, state, state, state)]
    assert counters == [0, 1, 2, 3]
    finish(tmp_path / "cut", "args.exit_interval=1")
    cut = finish(tmp_path / "cut", "args.resume=latest")
    one, other = (
        safetensors.torch.load_file(run / "checkpoints/00000004/rank-00000.safetensors")
        for run in (cut, whole)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_a_checkpoint_without_moments_is_refused(tmp_path: Path, base: Path) -> None:
    checkpoint = newest_checkpoint(train(base, tmp_path, "args.train_iters=2"))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["checksum"]
    for name, slices in manifest["slices"].items():
        kept = {key: s for key, s in slices.items() if s["kind"] in ("master", "frozen", "exp_avg")}
        manifest["slices"][name] = kept
    write_manifest(checkpoint, manifest)
    wanted = (
        r"args.resume=\S+: the checkpoint has no exp_avg_sq, shadow of FusedEmaAdam; resume from"
    )
    with pytest.raises(ValueError, match=wanted):
        train(base, tmp_path, "args.resume=latest")


class Damaged(Trainer):
    """An element of the master weights becomes infinite after step 3."""

    def compute_loss(self, batch: dict) -> torch.Tensor:
        if self.step == 3:
            self.engine.parts[0].detach()[5] = math.inf
        return super().compute_loss(batch)


def test_damaged_weights_are_not_saved(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The good checkpoints stay, whatever is saved later, and the run ends with an error."""
    words = [f"args.save={tmp_path}", "args.train_iters=8", "args.save_interval=1"]
    trainer = Damaged(load_config([base], [*words, "args.keep_last=2"]))
    wanted = (
        r"step 8 could not be saved .*the last checkpoint is \S+/00000003; run the same command"
    )
    with pytest.raises(RuntimeError, match=wanted):
        trainer.train()
    assert saved_steps(trainer.folder) == [2, 3]
    assert newest_checkpoint(trainer.folder).name == "00000003"
    assert all(
        v.isfinite().all() for v in read_run_weights(newest_checkpoint(trainer.folder)).values()
    )
    wanted = (
        r"checkpoint of step 4 failed: its weights are not finite \(first: \S+\); the previous one"
    )
    assert re.search(wanted, caplog.text)
    assert not list((trainer.folder / "checkpoints").glob("*.incomplete"))


def test_a_latest_that_cannot_be_written_is_logged(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step 2 is complete without it; the next save moves it."""
    write, calls = checkpoint_writer.write_text, []

    def write_text(path: Path, text: str) -> None:
        calls.append(text)
        if len(calls) == 1:
            raise WriteError(path, OSError(28, "No space left on device"))
        write(path, text)

    monkeypatch.setattr(checkpoint_writer, "write_text", write_text)
    run = train(base, tmp_path)
    assert calls == ["00000002", "00000004"]
    assert newest_checkpoint(run).name == "00000004"
    wanted = (
        r"checkpoint of step 2 failed: \S+/latest cannot be .*; it is complete; resume from it with"
    )
    assert re.search(wanted, caplog.text)


def test_no_memory_for_the_copy_leaves_the_run_alone(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make, calls = checkpoint_writer.host_buffer, []

    def host_buffer(like: torch.Tensor) -> torch.Tensor:
        calls.append(like)
        if len(calls) == 1:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return make(like)

    monkeypatch.setattr(checkpoint_writer, "host_buffer", host_buffer)
    run = train(base, tmp_path, "args.train_iters=4")
    assert saved_steps(run) == [4]
    assert "checkpoint of step 2 failed: DefaultCPUAllocator" in caplog.text


def test_a_finished_run_is_left_as_it_is(tmp_path: Path, base: Path) -> None:
    run = train(base, tmp_path, "args.train_iters=3")
    manifest = newest_checkpoint(run) / "manifest.json"
    before = manifest.stat().st_mtime_ns
    train(base, tmp_path, "args.train_iters=3", "args.resume=latest")
    assert manifest.stat().st_mtime_ns == before


@pytest.mark.parametrize("optimizer", ["torch.optim.SGD", "torch.optim.NAdam"])
def test_every_optimizers_state_is_kept(tmp_path: Path, base: Path, optimizer: str) -> None:
    """3 steps and 3 resumed ones equal 6, bit for bit, including momentum, squares and counters."""
    params = {"torch.optim.SGD": "{lr: 0.01, momentum: 0.9}"}.get(optimizer, "{lr: 0.001}")
    arguments = [f"deepspeed.optimizer={{type: {optimizer}, params: {params}}}"]
    whole = train(base, tmp_path / "whole", *arguments, "args.train_iters=6")
    train(base, tmp_path / "cut", *arguments, "args.train_iters=6", "args.exit_interval=3")
    cut = train(base, tmp_path / "cut", *arguments, "args.train_iters=6", "args.resume=latest")
    assert losses(cut) == losses(whole)
    one, other = (read_run_weights(newest_checkpoint(run)) for run in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_optimizer_and_another_model_are_refused(tmp_path: Path, base: Path) -> None:
    train(base, tmp_path, "args.train_iters=2")
    cases = {
        "deepspeed.optimizer.type=AdamW": "its optimizer is FusedEmaAdam, whose state does not fit AdamW",
        "model.network_config.params.num_layers=3": (
            r"the checkpoint is of another model: \d+ trained parameters differ, first blocks.2"
        ),
    }
    for word, wanted in cases.items():
        with pytest.raises(ValueError, match=wanted):
            train(base, tmp_path, "args.resume=latest", "args.accept_changes=true", word)


def test_another_number_of_samples_is_logged(
    tmp_path: Path, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    train(base, tmp_path, "args.train_iters=2")
    more = write_clips(tmp_path / "data", num_clips=7)
    Trainer(
        load_config(
            [base],
            [f"args.save={tmp_path}", f"args.train_data=[{more}]", "args.resume=latest"],
        )
    )
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


def test_checkpoints_hold_what_diffusers_loads(tmp_path: Path, base: Path) -> None:
    words = ("args.export=all", "args.train_iters=5", "args.keep_last=2")
    run = train(base, tmp_path / "all", *words)
    assert saved_steps(run) == [4, 5]  # the older one is removed with its files
    assert_exported(run / "checkpoints" / "00000004", tmp_path / "4")
    # In the last checkpoint; with args.export_interval, in those of its multiples, too.
    words = ("args.export=last", "args.train_iters=7", "args.export_interval=4", "args.keep_last=0")
    run = train(base, tmp_path / "last", *words)
    assert saved_steps(run) == [2, 4, 6, 7]
    has = {p.parts[-3] for p in (run / "checkpoints").glob("*/transformer/config.json")}
    assert has == {"00000004", "00000007"}


@pytest.mark.slow
def test_two_ranks_export_the_whole_model(tmp_path: Path, base: Path) -> None:
    words = ["deepspeed.train_micro_batch_size_per_gpu=2", "deepspeed.bf16={enabled: true}"]
    words += ["args.export=last", "args.train_iters=2", f"args.save={tmp_path / 'runs'}"]
    done = run_forked(["-m", "cogfast", "train", "--base", str(base), *words], 2, free_port())
    assert done.returncode == 0, done.stdout
    checkpoint = newest_checkpoint(run_folder(tmp_path / "runs"))
    assert len(list(checkpoint.glob("rank-*.safetensors"))) == 2
    for name, ema in (("transformer", False), ("transformer_ema", True)):
        convert(checkpoint, tmp_path / name, "diffusers", ema=ema, dtype="bfloat16")
        assert files_of(checkpoint / name) == files_of(tmp_path / name)


def test_an_export_that_fails_costs_no_checkpoint(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full after the first of the two folders."""
    write, calls = export.write_diffusers, []

    def write_once(*given: object) -> None:
        calls.append(given)
        if len(calls) > 1:
            raise OSError(28, "No space left on device")
        write(*given)

    monkeypatch.setattr(export, "write_diffusers", write_once)
    run = train(base, tmp_path, "args.export=last")
    assert len(calls) == 2 and saved_steps(run) == [2, 4]
    lines = [r.message for r in caplog.records if r.levelname == "WARNING"]
    assert [line for line in lines if "without files for diffusers" in line] == [
        "args.export=last: checkpoint 00000004 is saved without files for diffusers ([Errno 28] No space left on device); write them with cogfast convert"
    ]
    found = {p.name for p in newest_checkpoint(run).iterdir()}
    assert found == {"manifest.json", "rank-00000.safetensors"}


def test_a_model_that_cannot_be_exported_is_refused_before_training(
    tmp_path: Path, base: Path
) -> None:
    network = "model.network_config.params"
    cases = {
        "args.export_interval=4": "args.export_interval=4 adds to args.export=last, but args.export=all",
        f"{network}.modules.adaln_layer_config.params.qk_ln=false": "args.export=all: qk_ln=False must",
        "model.not_trainable_prefixes=[model.diffusion_model.transformer]": (
            r"args.export=all: checkpoints of this run lack \d+ frozen tensors, first blocks.0"
        ),
    }
    for word, match in cases.items():
        with pytest.raises(ValueError, match=match):
            train(base, tmp_path, "args.export=all", word)

"""Running out of memory: what the error says, and the plan beside what a step takes."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from cogfast.__main__ import _is_raised_by_cogfast
from cogfast.config import load_config
from cogfast.model.block import Block
from cogfast.plan import out_of_memory
from cogfast.plan.memory import base_parts
from cogfast.plan.out_of_memory import is_out_of_memory
from cogfast.plan.zero import num_trained
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import run_folder, write_clips, write_config


def too_much(*_: object) -> torch.Tensor:
    """Ask for more memory than a process can address."""
    return torch.empty(2**52, dtype=torch.uint8)


def host_error() -> BaseException:
    try:
        too_much()
    except BaseException as error:
        return error
    raise AssertionError("4 PiB were allocated")


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (host_error(), True),
        (RuntimeError("the mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("can't allocate memory"), False),
        (None, False),
    ],
    ids=["cuda", "python", "torch on a host", "shapes", "a value", "none"],
)
def test_errors_of_memory(error: BaseException | None, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one


def test_the_error_names_phase_block_and_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block 1 allocates too much in the second step; the checkpoint of the first is kept."""
    data = write_clips(tmp_path / "data")
    base = write_config(tmp_path / "base.yaml", data, train_iters=3, save_interval=1)
    trainer = Trainer(load_config([base], []))
    forward, watched = Block.forward, trainer.engine.transformer.blocks[1]

    def fail(self: Block, *inputs):
        if self is watched and trainer.step == 1:
            too_much()
        return forward(self, *inputs)

    monkeypatch.setattr(Block, "forward", fail)
    with pytest.raises(RuntimeError, match="^out of memory: ") as raised:
        trainer.train()
    text = str(raised.value)
    assert _is_raised_by_cogfast(raised.value) and "\n" not in text  # one line and exit status 1
    assert "it happened in step 2, phase forward, block 1" in text
    assert "planned for training: " in text and "activations" in text
    folder = run_folder(tmp_path / "runs")
    assert f"the last checkpoint is {folder / 'checkpoints' / '00000001'}" in text
    assert trainer.writer.saved_step == 1


def test_a_plan_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of memory is then explained without a plan."""

    def fail(*_: object) -> None:
        raise KeyError("a model of one's own")

    monkeypatch.setattr(out_of_memory, "plan_memory", fail)
    data = write_clips(tmp_path / "data")
    base = write_config(tmp_path / "base.yaml", data, train_iters=1)
    trainer = Trainer(load_config([base], []))
    trainer.train()
    assert trainer.parts.memory.plan() is None and trainer.parts.memory.plan() is None
    assert caplog.text.count("the memory of the run cannot be predicted (KeyError") == 1
    assert "it happened in step" in trainer.parts.memory.explain(None)


def live_bytes() -> int:
    """Return the bytes of all tensors that exist, each storage once."""
    gc.collect()
    found = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    storages = (t.untyped_storage() for t in found if t.device.type == "cpu")
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_lasts_on_a_cpu(tmp_path: Path, dtype: str) -> None:
    """After a checkpoint the tensors in memory are those of the plan."""
    data = write_clips(tmp_path / "data")
    base = write_config(tmp_path / "base.yaml", data, train_iters=2, save_interval=1)
    network = "model.network_config.params"
    wide = [
        f"{network}.hidden_size=384",
        f"{network}.modules.pos_embed_config.params.hidden_size_head=192",
        f"deepspeed.bf16.enabled={dtype == 'bf16'}",
    ]
    before = live_bytes()
    trainer = Trainer(load_config([base], wide))
    trainer.train()
    setup = trainer.parts.memory.setup
    assert setup is not None
    numel = num_trained(setup.transformer)
    # Master weights, two moments and the EMA, in use and in the checkpoint's copy; weights
    per_number = 2 * 16 + (2 if dtype == "bf16" else 4)
    assert live_bytes() - before == pytest.approx(numel * per_number, rel=0.03)
    parts = {name: n for name, n in base_parts(setup).items() if "workspaces" not in name}
    assert sum(parts.values()) == pytest.approx(numel * per_number, rel=0.03)


def test_scarce_memory_is_returned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A run whose plan nearly fills the host's memory does not let malloc keep freed memory."""
    data = write_clips(tmp_path / "data")
    base = write_config(tmp_path / "base.yaml", data, train_iters=1, save_interval=None)
    trainer = Trainer(load_config([base], []))
    plan, calls = trainer.parts.memory.plan(), []
    assert plan is not None
    monkeypatch.setattr(out_of_memory, "return_freed_memory", lambda: calls.append(1))
    held = out_of_memory.psutil.Process().memory_info().rss
    monkeypatch.setattr(out_of_memory, "free_memory", lambda device: (2**40, 2**40))
    trainer.parts.memory.start()
    assert not calls
    monkeypatch.setattr(out_of_memory, "free_memory", lambda device: (plan.peak - held, 2**40))
    with caplog.at_level("INFO"):
        trainer.parts.memory.start()
    assert calls == [1] and "it is scarce" in caplog.text

"""Running out of memory: what the error says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cogfast.__main__ import _is_raised_by_cogfast
from cogfast.config import load_config
from cogfast.model.block import Block
from cogfast.plan import out_of_memory
from cogfast.plan.out_of_memory import is_out_of_memory
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


def test_the_error_names_phase_and_checkpoint(
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
    assert "it happened in step 2, phase forward;" in text
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
    assert "it happened in step" in trainer.parts.memory.explain()

"""Running out of memory: what the error says."""

import pytest
import torch

from cogfast.__main__ import _is_raised_by_cogfast
from cogfast.extensions.plan import out_of_memory
from cogfast.model.block import Block
from cogfast.train.watchers.out_of_memory import OutOfMemory, is_out_of_memory
from tests.support.runs import Run


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


def test_the_error_names_phase_and_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block 1 allocates too much in the second step; the checkpoint of the first is kept."""
    run = run.with_args(train_iters=3, save_interval=1)
    trainer = run.trainer()
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
    assert f"the last checkpoint is {run.path / 'checkpoints' / '00000001'}" in text
    assert trainer.writer.saved_step == 1


def test_a_plan_that_fails_ends_no_run(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error of memory is then explained without a plan."""

    def fail(*_: object) -> None:
        raise KeyError("a model of one's own")

    monkeypatch.setattr(out_of_memory, "plan_memory", fail)
    parts = run.train(steps=1).last.parts
    assert out_of_memory.plan_of(parts) is out_of_memory.plan_of(parts) is None
    assert caplog.text.count("the run's memory cannot be predicted (KeyError") == 1
    with pytest.raises(RuntimeError, match=r"step \d+, phase .* layers; the last"):
        OutOfMemory(parts).close(MemoryError())

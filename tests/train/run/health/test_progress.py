"""Progress: the phases of a step, in the order in which a run enters them."""

from __future__ import annotations

from pathlib import Path

import pytest

from cogfast.config import load_config
from cogfast.train.run.health.progress import Progress
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import write_clips, write_config

MICRO_BATCH = ["data", "encode", "forward", "backward", "optimizer"]


def test_a_run_enters_the_phases_of_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[tuple[int, str]] = []
    enter = Progress.enter

    def note(self: Progress, phase: str) -> None:
        enter(self, phase)
        entered.append((self.step, self.phase))

    monkeypatch.setattr(Progress, "enter", note)
    data = write_clips(tmp_path / "data")
    args = {"train_iters": 2, "log_interval": 2, "eval_interval": 2, "split": "5,1,0"}
    base = write_config(tmp_path / "base.yaml", data, **args)
    trainer = Trainer(load_config([base], ["deepspeed.gradient_accumulation_steps=2"]))
    assert (trainer.progress.phase, trainer.progress.num_moves) == ("start", 0)
    trainer.train()
    first, second = [[(i, phase) for phase in MICRO_BATCH * 2] for i in (0, 1)]
    assert entered == [*first, *second, (1, "log"), (1, "evaluation"), (1, "end"), (1, "save")]
    assert trainer.progress.num_moves == len(entered)

"""A run's speed beside the measured one: which entry counts, and what is shown about it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from cogfast.config import load_config
from cogfast.train.plan import measured as measured_steps
from cogfast.train.plan.measured import MeasuredStep, StepCase
from cogfast.train.run.health import speed
from cogfast.train.run.health.speed import compare
from cogfast.train.trainer import Trainer
from tests.support.tiny_run import write_clips, write_config
from tests.support.tiny_transformers import FAMILY

CASE = StepCase.of_run(
    FAMILY["5b"], 106, 1, "fp32", ["full"] * 2, is_compiled=False, device=torch.device("cpu")
)
FOUND = MeasuredStep(
    case=CASE, step_ms=500.0, forward_backward_ms=400.0, optimizer_ms=100.0, source="r.json"
)
LINE = {"step": 50, "step_ms": 1000.0, "data_wait_ms": 20.0, "encode_ms": 30.0}
LINE |= {"forward_backward_ms": 420.0, "optimizer_ms": 110.0, "communication_ms": 400.0}


def test_the_part_with_the_largest_difference_is_named() -> None:
    text = compare(LINE, FOUND, 1)
    assert text is not None
    assert text.startswith("1000 ms per step, 2.00 times the 500 ms that were measured")
    assert text.endswith("; communication takes most of the difference: 400 instead of 0 ms")
    slow = {**LINE, "forward_backward_ms": 900.0, "communication_ms": None}
    text = compare(slow, FOUND, 1)
    assert text is not None and text.endswith(
        "forward and backward takes most of the difference: 900 instead of 400 ms"
    )


def test_no_part_is_named_at_the_measured_speed() -> None:
    line = dict.fromkeys(LINE, 0.0) | {"step_ms": 505.0, "forward_backward_ms": 405.0}
    text = compare({**line, "optimizer_ms": 100.0}, FOUND, 1)
    assert text is not None and "1.01 times the 500 ms" in text
    assert text.endswith("(r.json)")


def test_micro_batches_repeat_forward_and_backward() -> None:
    text = compare({**LINE, "step_ms": 1300.0, "forward_backward_ms": 1200.0}, FOUND, 3)
    assert text is not None and "1.00 times the 1300 ms" in text
    whole = dataclasses.replace(FOUND, forward_backward_ms=None, optimizer_ms=None)
    assert compare(LINE, whole, 3) is None  # the share of the optimizer is unknown
    text = compare({**LINE, "communication_ms": 0.0, "encode_ms": 40.0}, whole, 1)
    assert text is not None and "2.00 times the 500 ms" in text
    assert text.endswith("; encode takes most of the difference: 40 instead of 0 ms")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = tmp_path_factory.mktemp("speed")
    args = {"train_iters": 3, "log_interval": 1, "activation_checkpointing": "full"}
    base = write_config(folder / "base.yaml", write_clips(folder / "data"), **args)
    return Trainer(load_config([base]))


def test_a_run_compares_itself_once(
    trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    config = trainer.engine.transformer.config
    fitting = StepCase.of_run(
        config, 8 + 3 * 2 * 2, 4, "fp32", ["full"] * 2, False, torch.device("cpu")
    )
    steps = [
        # Entries that differ in one thing are of other steps.
        {"step_ms": 1e6, "case": {**dataclasses.asdict(fitting), key: value}}
        for key, value in {"num_tokens": 21, "policy": "none", "device": "h100-80"}.items()
    ]
    steps.append({"step_ms": 0.001, "case": dataclasses.asdict(fitting)})
    parts = {"forward_backward_ms": None, "optimizer_ms": None, "source": "of a test"}
    path = tmp_path / "measured.json"
    path.write_text(json.dumps({"rates": [], "steps": [step | parts for step in steps]}))
    monkeypatch.setattr(measured_steps, "MEASURED", path)
    monkeypatch.setattr(speed, "_NUM_STEPS", 2)
    trainer.train()
    (shown,) = [text for text in caplog.messages if "were measured" in text]
    assert shown.startswith("step 2: ")
    assert "times the 0 ms that were measured for this model, size and policy" in shown
    assert "(of a test); " in shown
    assert shown.endswith(" instead of 0 ms")
    # The plan has that measurement, too; memory is not measured on a CPU.
    plan = json.loads((trainer.folder / "plan.json").read_text())
    assert (plan["step_ms"], plan["measured_peak"]) == (0.001, None)
    assert plan["peak"] == sum(plan["memory"].values()) > 0

"""A configuration without a precision takes that of the weights it starts from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cogfast.__main__ import main
from cogfast.config import load_config
from cogfast.schema.arguments import TrainArguments
from cogfast.train.preflight.precision import infer_precision
from tests.model.weights.test_weights_load import sat_state, save_sat
from tests.support.tiny_run import write_config
from tests.support.tiny_transformers import tiny

CONFIGURED = {
    "nothing": ([], "bf16"),
    "fp32": (["deepspeed.bf16.enabled=false"], "fp32"),
    "fp32, in args": (["args.bf16=false"], "fp32"),
    "fp16": (["deepspeed.fp16.enabled=true"], "fp16"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    for dtype in (torch.bfloat16, torch.float32):
        state = sat_state(tiny("5b", seed=1).to(dtype))
        save_sat(folder / str(dtype).removeprefix("torch."), {"module": state})
    return write_config(folder / "base.yaml", folder / "data")


@pytest.mark.parametrize("case", CONFIGURED)
def test_a_configured_precision_is_kept(base: Path, case: str) -> None:
    arguments, precision = CONFIGURED[case]
    config = load_config([base], [f"args.load={base.parent / 'bfloat16'}", *arguments])
    infer_precision(config)
    assert TrainArguments.from_config(config).precision == precision


def test_other_weights_leave_float32(base: Path) -> None:
    for load in ([], ["args.load=nowhere"], [f"args.load={base.parent / 'float32'}"]):
        config = load_config([base], load)
        infer_precision(config)
        assert TrainArguments.from_config(config).precision == "fp32"


def test_a_dry_run_shows_it(base: Path, capsys: pytest.CaptureFixture) -> None:
    load = f"args.load={base.parent / 'bfloat16'}"
    assert main(["train", "--base", str(base), "--dry-run", load]) == 0
    text = capsys.readouterr().out
    after = text[text.rindex("  bf16:") :].splitlines()[1]
    assert after.split() == ["enabled:", "true", "#", "args.load"]

"""The variables of `accelerate launch`. Those below were printed by a script that accelerate 1.15 started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from cogfast.finetune.accelerate import Launch, read_launch
from cogfast.finetune.deepspeed_file import deepspeed_settings
from cogfast.finetune.schemas import Args

# distributed_type DEEPSPEED with deepspeed_config_file: as CogVideo's accelerate_config.yaml
WITH_FILE = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero3_init_flag",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "configs/zero2.yaml",
}
# distributed_type DEEPSPEED that accelerate's own questions wrote
DESCRIBED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
}
ON_CPU = {
    "ACCELERATE_USE_CPU": "True",
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_DYNAMO_BACKEND": "NO",
}
SECTION = {
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 0.5,
}


def test_launches() -> None:
    assert read_launch({}) == Launch()
    assert read_launch(WITH_FILE) == Launch(file=Path("configs/zero2.yaml"))
    assert read_launch(DESCRIBED) == Launch(section=SECTION, precision="bf16")
    assert read_launch(ON_CPU) == Launch(precision="bf16")
    nvme = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/nvme",
    }
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    assert read_launch(nvme) == Launch(section={"zero_optimization": zero})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"USE_FSDP": "true"},
            "ACCELERATE_USE_FSDP=true: FSDP is not supported, since cogfast shards",
        ),
        (
            {"MIXED_PRECISION": "fp8"},
            "ACCELERATE_MIXED_PRECISION=fp8 must be one of no, fp16, bf16",
        ),
        ({"GRADIENT_CLIPPING": "much"}, "ACCELERATE_GRADIENT_CLIPPING=much must be a number"),
        ({"DEEPSPEED_OFFLOAD_PARAM_DEVICE": "disk"}, "PARAM_DEVICE=disk must be one of none, cpu"),
    ],
)
def test_launches_that_cannot_be_followed(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch(DESCRIBED | {f"ACCELERATE_{name}": value for name, value in changes.items()})


@pytest.mark.soak
def test_accelerate_itself_sets_these_variables(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    config = {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.5,
            "offload_optimizer_device": "cpu",
            "offload_param_device": "none",
            "zero3_init_flag": False,
            "zero_stage": 2,
        },
        "distributed_type": "DEEPSPEED",
        "mixed_precision": "bf16",
        "num_machines": 1,
        "num_processes": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    script = "import json, os; print('variables', json.dumps(dict(os.environ)))"
    (tmp_path / "show.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
        + [str(tmp_path / "config.json"), str(tmp_path / "show.py")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout.partition("variables ")[2])
    assert read_launch(found) == Launch(section=SECTION, precision="bf16")


def test_the_command_follows_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO that accelerate's file describes becomes the deepspeed section; contradictions are named."""
    given = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    args = SimpleNamespace(
        **given,
        deepspeed_config=None,
        batch_size=1,
        learning_rate=1e-4,
        optimizer="adamw",
        epsilon=1e-8,
        weight_decay=1e-4,
        beta1=0.9,
        beta2=0.95,
    )
    assert deepspeed_settings(cast(Args, args)) == {}
    for name, value in DESCRIBED.items():
        monkeypatch.setenv(name, value)
    expected = {f"deepspeed.{k}": (v, "accelerate launch") for k, v in SECTION.items()}
    assert deepspeed_settings(cast(Args, args)) == expected
    for name, value, text in (
        (
            "mixed_precision",
            "no",
            "--mixed_precision no, but the file of accelerate launch --config_file has mixed_precision=bf16; give --mixed_precision bf16",
        ),
        (
            "max_grad_norm",
            1.0,
            "--max_grad_norm 1.0, but accelerate launch has gradient_clipping=0.5",
        ),
    ):
        other = SimpleNamespace(**(vars(args) | {name: value}))
        with pytest.raises(ValueError, match=text):
            deepspeed_settings(cast(Args, other))

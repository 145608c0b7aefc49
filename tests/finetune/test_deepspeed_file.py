"""DeepSpeed files, the variables of `accelerate launch`, and options that contradict them.

The variables were printed by a script that accelerate 1.15 started.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.config.merged_config import find_origin, to_dict
from cogfast.finetune.deepspeed_file import Launch, deepspeed_settings, read_launch
from cogfast.finetune.schemas import Args
from cogfast.finetune.translate import translate
from tests.finetune.test_translate import options, words  # noqa: F401

UPSTREAM_ZERO2 = {
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {
            "lr": "auto",
            "weight_decay": "auto",
            "torch_adam": True,
            "adam_w_mode": True,
        },
    },
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 5e8},
    "gradient_accumulation_steps": 1,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
}


@pytest.mark.parametrize("by", ["option", "accelerate"])
def test_a_deepspeed_file_sets_what_is_not_auto(options, tmp_path, monkeypatch, by):  # noqa: F811
    file = tmp_path / "zero2.yaml"
    # A key twice, as in two of upstream's files: JSON takes the last.
    text = json.dumps(UPSTREAM_ZERO2).replace('"stage": 2', '"stage": 3, "stage": 2')
    file.write_text(text)
    given = options(mixed_precision="bf16", beta2=0.99, max_grad_norm=0.5, deepspeed_config=file)
    if by == "accelerate":
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(given.pop("deepspeed_config")))
    config = translate(Args(**given))
    section = to_dict(config.deepspeed)
    zero = {"stage": config.args.zero_stage, **section["zero_optimization"]}
    assert zero == UPSTREAM_ZERO2["zero_optimization"]
    assert section["optimizer"]["type"] == "AdamW"
    # Under DeepSpeed upstream's betas are 0.9 and 0.999, and its clipping is 1.
    assert section["optimizer"]["params"]["betas"] == [0.9, 0.99]
    assert section["gradient_clipping"] == 0.5
    assert "scheduler" not in section
    assert "auto" not in json.dumps(section)
    assert find_origin(config.origins, "args.zero_stage") == "zero2.yaml"
    assert find_origin(config.origins, "deepspeed.gradient_clipping") == "--max_grad_norm"


@pytest.mark.parametrize(
    ("option", "change", "message"),
    [
        ({"batch_size": 2}, {}, "--batch_size 2, but .* has train_micro_batch_size_per_gpu=1"),
        ({"gradient_accumulation_steps": 2}, {}, "has gradient_accumulation_steps=1; change one"),
        ({"mixed_precision": "no"}, {}, "--mixed_precision no, but .* has bf16.enabled=true"),
        ({"mixed_precision": "bf16"}, {"bf16": {"enabled": False}}, "has bf16.enabled=false"),
        ({}, {"gradient_clipping": 0.1}, "--max_grad_norm 1.0, but .* has gradient_clipping=0.1"),
        ({"optimizer": "adam"}, {}, "--optimizer adam, but .* has optimizer.type='AdamW'"),
        (
            {"learning_rate": 1e-3},
            {"optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}},
            "--learning_rate 0.001, but .* has optimizer.params.lr=0.0001; change one of them, or set",
        ),
        ({}, {"optimizer": True}, "zero2.json: optimizer=true must be a mapping; correct it"),
        ({}, {"optimizer": 5}, "zero2.json: optimizer=5 must be a mapping"),
        ({}, {"optimizer": {"params": [1]}}, r"optimizer.params=\[1\] must be a mapping"),
    ],
)
def test_a_deepspeed_file_that_contradicts_an_option_is_refused(
    options,  # noqa: F811
    tmp_path,
    option,
    change,
    message,
):
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | change))
    args = Args(**options(deepspeed_config=file, **{"mixed_precision": "bf16", **option}))
    with pytest.raises(ValueError, match=message):
        translate(args)


def test_a_world_that_does_not_fit_the_file_is_refused(options, tmp_path, capsys, monkeypatch):  # noqa: F811
    monkeypatch.setenv("WORLD_SIZE", "8")
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | {"train_batch_size": 4}))
    given = words(options(deepspeed_config=file, mixed_precision="bf16"))
    assert main(["finetune", *given]) == 2
    message = "zero2.json: deepspeed.train_batch_size=4 does not fit 8 data-parallel ranks"
    assert message in capsys.readouterr().err


# --- accelerate launch ---

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
            "ACCELERATE_USE_FSDP=true is not supported, since cogfast shards",
        ),
        ({"GRADIENT_CLIPPING": "much"}, "ACCELERATE_GRADIENT_CLIPPING=much must be a number"),
    ],
)
def test_launches_that_cannot_be_followed(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_launch(DESCRIBED | {f"ACCELERATE_{name}": value for name, value in changes.items()})


def test_the_command_follows_the_launch(options, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """ZeRO that accelerate's file describes becomes the deepspeed section; contradictions are named."""
    given = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    build = lambda **changes: Args(**options(**(given | changes)))
    assert deepspeed_settings(build()) == {}
    for name, value in DESCRIBED.items():
        monkeypatch.setenv(name, value)
    expected = {f"deepspeed.{k}": (v, "accelerate launch") for k, v in SECTION.items()}
    assert deepspeed_settings(build()) == expected
    text = "--mixed_precision no, but accelerate launch --config_file has mixed_precision='bf16'; change"
    with pytest.raises(ValueError, match=text):
        deepspeed_settings(build(mixed_precision="no"))
    text = (
        "--max_grad_norm 1.0, but accelerate launch has gradient_clipping=0.5; change one of them"
    )
    with pytest.raises(ValueError, match=text):
        deepspeed_settings(build(max_grad_norm=1.0))

"""DeepSpeed files, the variables of `accelerate launch`, and options that contradict them.

The variables were printed by a script that accelerate 1.15 started.
"""

import json
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.config.yaml_files import to_dict
from cogfast.core.keys import find_origin
from cogfast.finetune.schemas import Args
from cogfast.finetune.translate import deepspeed_settings, read_launch, translate
from tests.finetune.conftest import words
from tests.support.refusals import Refusal, assert_line, assert_refused, refusals

TABLE = Path(__file__).with_name("refusals.txt")
UPSTREAM_ZERO2 = {
    "bf16": {"enabled": True},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True, "adam_w_mode": True},
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
def test_a_deepspeed_file_sets_what_is_not_auto(options, tmp_path, monkeypatch, by):
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


@refusals(TABLE, "a DeepSpeed file")
def test_a_deepspeed_file_that_contradicts_an_option_is_refused(options, tmp_path, refusal):
    option, change = map(json.loads, refusal.words)
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | change))
    args = Args(**options(deepspeed_config=file, **{"mixed_precision": "bf16", **option}))
    assert_refused(lambda: translate(args), refusal.line)


def test_a_world_that_does_not_fit_the_file_is_refused(options, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    for name, value in {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "zero2.json"
    file.write_text(json.dumps(UPSTREAM_ZERO2 | {"train_batch_size": 4}))
    given = words(options(deepspeed_config=file, mixed_precision="bf16"))
    line = "zero2.json: deepspeed.train_batch_size=4 does not fit 8 data-parallel ranks"
    assert main(["finetune", *given]) == 2
    assert_line(capsys.readouterr().err.splitlines()[-1], line)  # behind a log line


def test_what_a_file_says_beside_the_options_is_accepted(options, tmp_path: Path) -> None:
    """legacy_fusion is DeepSpeed's own key, and beta3 is the file's to say."""
    file = tmp_path / "more.json"
    section = {"type": "prodigy", "params": {"beta3": 0.9}, "legacy_fusion": False}
    file.write_text(json.dumps({"optimizer": section}))
    config = translate(Args(**options(deepspeed_config=file, optimizer="prodigy")))
    assert config.deepspeed.optimizer.params.beta3 == 0.9


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
    assert read_launch({}) == (None, {}, None)
    assert read_launch(WITH_FILE) == (Path("configs/zero2.yaml"), {}, None)
    assert read_launch(DESCRIBED) == (None, SECTION, "bf16")
    assert read_launch(ON_CPU) == (None, {}, "bf16")
    nvme = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/nvme",
    }
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/nvme"}}
    assert read_launch(nvme) == (None, {"zero_optimization": zero}, None)


@refusals(TABLE, "a launch")
def test_launches_that_cannot_be_followed(refusal: Refusal) -> None:
    changes = dict(f"ACCELERATE_{word}".split("=") for word in refusal.words)
    assert_refused(lambda: read_launch(DESCRIBED | changes), refusal.line)


def test_the_command_follows_the_launch(options, monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeRO that accelerate's file describes becomes the deepspeed section; contradictions are named."""
    given = {"mixed_precision": "bf16", "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    build = lambda **changes: Args(**options(**(given | changes)))
    assert deepspeed_settings(build()) == {}
    for name, value in DESCRIBED.items():
        monkeypatch.setenv(name, value)
    expected = {f"deepspeed.{k}": (v, "accelerate launch") for k, v in SECTION.items()}
    assert deepspeed_settings(build()) == expected
    line = "--mixed_precision no, but accelerate launch --config_file has mixed_precision='bf16'; change"
    assert_refused(lambda: deepspeed_settings(build(mixed_precision="no")), line)
    line = (
        "--max_grad_norm 1.0, but accelerate launch has gradient_clipping=0.5; change one of them"
    )
    assert_refused(lambda: deepspeed_settings(build(max_grad_norm=1.0)), line)

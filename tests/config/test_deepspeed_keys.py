"""DeepSpeed configurations of transformers, accelerate and CogVideo's trainer, with "auto" in them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.__main__ import main
from cogfast.config import Config, load_config, with_words
from cogfast.config.arguments import TrainArguments
from cogfast.config.merged_config import to_dict
from cogfast.distributed.zero_engine import deepspeed_config
from cogfast.train.preflight.mesh import check_global_batch
from tests.support.tiny_run import ROOT

# The sections of zero2.yaml, zero2_offload.yaml, zero3.yaml and zero3_offload.yaml of CogVideo's trainer.
ZERO2 = """
    "stage": 2,
    "allgather_partitions": true,
    "allgather_bucket_size": 2e8,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": true"""
ZERO3 = """
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e5,
    "stage": 3"""
OFFLOAD = ', "offload_%s": {"device": "cpu", "pin_memory": true}'
ZERO = {
    "zero2": ZERO2,
    "zero2_offload": ZERO2 + OFFLOAD % "optimizer",
    "zero3": ZERO3,
    "zero3_offload": ZERO3 + OFFLOAD % "optimizer" + OFFLOAD % "param",
}
WHOLE = """{
  "bf16": {"enabled": true},
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": true, "adam_w_mode": true}
  },
  "scheduler": {
    "type": "WarmupDecayLR",
    "params": {"warmup_min_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
  },
  "zero_optimization": {%s},
  "gradient_accumulation_steps": 1,
  "train_micro_batch_size_per_gpu": 1,
  "train_batch_size": "auto",
  "gradient_clipping": "auto",
  "steps_per_print": 2000,
  "wall_clock_breakdown": false
}"""


@pytest.mark.parametrize("name", ZERO)
def test_the_files_of_cogvideos_trainer_are_deepspeed_sections(name: str, tmp_path: Path) -> None:
    """Two of them have a key twice, first as "auto": JSON takes the last."""
    base = tmp_path / "base.yaml"
    section = json.dumps(json.loads(WHOLE % ZERO[name]))
    base.write_text(f"args: {{lr: 0.002, weight_decay: 0.3}}\ndeepspeed: {section}\n")
    config = load_config([base])
    section = to_dict(config.deepspeed)
    assert section["optimizer"]["params"] == {
        "lr": 0.002,
        "weight_decay": 0.3,
        "torch_adam": True,
        "adam_w_mode": True,
    }
    assert section["gradient_clipping"] == 1.0
    assert "train_batch_size" not in section
    zero = section["zero_optimization"]
    assert "auto" not in zero.values() and zero["reduce_bucket_size"] == 5e8
    if name.startswith("zero3"):
        assert zero["stage3_prefetch_bucket_size"] == 5e8
        assert zero["stage3_param_persistence_threshold"] == 1e5
        assert "stage3_gather_16bit_weights_on_model_save" not in zero
    assert config.unused == {
        "deepspeed.scheduler": "args.lr_schedule, lr_decay_style and warmup set the learning rate"
    }
    assert config.origins["deepspeed.optimizer.params.lr"] == "args.lr"
    args = TrainArguments.from_config(config)
    assert (args.lr, args.weight_decay, args.precision) == (0.002, 0.3, "bf16")
    assert args.zero_stage == int(name[4])
    given = deepspeed_config(config, args)
    assert "scheduler" not in given and "auto" not in str(given)


def filled(*overrides: str) -> Config:
    return load_config([], overrides)


def test_batch_sizes_come_from_args() -> None:
    auto = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    given = ["args.batch_size=3", "args.gradient_accumulation_steps=2"]
    config = filled(*given, *(f"deepspeed.{name}=auto" for name in auto))
    assert to_dict(config.deepspeed) == {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
    }
    assert config.origins["deepspeed.train_micro_batch_size_per_gpu"] == "args.batch_size"
    assert "deepspeed.train_batch_size" not in config.origins
    check_global_batch(config, TrainArguments.from_config(config), world_size=4)


def test_a_dry_run_shows_where_a_value_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(
        "args: {lr: 0.5, bf16: true}\ndeepspeed: {optimizer: {type: AdamW, params: {}}}"
    )
    names = ("lr", "betas", "eps", "weight_decay", "fused")
    autos = [f"deepspeed.optimizer.params.{name}=auto" for name in names]
    autos += ["deepspeed.bf16.enabled=auto", "deepspeed.scheduler={type: WarmupLR}"]
    assert main(["train", "--base", str(base), "--dry-run", *autos]) == 0
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {
        "lr: 0.5 # args.lr",
        "betas: [0.9, 0.999] # auto",
        "eps: 1.0e-08 # auto",
        "weight_decay: 0.01 # args.weight_decay",
        "enabled: true # args.bf16",
    } <= lines
    assert any(line.startswith("# deepspeed.scheduler is accepted and not used") for line in lines)
    assert not any("fused" in line for line in lines)


@pytest.mark.parametrize(("args", "expected"), [((), {}), (("args.bf16=true",), {"bf16": True})])
def test_precision(args: tuple, expected: dict) -> None:
    """If args sets no precision, the dtype of the weights decides, as it does without the section."""
    autos = ("deepspeed.bf16={enabled: auto}", "deepspeed.fp16={enabled: auto, loss_scale: 0}")
    section = to_dict(filled(*args, *autos).deepspeed)
    if not expected:
        assert section == {}
    else:
        assert section == {
            "bf16": {"enabled": True},
            "fp16": {"enabled": False, "loss_scale": 0},
        }


def test_bucket_sizes_follow_the_width() -> None:
    """The rule is that of transformers and accelerate: of 3072, 9.4 million elements."""
    names = ("reduce_bucket_size", "stage3_prefetch_bucket_size")
    names += ("stage3_param_persistence_threshold", "allgather_bucket_size", "sub_group_size")
    autos = [f"deepspeed.zero_optimization.{name}=auto" for name in names]
    assert to_dict(filled(*autos).deepspeed) == {"zero_optimization": {}}
    config = load_config([ROOT / "configs" / "cogvideox_5b.yaml"], autos)
    zero = to_dict(config.deepspeed)["zero_optimization"]
    assert zero == dict(zip(names, (9437184, 8493465, 30720), strict=False))
    assert config.origins[f"deepspeed.zero_optimization.{names[0]}"] == "auto: hidden_size"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("args.batch_size=2", "deepspeed.train_micro_batch_size_per_gpu=1"),
            r"command line: args.batch_size=2, but deepspeed.train_micro_batch_size_per_gpu=1; chan",
        ),
        (
            ("args.batch_size=1", "deepspeed.train_micro_batch_size_per_gpu=2"),
            r"args.batch_size=1, but deepspeed.train_micro_batch_size_per_gpu=2; change one of them",
        ),
        (
            ("args.gradient_accumulation_steps=4", "deepspeed.gradient_accumulation_steps=2"),
            r"args.gradient_accumulation_steps=4, but deepspeed.gradient_accumulation_steps=2",
        ),
        (
            ("deepspeed.train_batch_size=4",),
            r"deepspeed.train_batch_size=4 does not fit 8 data-parallel ranks: train_micro_batch_s",
        ),
    ],
)
def test_two_values_of_one_thing_are_refused(overrides: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config = filled(*overrides)
        check_global_batch(config, TrainArguments.from_config(config), world_size=8)


def test_a_runs_saved_configuration_does_not_contradict_itself(tmp_path: Path) -> None:
    saved = tmp_path / "training_config.yaml"
    saved.write_text(filled("deepspeed.train_micro_batch_size_per_gpu=4").to_yaml())
    config = load_config([saved], ["deepspeed.train_micro_batch_size_per_gpu=2"])
    check_global_batch(config, TrainArguments.from_config(config), world_size=1)


# A value of args that the files' deepspeed section contradicts, and the key of the section
COMMANDS = {
    "args.lr=0.5": "optimizer.params.lr",
    "args.weight_decay=0.3": "optimizer.params.weight_decay",
    "args.zero_stage=3": "zero_optimization.stage",
    "args.batch_size=9": "train_micro_batch_size_per_gpu",
    "args.gradient_accumulation_steps=5": "gradient_accumulation_steps",
    "args.bf16=false": "bf16.enabled",
    "args.fp16=true": "fp16.enabled",
}
SFT = ROOT / "tests" / "golden" / "sat_configs" / "sft.yaml"


@pytest.mark.parametrize("word", COMMANDS)
@pytest.mark.parametrize("file", [SFT, ROOT / "configs/sft.yaml", ROOT / "configs/quickstart.yaml"])
def test_the_command_line_wins_over_the_other_key_of_a_file(file: Path, word: str) -> None:
    """With args on the command line and deepspeed in the file, and the other way round."""
    key, _, text = word.partition("=")
    wanted = yaml.safe_load(text)
    other = f"deepspeed.{COMMANDS[word]}"
    for config in (load_config([file], [word]), load_config([file], [f"{other}={text}"])):
        args = TrainArguments.from_config(config)
        assert getattr(args, key.removeprefix("args.")) == wanted
        # Both keys have the value where --dry-run prints them.
        printed = OmegaConf.create(config.to_yaml())
        assert OmegaConf.select(printed, key) == wanted
        assert OmegaConf.select(printed, other, default=wanted) == wanted
        assert config.unused.keys().isdisjoint({key, other})
    engine = deepspeed_config(load_config([file], [word]), args)
    if "optimizer" not in other:  # cogfast builds the optimizer
        assert OmegaConf.select(OmegaConf.create({"deepspeed": engine}), other) == wanted


def test_in_one_file_the_deepspeed_section_wins_as_in_sat(tmp_path: Path) -> None:
    file = tmp_path / "sat.yaml"
    text = "args: {lr: 0.5, batch_size: 3}\ndeepspeed: {train_micro_batch_size_per_gpu: 2, "
    file.write_text(text + "optimizer: {type: AdamW, params: {lr: 0.25}}}")
    config = load_config([file])
    args = TrainArguments.from_config(config)
    assert (args.lr, args.batch_size) == (0.25, 2)
    assert (
        config.unused["args.lr"] == "deepspeed.optimizer.params.lr=0.25 takes precedence in a file"
    )
    assert "args.batch_size" in config.describe().split("\n# ", 1)[1]


def test_a_section_that_disables_the_other_precision_leaves_args_theirs(tmp_path: Path) -> None:
    file = tmp_path / "sat.yaml"
    file.write_text("args: {bf16: true}\ndeepspeed: {fp16: {enabled: false}}")
    config = load_config([file])
    assert TrainArguments.from_config(config).precision == "bf16"
    assert "args.bf16" not in config.unused


def test_two_files_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    first, second = tmp_path / "lora.yaml", tmp_path / "sft.yaml"
    first.write_text("args: {lr: 0.5}")
    second.write_text("deepspeed: {optimizer: {type: AdamW, params: {lr: 0.25}}}")
    message = (
        r"lora.yaml: args.lr=0.5, but deepspeed.optimizer.params.lr=0.25 in sft.yaml; change one of "
        "them, or set one on the command line"
    )
    with pytest.raises(ValueError, match=message):
        load_config([first, second])
    config = load_config([first, second], ["args.lr=0.125"])
    assert TrainArguments.from_config(config).lr == 0.125


def test_a_setting_that_makes_a_run_fit_stays(tmp_path: Path) -> None:
    """args.fit changes keys of the deepspeed section, whatever the command line says in args."""
    config = load_config([SFT], ["args.batch_size=4"])
    config = with_words(config, ["deepspeed.train_micro_batch_size_per_gpu=1"], "args.fit=auto")
    assert TrainArguments.from_config(config).batch_size == 1
    saved = tmp_path / "training_config.yaml"
    saved.write_text(config.to_yaml())
    again = load_config([saved])
    assert TrainArguments.from_config(again).batch_size == 1
    assert "args.batch_size" not in again.unused


def test_weight_decay_that_nothing_sets_is_sats() -> None:
    """SAT gives FusedEmaAdam its params alone; args.weight_decay is for SAT's own DeepSpeed files."""
    optimizer = "deepspeed.optimizer={type: sat.ops.FusedEmaAdam, params: {lr: 1e-5}}"
    assert TrainArguments.from_config(filled(optimizer)).weight_decay == 0
    assert (
        TrainArguments.from_config(filled(optimizer, "args.weight_decay=0.2")).weight_decay == 0.2
    )
    assert TrainArguments.from_config(filled()).weight_decay == 0.01


@pytest.mark.parametrize("twice", ["a: 1, a: 2", "a: auto, a: 1"])
def test_keys_that_occur_twice_are_refused(twice: str, tmp_path: Path) -> None:
    base = tmp_path / "base.yaml"
    base.write_text(f"deepspeed: {{zero_optimization: {{{twice}}}}}\n")
    with pytest.raises(ValueError, match="base.yaml.*duplicate key a"):
        load_config([base])

"""The deepspeed section: what of it is kept in args, "auto", and which of two values wins."""

import json
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.config import Config, load_config
from cogfast.config.yaml_files import to_dict
from cogfast.distributed.zero_engine import deepspeed_config
from tests.support.tiny_run import ROOT

# The sections of zero2_offload.yaml and zero3.yaml of CogVideo's trainer.
ZERO = {
    "zero2": """
    "stage": 2,
    "allgather_partitions": true,
    "allgather_bucket_size": 2e8,
    "overlap_comm": true,
    "reduce_scatter": true,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": true,
    "offload_optimizer": {"device": "cpu", "pin_memory": true}""",
    "zero3": """
    "overlap_comm": true,
    "contiguous_gradients": true,
    "reduce_bucket_size": 5e8,
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "sub_group_size": 1e9,
    "stage3_gather_16bit_weights_on_model_save": "auto",
    "stage3_prefetch_bucket_size": 5e8,
    "stage3_param_persistence_threshold": 1e5,
    "stage": 3""",
}
WHOLE = """{
  "bf16": {"enabled": true},
  "optimizer": {
    "type": "AdamW",
    "params": {"lr": "auto", "weight_decay": "auto", "betas": "auto", "torch_adam": true}
  },
  "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto"}},
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
    """One of them has a key twice, first as "auto": JSON takes the last."""
    base = tmp_path / "base.yaml"
    section = json.loads(WHOLE % ZERO[name])
    base.write_text(f"args: {{lr: 0.002, weight_decay: 0.3}}\ndeepspeed: {json.dumps(section)}\n")
    config = load_config([base])
    args = config.run.args
    assert (args.lr, args.weight_decay, args.precision) == (0.002, 0.3, "bf16")
    assert (args.zero_stage, args.batch_size) == (int(name[4]), 1)
    reason = "args.lr_schedule, lr_decay_style and warmup set the learning rate"
    assert config.unused == {"deepspeed.scheduler": reason}
    given = deepspeed_config(to_dict(config.deepspeed), args)
    assert "scheduler" not in given and "auto" not in json.dumps(given)
    assert given["gradient_clipping"] == 1.0
    zero = section["zero_optimization"]
    zero.pop("stage3_gather_16bit_weights_on_model_save", None)
    assert given["zero_optimization"] == zero
    # All that is kept in args has left the section.
    assert to_dict(config.deepspeed)["optimizer"] == {
        "type": "AdamW",
        "params": {"torch_adam": True},
    }


def filled(*overrides: str) -> Config:
    return load_config([], overrides)


def test_values_of_the_section_are_kept_in_args_with_their_origin(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    optimizer = "optimizer: {type: AdamW, params: {lr: 0.25, weight_decay: 0.5}}"
    zero = "zero_optimization: {stage: 1, reduce_bucket_size: 7}"
    batch = "train_micro_batch_size_per_gpu: 3, gradient_accumulation_steps: 2"
    file.write_text(f"deepspeed: {{{batch}, fp16: {{enabled: true}}, {zero}, {optimizer}}}")
    config = load_config([file], ["deepspeed.zero_optimization.stage=3"])
    assert to_dict(config.deepspeed) == {
        "zero_optimization": {"reduce_bucket_size": 7},
        "optimizer": {"type": "AdamW"},
    }
    values = {"batch_size": 3, "gradient_accumulation_steps": 2, "fp16": True, "lr": 0.25}
    assert {key: config.args[key] for key in values} == values
    assert config.args.weight_decay == 0.5 and config.args.zero_stage == 3
    assert {config.origins[f"args.{key}"] for key in values} == {"own.yaml"}
    assert config.origins["args.zero_stage"] == "command line"
    # SAT's inference.yaml says how many videos to sample for each prompt.
    config = load_config([file], ["args.mode=inference", "args.batch_size=2"])
    assert config.run.args.batch_size == 2


@pytest.mark.parametrize(("words", "precision"), [([], "fp32"), (["args.bf16=true"], "bf16")])
def test_a_precision_of_auto_is_that_of_args(words: list[str], precision: str) -> None:
    autos = ("deepspeed.bf16={enabled: auto}", "deepspeed.fp16={enabled: auto, loss_scale: 0}")
    config = filled(*words, *autos)
    assert config.run.args.precision == precision
    assert to_dict(config.deepspeed)["fp16"] == {"loss_scale": 0}


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
@pytest.mark.parametrize("file", [SFT, ROOT / "configs/quickstart.yaml"])
def test_the_command_line_wins_over_the_other_key_of_a_file(file: Path, word: str) -> None:
    """With args on the command line and deepspeed in the file, and the other way round."""
    key, _, text = word.partition("=")
    other = f"deepspeed.{COMMANDS[word]}={text}"
    for config in (load_config([file], [word]), load_config([file], [other])):
        args = config.run.args
        assert getattr(args, key.removeprefix("args.")) == yaml.safe_load(text)
        assert key not in config.unused
        engine = OmegaConf.create(deepspeed_config(to_dict(config.deepspeed), args))
        if "optimizer" not in other:  # cogfast builds the optimizer
            assert OmegaConf.select(engine, COMMANDS[word]) == yaml.safe_load(text)


def test_in_one_file_the_deepspeed_section_wins_as_in_sat(tmp_path: Path) -> None:
    file = tmp_path / "sat.yaml"
    text = "args: {lr: 0.5, batch_size: 3}\ndeepspeed: {train_micro_batch_size_per_gpu: 2, "
    file.write_text(text + "optimizer: {type: AdamW, params: {lr: 0.25}}}")
    config = load_config([file])
    args = config.run.args
    assert (args.lr, args.batch_size) == (0.25, 2)
    assert (
        deepspeed_config(to_dict(config.deepspeed), args)["gradient_clipping"] == 0.0
    )  # DeepSpeed's default is 1
    reason = "deepspeed.optimizer.params.lr=0.25 takes precedence in a file"
    assert config.unused["args.lr"] == reason
    assert "args.batch_size" in config.describe().split("\n# ", 1)[1]
    # A section that only switches the other precision off leaves args theirs.
    file.write_text("args: {bf16: true}\ndeepspeed: {fp16: {enabled: false}}")
    config = load_config([file])
    assert config.run.args.precision == "bf16" and not config.unused


def test_the_command_line_decides_between_two_files_that_contradict_each_other(
    tmp_path: Path,
) -> None:
    """The table has the refusal. A run's own file, which has all defaults, contradicts none above."""
    first, second, own = (tmp_path / f"{name}.yaml" for name in ("lora", "sft", "own"))
    first.write_text("args: {lr: 0.5}")
    second.write_text("deepspeed: {optimizer: {type: AdamW, params: {lr: 0.25}}}")
    config = load_config([first, second], ["args.lr=0.125"])
    assert config.run.args.lr == 0.125
    second.write_text("deepspeed: {train_micro_batch_size_per_gpu: 2, bf16: {enabled: true}}")
    own.write_text(load_config([]).to_yaml())
    assert load_config([own, second]).run.args.batch_size == 2


def test_a_runs_own_file_has_what_the_run_was_given(tmp_path: Path) -> None:
    """args.fit changes args; another value of either key may follow on the command line."""
    config = load_config([SFT], ["args.batch_size=4"])
    config = config.with_values({"args.batch_size": (1, "args.fit=auto")})
    assert config.origins["args.batch_size"] == "args.fit=auto"
    saved = tmp_path / "training_config.yaml"
    saved.write_text(config.to_yaml())
    again = load_config([saved])
    assert again.run.args == config.run.args
    assert again.run.args.batch_size == 1
    for word in ("args.batch_size=2", "deepspeed.train_micro_batch_size_per_gpu=2"):
        assert load_config([saved], [word]).run.args.batch_size == 2


def test_weight_decay_that_nothing_sets_is_sats() -> None:
    """SAT gives FusedEmaAdam its params alone; args.weight_decay is for SAT's own DeepSpeed files."""
    optimizer = "deepspeed.optimizer={type: sat.ops.FusedEmaAdam, params: {lr: 1e-5}}"
    decay = lambda *words: filled(*words).run.args.weight_decay
    assert decay(optimizer) == 0
    assert decay(optimizer, "args.weight_decay=0.2") == 0.2
    assert decay(optimizer, "deepspeed.optimizer.params.weight_decay=auto") == 0.01
    assert decay() == 0.01

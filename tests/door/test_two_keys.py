"""Keys that set the same: LoRA's short names, and keys that stand in the place of others."""

from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from cogfast.config import Config, load_config
from cogfast.config.sat_network import LORA_KEY, transformer_arguments
from cogfast.model.config import TransformerConfig
from tests.support.refusals import assert_refused
from tests.support.tiny_run import ROOT

CONFIGS = ROOT / "configs"
SAT = ROOT / "tests" / "golden" / "sat_configs" / "cogvideox_5b_lora.yaml"
PLAIN, SHORT = CONFIGS / "cogvideox_5b.yaml", CONFIGS / "lora.yaml"


def offloading(config: Config) -> DictConfig:
    return config.deepspeed.zero_optimization.offload_optimizer


def network(config: Config) -> TransformerConfig:
    return TransformerConfig(**transformer_arguments(config.model.network_config.params))


MODULES = ("args.lora_rank=8", "args.lora_alpha=2", "args.lora_modules=[fc2, to_v, q]")
BOTH_NAMES = ("args.lora_rank=8", f"{LORA_KEY}.r=8", f"{LORA_KEY}.lora_alpha=4")
# (files, words) -> rank, alpha, targets
ADAPTERS = {
    "the file": ((PLAIN, SHORT), (), 128, 128, "q k v out"),
    "a rank over the file's": ((PLAIN, SHORT), ("args.lora_rank=64",), 64, 64, "q k v out"),
    "no file": ((PLAIN,), ("args.lora_rank=8",), 8, 8, "q k v out"),
    "modules": ((PLAIN,), MODULES, 8, 2, "q v fc2"),
    "SAT's file": ((SAT,), (), 128, 1, "q k v out"),
    "a rank over SAT's": ((SAT,), ("args.lora_rank=64",), 64, 1, "q k v out"),
    "the long name over the file's": ((PLAIN, SHORT), (f"{LORA_KEY}.r=16",), 16, 16, "q k v out"),
    "both names with one value": ((PLAIN,), BOTH_NAMES, 8, 4, "q k v out"),
}


@pytest.mark.parametrize("case", ADAPTERS)
def test_short_names_are_lora_config(case: str, tmp_path: Path) -> None:
    files, words, rank, alpha, on = ADAPTERS[case]
    config = load_config(files, words)
    text = f"LoRA rank {rank}, alpha {alpha}, strength {alpha / rank:.4g}, on {on}"
    assert network(config).adapters == text
    assert list(config.model.not_trainable_prefixes) == ["all"]
    # A run's own file has the same under one name.
    saved = tmp_path / "training_config.yaml"
    saved.write_text(config.to_yaml())
    assert "lora_rank" not in saved.read_text()
    assert network(load_config([saved])) == network(config)


def test_a_rank_keeps_its_origin() -> None:
    origins = load_config([PLAIN, SHORT], ["args.lora_rank=64"]).origins
    assert origins[f"{LORA_KEY}.r"] == "command line"
    assert origins[f"{LORA_KEY}.target_modules"] == "lora.yaml"
    words = ["model.not_trainable_prefixes=[]", "args.lora_rank=64"]
    assert list(load_config([PLAIN], words).model.not_trainable_prefixes) == []


def test_two_files_must_not_contradict_each_other(tmp_path: Path) -> None:
    above = tmp_path / "own.yaml"
    above.write_text("args: {lora_rank: 64}")
    line = "^own.yaml: args.lora_rank=64, but <...>params.r=128 (cogvideox_5b_lora.yaml); keep"
    assert_refused(lambda: load_config([SAT, above]), line)
    above.write_text("args: {lora_modules: [q, k, v, out], lora_rank: 128}")
    assert network(load_config([SAT, above])) == network(load_config([SAT]))


ZERO = "deepspeed.zero_optimization"
AUTO = "args: {activation_checkpointing: auto}"
SCALE_OF_2 = "deepspeed: {fp16: {enabled: true, loss_scale: 2}}"
NO_OFFLOAD = "deepspeed: {zero_optimization: {offload_optimizer: {device: none}}}"
# A word of the command line, a file that would count in its place, and the key and value that then count
OVERRULED = {
    "args.epochs=3": ("args: {train_iters: 9}", "args.train_iters", None),
    "args.train_iters=9": ("args: {epochs: 3}", "args.epochs", None),
    "args.warmup=0.5": ("args: {warmup_steps: 9}", "args.warmup_steps", None),
    "args.checkpoint_activations=false": (AUTO, "args.activation_checkpointing", None),
    "args.save=there": ("args: {run_folder: here}", "args.run_folder", None),
    "args.split=9,1,0": ("args: {valid_data: [here]}", "args.valid_data", []),
    "args.eval_prompt_file=a.txt": ("args: {eval_prompts: [a]}", "args.eval_prompts", []),
    "args.eval_prompts=[a]": ("args: {eval_prompt_file: a}", "args.eval_prompt_file", None),
    "args.batch_size=2": ("deepspeed: {train_batch_size: 8}", "deepspeed.train_batch_size", None),
    "args.fp16=true": ("deepspeed: {bf16: {enabled: true}}", "args.bf16", False),
    "args.bf16=true": ("args: {fp16: true}", "args.fp16", False),
    "model.not_trainable_prefixes=[]": ("model: {lora_train: true}", "model.lora_train", False),
    "deepspeed.loss_scale=4": (SCALE_OF_2, "deepspeed.fp16.loss_scale", 4),
    f"{ZERO}.cpu_offload=true": (NO_OFFLOAD, f"{ZERO}.offload_optimizer.device", "cpu"),
}


@pytest.mark.parametrize("word", OVERRULED)
def test_the_command_line_beats_a_key_that_a_file_sets_in_its_place(
    word: str, tmp_path: Path
) -> None:
    text, key, wanted = OVERRULED[word]
    file = tmp_path / "own.yaml"
    file.write_text(text)
    # The file alone sets its own key.
    assert OmegaConf.select(OmegaConf.create(load_config([file]).sections()), key) != wanted
    config = load_config([file], [word])
    assert OmegaConf.select(OmegaConf.create(config.sections()), key) == wanted
    assert "own.yaml" not in config.origins.get(key, "")


@pytest.mark.parametrize(
    ("older", "device"), [("true", "none"), ("false", "cpu"), ("false", "nvme")]
)
def test_the_older_key_of_offloading_must_not_contradict_the_newer_one(
    older: str, device: str, tmp_path: Path
) -> None:
    """DeepSpeed refuses both; a file of SAT, which has cpu_offload: false, is no contradiction."""
    words = [f"{ZERO}.offload_optimizer.device={device}"]
    file = tmp_path / "own.yaml"
    file.write_text(f"deepspeed: {{zero_optimization: {{cpu_offload: {older}}}}}")
    assert offloading(load_config([PLAIN, file], words)).device == device
    text = file.read_text().replace("}}", f", offload_optimizer: {{device: {device}}}}}}}")
    file.write_text(text)
    if older == "false":
        assert offloading(load_config([file])).device == device
    else:
        assert_refused(lambda: load_config([file]), "^own.yaml: <...>; keep one")


def test_the_older_key_of_offloading_completes_the_newer_one() -> None:
    words = [f"{ZERO}.cpu_offload=true", f"{ZERO}.offload_optimizer.pin_memory=true"]
    assert offloading(load_config([PLAIN], words)) == {"pin_memory": True, "device": "cpu"}

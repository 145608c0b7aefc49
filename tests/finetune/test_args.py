"""The arguments of CogVideo's diffusers trainer: names, types, defaults, help, and values that are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cogfast.finetune.schemas import Args
from tests.finetune.conftest import words as as_words
from tests.support.refusals import assert_refused, refusals
from tests.support.tiny_run import ROOT

# Typed from finetune/schemas/args.py of zai-org/CogVideo 7a1af71: {option: (type, default, required)}.
SHELL = {
    "model_path": (str, None, True),
    "model_name": (str, None, True),
    "model_type": (str, None, True),
    "training_type": (str, None, True),
    "output_dir": (str, None, True),
    "data_root": (str, None, True),
    "caption_column": (str, None, True),
    "video_column": (str, None, True),
    "train_resolution": (str, None, True),
    "report_to": (str, None, False),  # there required, here not
    "seed": (int, 42, False),
    "train_epochs": (int, 10, False),
    "train_steps": (int, None, False),
    "gradient_accumulation_steps": (int, 1, False),
    "batch_size": (int, 1, False),
    "learning_rate": (float, 2e-5, False),
    "optimizer": (str, "adamw", False),
    "beta1": (float, 0.9, False),
    "beta2": (float, 0.95, False),
    "beta3": (float, 0.98, False),
    "epsilon": (float, 1e-8, False),
    "weight_decay": (float, 1e-4, False),
    "max_grad_norm": (float, 1.0, False),
    "lr_scheduler": (str, "constant_with_warmup", False),
    "lr_warmup_steps": (int, 100, False),
    "lr_num_cycles": (int, 1, False),
    "lr_power": (float, 1.0, False),
    "num_workers": (int, 8, False),
    "pin_memory": (bool, True, False),
    "image_column": (str, None, False),
    "mixed_precision": (str, "no", False),
    "gradient_checkpointing": (bool, True, False),
    "enable_slicing": (bool, True, False),
    "enable_tiling": (bool, True, False),
    "nccl_timeout": (int, 1800, False),
    "rank": (int, 128, False),
    "lora_alpha": (int, 64, False),
    "target_modules": (list, ["to_q", "to_k", "to_v", "to_out.0"], False),
    "checkpointing_steps": (int, 200, False),
    "checkpointing_limit": (int, 10, False),
    "resume_from_checkpoint": (str, None, False),
    "do_validation": (bool, False, False),
    "validation_steps": (int, None, False),
    "validation_dir": (str, None, False),
    "validation_prompts": (str, None, False),
    "validation_images": (str, None, False),
    "validation_videos": (str, None, False),
    "gen_fps": (int, 15, False),
}
# Types of the class Args of the same file, where they are not those of the table.
PATHS = {"model_path", "output_dir", "data_root", "caption_column", "video_column"}
PATHS |= {"image_column", "resume_from_checkpoint", "validation_dir"}
NEEDED = {"model_path": "CogVideoX-5b", "model_name": "cogvideox-t2v", "model_type": "t2v"}
NEEDED |= {"training_type": "lora", "output_dir": "out", "data_root": "data"}
NEEDED |= {"caption_column": "prompts.txt", "video_column": "videos.txt"}
NEEDED |= {"train_resolution": "49x480x720"}
SAMPLES = {int: "3", float: "0.5", bool: "false"}


def words(**options: object) -> list[str]:
    return as_words({**NEEDED, **options})


def test_options_without_a_value_have_upstreams_default():
    args = Args.parse_args(words())
    assert len(SHELL) == 48
    for name, (_, default, is_required) in SHELL.items():
        if not is_required:
            assert getattr(args, name) == default, name
    assert args.train_resolution == (49, 480, 720)
    assert args.tracker_name == "finetrainer-cogvideo"


@pytest.mark.parametrize("name", sorted(SHELL))
def test_options_have_upstreams_type(name):
    kind = SHELL[name][0]
    special = {"lr_scheduler": "cosine", "mixed_precision": "bf16", "report_to": "all"}
    special |= {"target_modules": "to_q"}
    text = special.get(name, NEEDED.get(name, SAMPLES.get(kind, "word")))
    value = getattr(Args.parse_args(words(**{name: text})), name)
    if name == "train_resolution":
        assert value == (49, 480, 720)
    elif kind is list:
        assert value == ["to_q"]
    elif name in PATHS:
        assert value == Path(text)
    else:
        assert type(value) is kind
        assert str(value).lower() == text


@pytest.mark.parametrize("name", [name for name, row in SHELL.items() if row[2]])
def test_required_options_are_named(name):
    given = words()
    at = given.index(f"--{name}")
    with pytest.raises(ValueError, match=rf"cogfast finetune needs --{name}; --help lists"):
        Args.parse_args(given[:at] + given[at + 2 :])


def test_python_gives_values_or_text():
    args = Args(
        **{**NEEDED, "train_resolution": (49, 480, 720), "rank": 64, "do_validation": False}
    )
    assert args.model_dump() == Args(**NEEDED, rank="64", do_validation="False").model_dump()
    # The class has a default for two options that the shell requires.
    few = {k: v for k, v in NEEDED.items() if k not in ("training_type", "output_dir")}
    assert Args(**few).training_type == "lora"
    assert Args(**few).output_dir.parent == Path("train_results")


@pytest.mark.parametrize("name", [name for name, row in SHELL.items() if row[0] is bool])
def test_boolean_options_read_true_and_false(name):
    """Upstream's type=bool takes every word for true."""
    for text, expected in (("true", True), ("True", True), ("false", False), ("False", False)):
        given = words(
            validation_steps=1, validation_dir="v", validation_prompts="p", **{name: text}
        )
        assert getattr(Args.parse_args(given), name) is expected
    given = [*words(validation_steps=1, validation_dir="v", validation_prompts="p"), f"--{name}"]
    assert getattr(Args.parse_args(given), name) is True


def test_words_with_an_equals_sign_are_overrides():
    given = ["args.log_interval=1", *words(target_modules="to_q"), "to_k", "data.params.fps=4"]
    args = Args.parse_args(given)
    assert args.overrides == ["args.log_interval=1", "data.params.fps=4"]
    assert args.target_modules == ["to_q", "to_k"]


@refusals(Path(__file__).with_name("refusals.txt"), "arguments")
def test_wrong_options_are_refused_in_one_line(refusal):
    assert_refused(lambda: Args.parse_args([*words(), *refusal.words]), refusal.line)


def test_validation_needs_its_files():
    given = {
        "model_name": "cogvideox-i2v",
        "model_type": "i2v",
        "do_validation": "true",
        "validation_steps": 7,  # need not be a multiple of checkpointing_steps
        "validation_dir": "v",
        "validation_prompts": "p",
        "validation_images": "i",
    }
    assert Args.parse_args(words(**given)).validation_steps == 7
    for missing in list(given)[3:]:
        few = {name: value for name, value in given.items() if name != missing}
        with pytest.raises(ValueError, match=f"--do_validation true needs --{missing}; set it"):
            Args.parse_args(words(**few))
    t2v = NEEDED | {name: given[name] for name in list(given)[2:-1]}
    assert Args.parse_args(words(**t2v)).validation_images is None


def test_help_is_grouped_has_each_default_and_imports_no_torch():
    code = """
import json, sys
from cogfast.__main__ import main
try:
    main(["finetune", "--help"])
except SystemExit:
    pass
print(json.dumps(sorted({name.split(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    *lines, modules = done.stdout.splitlines()
    assert not {"torch", "diffusers", "deepspeed", "numpy"} & set(json.loads(modules)), done.stderr
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    for group in ("Model:", "Output:", "Data:", "Training:", "LoRA:", "Validation:"):
        assert group in headings
    for name, (_, default, is_required) in SHELL.items():
        (line,) = [text for text in lines if text.startswith(f"  --{name} ")]
        shown = "required" if is_required else "not set" if default is None else default
        shown = " ".join(shown) if isinstance(shown, list) else shown
        shown = str(shown).lower() if isinstance(shown, bool) else shown
        assert line.endswith(f"[{shown}]"), line
        assert len(line) <= 150

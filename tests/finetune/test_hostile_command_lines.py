"""Random command lines of `cogfast finetune`: success or one line."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path

import pytest

from cogfast.__main__ import main
from tests.finetune.test_args import SHELL
from tests.support.hostile import faults, preload, run_case
from tests.support.video_files import constant_rate, write_clip
from tests.train.sampling.test_sample_sources import Pipelines, pipelines  # noqa: F401

pytestmark = pytest.mark.forks

NUM_QUICK, NUM_SOAKED = 12, 200
SMALL = "deepspeed.zero_optimization.reduce_bucket_size=100000"
VALUES = ["1", "0", "-1", "2", "1e400", "nan", "0.5", "true", "maybe", "", "a=b", "=", "\0", "None"]
VALUES += ["ü" * 300, "9" * 5000, "x" * 5000, "${model}", "${oc.env:HOME}", "[1", "{", "\n", "~"]
VALUES += ["9x32x48", "17x32x48", "9x48x32", "1x16x16", "49x480x720", "65535x65535x65535", "9x32"]
VALUES += ["prompts.txt", "videos.txt", "metadata.jsonl", "1.mp4", "1.png", ".", "/dev/zero"]
VALUES += ["to_q", "to_x", "lora", "sft", "t2v", "i2v", "bf16", "fp16", "adam", "came", "cosine"]
VALUES += ["cogvideox-i2v", "latest", "auto", "none", "zero.json", "config.yaml", "/proc/self/mem"]
OWN = ["fps", "frame-selection", "resize", "latent-cache", "trust-cache", "export-interval"]
OWN += ["deepspeed-config", "yaml", "dry-run", "plan", "seeed", "keep-last"]
WORDS = ["args.lr=1", "args.run_folder=null", "args=1", "data=null", "model.scale_factor=0", "=2"]
WORDS += [
    "args.latent_cache=null",
    "data.params.fps=-1",
    "args.resume=auto",
    "-x",
    "--",
    "a.b=${c}",
]
WORDS += ["deepspeed.zero_optimization.stage=3", "args.eval_interval=1", "args.lr=" + "[" * 3000]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of data; its lists name two clips."""
    folder = tmp_path_factory.mktemp("command_lines")
    for i in (1, 2):
        write_clip(folder / f"{i}.mp4", constant_rate(17, 8), size=(32, 48))
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "videos.txt").write_text("1.mp4\n2.mp4\n")
    rows = [json.dumps({"file_name": f"{i}.mp4", "prompt": "a"}) + "\n" for i in (1, 2)]
    (folder / "metadata.jsonl").write_text("".join(rows))
    preload()
    import cogfast.finetune.models  # noqa: F401

    return folder


def copy_of(start: Path, root: Path) -> Path:
    """Copy the data into a case's folder: a run writes its cache there."""
    data = root / "data"
    data.mkdir(parents=True)
    for file in start.iterdir():
        (data / file.name).write_bytes(file.read_bytes())
    return data


def command_line(rng: random.Random, model: Path, data: Path) -> list[str]:
    """Options of a run that works, with some changed, and one or two more."""
    options = {
        "model_path": model,
        "model_name": "cogvideox-t2v",
        "model_type": "t2v",
        "training_type": "lora",
        "output_dir": data.parent / "out",
        "data_root": data,
        "caption_column": "prompts.txt",
        "video_column": "videos.txt",
        "train_resolution": "9x32x48",
        "rank": "4",
        "num_workers": "0",
        "train_steps": "1",
    }
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        options[rng.choice([*SHELL, *OWN])] = rng.choice(VALUES)
    if rng.random() < 0.2:
        del options[rng.choice(list(options))]
    # A long run is no fault: what a case trains is bounded.
    bounds = {"train_steps": "1", "gradient_accumulation_steps": "1", "batch_size": "1"}
    options |= {name: most for name, most in bounds.items() if options.get(name, "").isdigit()}
    found = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if rng.random() < 0.2:
        del found[rng.randrange(len(found))]
    words = rng.choices(WORDS, k=rng.choice((0, 0, 1, 2)))
    return [*found, SMALL, "args.log_interval=1", *words]


def examine(seeds: range, start: Path, model: Path, folder: Path) -> tuple[list[str], int]:
    """Return the faults of the cases of `seeds`, and how many cases succeeded."""
    found, succeeded = [], 0
    for seed in seeds:
        rng = random.Random(f"command line {seed}")
        root = folder / str(seed) / "root"
        data = copy_of(start, root)
        words = ["finetune", *command_line(rng, model, data)]
        if rng.random() < 0.5:
            words.append("--dry-run")
        outcome = run_case(functools.partial(main, words), root)
        succeeded += outcome.status == 0
        shown = [word[:80] for word in words if not word.startswith(str(folder))]
        found += [f"seed {seed} {shown}: {fault}" for fault in faults(outcome)]
    return found, succeeded


def test_random_command_lines(start: Path, pipelines: Pipelines, tmp_path: Path) -> None:  # noqa: F811
    found, succeeded = examine(range(NUM_QUICK), start, pipelines.path("5b"), tmp_path)
    assert not found, "\n".join(found)
    assert 2 <= succeeded <= NUM_QUICK - 2


@pytest.mark.soak
def test_200_random_command_lines(start: Path, pipelines: Pipelines, tmp_path: Path) -> None:  # noqa: F811
    seeds = range(NUM_QUICK, NUM_QUICK + NUM_SOAKED)
    found, succeeded = examine(seeds, start, pipelines.path("5b"), tmp_path)
    assert not found, "\n".join(found)
    assert 20 <= succeeded <= NUM_SOAKED - 20

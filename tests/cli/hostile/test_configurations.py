"""Mutated configurations and command lines: each ends in success or in one line of cogfast's, quickly,
in little memory, without a command run or a file written elsewhere."""

import functools
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.__main__ import main
from tests.cli.hostile.damage import DEEP, ODD, odd_json
from tests.cli.hostile.forked_case import Outcome, faults, preload, run_case
from tests.door.test_yaml_files import LAUGHS
from tests.finetune.test_args import SHELL
from tests.support.pipelines import Pipelines
from tests.support.tiny_run import ROOT, write_clips, write_config
from tests.support.video_files import constant_rate, write_clip

pytestmark = pytest.mark.forks

VERBS = ("dry", "train", "train", "cache", "sample")
STOCK = [
    ROOT / "tests/golden/sat_configs/cogvideox_5b_i2v_lora.yaml",
    ROOT / "configs/quickstart.yaml",
]
# A valid configuration may ask for weeks of work: what a case really runs is bounded.
MOST_WORK = {
    "args.train_iters": 2,
    "args.eval_iters": 2,
    "args.eval_num_samples": 1,
    "model.sampler_config.params.num_steps": 3,
    "deepspeed.gradient_accumulation_steps": 2,
}
TEXTS = [  # whole files, and values of the command line
    "5",
    "args: [",
    "a: &a [*a]",
    LAUGHS,
    "args: " + DEEP[:5000],
    "args: {" + "k" * 20_000 + ": 1}",
    "args: {x: ${args.y}, y: ${args.x}}",
    "args: !!python/object/apply:os.system [x]",
    "? [1, 2]\n: 3",
    "args: {1: 2, on: 3, null: 4}",
    "args: {seed: " + "9" * 10_000 + "}",
    "%YAML 9.9\n---\nargs: {}",
    "--- 1\n--- 2",
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run's configuration and its clips; commands/ has those of command lines."""
    folder = tmp_path_factory.mktemp("hostile")
    write_clips(folder / "data", num_clips=2, num_frames=9)
    write_config(folder / "tiny.yaml", folder / "data", train_iters=1)
    commands = folder / "commands"
    for i in (1, 2):
        write_clip(commands / f"{i}.mp4", constant_rate(17, 8), size=(32, 48))
    (commands / "prompts.txt").write_text("one\ntwo\n")
    (commands / "videos.txt").write_text("1.mp4\n2.mp4\n")
    preload()
    return folder


def mutated(
    seed: int, start: Path, folder: Path, verbs: Sequence[str] = VERBS
) -> tuple[str, list[str]]:
    """Write a mutated file; return its description and the command's arguments."""
    rng = random.Random(f"config {seed}")
    file, verb = folder / "case.yaml", rng.choice(verbs)
    source = rng.choice([start / "tiny.yaml", *STOCK]) if verb == "dry" else start / "tiny.yaml"
    config, arguments = OmegaConf.to_container(OmegaConf.load(source)), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        config = odd_json(config, rng)
    if verb != "dry":
        bound_work(config)
    data = yaml.safe_dump(config, allow_unicode=True, sort_keys=False).encode("utf-8", "replace")
    what = rng.choice(("value",) * 6 + ("override", "text", "bytes"))
    if what == "override":
        key = rng.choice(("args.lr", "args.load[0]", "args.x", "", "=", "a" * 5000, "args[", "[]"))
        arguments.append(f"{key}={rng.choice([*map(str, ODD), *TEXTS])}"[:100_000])
    elif what == "text":
        data = rng.choice(TEXTS).encode()
    elif what == "bytes":
        data = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(bytes(data))
    done = f"{source.name}, {what}"
    base = ["--base", str(file)]
    if verb == "train":  # a mutated args.save would write where it says
        arguments.append(f"args.save={folder / 'runs'}")
    if verb == "cache":
        arguments.append(f"args.latent_cache={folder / 'cache'}")
    if verb == "sample":
        arguments += ["args.force_inference=true", "args.mode=inference"]
        return done, ["sample", *base, "--prompt", "x", "--out", str(folder / "out"), *arguments]
    if verb == "dry":
        return done, ["train", *base, *arguments, "--dry-run"]
    return done, [verb, *base, *arguments]


def bound_work(config: object) -> None:
    for key, most in MOST_WORK.items():
        *path, last = key.split(".")
        node = config
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and type(node.get(last)) is int:
            node[last] = min(node[last], most)


def examine(
    seeds: range, folder: Path, case: Callable[[int, Path], tuple[str, list[str]]]
) -> list[Outcome]:
    """Run the cases of `seeds`, each with its arguments; none may have a fault."""
    outcomes, found = [], []
    for seed in seeds:
        root = folder / str(seed) / "root"
        root.mkdir(parents=True)
        done, arguments = case(seed, root)
        outcomes.append(run_case(functools.partial(main, arguments), root))
        shown = [word[:80] for word in arguments if not word.startswith(str(folder))]
        found += [f"seed {seed} ({done}) {shown}: {fault}" for fault in faults(outcomes[-1])]
    assert not found, "\n".join(found)
    return outcomes


@pytest.mark.parametrize(
    ("seeds", "verbs"),
    [(range(24), ("dry",)), pytest.param(range(30, 430), VERBS, marks=pytest.mark.soak)],
)
def test_mutated_configurations(
    seeds: range, verbs: Sequence[str], start: Path, tmp_path: Path
) -> None:
    examine(seeds, tmp_path, lambda seed, root: mutated(seed, start, root, verbs))


# --- command lines of `cogfast finetune` ---

SMALL = "deepspeed.zero_optimization.reduce_bucket_size=100000"
WORDS = ["1", "0", "-1", "1e400", "nan", "true", "maybe", "", "a=b", "\0", "None", "ü" * 300]
WORDS += ["9" * 5000, "${model}", "${oc.env:HOME}", "[1", "{", "9x32x48", "9x48x32", "9x32"]
WORDS += ["65535x65535x65535", "prompts.txt", "videos.txt", "1.mp4", ".", "/dev/zero", "to_q"]
WORDS += ["lora", "sft", "i2v", "bf16", "adam", "cosine", "latest", "none"]
OWN = ["fps", "frame-selection", "resize", "latent-cache", "export-interval", "deepspeed-config"]
OWN += ["dry-run", "plan", "seeed", "keep-last"]
MORE = ["args.lr=1", "args.run_folder=null", "args=1", "data=null", "model.scale_factor=0", "=2"]
MORE += ["args.latent_cache=null", "data.params.fps=-1", "-x", "--", "a.b=${c}"]
MORE += ["deepspeed.zero_optimization.stage=3", "args.lr=" + "[" * 3000]


def command_line(seed: int, model: Path, start: Path, root: Path) -> tuple[str, list[str]]:
    """Options of a run that works, with some changed, and one or two more."""
    rng = random.Random(f"command line {seed}")
    data = Path(shutil.copytree(start / "commands", root / "data"))  # a run writes its cache there
    options = {"model_path": model, "output_dir": data.parent / "out", "data_root": data}
    options |= {"model_name": "cogvideox-t2v", "model_type": "t2v", "training_type": "lora"}
    options |= {"caption_column": "prompts.txt", "video_column": "videos.txt"}
    options |= {"train_resolution": "9x32x48", "rank": "4", "num_workers": "0", "train_steps": "1"}
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        options[rng.choice([*SHELL, *OWN])] = rng.choice(WORDS)
    if rng.random() < 0.2:
        del options[rng.choice(list(options))]
    # A long run is no fault: what a case trains is bounded.
    bounds = {"train_steps": "1", "gradient_accumulation_steps": "1", "batch_size": "1"}
    options |= {name: most for name, most in bounds.items() if options.get(name, "").isdigit()}
    found = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if rng.random() < 0.2:
        del found[rng.randrange(len(found))]
    words = rng.choices(MORE, k=rng.choice((0, 0, 1, 2)))
    words = ["finetune", *found, SMALL, "args.log_interval=1", *words]
    return "", words + ["--dry-run"] * (rng.random() < 0.5)


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(12, 132), marks=pytest.mark.soak)])
def test_random_command_lines(
    seeds: range, start: Path, pipelines: Pipelines, tmp_path: Path
) -> None:
    model = pipelines.path("5b")
    outcomes = examine(seeds, tmp_path, lambda seed, root: command_line(seed, model, start, root))
    succeeded = sum(outcome.status == 0 for outcome in outcomes)
    assert 0 < succeeded < len(seeds)

"""Mutated configurations and command lines: each ends in success or in one line of cogfast's, quickly,
in little memory, without a command run or a file written elsewhere."""

from __future__ import annotations

import functools
import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.__main__ import main
from tests.cli.hostile.forked_case import Outcome, faults, preload, run_case
from tests.finetune.test_args import SHELL
from tests.support.pipelines import Pipelines
from tests.support.tiny_run import ROOT, write_clips, write_config
from tests.support.video_files import constant_rate, write_clip

pytestmark = pytest.mark.forks

SATS = ("cogvideox_2b", "cogvideox_5b_i2v_lora", "cogvideox1.5_5b_i2v")
OURS = ("quickstart.yaml", "cogvideox_5b.yaml")
VERBS = ("dry", "dry", "train", "train", "cache", "sample")
# A valid configuration may ask for weeks of work: what a case really runs is bounded.
MOST_WORK = {
    ("args", "train_iters"): 2,
    ("args", "eval_iters"): 2,
    ("args", "eval_num_samples"): 1,
    ("model", "sampler_config", "params", "num_steps"): 3,
    ("deepspeed", "gradient_accumulation_steps"): 2,
}
LAUGHS = "a0: &a0 [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
INF = float("inf")
VALUES: list[object] = [None, True, "", " ", "text", 0, -1, 1, 2, 7, 2**31, 2**63, 10**9, 10**18]
VALUES += [10**400, -(10**9), 0.5, -0.5, 1e308, 1e-308, float("nan"), INF, -INF, "9" * 5000]
VALUES += [[], {}, [[]], [1, 2], [None], ["x"] * 1000, {"a": {"b": {"c": [{}]}}}, "x" * 10_000]
VALUES += [{"target": "torch.nn.Identity"}, {"target": None}, {"target": "x", "params": 3}]
VALUES += ["${args.seed}", "${oc.env:HOME}", "${nothing}", "${args.lr}${args.lr}", "${", "???"]
VALUES += ["\0", "../../../etc/passwd", "/dev/zero", "/proc/self/mem", "~", "\ud7ff\u202e"]
VALUES += ["2026-13-45", "${oc.decode:'${args.seed}'}", "1_000", "0x1F", "1e999"]
VALUES += ["!!python/object:os.system"]
HOSTILE_TARGETS = ["torch.os.system", "torch.jit.load", "torch.hub.load", "os.system"]
HOSTILE_TARGETS += [
    "builtins.exec",
    "cogfast.train.trainer.Trainer",
    "torch.__loader__.load_module",
]
HOSTILE_TARGETS += ["subprocess.Popen", "sgm.modules.diffusionmodules.denoiser_scaling.EpsScaling"]
HOSTILE_TARGETS += ["x" * 5000, ".", "a..b", "cogfast.diffusion.sampler.VideoDDIMSampler"]
HOSTILE_TARGETS += ["cogfast.data.datasets.VideoManifest"]
KINDS = ["number", "number", "value", "value", "delete", "rename", "move", "target", "list", "deep"]
TEXTS = [  # whole files
    "",
    "5",
    "[]",
    "args",
    "args: [",
    "\t",
    "args: {seed: 1, seed: 2}",
    "a: &a [*a]",
    LAUGHS,
    "args: " + "[" * 5000,
    "args: " + "{a: " * 3000,
    "args: {" + "k" * 20_000 + ": 1}",
    "args: {x: ${args.y}, y: ${args.x}}",
    "args: ${args}",
    "args: !!python/object/apply:os.system [x]",
    "? [1, 2]\n: 3",
    "args: {1: 2, on: 3, null: 4}",
    "args: 2026-13-45",
    "%YAML 9.9\n---\nargs: {}",
    "args: {seed: !!int x}",
    "args: {seed: " + "9" * 10_000 + "}",
    "--- 1\n--- 2",
    "args: *nothing",
]


def nodes_of(node: object, path: tuple = ()) -> list[tuple]:
    """Paths of all values below `node`."""
    found = [path] if path else []
    pairs = node.items() if isinstance(node, dict) else ()
    pairs = enumerate(node) if isinstance(node, list) else pairs
    return found + [inner for key, value in pairs for inner in nodes_of(value, (*path, key))]


def at(node: object, path: tuple) -> object:
    return functools.reduce(lambda inner, key: inner[key], path, node)


def mutate(config: dict, rng: random.Random) -> str:
    """Change one value, key or component of `config` in place; returns what was done."""
    paths = nodes_of(config)
    if not paths:  # an earlier step took all of it
        return "nothing"
    path = rng.choice(paths)
    parent, key = at(config, path[:-1]), path[-1]
    kind = rng.choice(KINDS)
    numbers = [p for p in nodes_of(config) if type(at(config, p)) in (int, float)]
    if kind == "number" and numbers:  # of the right type, so that it gets further
        path = rng.choice(numbers)
        factor = rng.choice((0, -1, 2, 3, 10, 1000, 10**6, 10**9, 0.5))
        value = at(config, path) * factor
        at(config, path[:-1])[path[-1]] = type(at(config, path))(value)
        return f"number {'.'.join(map(str, path))} x {factor}"
    targets = [p for p in nodes_of(config) if p[-1] == "target"]
    if kind == "target" and targets:
        path = rng.choice(targets)
        others = [at(config, p) for p in targets]
        at(config, path[:-1])["target"] = rng.choice(HOSTILE_TARGETS + others)
    elif kind == "delete":
        del parent[key]
    elif kind == "rename" and isinstance(parent, dict):
        parent[rng.choice(("x", "", f"{key}s", "k" * 3000, 7, "a.b", "a[0]"))] = parent.pop(key)
    elif kind == "move":
        parent[key] = json.loads(json.dumps(at(config, rng.choice(nodes_of(config))), default=str))
    elif kind == "list":
        parent[key] = [parent[key]] * rng.choice((1, 2, 300))
    elif kind == "deep":
        for _ in range(rng.choice((3, 30, 60))):
            parent[key] = {"a": parent[key]}
    else:
        parent[key] = rng.choice(VALUES)
    return f"{kind} {'.'.join(map(str, path))[:200]}"


def bound_work(config: dict) -> None:
    for (*path, key), most in MOST_WORK.items():
        try:
            parent = at(config, tuple(path))
            if type(parent[key]) is int and parent[key] > most:
                parent[key] = most
        except (KeyError, TypeError):  # a mutation took it away
            continue


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny run's configuration and its clips; commands/ has those of command lines."""
    folder = tmp_path_factory.mktemp("hostile")
    write_clips(folder / "data", num_clips=2, num_frames=9)
    write_config(folder / "tiny.yaml", folder / "data", train_iters=1, check_videos=True)
    commands = folder / "commands"
    for i in (1, 2):
        write_clip(commands / f"{i}.mp4", constant_rate(17, 8), size=(32, 48))
    (commands / "prompts.txt").write_text("one\ntwo\n")
    (commands / "videos.txt").write_text("1.mp4\n2.mp4\n")
    rows = [json.dumps({"file_name": f"{i}.mp4", "prompt": "a"}) + "\n" for i in (1, 2)]
    (commands / "metadata.jsonl").write_text("".join(rows))
    preload()
    return folder


def mutated(
    seed: int, start: Path, folder: Path, verbs: Sequence[str] = VERBS
) -> tuple[str, list[str]]:
    """Write a mutated config; return its description and the command's arguments."""
    rng = random.Random(f"config {seed}")
    file, others = folder / "case.yaml", []
    verb = rng.choice(verbs)
    what = rng.choice(("file", "override", "text", "bytes")) if seed % 4 == 0 else "file"
    source = rng.choice(("tiny", "tiny", "sat", "ours"))
    if verb != "dry":
        source = "tiny"
    name = start / "tiny.yaml"
    if source == "sat":
        folder_of_sat = ROOT / "tests/golden/sat_configs"
        name, others = folder_of_sat / f"{rng.choice(SATS)}.yaml", [str(folder_of_sat / "sft.yaml")]
    elif source == "ours":
        name = ROOT / "configs" / rng.choice(OURS)
    config = OmegaConf.to_container(OmegaConf.load(name))
    arguments, done = [], what
    if what in ("file", "override"):
        steps = [mutate(config, rng) for _ in range(rng.choice((1, 1, 2, 3)))]
        if verb != "dry":
            bound_work(config)
        done = f"{name.name}: {'; '.join(steps)}"
    if what == "override":
        key = ".".join(map(str, rng.choice(nodes_of(config))))
        key = rng.choice((key, key, f"{key}[0]", f"{key}.x", "", "=", "a" * 5000, "args[", "[]"))
        arguments.append(f"{key}={rng.choice((*map(str, VALUES), LAUGHS, '[' * 3000))}"[:100_000])
        done += f" {arguments[-1][:100]}"
    text = yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
    if what == "text":
        text = rng.choice(TEXTS)
        done = text[:80]
    data = text.encode("utf-8", errors="surrogatepass")
    if what == "bytes":
        data = bytearray(data)
        for _ in range(rng.choice((1, 3, 20))):
            data[rng.randrange(len(data))] = rng.randrange(256)
    file.write_bytes(bytes(data))
    base = ["--base", str(file), *others]
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


def test_mutated_configurations(start: Path, tmp_path: Path) -> None:
    """With --dry-run; the soak test also trains, encodes and samples."""
    examine(range(30), tmp_path, lambda seed, root: mutated(seed, start, root, ("dry",)))


@pytest.mark.soak
def test_a_thousand_mutated_configurations(start: Path, tmp_path: Path) -> None:
    examine(range(30, 1030), tmp_path, lambda seed, root: mutated(seed, start, root))


# --- command lines of `cogfast finetune` ---

SMALL = "deepspeed.zero_optimization.reduce_bucket_size=100000"
WORDS = ["1", "0", "-1", "2", "1e400", "nan", "0.5", "true", "maybe", "", "a=b", "=", "\0", "None"]
WORDS += ["ü" * 300, "9" * 5000, "x" * 5000, "${model}", "${oc.env:HOME}", "[1", "{", "\n", "~"]
WORDS += ["9x32x48", "17x32x48", "9x48x32", "1x16x16", "49x480x720", "65535x65535x65535", "9x32"]
WORDS += ["prompts.txt", "videos.txt", "metadata.jsonl", "1.mp4", "1.png", ".", "/dev/zero"]
WORDS += ["to_q", "to_x", "lora", "sft", "t2v", "i2v", "bf16", "fp16", "adam", "came", "cosine"]
WORDS += ["cogvideox-i2v", "latest", "auto", "none", "zero.json", "config.yaml", "/proc/self/mem"]
OWN = ["fps", "frame-selection", "resize", "latent-cache", "trust-cache", "export-interval"]
OWN += ["deepspeed-config", "yaml", "dry-run", "plan", "seeed", "keep-last"]
MORE = ["args.lr=1", "args.run_folder=null", "args=1", "data=null", "model.scale_factor=0", "=2"]
MORE += ["args.latent_cache=null", "data.params.fps=-1", "args.resume=auto", "-x", "--", "a.b=${c}"]
MORE += ["deepspeed.zero_optimization.stage=3", "args.eval_interval=1", "args.lr=" + "[" * 3000]


def command_line(seed: int, model: Path, start: Path, root: Path) -> tuple[str, list[str]]:
    """Options of a run that works, with some changed, and one or two more."""
    rng = random.Random(f"command line {seed}")
    data = Path(shutil.copytree(start / "commands", root / "data"))  # a run writes its cache there
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


@pytest.mark.parametrize("seeds", [range(12), pytest.param(range(12, 212), marks=pytest.mark.soak)])
def test_random_command_lines(
    seeds: range,
    start: Path,
    pipelines: Pipelines,
    tmp_path: Path,
) -> None:
    model = pipelines.path("5b")
    outcomes = examine(seeds, tmp_path, lambda seed, root: command_line(seed, model, start, root))
    succeeded = sum(outcome.status == 0 for outcome in outcomes)
    assert 0 < succeeded < len(seeds)

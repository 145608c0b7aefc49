"""Mutated and hostile configurations: each ends in success or in lines of cogfast's own, quickly, in
little memory, without a command run or a file written elsewhere."""

from __future__ import annotations

import functools
import importlib
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from cogfast.__main__ import main
from tests.support.hostile import faults, run_case
from tests.support.tiny_run import ROOT, write_clips, write_config

pytestmark = pytest.mark.forks

SATS = ("cogvideox_2b", "cogvideox_5b_i2v_lora", "cogvideox1.5_5b_i2v")
OURS = ("quickstart.yaml", "cogvideox_5b.yaml")
NUM_QUICK, NUM_SOAKED = 30, 1000
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
VALUES: list[object] = [
    None,
    True,
    "",
    " ",
    "text",
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**63,
    10**9,
    10**18,
    10**400,
    -(10**9),
    0.5,
    -0.5,
    1e308,
    1e-308,
    float("nan"),
    float("inf"),
    float("-inf"),
    "9" * 5000,
    [],
    {},
    [[]],
    [1, 2],
    [None],
    ["x"] * 1000,
    {"a": {"b": {"c": [{}]}}},
    "x" * 10_000,
    {"target": "torch.nn.Identity"},
    {"target": None},
    {"target": "x", "params": 3},
    "${args.seed}",
    "${oc.env:HOME}",
    "${nothing}",
    "${args.lr}${args.lr}",
    "${",
    "???",
    "\0",
    "../../../etc/passwd",
    "/dev/zero",
    "/proc/self/mem",
    "~",
    "\ud7ff\u202e",
    "2026-13-45",
    "${oc.decode:'${args.seed}'}",
    "1_000",
    "0x1F",
    "1e999",
    "!!python/object:os.system",
]
HOSTILE_TARGETS = [
    "torch.os.system",
    "torch.jit.load",
    "torch.hub.load",
    "os.system",
    "builtins.exec",
    "cogfast.train.trainer.Trainer",
    "torch.__loader__.load_module",
    "subprocess.Popen",
    "sgm.modules.diffusionmodules.denoiser_scaling.EpsScaling",
    "x" * 5000,
    ".",
    "a..b",
    "cogfast.diffusion.sampler.VideoDDIMSampler",
    "cogfast.data.datasets.VideoManifest",
]
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
    pairs = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
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
    kinds = (
        "number",
        "number",
        "value",
        "value",
        "delete",
        "rename",
        "move",
        "target",
        "list",
        "deep",
    )
    kind = rng.choice(kinds)
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
    """A folder with a tiny run's configuration and its clips."""
    folder = tmp_path_factory.mktemp("hostile")
    write_clips(folder / "data", num_clips=2, num_frames=9)
    write_config(folder / "tiny.yaml", folder / "data", train_iters=1, check_videos=True)
    import cogfast.train.caching.command
    import cogfast.train.sampling.command
    import cogfast.train.trainer  # noqa: F401  (the forked cases then have it)

    return folder


def case(
    seed: int, start: Path, folder: Path, verbs: Sequence[str] = VERBS
) -> tuple[str, list[str]]:
    """Write a mutated config; return its description and the command's arguments."""
    rng = random.Random(f"config {seed}")
    folder.mkdir()
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
    return done, [
        "train" if verb == "dry" else verb,
        *base,
        *arguments,
        *["--dry-run"] * (verb == "dry"),
    ]


def examine(seeds: range, start: Path, folder: Path, verbs: Sequence[str] = VERBS) -> list[str]:
    """The faults of the cases of `seeds`, each with its arguments."""
    found = []
    for seed in seeds:
        done, arguments = case(seed, start, folder / str(seed), verbs)
        outcome = run_case(lambda arguments=arguments: main(arguments), folder / str(seed))
        shown = [argument for argument in arguments if not argument.startswith(str(folder))]
        found += [f"seed {seed} ({done}) {shown}: {fault}" for fault in faults(outcome)]
        wrong = [line for line in outcome.output.splitlines() if line.startswith("cogfast: ")]
        if outcome.status in (1, 2) and not wrong:
            found.append(f"seed {seed} ({done}): no line of cogfast's")
        found += [f"seed {seed}: {len(line)} characters" for line in wrong if len(line) > 400]
    return found


def test_mutated_configurations(start: Path, tmp_path: Path) -> None:
    """Mutated configurations with --dry-run; the soak test also trains, encodes and samples."""
    found = examine(range(NUM_QUICK), start, tmp_path, ("dry",))
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def slow_imports() -> None:
    """A forked case that trains or encodes has what takes seconds to import."""
    for name in (
        "deepspeed",
        "networkx",
        "torch._inductor.compile_fx",
        "torch.utils.tensorboard",
        "transformers.models.t5.modeling_t5",
    ):
        importlib.import_module(name)


@pytest.mark.soak
@pytest.mark.usefixtures("slow_imports")
def test_a_thousand_mutated_configurations(start: Path, tmp_path: Path) -> None:
    found = examine(range(NUM_QUICK, NUM_QUICK + NUM_SOAKED), start, tmp_path)
    assert not found, "\n".join(found)

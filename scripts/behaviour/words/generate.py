"""Draws the recorded command lines, with seeds: stock files, every key, pairs of keys, files that are
damaged, and options of each command.

The words are stored with their outcome, so that a change here changes nothing that is recorded.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Iterator
from itertools import count, product
from pathlib import Path

import yaml

from scripts.behaviour.difference import ROOT
from scripts.behaviour.words.damage import ODD, TEXTS, odd_value, plain_values, wrong_values
from scripts.behaviour.words.world import FAMILIES, STOCK, tiny_files

SAT = ROOT / "tests" / "golden" / "sat_configs"
CONFIGS = ROOT / "configs"
_FT = {
    "model_path": "models/5b",
    "model_name": "cogvideox-t2v",
    "model_type": "t2v",
    "training_type": "lora",
    "output_dir": "out",
    "data_root": "clips",
    "caption_column": "prompts.txt",
    "video_column": "videos.txt",
    "train_resolution": "9x32x32",
    "rank": "4",
    "train_steps": "1",
    "num_workers": "0",
}


def all_cases(folder: Path) -> Iterator[dict]:
    """Yield every case: id, kind, words, world, files. folder: has written.txt."""
    kinds: dict[str, Callable[[], Iterator[tuple]]] = {
        "stock": _stock,
        "written": lambda: _written(folder / "written.txt"),
        "key": _keys,
        "pair": _pairs,
        "file": _mutated_files,
        "finetune": _finetune,
        "sample": _samples,
        "folder": _folders,
        "plan": _plans,
        "top": _top,
    }
    for kind, cases in kinds.items():
        numbers = count(1)
        for words, files in cases():
            words = shlex.split(words) if isinstance(words, str) else list(words)
            text = " ".join([*words, *(c for c in files.values() if isinstance(c, str)), *files])
            text += " clips" * ("tiny" in text)  # tiny models train on them
            world = [name for name in _ENTRIES if name in text]
            case = {"id": f"{kind}-{next(numbers):04}", "kind": kind, "words": words}
            yield case | {"world": world, "files": files}


# A case may need these of the world: folders in a folder where the rest of it is large.
_ENTRIES = ("clips", "tiny", "cache", "sat", "adapters", "runs", *(f"models/{f}" for f in FAMILIES))


def _base(family: str = "5b") -> str:
    return "--base " + " ".join(tiny_files(family))


def _stock() -> Iterator[tuple]:
    """Upstream's files and ours in the pairs that users give them."""
    for name in sorted(path.stem for path in SAT.glob("cogvideo*.yaml")):
        files = {f"{n}.yaml": (SAT / f"{n}.yaml").read_text() for n in (name, "sft", "inference")}
        # Beside the command, as in upstream's configs folder, but not in the place of our names.
        files = {f"sat/{file}": text for file, text in files.items()}
        for words in (
            f"train --base sat/{name}.yaml sat/sft.yaml --dry-run",
            f"train --base sat/{name}.yaml sat/sft.yaml",
            f"sample --base sat/{name}.yaml sat/inference.yaml --dry-run",
            f"sample --base sat/{name}.yaml sat/inference.yaml --prompt x",
            f"cache --base sat/{name}.yaml sat/sft.yaml",
            f"train --base sat/sft.yaml sat/{name}.yaml --dry-run",
        ):
            yield words, files
    for name in STOCK.values():
        for more, words in product(
            ("sft.yaml", "lora.yaml sft.yaml"), ("--dry-run", "", "--lora 8 --dry-run")
        ):
            yield f"train --base {name} {more} {words}", {}
        yield f"sample --base {name} inference.yaml --dry-run", {}
        yield f"sample --base {name} inference.yaml --prompt x", {}
        yield f"cache --base {name} sft.yaml args.latent_cache=cache", {}
        for condition in ("control", "first_last", "inpainting", "conditions/control"):
            files = f"{name} {condition}.yaml"
            yield f"train --base {files} sft.yaml --dry-run", {}
            yield f"sample --base {files} inference.yaml --dry-run", {}
    for family in FAMILIES:
        yield f"train {_base(family)} --dry-run", {}
        yield f"train models/{family} --data clips --dry-run", {}
        yield f"train models/{family} --data clips --lora 4 --dry-run", {}
        yield f"sample models/{family} --prompt x --dry-run", {}
        yield f"plan models/{family} --lora 4 --gpu 4090", {}
        yield f"plan {_base(family)} --gpu h100-80", {}
    for words in ("quickstart.yaml", "configs/quickstart.yaml", "quickstart.yaml sft.yaml"):
        yield f"train --base {words} --dry-run", {}
    yield "train --base --dry-run", {}


def _written(file: Path) -> Iterator[tuple]:
    """Command lines of a file, one a line, as a shell reads them; @NAME=TEXT writes a file."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") or not line:
            continue
        words, files = [], {}
        for word in shlex.split(line):
            if word.startswith("@"):
                name, _, text = word[1:].partition("=")
                files[name] = text.replace("\\n", "\n") + "\n"
            else:
                words.append(word.replace("{base}", _base()))
        yield [part for w in words for part in (w.split() if w == _base() else [w])], files


def keys_of_schema() -> list[tuple[str, dict]]:
    """(dotted key, schema) of each key of a YAML file."""
    schema = json.loads((CONFIGS / "cogfast.schema.json").read_text(encoding="utf-8"))
    found: list[tuple[str, dict]] = []

    def walk(node: dict, path: str) -> None:
        inner = [one for one in (node, *node.get("anyOf", ())) if one.get("properties")]
        for one in inner:
            for key, value in one["properties"].items():
                walk(value, f"{path}.{key}" if path else key)
        if not inner:
            found.append((path, node))

    walk(schema, "")
    return found


def _keys() -> Iterator[tuple]:
    """Each key: under another name, with a value of another type, beyond its range, and with ones that fit."""
    draw = random.Random("keys")
    bases = [f"train --base {name} sft.yaml" for name in STOCK.values()] + [f"train {_base()}"]
    for key, schema in keys_of_schema():
        short = draw.choice(bases)
        place = draw.randrange(len(key.rpartition(".")[2])) + key.rfind(".") + 1
        near = draw.choice(
            (key[:place] + key[place + 1 :], f"{key}s", key[:place] + key[place:][::-1])
        )
        words = [f"{near}=1"] * (draw.random() < 0.4)
        words += [f"{key}={value}" for value in draw.sample(wrong_values(schema, draw), 1)]
        fitting = plain_values(schema)
        words += [f"{key}={value}" for value in draw.sample(fitting, min(1, len(fitting)))]
        for word in words:
            yield [*short.split(), word, *["--dry-run"] * (draw.random() < 0.75)], {}


def _pairs() -> Iterator[tuple]:
    """Two or three keys at once, without --dry-run: placeholders end these commands before they train."""
    draw = random.Random("pairs")
    known = [one for one in keys_of_schema() if plain_values(one[1])]
    for _ in range(200):
        keys = draw.sample(known, draw.choice((2, 2, 3)))
        values = [f"{key}={draw.choice(plain_values(schema))}" for key, schema in keys]
        family = draw.choice(FAMILIES)
        lora = draw.choice(("", "lora.yaml "))
        start = draw.choice(
            (
                f"train --base {STOCK[family]} {lora}sft.yaml",
                f"train {_base(family)} args.load=missing",
                f"train {_base(family)} args.train_data=[missing]",
                f"train {_base(family)} args.resume=missing",
                f"cache {_base(family)} args.latent_cache=clips/prompts.txt",
                f"sample --base {STOCK[family]} inference.yaml --prompt x",
            )
        )
        yield [*start.split(), *values], {}


def _merged(*files: str) -> dict:
    """The configuration that files give together, before anything is read as a key."""
    from omegaconf import OmegaConf

    found = []
    for name in files:
        text = (CONFIGS / name).read_text() if (CONFIGS / name).exists() else ""
        found.append(OmegaConf.create(text or _tiny_text(name)))
    return OmegaConf.to_container(OmegaConf.merge(*found))  # type: ignore[return-value]


def _tiny_text(name: str) -> str:
    from scripts.behaviour.words.world import WAVELET, tiny_text

    return WAVELET if name.endswith("wavelet.yaml") else tiny_text(Path(name).stem)


def _mutated_files() -> Iterator[tuple]:
    """Whole files with a value, a text or bytes that do not belong there."""
    for seed in range(260):
        draw = random.Random(f"file {seed}")
        family = draw.choice(FAMILIES)
        sources = [tiny_files(family), [STOCK[family], "sft.yaml"], ["quickstart.yaml"]]
        config: object = _merged(*draw.choice(sources))
        for _ in range(draw.choice((1, 1, 2, 3))):
            config = odd_value(config, draw)
        text = yaml.safe_dump(config, allow_unicode=True, sort_keys=False)
        content = text
        what = draw.choice(("value",) * 6 + ("override", "text", "bytes"))
        more = []
        if what == "override":
            key = draw.choice(
                ("args.lr", "args.load[0]", "args.x", "", "=", "a" * 500, "args[", "[]")
            )
            more = [f"{key}={draw.choice([*map(str, ODD), *TEXTS])}"[:5000]]
        elif what == "text":
            content = draw.choice(TEXTS)
        elif what == "bytes":
            data = bytearray(text.encode())
            for _ in range(draw.choice((1, 3, 20))):
                data[draw.randrange(len(data))] = draw.randrange(256)
            content = data.decode("utf-8", "surrogateescape")
        verb = draw.choice(
            (
                "train --base case.yaml --dry-run",
                "train --base case.yaml --dry-run",
                "train --base case.yaml args.load=missing",
                "cache --base case.yaml args.latent_cache=clips/prompts.txt",
                "sample --base case.yaml --prompt x args.mode=inference args.load=missing",
                "sample --base case.yaml --dry-run",
                "plan --base case.yaml --gpu",
            )
        )
        yield [*verb.split(), *more], {"case.yaml": content, "clips/empty": ""}


WORDS = ["1", "0", "-1", "1e400", "nan", "true", "maybe", "", "a=b", "None", "ü" * 300]
WORDS += ["9" * 500, "${model}", "${oc.env:HOME}", "[1", "{", "9x32x48", "9x48x32", "9x32"]
WORDS += ["65535x65535x65535", "prompts.txt", "videos.txt", "1.mp4", ".", "/dev/zero", "to_q"]
WORDS += ["lora", "sft", "i2v", "bf16", "adam", "cosine", "latest", "none"]
_OWN = ["fps", "frame-selection", "resize", "latent-cache", "export-interval", "deepspeed-config"]
_OWN += ["plan", "seeed", "keep-last", "trust_cache"]
_MORE = ["args.lr=1", "args.run_folder=null", "args=1", "data=null", "model.scale_factor=0", "=2"]
_MORE += ["args.latent_cache=null", "data.params.fps=-1", "-x", "--", "a.b=${c}"]
_MORE += ["deepspeed.zero_optimization.stage=3", "args.lr=" + "[" * 300]
_OPTIONS = [
    "report_to",
    "seed",
    "train_epochs",
    "train_steps",
    "gradient_accumulation_steps",
    "batch_size",
    "learning_rate",
    "optimizer",
    "beta1",
    "beta2",
    "beta3",
    "epsilon",
    "weight_decay",
    "max_grad_norm",
    "lr_scheduler",
    "lr_warmup_steps",
    "lr_num_cycles",
    "lr_power",
    "num_workers",
    "pin_memory",
    "gradient_checkpointing",
    "checkpointing_steps",
    "checkpointing_limit",
    "resume_from_checkpoint",
    "enable_slicing",
    "enable_tiling",
    "nccl_timeout",
    "rank",
    "lora_alpha",
    "target_modules",
    "do_validation",
    "validation_steps",
    "validation_dir",
    "validation_prompts",
    "validation_images",
    "validation_videos",
    "gen_fps",
    "mixed_precision",
    "image_column",
    "tracker_name",
]
_NAMES = {"2b": "cogvideox-t2v", "5b": "cogvideox-t2v", "5b_i2v": "cogvideox-i2v"}
_NAMES |= {"1.5_5b": "cogvideox1.5-t2v", "1.5_5b_i2v": "cogvideox1.5-i2v"}


def _finetune() -> Iterator[tuple]:
    """Options of `cogfast finetune`, each with words that it may not take, and several at once."""

    def words(changes: dict[str, str], *more: str) -> list[str]:
        options = _FT | changes
        return ["finetune", *(w for k, v in options.items() for w in (f"--{k}", v)), *more]

    for family, kind in product(FAMILIES, ("lora", "sft")):
        frames = "17x32x32" if "1.5" in family else "9x32x32"
        of = {"model_path": f"models/{family}", "model_name": _NAMES[family]}
        of |= {"model_type": "i2v" if "i2v" in family else "t2v", "training_type": kind}
        yield words(of | {"train_resolution": frames}, "--dry-run"), {}
        yield words(of | {"train_resolution": "49x480x720"}, "--dry-run"), {}
        yield words(of | {"train_resolution": frames}, "--plan", "h100-80"), {}
    for option in [*_FT, *_OPTIONS]:
        draw = random.Random(f"finetune {option}")
        for value in draw.sample(WORDS, 2):
            yield words({option: value}, "--dry-run"), {}
        left = [w for w in words({}) if w != f"--{option}" or option not in _FT]
        yield [w for w in left if w != _FT.get(option)] + ["--dry-run"], {}
    for seed in range(90):
        draw = random.Random(f"finetune command line {seed}")
        changes = {draw.choice([*_FT, *_OPTIONS, *_OWN]): draw.choice(WORDS) for _ in range(2)}
        line = words(changes, *draw.choices(_MORE, k=draw.choice((0, 0, 1, 2))))
        if draw.random() < 0.2:
            del line[draw.randrange(1, len(line))]
        yield [*line, "--dry-run"], {}


def _samples() -> Iterator[tuple]:
    """Options of `cogfast sample`: a run, models, files, adapters that are missing or of another kind."""
    values = ["1", "0", "-1", "x", "", "9", "10", "32x32", "31x32", "1e9", "clips/videos/0.mp4"]
    values += ["missing.mp4", "clips/prompts.txt", "clips", "runs/lora:0.5", "runs/lora:x", "a=b"]
    options = ["image", "control", "first-frame", "last-frame", "video", "mask", "tensor", "lora"]
    options += ["steps", "guidance", "frames", "num-videos", "size", "fps", "seed", "out"]
    options += ["negative-prompt", "prompt-file", "allow-import", "base", "ema", "step", "frame"]
    sources = [
        "runs/full",
        "runs/lora",
        "models/5b",
        "models/5b_i2v",
        "sat",
        "clips",
        "missing",
        "",
    ]
    for option in options:
        draw = random.Random(f"sample {option}")
        for value in draw.sample(values, 5):
            source = draw.choice(sources)
            more = draw.choice((["--prompt", "x"], ["--prompt", "x", "--dry-run"], ["--dry-run"]))
            more = [*more, *["args.load=missing"] * ("--dry-run" not in more)]
            yield ["sample", *[source] * bool(source), f"--{option}", value, *more], {}
    for draw in (random.Random(f"two sample options {seed}") for seed in range(60)):
        two = [w for o in draw.sample(options, 2) for w in (f"--{o}", draw.choice(values))]
        yield ["sample", draw.choice(sources[:-1]), "--prompt", "x", *two, "--dry-run"], {}


def _folders() -> Iterator[tuple]:
    """convert, report and publish, with options, and with files that are missing, damaged or of another run."""
    for source, kind in product(
        ("runs/full", "runs/lora", "sat", "models/5b", "models/5b/transformer", "models/5b/vae"),
        ("sat", "diffusers", "peft"),
    ):
        for more in ("", "--ema", "--verify", "--dtype bf16", "--model-parallel-size 2"):
            yield f"convert {source} out --to {kind} {more}", {}
    options = ["--merge-lora", "--merge-lora adapters", "--merge-lora runs/lora", "--lora-alpha 8"]
    options += ["--add-lora adapters", "--allow-unexpected", "--scaling-factor 2", "--dtype fp8"]
    options += ["--lora-alpha x", "--model-parallel-size 0", "--scaling-factor 0", "--verify --ema"]
    options += ["--model-parallel-size 3", "--add-lora missing", "--merge-lora clips", "--to x"]
    sources = ["runs/full", "runs/lora", "sat", "models/5b", "models/2b/vae", "adapters", "clips"]
    for option, seed in product(options, range(3)):
        draw = random.Random(f"convert {option} {seed}")
        kind = draw.choice(("sat", "diffusers", "peft"))
        yield f"convert {draw.choice(sources)} out --to {kind} {option}", {}
    checkpoint = "checkpoints/00000002"
    files = [f"{checkpoint}/manifest.json", f"{checkpoint}/rank-00000.safetensors", "metrics.jsonl"]
    files += ["checkpoints/latest", "run_facts.json", "training_config.yaml", "environment.json"]
    contents = [None, "", "{", "[]", "null", "5", '{"a": 1}', "../x", "a: [", "9" * 400]
    commands = ["report {}", "publish {} a/b --dry-run", "convert {} out --to diffusers"]
    commands += ["sample {} --prompt x --dry-run", "sample {} --prompt x args.load=missing"]
    commands += [
        f"train {_base()} --resume {{}} args.load=missing",
        "report {} runs/lora --out a.html",
    ]
    for file in files:
        draw = random.Random(f"damaged {file}")
        for content, command in zip(
            draw.sample(contents, 8), draw.choices(commands, k=8), strict=True
        ):
            yield command.format("runs/full"), {f"runs/full/{file}": content}
    for words in (
        "report",
        "report missing",
        "report clips",
        "report runs",
        "report runs/full runs/lora",
    ):
        for more in ("", "--out page.html", "--out clips", "--out", "--outt x"):
            yield f"{words} {more}", {}
    for run, name in product(
        ("runs/full", "runs/lora", "missing", "runs"), ("a/b", "ab", "a/b/c", "a b/c", "../x")
    ):
        yield ["publish", run, name, "--dry-run"], {}


def _plans() -> Iterator[tuple]:
    """`cogfast plan` of models, GPUs and layouts, and with words that it refuses."""
    for family, gpu in product(FAMILIES, ("4090", "24", "h1000", "0")):
        yield f"plan {_base(family)} --gpu {gpu}", {}
    for words in (
        "",
        "--gpus 8",
        "--gpus 0",
        "--gpus x",
        "--table",
        "--table --gpus 8,64",
        "--lora 0",
    ):
        yield f"plan {_base()} --gpu h100-80 {words}", {}
        yield f"plan {_base()} {words}", {}
    for words in ("args.zero_stage=3", "args.model_parallel_size=2", "args.quantize_base=int8"):
        yield f"plan models/5b --lora 4 --gpu 24 {words}", {}
    for words in ("--failures 1", "--table --failures 0", "missing", "clips", "--data missing"):
        yield f"plan models/5b --gpu 24 {words}", {}


def _top() -> Iterator[tuple]:
    """Names of commands, help, and words that any command refuses."""
    commands = (
        "train",
        "cache",
        "sample",
        "convert",
        "finetune",
        "doctor",
        "plan",
        "report",
        "publish",
    )
    yield "", {}
    for words in ("--help", "-h", "--version", "help", "trian", "xyzzy", "TRAIN", "-x", "train2"):
        yield words, {}
    for command in commands:
        for words in (
            "--help",
            "-h",
            "--help-all",
            "--traceback",
            "-x",
            "--",
            "a b c",
            "x=",
            "=",
            "''",
        ):
            if (command, words) != ("doctor", "--traceback"):  # it would look at the machine
                yield f"{command} {words}", {}

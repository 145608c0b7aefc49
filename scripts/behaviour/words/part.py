"""Records and compares the outcome of command lines, the printed references, and what each command imports."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.behaviour.difference import ERROR_TEXT, ROOT, Difference, compare_values
from scripts.behaviour.words.generate import all_cases
from scripts.behaviour.words.run import PROCESSES, run_cases
from scripts.behaviour.words.store import read_cases, write_cases
from scripts.behaviour.words.world import environment, tiny_files, unpack, write_world

PART = "words"
_SMALL = 100  # command lines, about
_STREAMS = ("status", "stdout", "stderr", "wrote")
# Files that users read or that their editors read, beside the package.
_REFERENCES = ("docs/options.md", "configs/cogfast.schema.json")
# Packages of others that a command may import. Which ones these import in turn is not ours.
_PACKAGES = [
    "torch",
    "triton",
    "deepspeed",
    "diffusers",
    "transformers",
    "sentencepiece",
    "omegaconf",
    "pydantic",
    "einops",
    "safetensors",
    "xxhash",
    "numpy",
    "psutil",
    "jinja2",
    "decord",
    "av",
    "PIL",
    "tensorboard",
    "huggingface_hub",
    "wandb",
    "matplotlib",
    "rich",
    "yaml",
    "fsspec",
    "s3fs",
    "gcsfs",
    "peft",
    "flash_attn",
    "nvidia",
]
_TRAINER = "--model_path models/5b --model_name cogvideox-t2v --model_type t2v --training_type lora"
_TRAINER += (
    " --output_dir out --data_root clips --caption_column prompts.txt --video_column videos.txt"
)
_TRAINER += " --train_resolution 9x32x32 --dry-run"
# Commands whose imports are recorded; each runs in a fresh process.
_IMPORTS = {
    "help": "--help",
    "train --help": "train --help",
    "train --help-all": "train --help-all",
    "train --dry-run": "train --base {base} --dry-run",
    "train, refused": "train --base {base} args.load=missing",
    "train, unknown option": "train --base {base} --foo",
    "sample --dry-run": "sample runs/full --prompt x --dry-run",
    "sample, refused": "sample runs/full --prompt x --image missing.png",
    "cache, refused": "cache --base {base} args.latent_cache=clips/prompts.txt",
    "convert": "convert runs/lora out --to peft",
    "convert to sat": "convert models/5b out --to sat",
    "plan": "plan --base {base} --gpu h100-80",
    "report": "report runs/full",
    "publish --dry-run": "publish runs/full a/b --dry-run",
    "finetune --help": "finetune --help",
    "finetune --dry-run": f"finetune {_TRAINER}",
    "doctor, refused": "doctor --x",
}
_LIST = """\
import json, sys
from cogfast.__main__ import main
try:
    main(sys.argv[2:])
except SystemExit:
    pass
names = sorted({name.partition(".")[0] for name in sys.modules})
open(sys.argv[1], "w").write(json.dumps(names))
"""


def record(folder: Path, work: Path) -> None:
    """Write the world if it is missing, run all cases, and keep those that end before any training."""
    archive = folder / "world.tar.xz"
    if not archive.exists():
        write_world(archive, _sub(work, "make"))
    cases = list(all_cases(folder))
    kept = [
        case | {stream: outcome[stream] for stream in _STREAMS}
        for case, outcome in zip(cases, _outcomes(cases, archive, _sub(work, "cases")), strict=True)
        if _is_kept(outcome)
    ]
    write_cases(folder, _with_small(kept, archive, _sub(work, "small")))
    for name, content in _references().items():
        (folder / name).write_text(content, encoding="utf-8")
    text = json.dumps(_imports(archive, _sub(work, "imports")), indent=1, sort_keys=True)
    (folder / "imports.json").write_text(f"{text}\n", encoding="utf-8")


def record_again(folder: Path, work: Path, _: bool) -> None:
    """Record again what the recorded commands do; the commands stay."""
    archive, cases = folder / "world.tar.xz", read_cases(folder)
    outcomes = _outcomes(cases, archive, _sub(work, "cases"))
    kept = [
        case | {stream: outcome[stream] for stream in _STREAMS}
        for case, outcome in zip(cases, outcomes, strict=True)
        if _is_kept(outcome)
    ]
    write_cases(folder, kept)
    for name, content in _references().items():
        (folder / name).write_text(content, encoding="utf-8")


def compare(folder: Path, work: Path, small: bool) -> tuple[int, list[Difference]]:
    """Run the recorded cases and return their number and the differences."""
    archive = folder / "world.tar.xz"
    cases = read_cases(folder)
    if small:
        cases = [case for case in cases if case.get("is_small")]
    outcomes = _outcomes(cases, archive, _sub(work, "cases"), small)
    differences: list[Difference] = []
    for case, found in zip(cases, outcomes, strict=True):
        differences += _differences(case, found)
    number = len(cases)
    for name, content in _references().items():
        number += 1
        recorded = (folder / name).read_text(encoding="utf-8")
        differences += compare_values(PART, name, recorded, content, "text")
    if not small:
        recorded = json.loads((folder / "imports.json").read_text(encoding="utf-8"))
        found = _imports(archive, _sub(work, "imports"))
        number += len(found)
        differences += compare_values(PART, "imports", recorded, found)
    return number, differences


def _differences(case: dict, found: dict) -> list[Difference]:
    differences = []
    for stream in _STREAMS:
        if _without_scratch(case[stream]) == _without_scratch(found[stream]):
            continue
        is_error = stream == "stderr" and case["status"] == found["status"] != 0
        what = ERROR_TEXT if is_error else stream
        texts = [
            one if isinstance(one, str) else json.dumps(one)
            for one in (case[stream], found[stream])
        ]
        differences.append(Difference(PART, case["id"], what, *texts))
    return differences


def _without_scratch(value: object) -> object:
    """Replace the start of a long path that a message has shortened."""
    return re.sub(r"/\S*/w{20,}", "<scratch>", value) if isinstance(value, str) else value


def _is_kept(outcome: dict) -> bool:
    """Whether a command ended before it computed: whatever trains or samples is in other parts."""
    computes = re.search(r"C\+\+ kernels|step 1/|\d/s\b", outcome["stderr"])
    return not computes and outcome["status"] in (0, 1, 2)


def _outcomes(cases: list[dict], archive: Path, work: Path, is_small: bool = False) -> list[dict]:
    world = unpack(archive, work / "world")
    return run_cases(cases, world, work, tiny_files("5b"), is_small)


def _with_small(cases: list[dict], archive: Path, work: Path) -> list[dict]:
    """Mark the cases of the small part: those of each kind and status that take the least time."""
    some = cases[:: max(1, len(cases) // (4 * _SMALL))]
    outcomes = _outcomes(some, archive, work, is_small=True)
    seconds = {case["id"]: one["seconds"] for case, one in zip(some, outcomes, strict=True)}
    groups: dict[tuple, list[str]] = {}
    for case in some:
        groups.setdefault((case["kind"], case["status"]), []).append(case["id"])
    chosen: set[str] = set()
    for ids in groups.values():
        chosen.update(sorted(ids, key=lambda name: seconds[name])[: -(-len(ids) // 4)])
    return [case | ({"is_small": True} if case["id"] in chosen else {}) for case in cases]


def _references() -> dict[str, str]:
    return {Path(name).name: (ROOT / name).read_text(encoding="utf-8") for name in _REFERENCES}


def _imports(archive: Path, work: Path) -> dict[str, dict[str, list[str]]]:
    """{command: which of _PACKAGES it has imported at its end, and which not}."""
    world = unpack(archive, work / "world")

    def loaded(number: int, words: str) -> list[str]:
        home = _sub(work, f"home-{number}")
        (home / "tmp").mkdir()
        listed = home / "modules.json"
        line = words.format(base=" ".join(tiny_files("5b"))).split()
        variables = environment(home) | {"PYTHONPATH": str(ROOT)}
        subprocess.run(
            [sys.executable, "-c", _LIST, str(listed), *line],
            cwd=world,
            env=variables,
            capture_output=True,
            check=False,
        )
        names = set(json.loads(listed.read_text()))
        return [name for name in _PACKAGES if name in names]

    with ThreadPoolExecutor(PROCESSES) as pool:
        found = list(pool.map(loaded, range(len(_IMPORTS)), _IMPORTS.values()))
    return {name: {"imported": one} for name, one in zip(_IMPORTS, found, strict=True)}


def _sub(work: Path, name: str) -> Path:
    folder = work / name
    folder.mkdir(parents=True)
    return folder

"""Records and compares what users wrote: names, targets, parameters, ops, examples of the documentation, and
all of it again beside a wheel."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.behaviour.difference import ROOT, Difference, compare_values
from scripts.behaviour.names.examples import examples
from scripts.behaviour.words.world import FAMILIES, environment, tiny_files, unpack

PART = "names"
_PROBE = Path(__file__).with_name("probe.py")
_SOURCES = ("pyproject.toml", "LICENSE", "docs", "cogfast", "setup.py", "setup.cfg", "MANIFEST.in")
# Losses of examples: another processor rounds otherwise.
_RELATIVE = 1e-4
# Public names that no documentation writes out.
_MORE = [
    "cogfast.__version__",
    "cogfast.__main__.main",
    "cogfast.finetune.Args",
    "cogfast.finetune.Components",
    "cogfast.finetune.Trainer",
    "cogfast.finetune.register",
    "cogfast.finetune.get_model_cls",
    "cogfast.finetune.show_supported_models",
    "cogfast.finetune.schemas.Args",
    "cogfast.finetune.schemas.Components",
    "cogfast.finetune.trainer.Trainer",
    "cogfast.config.load_config",
    "cogfast.config.instantiate",
    "cogfast.config.resolve",
    "cogfast.config.Config",
]
_OPTIMIZERS = [
    "sat.ops.FusedEmaAdam",
    "cogfast.kernels.fused_ema_adam.FusedEmaAdam",
    "cogfast.distributed.optimizers.Prodigy",
    "cogfast.distributed.optimizers.Muon",
    "torch.optim.AdamW",
    "torch.optim.Adam",
    "torch.optim.Adafactor",
    "torch.optim.Adagrad",
    "torch.optim.Adadelta",
    "torch.optim.Adamax",
    "torch.optim.ASGD",
    "torch.optim.NAdam",
    "torch.optim.RAdam",
    "torch.optim.RMSprop",
    "torch.optim.Rprop",
    "torch.optim.SGD",
]
_VARIANTS = {
    "": [],
    " lora": ["args.lora_rank=4"],
    " lora of all": ["args.lora_rank=4", "args.lora_modules=[q,k,v,out,fc1,fc2]"],
}
_CONDITIONS = {"control": "5b", "inpainting": "5b", "first_last": "5b_i2v"}


def record(folder: Path, work: Path) -> None:
    """Write asked.json, what is described, and found.json, its description."""
    asked = {
        "names": _public_names(),
        "targets": _targets(),
        "families": _families(),
        "examples": examples(),
    }
    found = _probe(asked, work, "checkout", ROOT)
    failed = [name for name, one in found["examples"].items() if one.get("status") != 0]
    missing = [name for name, one in found["names"].items() if "missing" in one]
    if failed or missing:
        raise RuntimeError(f"not found: {missing}; examples that fail: {failed}")
    _write(folder / "asked.json", asked)
    found |= {"wheel": _wheel_facts(_build_wheel(work))}
    del found["paths"]
    _write(folder / "found.json", found)


def compare(folder: Path, work: Path, small: bool) -> tuple[int, list[Difference]]:
    """Describe what was recorded again, of this tree and of its wheel."""
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    recorded = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    if small:
        asked = {"names": asked["names"], "targets": asked["targets"]}
        return _compare("checkout", recorded, _probe(asked, work, "checkout", ROOT))
    wheel = _build_wheel(work)
    site = work / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(lambda one: _probe(asked, work, *one), (("checkout", ROOT), ("wheel", site)))
        )
    # The wheel has each file of the tree, in its place.
    paths = [one.pop("paths") for one in both]
    number, differences = 1, list(compare_values(PART, "files of the wheel", *paths))
    both[1]["wheel"] = _wheel_facts(wheel)
    for name, found in zip(("checkout", "wheel"), both, strict=True):
        count, more = _compare(name, recorded, found)
        number, differences = number + count, differences + more
    return number, differences


def _compare(name: str, recorded: dict, found: dict) -> tuple[int, list[Difference]]:
    """Compare the kinds that were found; the number of cases is that of their entries."""
    differences, number = [], 0
    for kind, entries in found.items():
        for key in sorted(entries.keys() | recorded[kind].keys()):
            number += 1
            one, two = (side[kind].get(key, "(nothing)") for side in (recorded, found))
            if isinstance(two, dict) and "missing" in two:  # one difference, not one for each part
                one = {"missing": "(nothing)"}
            if kind == "examples" and _are_close(one, two):
                continue
            differences += compare_values(PART, f"{name} {kind} {key}", one, two)
    return number, differences


def _are_close(one: dict, two: dict) -> bool:
    if not {"losses"} <= one.keys() & two.keys() or len(one["losses"]) != len(two["losses"]):
        return False
    pairs = zip(one["losses"], two["losses"], strict=True)
    return one["status"] == two["status"] and all(
        abs(a - b) <= _RELATIVE * abs(a) for a, b in pairs
    )


# --- what is asked ---


def _public_names() -> list[str]:
    """Dotted names that the documentation writes, and those of `target`."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    text += (ROOT / "README.md").read_text()
    found = set(re.findall(r"\bcogfast(?:\.[A-Za-z_]\w*)+", text))
    for module, names in re.findall(r"\bcogfast((?:\.\w+)+)\.\{([\w, ]+)\}", text):
        found |= {f"cogfast{module}.{name.strip()}" for name in names.split(",")}
    for module, names in re.findall(r"from (cogfast(?:\.\w+)*) import ([\w, ]+)", text):
        found |= {f"{module}.{name.strip()}" for name in names.split(",")}
    found |= {name for name in _targets() if name.startswith("cogfast.")} | set(_MORE)
    for version in ("", "1_5"):
        for kind in ("T2VLora", "T2VSft", "I2VLora", "I2VSft"):
            name = f"CogVideoX{version}{kind}Trainer"
            place = f"cogvideox{version}_{kind[:3].lower()}"
            found |= {f"cogfast.finetune.{name}"}
            found |= {f"cogfast.finetune.models.{place}.{kind[3:].lower()}_trainer.{name}"}
    ends = (".json", ".yaml", ".md", ".so")
    return sorted(name for name in found if not name.endswith(ends))


def _targets() -> list[str]:
    """Dotted names that `target` takes, cogfast's and SAT's, from the schema of YAML files."""
    schema = json.loads((ROOT / "configs" / "cogfast.schema.json").read_text(encoding="utf-8"))
    found: set[str] = set()

    def walk(node: object, key: str = "") -> None:
        if isinstance(node, dict):
            if key in ("target", "type"):
                found.update(word for word in _strings(node) if "." in word and " " not in word)
            for name, value in node.items():
                if name != "description":
                    walk(value, name)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(schema)
    found |= set(_OPTIMIZERS)
    return sorted(name for name in found if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)+", name))


def _strings(node: dict) -> list[str]:
    return [word for one in (node, *node.get("anyOf", ())) for word in one.get("enum", ())]


def _families() -> dict[str, dict]:
    found = {}
    for family in FAMILIES:
        for name, words in _VARIANTS.items():
            found[f"{family}{name}"] = {"files": tiny_files(family), "words": words}
    for condition, family in _CONDITIONS.items():
        first, *rest = tiny_files(family)
        files = [first, f"{condition}.yaml", *rest]
        network = "model.network_config.params"
        words = [f"{network}.in_channels={ {'inpainting': 24}.get(condition, 16) }"]
        words = [word.replace(" ", "") for word in words]
        found[f"{family} {condition}"] = {"files": files, "words": words}
    return found


# --- the checkout and the wheel ---


def _probe(asked: dict, work: Path, name: str, place: Path) -> dict:
    """Describe what a process finds that has `place` first on its path, from a folder elsewhere."""
    home, world = work / f"home-{name}", work / f"world-{name}"
    (home / "tmp").mkdir(parents=True)
    world.mkdir()
    if "families" in asked:
        unpack(ROOT / "tests" / "behaviour" / "words" / "world.tar.xz", world)
    _write(home / "asked.json", asked)
    variables = environment(home) | {"PYTHONPATH": str(place)}
    done = subprocess.run(
        [sys.executable, "-P", str(_PROBE), str(home / "asked.json"), str(home / "found.json")],
        cwd=world,
        env=variables,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"the probe of the {name} ended: {done.stderr[-3000:]}")
    found = json.loads((home / "found.json").read_text())
    own = Path(found.pop("place"))
    assert own == place / "cogfast", f"the {name} imported {own}"
    if "families" in asked:
        suffixes = (".py", ".pyc", ".so")
        files = [path for path in own.rglob("*") if path.is_file() and path.suffix not in suffixes]
        paths = sorted(path.relative_to(own).as_posix() for path in files)
        # Users name the files of configs/; others may move to another folder, with their name.
        names = (path if path.startswith("configs/") else Path(path).name for path in paths)
        found["files"] = dict.fromkeys(names, "a file")
        found["paths"] = dict.fromkeys(paths, "a file")
    return found


def _build_wheel(work: Path) -> Path:
    source = work / "source"
    source.mkdir()
    for name in filter(lambda name: (ROOT / name).exists(), _SOURCES):
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(ROOT / name, source / name)
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(work), str(source)],
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"no wheel: {done.stderr[-2000:]}")
    (wheel,) = work.glob("*.whl")
    return wheel


def _wheel_facts(wheel: Path) -> dict[str, object]:
    """Name, entry points and metadata of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
    fields = {
        key: sorted(map(str, metadata.get_all(key, []))) for key in sorted(set(metadata.keys()))
    }
    fields.pop("Metadata-Version", None)  # of the tool that builds
    tops = sorted({name.split("/")[0] for name in names} - {info})
    return {"name": wheel.name, "entry points": points, "fields": fields, "folders": tops}


def _write(file: Path, value: object) -> None:
    text = json.dumps(value, indent=1, sort_keys=True)
    file.write_text(f"{text}\n", encoding="utf-8")

"""The rules that keep the tree readable: who imports whom, sizes, names, quiet imports."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.tiny_run import ROOT

PACKAGE = ROOT / "cogfast"
SOURCES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in SOURCES.items()}

GROUND = (
    *("shapes", "slot_random", "files", "kernels", "value_check", "json_files"),
    "stop_signals",
)
MIDDLE = ("model", "diffusion", "data")
FACTORY = (
    *("component_factory", "component_places", "config", "config_check", "deepspeed_keys"),
    *("sat_names", "sat_network", "sat_unused"),
)
ENTRY = ("__main__", "command_line", "convert_words", "standard_streams")
# What modules of each part may import besides their own part.
MAY_IMPORT = {
    **dict.fromkeys(GROUND, GROUND),
    **dict.fromkeys(MIDDLE, GROUND),
    **dict.fromkeys(FACTORY, (*FACTORY, "value_check", "json_files")),
    "train": (*GROUND, *MIDDLE, *FACTORY),
    **dict.fromkeys(ENTRY, (*FACTORY, *GROUND, "train", "model", *ENTRY)),
}
# (module, what it imports): why it may, all the same.
EXCEPTIONS = {
    ("config_check.py", "cogfast.train.arguments"): "the args section is checked against it",
    ("model/transformer.py", "cogfast.sat_names"): "build_transformer reads SAT's section",
    ("model/weights/run.py", "cogfast.sat_names"): "a run's config says what its model is",
    ("sat_network.py", "cogfast.shapes"): "patch_size becomes a PatchSize",
    ("sat_network.py", "cogfast.model.transformer"): "its params become a TransformerConfig",
    ("sat_network.py", "cogfast.model.autoencoder"): "the autoencoder's two sections are compared",
}
MOST_LINES = 600
# Packages that are slow to import or that a machine may lack: imported where they are needed.
LATE = (
    *("diffusers", "transformers", "deepspeed", "decord", "av", "matplotlib", "wandb"),
    *("tensorboard", "rich", "PIL", "sentencepiece"),
)
# Words of names that say how processes are arranged, which only train/ knows.
PARALLEL_WORDS = (
    *("rank", "ranks", "world", "group", "groups", "dist", "distributed", "nccl", "gloo", "mpu"),
    *("dp", "tp", "ddp", "fsdp"),
)
# (file, name): what the word means there.
OTHER_MEANINGS = {
    ("model/lora.py", "rank"): "of the matrices",
    ("model/transformer.py", "lora_rank"): "of the matrices",
    ("model/weights/convert.py", "rank"): "of LoRA's matrices",
    ("model/weights/diffusers.py", "lora_rank"): "of LoRA's matrices",
    ("model/weights/adapters.py", "ranks"): "of LoRA's matrices",
    ("model/weights/adapters.py", "lora_rank"): "of LoRA's matrices",
    ("model/weights/extract_lora.py", "rank"): "of LoRA's matrices",
    ("model/weights/convert_adapters.py", "rank"): "of LoRA's matrices",
    ("model/weights/identify.py", "ranks"): "of LoRA's matrices",
    ("model/weights/peft.py", "ranks"): "of LoRA's matrices",
    ("model/weights/peft.py", "rank"): "of LoRA's matrices",
    ("model/weights/safetensors_files.py", "groups"): "of tensors, one per file",
    ("model/autoencoder.py", "_NORM_GROUPS"): "of group norm",
    ("model/weights/vae.py", "norm_num_groups"): "of group norm",
    ("model/autoencoder.py", "latent_dist"): "diffusers' name for a distribution",
    ("diffusion/timestep_sampling.py", "group_num"): "SAT's name for the number of strata",
    ("kernels/fused_ema_adam.py", "group"): "of parameters, as in torch.optim",
    ("kernels/fused_ema_adam.py", "param_groups"): "as in torch.optim",
}
HOSTS = {"www.apache.org", "download.pytorch.org", "arxiv.org", "github.com"}


def part_of(module: str) -> str:
    """cogfast.model.lora -> model; cogfast.config -> config; cogfast -> nothing."""
    return module.split(".")[1] if "." in module else ""


def imports_of(name: str) -> Iterator[str]:
    """The cogfast modules that a file imports, wherever in it."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "cogfast")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: import by the full name"
            if node.module and node.module.split(".")[0] == "cogfast":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield inner if is_module(inner) else node.module


def is_module(dotted: str) -> bool:
    path = dotted.removeprefix("cogfast.").replace(".", "/")
    return f"{path}.py" in SOURCES or f"{path}/__init__.py" in SOURCES


def test_every_file_has_a_part() -> None:
    parts = {name.split("/")[0].removesuffix(".py") for name in SOURCES} - {"__init__"}
    assert parts == set(MAY_IMPORT)


def test_imports_go_one_way() -> None:
    seen, wrong = set(), []
    for name in SOURCES:
        own = name.split("/")[0].removesuffix(".py")
        for module in imports_of(name):
            if (name, module) in EXCEPTIONS:
                seen.add((name, module))
            elif part_of(module) not in (own, *MAY_IMPORT.get(own, ())):
                wrong.append(f"{name} imports {module}")
    assert not wrong
    assert seen == set(EXCEPTIONS), "an exception that nothing needs"


def test_a_middle_part_stands_alone() -> None:
    """The rule above, told again where it counts: model, diffusion and data know no other."""
    for name in SOURCES:
        own = name.split("/")[0]
        if own in MIDDLE:
            others = set(MIDDLE) - {own}
            met = {module for module in imports_of(name) if part_of(module) in others}
            assert not met, f"{name} imports {met}"


def test_files_are_short_and_init_files_empty() -> None:
    lines = {name: len(path.read_text().splitlines()) for name, path in SOURCES.items()}
    long = {name: count for name, count in lines.items() if count > MOST_LINES}
    assert not long
    inner = {n: count for n, count in lines.items() if n.endswith("/__init__.py")}
    filled = [n for n, count in inner.items() if count]  # the package's own has the version
    assert not filled
    folders = {path.parent for path in SOURCES.values()}
    assert all((folder / "__init__.py").is_file() for folder in folders)


def test_names_say_what_a_file_holds() -> None:
    vague = {"utils", "util", "helpers", "helper", "common", "misc", "base", "tools"}
    assert not [n for n in SOURCES if vague & set(n.removesuffix(".py").split("/"))]


def test_imports_have_no_effect() -> None:
    """In a process of its own: every module of cogfast, then what came with it."""
    modules = sorted(
        "cogfast." + name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in SOURCES
        if name not in ("__init__.py",)
    )
    code = f"""
import importlib, json, os, sys, threading
before = dict(os.environ)
for name in {modules!r}:
    importlib.import_module(name)
import logging, torch
print(json.dumps({{
    "packages": sorted({{name.split(".")[0] for name in sys.modules}}),
    "modules": sorted(name for name in sys.modules if name.startswith("cogfast.")),
    "cuda": torch.cuda.is_initialized(),
    "process group": torch.distributed.is_initialized(),
    "environment": dict(os.environ) != before,
    "threads": threading.active_count(),
    "log handlers": len(logging.getLogger().handlers) + len(logging.getLogger("cogfast").handlers),
    "default dtype": str(torch.get_default_dtype()),
}}))
"""
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(modules) <= set(found["modules"])
    assert not set(LATE) & set(found["packages"])
    assert found["cuda"] is found["process group"] is found["environment"] is False
    assert (found["threads"], found["log handlers"]) == (1, 0)
    assert found["default dtype"] == "torch.float32"
    assert done.stderr == ""


def test_nothing_reads_the_environment_when_imported() -> None:
    for name, tree in TREES.items():
        inside = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            is_read = isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
            assert not is_read or id(node) in inside, f"{name}:{node.lineno} reads the environment"


def names_in(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every name that code uses: variables, attributes, arguments, functions, imported modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg, node.value.lineno
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            module = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for dotted in [*module, *(alias.name for alias in node.names)]:
                yield from ((word, node.lineno) for word in dotted.split("."))


def words_of(name: str) -> set[str]:
    """world_size, WorldSize and WORLD_SIZE -> {world, size}."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)
    return set(spaced.lower().split("_"))


def test_only_train_knows_how_processes_are_arranged() -> None:
    seen, wrong = set(), []
    for name, tree in TREES.items():
        if name.split("/")[0] not in ("model", "diffusion", "kernels"):
            continue
        for used, line in names_in(tree):
            if not words_of(used) & set(PARALLEL_WORDS):
                continue
            if (name, used) in OTHER_MEANINGS:
                seen.add((name, used))
            else:
                wrong.append(f"{name}:{line}: {used}")
    assert not wrong
    assert seen == set(OTHER_MEANINGS), "an exception that nothing needs"


def test_nothing_prints() -> None:
    """Progress goes through logging, what a command answers through sys.stdout."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            is_print = isinstance(node, ast.Name) and node.id in ("print", "pprint", "breakpoint")
            assert not is_print, f"{name}:{node.lineno}: {node.id}"


def texts() -> Iterator[tuple[str, str]]:
    """Every text file of the project, by its path."""
    folders = ("cogfast", "bench", "configs", "docs", "scripts", "tests", ".ci")
    paths = [p for folder in folders for p in sorted((ROOT / folder).rglob("*")) if p.is_file()]
    paths += [p for p in ROOT.iterdir() if p.is_file() and p.name != ".git"]  # a worktree's link
    for path in paths:
        if "__pycache__" in path.parts:
            continue
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # weights, pictures
            continue


# The brackets keep the patterns from matching themselves.
MACHINES = {
    "a folder of some machine": r"(?<![\w.$}])/(?:hom[e]|roo[t]|User[s]|wor[k]|workspac[e]|mn[t])/\w",
    "a Windows folder": r"\b[A-Z]:\\\\?Users\b",
    "an address": r"\b(?!127\.0\.0\.1\b)\d{1,3}(?:\.\d{1,3}){3}\b",
    "a package index": r"(?i)\b(?:index|registry|proxy)[-_]?ur[l]\s*[=:]|PIP_INDE[X]",
}


@pytest.mark.parametrize("what", MACHINES)
def test_no_trace_of_a_machine(what: str) -> None:
    found = [
        f"{name}: {match[0]}"
        for name, text in texts()
        for match in re.finditer(MACHINES[what], text)
    ]
    assert not found


def test_web_addresses_are_public_ones() -> None:
    named = {
        (host, name) for name, text in texts() for host in re.findall(r"\bhttps?://([\w.-]+)", text)
    }
    assert not {(host, name) for host, name in named if host not in HOSTS}

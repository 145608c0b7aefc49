"""Runs recorded commands, each in a fork of a process that has the imports of all commands.

A case is a mapping: words of `cogfast`, world (the entries of the world that it needs), files (written
beside them: text, with surrogates for other bytes, or None for one that is missing). Its outcome: the exit status, both streams, and the
names of the files that it wrote.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.behaviour.difference import normalized
from scripts.behaviour.words.world import environment

PROCESSES = 2
_OUTCOMES = "outcomes.jsonl"
_LENGTH = 80  # of the path of a case's folder: some messages are cut, some texts aligned by length
_SECONDS = 300  # until a case that waits is killed
_CPU_SECONDS = 120
# These take long to import; in the order that keeps forks of _WARM_UP short.
_SLOW = [
    "torch",
    "omegaconf",
    "pydantic",
    "deepspeed",
    "diffusers",
    "transformers",
    "transformers.models.t5.modeling_t5",
    "transformers.models.t5.tokenization_t5",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "av",
    "PIL",
    "sentencepiece",
]
# Commands that import what others need. {base} stands for files of a tiny model.
_WARM_UP = (
    "train --base {base} --dry-run",
    "train --base {base} args.load=missing",
    "sample runs/full --prompt x --dry-run",
    "sample runs/full --prompt x --lora missing",
    "convert models/5b out --to sat",
    "convert sat out2 --to diffusers",
    "convert runs/lora out3 --to peft",
    "cache --base {base} args.latent_cache=clips/prompts.txt",
    "plan --base {base} --gpu h100-80",
    "report runs/full",
    "publish runs/full a/b --dry-run",
    "finetune --help",
    "finetune --model_path models/5b --model_name cogvideox-t2v --model_type t2v --training_type "
    "lora --output_dir o --data_root clips --caption_column prompts.txt --video_column videos.txt "
    "--train_resolution 9x32x32 --dry-run",
)

_OF_SMALL = ("torch", "omegaconf", "pydantic")
_WARM_UP_OF_SMALL = (_WARM_UP[0],)


def run_cases(
    cases: Sequence[dict], world: Path, work: Path, base: Sequence[str], is_small: bool = False
) -> list[dict]:
    """Return the outcome of each case, in their order.

    world: the folder of the world. base: the files of a tiny model in it. is_small: import little
    before the cases, which pays for few cases.
    """
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(list(cases), world, work, list(base), is_small))
    server.start()
    server.join()
    rows = (work / _OUTCOMES).read_text(encoding="utf-8").splitlines()
    outcomes = {row.pop("number"): row for row in map(json.loads, rows)}
    if len(outcomes) < len(cases):
        raise RuntimeError("the process that forks commands has ended; see above")
    return [outcomes[number] for number in range(len(cases))]


def _serve(cases: list[dict], world: Path, work: Path, base: list[str], is_small: bool) -> None:
    """Import what commands import, then fork a process for each case, two at a time."""
    if is_small:
        _preload(world, work, base, _OF_SMALL, _WARM_UP_OF_SMALL)
    else:
        _preload(world, work, base, _SLOW, _WARM_UP)
    running: dict[int, _Running] = {}
    with (work / _OUTCOMES).open("w", encoding="utf-8") as file:
        for number, case in enumerate(cases):
            while len(running) >= PROCESSES:
                file.write(_end_one(running))
                file.flush()
            started = _start(case, number, world, work)
            running[started.process] = started
        while running:
            file.write(_end_one(running))


@dataclass(frozen=True)
class _Running:
    process: int
    number: int
    root: Path
    home: Path
    before: dict[Path, int]  # when each file was written
    end: float  # of the time that it has

    @property
    def streams(self) -> list[Path]:
        return [self.home / "stdout", self.home / "stderr"]


def _padded(work: Path) -> Path:
    """Return a folder in `work` whose path has always one length."""
    folder = work / ("w" * (_LENGTH - len(str(work)) - 6))
    assert len(str(folder)) == _LENGTH - 5, f"the path of the scratch folder is too long: {work}"
    return folder


def _start(case: dict, number: int, world: Path, work: Path) -> _Running:
    """Make the folder of a case and fork its process."""
    root, home = _padded(work) / f"{number:04}", _padded(work) / f"{number:04}-home"
    (home / "tmp").mkdir(parents=True)
    root.mkdir(parents=True)
    for name in case.get("world", ()):
        _link(world / name, root / name)
    for name, content in case.get("files", {}).items():
        path = root / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode("utf-8", "surrogateescape"))
    before = {path: path.lstat().st_mtime_ns for path in _files(root)}
    child = os.fork()
    started = _Running(child, number, root, home, before, time.monotonic() + _SECONDS)
    if child == 0:
        _be_case(case["words"], root, home, started.streams)
    return started


def _end_one(running: dict[int, _Running]) -> str:
    """Wait until a case ends, and return the line of its outcome."""
    while True:
        process, status, usage = os.wait4(-1, os.WNOHANG)
        if process in running:
            break
        for one in running.values():
            if time.monotonic() > one.end:
                os.kill(one.process, signal.SIGKILL)
        time.sleep(0.005)
    one = running.pop(process)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)  # what it left behind
    streams = [file.read_bytes().decode(errors="replace") for file in one.streams]
    stdout, stderr = (_plain(text, one) for text in streams)
    wrote = sorted(
        normalized(path.relative_to(one.root).as_posix(), one.root, has_times=False)
        for path in _files(one.root)
        # The index of videos is written if reading them has taken long.
        if one.before.get(path) != path.lstat().st_mtime_ns and path.name != ".cogfast-index"
    )
    shutil.rmtree(one.root, ignore_errors=True)
    shutil.rmtree(one.home, ignore_errors=True)
    outcome = {
        "number": one.number,
        "status": os.waitstatus_to_exitcode(status),
        "stdout": stdout,
        "stderr": stderr,
        "wrote": wrote,
        "seconds": usage.ru_utime + usage.ru_stime,
    }
    return json.dumps(outcome) + "\n"


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def _plain(text: str, one: _Running) -> str:
    return normalized(text.replace(str(one.home), "<home>"), one.root, has_times=False)


def _link(source: Path, target: Path) -> None:
    """Link files and make folders: a copy of a folder of the world without its bytes."""
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(source, target)
        return
    target.mkdir(parents=True, exist_ok=True)
    with os.scandir(source) as entries:
        for entry in entries:
            _link(source / entry.name, target / entry.name)


def _be_case(words: list[str], root: Path, home: Path, streams: list[Path]) -> None:
    """Be the process of a case; never returns."""
    status = 1
    try:
        os.setsid()
        for number, file in enumerate(streams, start=1):
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(descriptor, number)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment(home))
        import tempfile

        tempfile.tempdir = None
        os.chdir(root)
        spent = int(sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
        resource.setrlimit(resource.RLIMIT_CPU, (spent + _CPU_SECONDS,) * 2)
        from cogfast.__main__ import main

        status = main(words) or 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        # Its lines name files and numbers of the package: only the error itself is a user's.
        sys.stderr.write(
            "Traceback\n" + "".join(traceback.format_exception_only(*sys.exc_info()[:2]))
        )
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _preload(
    world: Path, work: Path, base: list[str], modules: Sequence[str], commands: Sequence[str]
) -> None:
    """Import modules, and then what commands import, which forks of this process find out."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    home = _padded(work) / "preloaded"  # some libraries keep this home, of the same length
    (home / "tmp").mkdir(parents=True)
    (home / ".cache").mkdir()
    os.environ.update(environment(home))
    names = dict.fromkeys(modules)
    _import(names)
    for number, text in enumerate(commands):
        words = text.format(base=" ".join(base)).split()
        root = home / str(number)
        entries = sorted(entry.name for entry in world.iterdir())
        for name in entries:
            _link(world / name, root / name)
        listed = home / f"modules-{number}"
        child = os.fork()
        if child == 0:
            _list_modules(words, root, home, listed)
        os.waitpid(child, 0)
        names |= dict.fromkeys(listed.read_text().split() if listed.exists() else ())
        _import(names)
    shutil.rmtree(home, ignore_errors=True)
    gc.collect()
    gc.freeze()


def _import(names: dict[str, None]) -> None:
    for name in list(names):
        if name not in sys.modules:
            try:
                importlib.import_module(name)
            except BaseException:  # a module that only its package can import
                del names[name]


def _list_modules(words: list[str], root: Path, home: Path, listed: Path) -> None:
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        os.environ.update(environment(home))
        os.chdir(root)
        from cogfast.__main__ import main

        main(words)
    except BaseException:
        pass
    finally:
        listed.write_text("\n".join(n for n in sys.modules if not n.startswith("__")))
        os._exit(0)

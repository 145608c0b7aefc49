"""Breaks one formula, check, key or collective of the package at a time, and says whether the tests notice.

    python -m scripts.plant [--only NAME ...] [--part FOLDER] [--list] [--all-tests] [--out FILE]

scripts/planted/*.yaml hold the faults: a name, a file, a text that occurs once in it, the text that takes
its place, and the tests that should fail. A scratch copy of the tree gets one fault after another; the
checkout is never changed. Before that, the same tests must pass in the copy as it is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import NoReturn

import yaml

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "scripts" / "planted"
_LIBRARY = "cogfast/kernels/cpu/"  # the sources and the name of a library that tests load
_COMPILE = "from cogfast.kernels.cpu.library import compile_library; print(compile_library())"
_SECONDS = 3600  # of a run of pytest; the tests themselves end ranks that wait for each other
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s\[]+::[^\s\[]+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault: `new` in place of `old` in `file`. tests: files or ids of the tests that should notice it."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def part(self) -> str:
        """The folder of the package that the fault is in, such as kernels/gpu."""
        return str(Path(self.file).parent.relative_to("cogfast"))


def read_faults() -> list[Fault]:
    """Return all faults, by file of scripts/planted and in its order."""
    rows = [
        row for file in sorted(FAULTS.glob("*.yaml")) for row in yaml.safe_load(file.read_text())
    ]
    return [Fault(**{**row, "tests": tuple(row["tests"])}) for row in rows]


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Yield a copy of the checkout's files, without what git ignores, that lasts as long as the block."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        for name in filter(None, names.split("\0")):
            if os.path.lexists(ROOT / name):  # not one that was deleted
                target = Path(folder, "tree", name)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target, follow_symlinks=False)
        yield Path(folder, "tree")


def _share_imports() -> None:
    """Import what takes most of a test's start, 4 of 6 s, for all forks of this process."""
    # conftest.py does the same before its imports.
    os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in ("torch", "pytest", "omegaconf", "pydantic"):
        importlib.import_module(name)


class Tree:
    """A copy of the checkout that has one fault at a time."""

    def __init__(self, root: Path) -> None:
        self.root, self._times = root, int(time.time())
        # Reports of tests that use ranks or a store depend on variables of the caller.
        self._environment = {**os.environ, "PYTHONPATH": str(root)}

    @contextmanager
    def with_fault(self, fault: Fault) -> Iterator[None]:
        """Plant a fault within the block, and compile the library of C++ kernels if it needs another."""
        path = self.root / fault.file
        before, library = path.read_text(), None
        assert before.count(fault.old) == 1, (
            f"{fault.name}: its old text is not once in {fault.file}"
        )
        try:
            self._write(path, before.replace(fault.old, fault.new))
            if fault.file.startswith(_LIBRARY):
                library = self._compile()
            yield
        finally:
            self._write(path, before)
            if library is not None:
                library.unlink(missing_ok=True)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Each version has a second of its own: Python takes a compiled file of the same second.
        self._times += 1
        os.utime(path, (self._times, self._times))

    def _compile(self) -> Path:
        """Compile the C++ kernels of the copy, into the user's cache, and return the library."""
        command = [sys.executable, "-c", _COMPILE]
        done = subprocess.run(
            command,
            cwd=self.root,
            env=self._environment,
            check=True,
            capture_output=True,
            text=True,
        )
        return Path(done.stdout.split()[-1])

    def run(self, tests: Sequence[str], *options: str) -> tuple[list[str], str]:
        """Run tests in a fork of this process, and return those that fail, and the end of the output.

        AssertionError if none ran.
        """
        words = ["-q", "-rfE", "--tb=short", "-m", "not soak", "-p", "no:cacheprovider"]
        with tempfile.TemporaryFile() as file:
            process = os.fork()
            if not process:
                self._be_pytest([*words, *options, *tests], file.fileno())
            status = _wait(process)
            file.seek(0)
            output = file.read().decode(errors="replace")
        assert status is not None, (
            f"no end within {_SECONDS} s, beside other work?\n{output[-3000:]}"
        )
        failed = _FAILED.findall(output)
        # No test ran, or a file of tests cannot be read: that says nothing of a fault.
        assert status == 0 or (status == 1 and failed), (
            f"pytest ended with status {status} for {' '.join(tests)}\n{output[-3000:]}"
        )
        return failed, output[-3000:]

    def _be_pytest(self, words: list[str], output: int) -> NoReturn:
        """Run pytest in the copy, as a process group of its own, and end."""
        status: int = 3
        try:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output, stream)
            os.chdir(self.root)
            os.environ |= self._environment
            others = [path for path in sys.path if Path(path).resolve() != ROOT]
            sys.path[:] = [str(self.root), *others]
            for name in [name for name in sys.modules if name.partition(".")[0] == "scripts"]:
                del sys.modules[name]
            status = importlib.import_module("pytest").main(words)
        finally:
            os._exit(status)


def _wait(process: int) -> int | None:
    """Return the exit status of a process; None if its time is over and it was killed with its group."""
    end = time.monotonic() + _SECONDS
    while time.monotonic() < end:
        found, status = os.waitpid(process, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)  # ranks that wait for each other end with it
    os.waitpid(process, 0)
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Plant the chosen faults, print what notices each, and return 1 if one is not noticed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults")
    parser.add_argument("--part", metavar="FOLDER", help="faults in this folder of cogfast/")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    text = "run all tests for a fault that its own tests do not notice"
    parser.add_argument("--all-tests", action="store_true", help=text)
    text = "JSON file of the results; those of other faults in it are kept"
    parser.add_argument("--out", type=Path, help=text)
    found = parser.parse_args(argv)
    faults = [
        fault
        for fault in read_faults()
        if (not found.only or fault.name in found.only)
        and (found.part is None or f"{fault.part}/".startswith(f"{found.part}/"))
    ]
    if missing := {*(found.only or ())} - {fault.name for fault in faults}:
        parser.error(f"no fault is called {', '.join(sorted(missing))}")
    if found.list:
        for fault in faults:
            print(f"{fault.name:40} {fault.file:55} {' '.join(fault.tests)}")
        return 0
    _share_imports()
    with copied_tree() as root:
        tree = Tree(root)
        failed, output = tree.run(sorted({test for fault in faults for test in fault.tests}))
        if failed:
            print(f"{output}\nthese tests fail without a fault: {' '.join(failed)}")
            return 2
        noticed = {fault.name: _noticed_by(tree, fault, found.all_tests) for fault in faults}
    if found.out is not None:
        _write_results(found.out, noticed)
    missed = [name for name, by in noticed.items() if not by]
    print(f"{len(noticed) - len(missed)} of {len(noticed)} are noticed; not: {missed or 'none'}")
    return 1 if missed else 0


def _noticed_by(tree: Tree, fault: Fault, runs_all: bool) -> str:
    """Return the first test that fails with a fault; "" if none does. Prints a line."""
    start = time.monotonic()
    with tree.with_fault(fault):
        failed, _ = tree.run(fault.tests, "-x")
        if not failed and runs_all:
            failed, _ = tree.run(["tests"], "-x", "-n", "2", "--dist", "loadfile")
    by = failed[0] if failed else ""
    seconds = time.monotonic() - start
    print(f"{fault.name:40} {by or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True)
    return by


def _write_results(file: Path, noticed: dict[str, str]) -> None:
    """Write what notices each fault, with the commit and the day of this run."""
    head = ["git", "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(head, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    before = json.loads(file.read_text())["noticed_by"] if file.exists() else {}
    names = [fault.name for fault in read_faults()]
    by = {name: {**before, **noticed}[name] for name in names if name in before or name in noticed}
    about = {"commit": commit.strip(), "date": date.today().isoformat(), "faults": len(by)}
    about |= {"noticed": sum(map(bool, by.values())), "noticed_by": by}
    file.write_text(json.dumps(about, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

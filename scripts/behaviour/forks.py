"""Commands of cogfast in forked processes whose arithmetic is pinned.

`run` starts one server, `python -m scripts.behaviour.forks JOBS`, which imports what a run imports and
forks the ranks of each command from it, so that a command starts in 0.1 s. The server itself runs
nothing, so that it has no threads when it forks.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# These variables choose instructions in place of the processor. MKL's COMPATIBLE is the only branch that processors of all
# makers share; oneDNN's AVX2 has no products in bf16, so that PyTorch computes these itself.
PINS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "DNNL_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
}
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_CALLER = (*_OF_RANKS, "COGFAST_LOCAL_CACHE", "PYTHONPATH", "TRITON_INTERPRET", "DS_ACCELERATOR")
_PAUSE = 0.02
# A command that does not work hangs after so many seconds, and ranks that are left when one has ended after
# so many: both are far above what a busy machine needs. Less than _WORK seconds of processor time in a
# window are no work: a rank that waits asks from time to time.
_HANGS, _AFTER_FIRST, _WINDOW, _WORK = 120.0, 60.0, 20.0, 0.5


@dataclass(frozen=True, slots=True)
class Command:
    """`python -m MODULE WORDS`. own: {rank: environment variables} beside the common ones."""

    words: Sequence[str]
    ranks: int = 1
    module: str = "cogfast"
    environment: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Ended:
    """statuses: of the ranks; None: it had to be killed. outputs: stdout and stderr of each rank."""

    statuses: list[int | None]
    outputs: list[str]

    @property
    def is_success(self) -> bool:
        return set(self.statuses) == {0}


def run(
    jobs: Mapping[str, Sequence[Command]],
    work: Path,
    inputs: Path,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    preload: Sequence[str] = (),
    copies: str = "inputs",
    slots: int = 2,
) -> dict[str, list[Ended]]:
    """Run each job's commands one after the other in work/JOB, which has a copy of the folder `inputs`.

    A job ends with its first command that fails. python, environment: of the server. preload: modules
    that it imports. copies: the name of the copy. slots: ranks that run at the same time.
    """
    work.mkdir(parents=True, exist_ok=True)
    content = {name: [asdict(command) for command in commands] for name, commands in jobs.items()}
    request = {"inputs": str(inputs), "copies": copies, "preload": list(preload), "slots": slots}
    (work / "jobs.json").write_text(json.dumps({"jobs": content} | request))
    kept = {key: value for key, value in os.environ.items() if key not in _OF_CALLER}
    kept |= {**PINS, "PYTHONPATH": str(ROOT), **(environment or {})}
    server = [python, "-m", "scripts.behaviour.forks", str(work / "jobs.json")]
    done = subprocess.run(server, cwd=ROOT, env=kept, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(f"the server of forked commands ended with status {done.returncode}")
    found = json.loads((work / "ended.json").read_text())
    return {name: [Ended(**ended) for ended in found[name]] for name in jobs}


class _Running:
    """A command that runs in `folder`."""

    def __init__(self, command: Command, folder: Path) -> None:
        self.command, self.folder = command, folder
        port = str(_free_port())
        self.files = [folder / f"output-{rank}" for rank in range(command.ranks)]
        self.alive = {_fork(command, folder, rank, port): rank for rank in range(command.ranks)}
        self.statuses: list[int | None] = [None] * command.ranks
        self.worked, self.last, self.window = 0.0, time.monotonic(), time.monotonic()
        self.first = float("inf")  # when the first rank ended

    @property
    def num_working(self) -> int:
        """Ranks, unless one has ended: the others wait for it, or end soon."""
        return self.command.ranks if len(self.alive) == self.command.ranks else 0

    def poll(self) -> Ended | None:
        """Return how it ended, or None while it runs."""
        now = time.monotonic()
        for pid in list(self.alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                self.statuses[self.alive.pop(pid)] = os.waitstatus_to_exitcode(status)
                self.first = min(self.first, now)
        worked = sum(map(_cpu_seconds, self.alive))
        if worked > self.worked + _WORK or worked < self.worked:
            self.last = now
        if worked != self.worked and (now > self.window + _WINDOW or self.last == now):
            self.worked, self.window = worked, now
        after_first = max(self.first + _AFTER_FIRST, self.last + _WINDOW)
        if self.alive and now > min(after_first, self.last + _HANGS):
            for pid in self.alive:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.alive = {}
        if self.alive:
            return None
        return Ended(self.statuses, [file.read_text(errors="replace") for file in self.files])


def _fork(command: Command, folder: Path, rank: int, port: str) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setsid()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs ignore it
        null = os.open(os.devnull, os.O_RDONLY)
        output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.chdir(folder)
        os.environ.update(command.environment)
        if command.ranks > 1:
            size = str(command.ranks)
            values = (str(rank), str(rank), size, size, "127.0.0.1", port)
            os.environ.update(zip(_OF_RANKS, values, strict=True))
        os.environ.update(command.own.get(str(rank), {}))
        sys.argv = [command.module, *command.words]
        status = _status_of(command.module)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _status_of(module: str) -> int:
    """Run the module as Python's -m does, and return the exit status."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process, from the 14th and 15th field of its stat file."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(work: Path) -> None:
    content = json.loads((work / "jobs.json").read_text())
    for name in content["preload"]:
        __import__(name)
    waiting = {n: [Command(**command) for command in jobs] for n, jobs in content["jobs"].items()}
    ended: dict[str, list[Ended]] = {name: [] for name in waiting}
    running: dict[str, _Running] = {}
    for name in waiting:
        shutil.copytree(content["inputs"], work / name / content["copies"], symlinks=True)
    while waiting or running:
        for name, job in list(running.items()):
            result = job.poll()
            if result is not None:
                del running[name]
                ended[name].append(result)
                if not result.is_success:
                    waiting.pop(name, None)
        for name in list(waiting):
            free = content["slots"] - sum(job.num_working for job in running.values())
            if name not in running and waiting[name][0].ranks <= max(free, 0 if running else 99):
                running[name] = _Running(waiting[name].pop(0), work / name)
                if not waiting[name]:
                    del waiting[name]
        time.sleep(_PAUSE)
    (work / "ended.json").write_text(
        json.dumps({name: [asdict(one) for one in many] for name, many in ended.items()})
    )


if __name__ == "__main__":
    _serve(Path(sys.argv[1]).parent)

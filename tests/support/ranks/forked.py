"""Processes forked from a server that has imported what a run imports: one starts in 0.1 s, not in 10 s.

The server is multiprocessing's. It runs nothing itself, so that it has no thread and no process
group when it forks. torchrun, forked from it, forks its ranks in turn: they are its children, and its
signals, its watch and its report of errors are real. What happens before a program has its imports
needs a real start: tiny_run.start(..., is_fresh=True).
"""

import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_SECONDS_TO_END = 10  # for the other ranks, when one has failed


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.ranks.preloaded"])
    return context


def run_forked(
    program: Sequence[str], processes: int = 1, port: int = 0, timeout: float = 600
) -> subprocess.CompletedProcess:
    """Run `python PROGRAM` as ranks of this machine; stdout and stderr of all in .stdout.

    The exit status is that of the first rank that fails, and it ends the other ranks, as torchrun
    does. program: a script, "-m" and a module, or "-c" and code, and the arguments.
    """
    with tempfile.NamedTemporaryFile() as output:
        ranks = start_ranks(program, processes, port, output.name)
        status = _wait_for_all(ranks, timeout)
        text = Path(output.name).read_text(errors="replace")
    assert status is not None, f"no end after {timeout} s:\n{text}"
    return subprocess.CompletedProcess(list(program), status, text)


def start_ranks(
    program: Sequence[str], processes: int, port: int, output: Path | str
) -> list[BaseProcess]:
    """Start `python PROGRAM` as ranks that append to the file `output`."""
    Path(output).touch()
    ranks: list[BaseProcess] = []
    # The server starts with the first rank and imports from the current folder.
    with contextlib.chdir(ROOT):
        for rank in range(processes):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            if processes > 1:
                environment |= _variables(rank, processes, port)
            arguments = (tuple(program), environment, output)
            ranks.append(_server().Process(target=_be_rank, args=arguments))
            ranks[-1].start()
    return ranks


def _variables(rank: int, processes: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _wait_for_all(ranks: list, timeout: float) -> int | None:
    """Return the exit status of the first failure, or 0; None if the time is over before."""
    end, status = time.monotonic() + timeout, 0
    alive = {rank.sentinel: rank for rank in ranks}
    try:
        while alive:
            ready = wait(alive, max(0.0, end - time.monotonic()))
            if not ready:
                return status or None
            for sentinel in ready:
                rank = alive.pop(sentinel)
                rank.join()
                if rank.exitcode != 0 and status == 0:
                    status, end = rank.exitcode, time.monotonic() + _SECONDS_TO_END
        return status
    finally:
        for rank in alive.values():
            rank.kill()
            rank.join()


class Forked:
    """A program that was forked from the server, with the interface of subprocess.Popen.

    It leads a session of its own. communicate() returns stdout and stderr together, unless they go to
    the terminal or file `output`.
    """

    def __init__(
        self, program: Sequence[str], environment: Mapping[str, str], output: str | None = None
    ) -> None:
        self.args = list(program)
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115
        with contextlib.chdir(ROOT):
            arguments = (tuple(program), dict(environment), output or self._output.name, True)
            self._process = _server().Process(target=_be_rank, args=arguments)
            self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        self.wait(timeout)
        return Path(self._output.name).read_text(errors="replace"), None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


class ForkedPopen(subprocess.Popen):
    """A child that runs Python, such as a rank of torchrun: forked from this process, which has the
    imports, and not executed. Other programs are executed."""

    def _execute_child(self, args: Sequence[str], *more: object) -> None:
        if args[0] != sys.executable:
            return super()._execute_child(args, *more)
        # The order is that of Popen's own method.
        environment, output, errors = more[5], more[11], more[13]
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                for target, file in ((1, output), (2, errors)):
                    if file != -1:
                        os.dup2(file, target)
                os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # torchrun's connections, as exec does
                for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if environment is not None:
                    os.environ.clear()
                    os.environ.update(environment)
                status = _run([word for word in args[1:] if word != "-u"])
            finally:
                os._exit(status)
        self._child_created = True


def _run(program: Sequence[str]) -> int:
    """Run `python PROGRAM` in this process and return its exit status."""
    sys.argv = list(program[program[0] in ("-c", "-m") :])
    status: object = 0
    try:
        if program[0] == "-c":
            exec(program[1], {"__name__": "__main__"})
        elif program[0] == "-m":
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(program[0]))  # as Python does
            runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        status = end.code
    except BaseException:
        traceback.print_exc()
        status = 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    return status if isinstance(status, int) else int(status is not None)


def _be_rank(
    program: Sequence[str], environment: Mapping[str, str], output: Path | str, leads: bool = False
) -> None:
    """Run the program in the forked process, with the environment and the output of its launch."""
    if leads:
        os.setsid()
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    assert "tests.support.ranks.preloaded" in sys.modules, "the server imported nothing"
    if program[:2] == ("-m", "torch.distributed.run"):
        from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

        subprocess_handler.Popen = ForkedPopen
    sys.exit(_run(program))

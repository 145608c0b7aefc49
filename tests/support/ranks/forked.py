"""Processes forked from a server that has imported what a run imports: one starts in 0.1 s, not in 10 s.

The server is multiprocessing's. It runs nothing itself, so that it has no thread and no process
group when it forks. What torchrun or a signal does to a run needs a real start: tiny_run.start.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
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
        ranks = []
        # The server starts with the first rank and imports from the current folder.
        with contextlib.chdir(ROOT):
            for rank in range(processes):
                environment = {**os.environ, "OMP_NUM_THREADS": "1"}
                if processes > 1:
                    environment |= _variables(rank, processes, port)
                arguments = (tuple(program), environment, output.name)
                ranks.append(_server().Process(target=_be_rank, args=arguments))
                ranks[-1].start()
        status = _wait_for_all(ranks, timeout)
        text = Path(output.name).read_text(errors="replace")
    assert status is not None, f"no end after {timeout} s:\n{text}"
    return subprocess.CompletedProcess(list(program), status, text)


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


def _be_rank(program: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run the program in the forked process, with the environment and the output of its launch."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(environment)
    assert "tests.support.ranks.preloaded" in sys.modules, "the server imported nothing"
    sys.argv = list(program[program[0] in ("-c", "-m") :])
    if program[0] == "-c":
        exec(program[1], {"__name__": "__main__"})
    elif program[0] == "-m":
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program[0], run_name="__main__")

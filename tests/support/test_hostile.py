"""tests/support/hostile.py reports forbidden actions: each test performs one of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.hostile import Outcome, faults, run_case

pytestmark = pytest.mark.forks


def run(tmp_path: Path, call, **limits: float) -> Outcome:
    root = tmp_path / "outer" / "root"
    root.mkdir(parents=True, exist_ok=True)
    return run_case(call, root, **limits)


def error_line() -> int:
    sys.stderr.write("cogfast: args.lr=x must be a number\n")
    return 2


def raise_error() -> None:
    raise KeyError("parameters")


def write_beside() -> None:
    Path("../evil.txt").write_text("x")


def take_memory() -> None:
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(0.2)


CASES = [
    pytest.param(lambda: 0, None, id="success"),
    pytest.param(error_line, None, id="error of one line"),
    pytest.param(lambda: Path("inside.txt").write_text("x") and 0, None, id="write inside"),
    pytest.param(lambda: 2, "without a line", id="no line"),
    pytest.param(raise_error, "traceback: KeyError", id="traceback"),
    pytest.param(lambda: os.kill(os.getpid(), signal.SIGTERM), "exit status -15", id="signal"),
    pytest.param(lambda: sys.exit(3), "exit status 3", id="exit status"),
    pytest.param(lambda: os.system("true"), "started", id="os.system"),
    pytest.param(lambda: subprocess.run(["true"]).returncode, "started", id="subprocess"),
    pytest.param(write_beside, "wrote", id="write outside"),
    pytest.param(lambda: os.mkdir("../evil"), "wrote", id="folder outside"),
]


@pytest.mark.parametrize(("call", "fault"), CASES)
def test_actions_of_a_case_are_reported(tmp_path: Path, call, fault: str | None) -> None:
    outcome = run(tmp_path, call)
    if fault is None:
        assert faults(outcome) == []
    else:
        assert any(fault in found for found in faults(outcome)), faults(outcome)


def test_a_hang_ends(tmp_path: Path) -> None:
    outcome = run(tmp_path, lambda: time.sleep(60), max_wait=0.5)
    assert faults(outcome) == ["hangs"]


def test_memory_is_measured(tmp_path: Path) -> None:
    outcome = run(tmp_path, take_memory)
    assert 250 * 2**20 < outcome.peak_bytes < 400 * 2**20
    assert faults(outcome, max_bytes=100 * 2**20) == ["took 0.3 GiB"]


def test_processes_that_are_left_are_seen(tmp_path: Path) -> None:
    def leave() -> None:
        if os.fork() == 0:
            time.sleep(30)
            os._exit(0)

    assert faults(run(tmp_path, leave)) == ["left processes behind"]

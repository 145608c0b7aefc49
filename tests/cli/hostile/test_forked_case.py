"""tests/cli/hostile/forked_case.py reports forbidden actions: each case performs one of them."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests.cli.hostile.forked_case import faults, run_case

pytestmark = pytest.mark.forks


def error_line() -> int:
    sys.stderr.write("cogfast: args.lr=x must be a number\n")
    return 2


def raise_error() -> None:
    raise KeyError("parameters")


def take_memory() -> None:
    block = bytearray(300 * 2**20)
    block[::4096] = b"x" * len(block[::4096])
    time.sleep(0.2)


def leave_process() -> None:
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)


def use_rights_of_root() -> None:
    Path("secret").write_text("x")
    os.chmod("secret", 0)
    Path("secret").read_text()


CASES = [
    pytest.param(lambda: 0, None, id="success"),
    pytest.param(error_line, None, id="error of one line"),
    pytest.param(lambda: 2, "without a line", id="no line"),
    pytest.param(raise_error, "traceback: KeyError", id="traceback"),
    pytest.param(lambda: os.kill(os.getpid(), signal.SIGTERM), "exit status -15", id="signal"),
    pytest.param(lambda: os.system("true"), "started", id="os.system"),
    pytest.param(lambda: Path("../evil").write_text("x"), "wrote", id="write outside"),
    pytest.param(lambda: time.sleep(60), "hangs", id="hang"),
    pytest.param(leave_process, "left processes behind", id="process"),
    pytest.param(take_memory, "took 0.3 GiB", id="memory"),
    pytest.param(use_rights_of_root, "PermissionError", id="rights of root"),
]


@pytest.mark.parametrize(("call", "fault"), CASES)
def test_actions_of_a_case_are_reported(tmp_path: Path, call, fault: str | None) -> None:
    root = tmp_path / "outer" / "root"
    root.mkdir(parents=True)
    outcome = run_case(call, root, max_wait=0.5 if fault == "hangs" else 60)
    found = faults(outcome, max_bytes=100 * 2**20)
    assert (not found) if fault is None else any(fault in line for line in found), found

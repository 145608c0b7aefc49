"""A command continues when its terminal is closed or the reader of its output ends."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_run import ROOT

# A command that logs, prints, and writes a file when it has reached its end.
COMMAND = """
import ctypes, logging, os, sys, time
import cogfast.__main__ as command
from cogfast.cli.log_lines import start_logging

def work(arguments):
    start_logging()
    while not os.path.exists(sys.argv[2] + ".go"):
        time.sleep(0.01)
    for i in range(3):
        logging.getLogger("cogfast").info("line %d", i)
        print("printed", i, flush=True)
        ctypes.CDLL(None).write(2, b"of a library\\n", 13)
    text = sys.stdin.read()
    with open(sys.argv[2], "w") as file:
        file.write(f"{file.fileno() > 2} {text!r}")

command._COMMANDS["cache"] = work
sys.exit(command.main())
"""


def start(file: Path, **streams: object) -> subprocess.Popen:
    command = [sys.executable, "-c", COMMAND, "cache", str(file)]
    return subprocess.Popen(command, cwd=ROOT, **streams)


def go(file: Path) -> None:
    Path(f"{file}.go").touch()


@pytest.mark.parametrize("lost", ["stdout", "stderr"])
def test_a_reader_that_ends_does_not_end_the_command(tmp_path: Path, lost: str) -> None:
    """The reader of a pipe ends first, as in `cogfast train 2>&1 | head`."""
    file = tmp_path / "end"
    process = start(file, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for name in ("stdout", "stderr"):
        if lost == name:
            getattr(process, name).close()
    go(file)
    text = (process.stderr if lost == "stdout" else process.stdout).read().decode()
    assert process.wait(timeout=30) == 0
    assert file.read_text() == "True ''"
    if lost == "stdout":
        assert text.startswith("line 0\nof a library\nline 1\n")
    else:
        assert text == "printed 0\nprinted 1\nprinted 2\n"


def test_a_terminal_that_is_closed_does_not_end_the_command(tmp_path: Path) -> None:
    """Writing to it is an error of input and output (EIO)."""
    file = tmp_path / "end"
    terminal, its_end = pty.openpty()
    process = start(file, stdin=subprocess.DEVNULL, stdout=its_end, stderr=its_end)
    os.close(terminal)
    os.close(its_end)
    go(file)
    assert process.wait(timeout=30) == 0
    assert file.read_text() == "True ''"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_at_the_start(tmp_path: Path, closed: str) -> None:
    """Files that the command opens do not take their place."""
    file = tmp_path / "end"
    go(file)
    done = subprocess.run(
        ["bash", "-c", f'"$@" {closed}', "-", sys.executable, "-c", COMMAND, "cache", str(file)],
        cwd=ROOT,
        input="",
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "True ''"
    assert (done.stdout == "") == (closed != "2>&-")

"""A command continues when its terminal is closed or the reader of its output ends."""

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
from cogfast.cli.streams import start_logging

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


@pytest.mark.parametrize("lost", ["stdout", "stderr", "terminal"])
def test_a_reader_that_ends_does_not_end_the_command(tmp_path: Path, lost: str) -> None:
    """The reader of a pipe ends first, as in `cogfast train 2>&1 | head`, or a terminal is closed."""
    file = tmp_path / "end"
    terminal, its_end = pty.openpty()
    out = its_end if lost == "terminal" else subprocess.PIPE
    command = [sys.executable, "-c", COMMAND, "cache", str(file)]
    streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
    process = subprocess.Popen(command, cwd=ROOT, **streams)
    os.close(its_end)
    os.close(terminal)  # writing to its other end is an error of input and output (EIO)
    if lost != "terminal":
        getattr(process, lost).close()
    Path(f"{file}.go").touch()
    if lost == "stdout":
        text = process.stderr.read().decode()
        assert text.startswith("line 0\nof a library\nline 1\n")
    elif lost == "stderr":
        assert process.stdout.read().decode() == "printed 0\nprinted 1\nprinted 2\n"
    assert process.wait(timeout=30) == 0
    assert file.read_text() == "True ''"


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed_at_the_start(tmp_path: Path, closed: str) -> None:
    """Files that the command opens do not take their place."""
    file = tmp_path / "end"
    Path(f"{file}.go").touch()
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

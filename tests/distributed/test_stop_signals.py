"""A command that is signalled ends in one line, by the signal, whatever its main thread does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import psutil
import pytest

from cogfast.distributed.process_groups import StopRequest
from tests.support.tiny_run import ROOT

# A command that runs FIRST, prints "ready" and runs BODY. Tests set the seconds that decide, so that a
# process which gets no core for a while changes nothing.
COMMAND = """
import hashlib, os, sys, time
import cogfast.__main__ as command
from cogfast.distributed import stop_signals
from cogfast.distributed.stop_signals import StopSignals

stop_signals._REPEAT_SECONDS, command._UNWIND_SECONDS = {repeat}, {patience}

def work(arguments):
    try:
        {first}
        os.write(1, b"ready\\n")  # what print writes may come again when a signal interrupts it
        {body}
    finally:
        print("removed", flush=True)

command._COMMANDS["convert"] = work
sys.argv = ["cogfast", "convert"]
sys.exit(command.main())
"""
SLEEP = "time.sleep(600)"
# A call that neither a signal nor another thread ends.
BUSY = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**8)"
# The process does as training: it listens for itself, and ends some time after the first signal.
SAVING = """
        with StopSignals(lambda reason: reason) as signals:
            os.write(1, b"listens\\n")
            while not signals.received:
                time.sleep(0.01)
            print("saving", flush=True)
            time.sleep({seconds})
        time.sleep(0.2)
"""
LINE = "the target was not written, and partly written files were removed\n"


_processes: list[subprocess.Popen] = []


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Kill what a failed test leaves: one of the commands keeps a core busy."""
    yield
    for process in _processes:
        process.kill()
        process.wait()
    _processes.clear()


def started(
    body: str,
    prefix: Sequence[str] = (),
    first: str = "",
    repeat: float = 60,
    patience: float = 600,
    **environment: str,
) -> subprocess.Popen:
    text = COMMAND.format(body=body, first=first, repeat=repeat, patience=patience)
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _processes.append(process)
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_command_ends_in_one_line_by_the_signal(number: signal.Signals) -> None:
    """The command first removes its unfinished files; a second signal does not interrupt that."""
    process = started(SLEEP)
    process.send_signal(number)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=120)
    assert (printed, errors) == ("removed\n", f"cogfast: ended by {number.name}; {LINE}")
    assert process.returncode == -number


def test_a_signal_that_is_repeated_late_leaves_the_last_line() -> None:
    """Slurm signals each process twice; the second one comes while the last line is written."""
    again = "command.tell_torchrun = lambda text: os.kill(os.getpid(), 15)"
    process = started(SLEEP, first=again)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=120)
    assert (printed, errors) == ("removed\n", f"cogfast: ended by SIGTERM; {LINE}")
    assert process.returncode == -signal.SIGTERM


def test_a_shell_sees_the_status_of_a_signal() -> None:
    shell = started(SLEEP, prefix=["bash", "-c", '"$@"; echo $?', "-"])
    (command,) = psutil.Process(shell.pid).children()
    command.send_signal(signal.SIGINT)
    assert shell.communicate(timeout=120)[0] == "removed\n130\n"


def test_other_ranks_are_quiet() -> None:
    process = started(SLEEP, RANK="1")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120) == ("removed\n", "")


def test_signals_ignored_at_the_start_stay_ignored() -> None:
    """nohup ignores SIGHUP; a shell script ignores SIGINT in processes that it starts in background."""
    process = started("time.sleep(1)", prefix=["nohup"])
    process.send_signal(signal.SIGHUP)
    printed, errors = process.communicate(timeout=120)
    assert (printed, process.returncode) == ("removed\n", 0)
    assert "SIGHUP" not in errors


def test_hours_count_from_the_start_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "create_time", lambda _: 1000.0)
    assert StopRequest(Mock(), max_hours=2).deadline == 1000 + 2 * 3600


def test_a_main_thread_that_does_not_listen_is_ended() -> None:
    """It may wait for another rank in C++: it is ended after some seconds, or at the second Ctrl-C."""
    patient, hasty = started(BUSY, patience=5), started(BUSY, repeat=0.3)
    for process in (patient, hasty):  # they say that they are ready just before the call
        times = psutil.Process(process.pid).cpu_times
        end = times().user + 0.2
        while times().user < end:
            time.sleep(0.05)
    patient.send_signal(signal.SIGTERM)
    hasty.send_signal(signal.SIGINT)
    time.sleep(1.3)
    hasty.send_signal(signal.SIGINT)
    assert hasty.communicate(timeout=120)[1] == f"cogfast: ended at once by a second SIGINT; {LINE}"
    assert patient.communicate(timeout=120)[1] == f"cogfast: ended by SIGTERM; {LINE}"
    assert (hasty.returncode, patient.returncode) == (128 + 2, 128 + 15)


# Signals and seconds between them; a second signal counts after 0.3 seconds, or after 60.
SECOND = {
    "Ctrl-C twice": ([signal.SIGINT, 1.3, signal.SIGINT], True),
    "Ctrl-C twice at torchrun": ([signal.SIGINT, 1.3, signal.SIGTERM], True),
    "one Ctrl-C that comes twice": ([signal.SIGINT, 0.05, signal.SIGINT], False),
    "the scheduler and torchrun": ([signal.SIGTERM, 1.3, signal.SIGTERM], False),
    "a closed terminal": ([signal.SIGHUP, 1.3, signal.SIGHUP, signal.SIGTERM], False),
    "ahead of the time limit and at it": ([signal.SIGUSR1, 1.3, signal.SIGTERM], False),
    "Ctrl-C while it saves for the scheduler": ([signal.SIGTERM, 1.3, signal.SIGINT], False),
}


def test_the_second_ctrl_c_ends_a_save_and_no_other_signal() -> None:
    with ThreadPoolExecutor(len(SECOND)) as pool:  # each spends its time in sleeps
        list(pool.map(lambda case: check_second(*case), SECOND.values()))


def check_second(sent: list[signal.Signals | float], is_ended: bool) -> None:
    saving = SAVING.format(seconds=600 if is_ended else 2.5)
    process = started(saving, repeat=60 if 0.05 in sent else 0.3)
    assert process.stdout.readline() == "listens\n"
    for step in sent:
        if isinstance(step, float):
            time.sleep(step)
        else:
            process.send_signal(step)
    printed, errors = process.communicate(timeout=120)
    if is_ended:
        assert (printed, errors) == ("saving\n", "ended at once by a second SIGINT\n"), sent
        assert process.returncode > 128
    else:
        assert (printed, errors, process.returncode) == ("saving\nremoved\n", "", 0), sent


def test_a_signal_after_the_save_changes_nothing() -> None:
    """The work is done: the exit status stays 0, which a scheduler may look at."""
    process = started(SAVING.format(seconds=0).replace("sleep(0.2)", "sleep(1.5)"))
    assert process.stdout.readline() == "listens\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "saving\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=120) == ("removed\n", "")
    assert process.returncode == 0

"""Runs that are stopped by signals and resume from what they saved."""

import random
import re
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.support.interrupted.kills import SECONDS_TO_END, newest_step
from tests.support.tiny_run import Started, start, wait_for

SECONDS_TO_SAVE = 90  # on a machine that does other things, too
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Stop:
    """A signal to all processes of the command, as a terminal or a scheduler sends it, or to the
    first alone, `delay` seconds after `when`: the "start" of the launch, the "step" after the newest
    checkpoint, the next "save" or the next "evaluation"."""

    number: signal.Signals
    when: str
    delay: float
    to_all: bool = False


def draw_stops(seed: int, count: int) -> list[Stop]:
    """Draw stops from a seed: each signal equally often, at every kind of moment."""
    rng = random.Random(seed)
    longest = {"start": 12.0, "step": 1.0, "save": 0.05, "evaluation": 0.3}
    kinds = ["step", "save", "evaluation", "step", "start"]
    stops = []
    for i in range(count):
        when = kinds[i % len(kinds)]
        stops.append(Stop(SIGNALS[i % 4], when, rng.uniform(0, longest[when]), rng.random() < 0.5))
    return stops


def run_with_stops(
    arguments: Sequence[str], save: Path, stops: Sequence[Stop], processes: int
) -> dict[str, int]:
    """`cogfast WORDS`, an endless run, again after each signal. Returns how many stops were before
    training began and how many saved."""
    counts = {"before training": 0, "saved": 0}
    for stop in stops:
        before = newest_step(save)
        is_fresh = stop.when == "start"
        process = start([*arguments, "--resume", "auto"], processes, is_fresh)
        everything, output = stop_now(process, stop, save, before, processes)
        _, alive = psutil.wait_procs(everything, timeout=SECONDS_TO_END)
        assert not alive, f"{stop}, and {alive} stayed"
        ours = output.partition("torch/distributed/run.py")[0] if processes > 1 else output
        ours = ours.replace("Traceback (most recent call last):", "", int(processes > 1))
        assert "Traceback" not in ours, f"{stop}\n{output}"
        found = re.search(r"stopped at step (\d+) of \d+ by (\w+)", output)
        if found is not None:
            counts["saved"] += 1
            assert newest_step(save) == int(found[1]), f"{stop}\n{output}"
            # torchrun ends with 1 after a signal of its own.
            status = int(processes > 1 and stop.number != signal.SIGUSR1)
            assert (found[2], process.returncode) == (stop.number.name, status), output
        elif stop.when == "start":
            counts["before training"] += 1
            assert newest_step(save) == before
            assert is_early_end(output, stop), f"{stop}\n{output}"
        else:
            raise AssertionError(f"{stop} was not heard\n{output}")
    return counts


def is_early_end(output: str, stop: Stop) -> bool:
    """One line of cogfast; none if the signal came before Python had read its first file."""
    lines = [line for line in output.splitlines() if line.startswith("cogfast: ")]
    wanted = f"cogfast: ended by {stop.number.name} before training began"
    return len(lines) <= 1 and all(line.startswith(wanted) for line in lines)


def stop_now(
    process: Started, stop: Stop, save: Path, before: int, processes: int
) -> tuple[list[psutil.Process], str]:
    """Send the signal at its moment; returns the processes that there were, and the output."""
    first = psutil.Process(process.pid)
    if stop.when == "start":
        # Before a signal can be handled at all, Python itself starts.
        wait_for(lambda: len(first.memory_maps()) > 30, process)
        time.sleep(0.5)
    else:
        folders = {
            "step": lambda: newest_step(save) > before,
            "save": lambda: any(save.glob("*/checkpoints/*.incomplete")),
            "evaluation": lambda: newest_sample(save) > before,
        }
        wait_for(folders[stop.when], process, pause=0.002)
    time.sleep(stop.delay)
    if stop.number == signal.SIGUSR1 and processes > 1:
        # torchrun may still be starting on a busy machine.
        wait_for(lambda: len(first.children()) == processes, process)
    ranks = first.children()
    everything = [first, *first.children(recursive=True)]
    targets = everything if stop.to_all else [first]
    if stop.number == signal.SIGUSR1 and processes > 1:
        targets = ranks  # torchrun passes it on only where its command says so
    for target in targets:
        with suppress(
            psutil.NoSuchProcess
        ):  # it may end by itself, or by the signal to another one
            target.send_signal(stop.number)
    output, _ = process.communicate(timeout=SECONDS_TO_SAVE)
    return everything, output


def newest_sample(save: Path) -> int:
    """The last step whose evaluation has begun to write videos."""
    return max((int(path.name[5:]) for path in save.glob("*/samples/step-*")), default=0)

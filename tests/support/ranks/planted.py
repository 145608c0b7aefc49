"""Runs with a stop or an error planted before a collective (planted_ranks.py), and how they end."""

import dataclasses
import json
import math
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from tests.support.ranks.forked import start_ranks
from tests.support.ranks.planted_ranks import Case, Plant
from tests.support.tiny_run import free_port

# Seconds in which a case must end on a free machine. A busy one may need longer: so many seconds without
# any work are a hang.
LIMIT = 30.0
# Seconds for the other ranks after one has ended. Under torchrun they get SIGTERM then.
AFTER_FIRST = 12.0


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """statuses: of the ranks, None if the launcher had to end it. seconds: until the last one ended."""

    statuses: list[int | None]
    seconds: float
    output: str

    @property
    def hangs(self) -> bool:
        return all(status is None for status in self.statuses)


def run_case(case: Case, processes: int) -> Outcome:
    program = ["tests/support/ranks/planted_ranks.py", json.dumps(dataclasses.asdict(case))]
    with tempfile.NamedTemporaryFile() as output:
        ranks = start_ranks(program, processes, free_port(), output.name)
        start = time.monotonic()
        alive = {rank.sentinel: rank for rank in ranks}
        end, worked, last = math.inf, 0.0, start
        while alive and time.monotonic() < min(end, last + LIMIT):
            for sentinel in wait(alive, 1.0):
                alive.pop(sentinel).join()
                end = min(end, time.monotonic() + AFTER_FIRST)
            now = sum(map(_cpu_seconds, alive.values()))
            if now > worked + 0.1 or now < worked:
                worked, last = now, time.monotonic()
        seconds = time.monotonic() - start
        statuses = [rank.exitcode for rank in ranks]
        for rank in alive.values():
            rank.kill()
            rank.join()
        return Outcome(statuses, seconds, Path(output.name).read_text(errors="replace"))


def _cpu_seconds(rank: BaseProcess) -> float:
    try:
        used = psutil.Process(rank.pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return used.user + used.system


def run_cases(cases: Sequence[Case], processes: int, at_once: int = 2) -> list[Outcome]:
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda case: run_case(case, processes), cases))


def calls_of(words: Sequence[str], record: Path, processes: int) -> list[dict[str, list[str]]]:
    """Return the calls of each rank in a run without a plant, {thread: places}."""
    outcome = run_case(Case(list(words), str(record)), processes)
    assert outcome.statuses == [0] * processes, outcome
    return [json.loads(Path(f"{record}-{rank}.json").read_text()) for rank in range(processes)]


def plants_of(calls: Sequence[dict[str, list[str]]]) -> dict[Plant, str]:
    """Return the plants of a run with these calls, each with the place of its call: a stop and an
    error on each rank, at the first and the last call of each place."""
    found = {}
    for rank, threads in enumerate(calls):
        for thread, places in threads.items():
            first = {place: i for i, place in reversed(list(enumerate(places)))}
            last = {place: i for i, place in enumerate(places)}
            for number in sorted({*first.values(), *last.values()}):
                for kind in ("error",) if thread.endswith("work") else ("stop", "error"):
                    found[Plant(rank, thread, number, kind)] = places[number]
    return found

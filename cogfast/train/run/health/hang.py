"""Ends a run in which a rank makes no progress, and names that rank (args.hang_minutes).

A thread of every rank publishes its progress in torchrun's store. A rank that waits in a collective
makes no progress either; the rank behind all others, or one whose thread is silent, is to blame.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.distributed.process_watch import tell_torchrun
from cogfast.train.run.health.progress import Progress

logger = logging.getLogger(__name__)

_LONGEST_TICK = 2.0  # seconds between two heartbeats
_SILENT_TICKS = 4  # missed heartbeats from which on a rank may be stopped
_PATIENCE = 8.0  # seconds to wait for the stack of a rank
_FRAMES = 3  # innermost frames in the message
# Evaluations, saves and the first step, which compiles, may take long.
_LIMITED = {"data", "encode", "forward", "backward", "optimizer", "log"}
_SIGNAL = signal.SIGUSR2  # makes a rank write its stack; the others ask to stop
_VERDICT = "hang/verdict"  # key in the store; its value is a list of ranks


@dataclass(frozen=True)
class State:
    """A rank's progress when it sent heartbeat `beat`. age: seconds in the phase."""

    step: int
    phase: str
    num_moves: int
    age: float
    is_limited: bool
    beat: int = 0


def blame(states: Sequence[State], silent: Sequence[float], limit: float, tick: float) -> list[int]:
    """Return the ranks that have made no progress for `limit` seconds, without those that wait for them.

    silent: seconds since each rank's last heartbeat.
    """
    # A silent rank's state is old: it decides nothing until the rank counts as stopped.
    if max(silent) > _SILENT_TICKS * tick:
        return [rank for rank, seconds in enumerate(silent) if seconds >= limit]
    last = min(state.num_moves for state in states)
    return [
        rank
        for rank, state in enumerate(states)
        if state.num_moves == last and state.is_limited and state.age >= limit
    ]


class HangWatch:
    """Watches the progress of all ranks in its block. minutes: the limit; 0: no watch.

    folder: the run's; stacks go into hang/rank-N.txt in it.
    """

    def __init__(
        self, progress: Progress, groups: ProcessGroups, folder: Path, minutes: float
    ) -> None:
        self.progress, self.groups, self.folder = progress, groups, folder / "hang"
        self.minutes, self.limit = minutes, 60 * minutes
        self.tick = min(_LONGEST_TICK, self.limit / 6)
        self.first_step, self.beat = 0, 0
        self._store: Any = None if groups.watch is None else groups.watch.store
        self._machines = (
            {"here": {0: os.getpid()}} if groups.watch is None else groups.watch.machines
        )
        self._own: dict[str, bytes] = {}  # the store of a single process
        self._heard: dict[int, tuple[int, float]] = {}  # {rank: (beat, when it was first seen)}
        self._is_over = Event()
        self._thread: Thread | None = None
        self._file: Any = None
        self._num_bytes = 0  # of the file, without a stack

    def __enter__(self) -> HangWatch:
        if self.minutes == 0:
            return self
        if self._store is None and self.groups.world_size > 1:
            logger.warning("args.hang_minutes needs torchrun, which did not start these ranks")
            return self
        self.first_step = self.progress.step
        self.groups.on_main(lambda: self.folder.mkdir(exist_ok=True))
        self.folder.mkdir(parents=True, exist_ok=True)  # another machine may have its own disk
        self._file = open(self._stack_file(self.groups.rank), "w+b")  # noqa: SIM115 - until the end
        self.progress.share(self._file)
        self._num_bytes = self._file.tell()
        # In C, so that it works while the main thread holds Python's lock.
        faulthandler.register(_SIGNAL, file=self._file, all_threads=True)
        self._publish()
        # Every rank has a state from here on: reading one that is missing would block.
        self.groups.gather(None)
        self._thread = Thread(target=self._watch, name="hang watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._thread is None:
            return
        self._is_over.set()
        self._thread.join()
        faulthandler.unregister(_SIGNAL)
        self.progress.unshare()
        self._file.close()
        file = self._stack_file(self.groups.rank)
        with contextlib.suppress(OSError):  # the last rank removes the folder
            if file.stat().st_size == self._num_bytes:
                file.unlink()
            self.folder.rmdir()

    def _watch(self) -> None:
        while not self._is_over.wait(self.tick):
            try:
                self._publish()
                verdict = self._get(_VERDICT) or self._judge()
            except RuntimeError:  # the store is gone, which ProcessWatch reports
                return
            if verdict:
                self._end(json.loads(verdict))

    def _publish(self) -> None:
        self.beat += 1
        progress = self.progress
        is_limited = progress.phase in _LIMITED and progress.step > self.first_step
        age = time.monotonic() - progress.entered
        state = State(progress.step, progress.phase, progress.num_moves, age, is_limited, self.beat)
        self._set(f"hang/state/{self.groups.rank}", json.dumps(asdict(state)))

    def _judge(self) -> bytes | None:
        """Look at all ranks if this one makes no progress; store who is to blame for all to read."""
        now = time.monotonic()
        age = now - self.progress.entered
        if age < 2 * self.tick:
            self._heard.clear()
            return None
        states = self._states()
        for rank, state in enumerate(states):
            if rank not in self._heard or self._heard[rank][0] != state.beat:
                self._heard[rank] = state.beat, now
        silent = [now - self._heard[rank][1] for rank in range(len(states))]
        blamed = blame(states, silent, self.limit, self.tick) if age >= self.limit else []
        if blamed:
            self._set(_VERDICT, json.dumps(blamed))
        return self._get(_VERDICT)

    def _states(self) -> list[State]:
        keys = [f"hang/state/{rank}" for rank in range(self.groups.world_size)]
        return [State(**json.loads(self._get(key) or b"{}")) for key in keys]

    def _end(self, blamed: list[int]) -> None:
        """Name the blamed ranks, kill those of this machine, and end this process."""
        rank, parts = self.groups.rank, []
        here = next(ranks for ranks in self._machines.values() if rank in ranks)
        helper = min((r for r in here if r not in blamed), default=rank)
        mine = [r for r in blamed if r in here] if rank == helper else []
        for other in mine:
            self._set(f"hang/stack/{other}", self._stack_of(here[other], self._stack_file(other)))
        end = time.monotonic() + _PATIENCE
        for other in blamed:
            where = self._get(f"hang/stack/{other}")
            while where is None and time.monotonic() < end:
                time.sleep(0.1)
                where = self._get(f"hang/stack/{other}")
            parts.append(f"rank {other} ({(where or b'no stack').decode()})")
        reason = (
            f"no progress for args.hang_minutes={self.minutes:g}: {'; '.join(parts)}; stacks are in "
            f"{self.folder}"
        )
        with contextlib.suppress(OSError):  # torchrun removed its folder, or the disk is full
            tell_torchrun(reason)
        sys.stderr.write(f"cogfast: rank {rank} ends: {reason}\n")
        sys.stderr.flush()
        for other in mine:
            if other != rank:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(here[other], signal.SIGKILL)
        os._exit(1)  # nothing else interrupts the main thread, which is in a collective

    def _stack_of(self, pid: int, file: Path) -> str:
        """Make a process of this machine write its stack; return step, phase and innermost frames."""
        end, place = time.monotonic() + _PATIENCE / 2, ""
        try:
            # First, since a stopped process runs again below. Its last heartbeat is older.
            place = file.read_bytes()[: self._num_bytes].decode(errors="replace").strip()
            os.kill(pid, _SIGNAL)
            os.kill(pid, signal.SIGCONT)  # a stopped process writes nothing
            while file.stat().st_size == self._num_bytes and time.monotonic() < end:
                time.sleep(0.1)
            time.sleep(0.2)
            return f"{place}: {innermost(file.read_text(errors='replace')) or 'no stack'}"
        except OSError as error:
            return f"{place}: no stack, {error.strerror}"

    def _stack_file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank}.txt"

    def _set(self, key: str, value: str) -> None:
        if self._store is None:
            self._own[key] = value.encode()
        else:
            self._store.set(key, value)

    def _get(self, key: str) -> bytes | None:
        if self._store is None:
            return self._own.get(key)
        return self._store.get(key) if self._store.check([key]) else None


def innermost(dump: str) -> str:
    """Return the innermost frames of the main thread in faulthandler's text, innermost first."""
    # It lists the newest thread first, and the main thread last.
    main = re.split(r"^(?:Current thread|Thread) .*$", dump, flags=re.MULTILINE)[-1]
    frames = re.findall(r'File "([^"]*)", line (\d+) in (\S+)', main)[:_FRAMES]
    return " < ".join(f"{Path(file).name}:{line} {name}" for file, line, name in frames)

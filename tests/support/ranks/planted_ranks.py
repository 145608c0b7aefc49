"""`cogfast WORDS` with a stop or an error planted before a collective of one rank:
`python tests/support/ranks/planted_ranks.py CASE`, where CASE is the JSON of a `Case`.

Every entry point of torch.distributed is counted, in the main thread and in the threads that write
checkpoints. Without a plant, the rank writes the places of its calls to `record`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cogfast.__main__ import main as cogfast
from cogfast.distributed import context_parallel, tensor_parallel
from cogfast.distributed.process_groups import ProcessGroups

ENTRIES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "init_process_group",
    "new_group",
    "new_subgroups_by_enumeration",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
# Functions by which a call belongs to a part of a run; the innermost of them counts.
PARTS = {
    "evaluate._held_out_loss": "held-out loss",
    "evaluate._sample": "samples",
    "trainer._evaluate": "evaluation",
    "trainer._save": "save",
    "write._write_all": "save",
    "command._fill": "cache",
    # StopRequest's: a stop before it listens ends a rank, and so the run, without a checkpoint.
    "process_groups.__enter__": "start",
    "trainer.train": "step",
}


@dataclass(frozen=True, slots=True)
class Plant:
    """A fault on `rank` before its call `number` in a thread: "stop" is SIGUSR1, "error" an error
    of the call. thread: "main" or "checkpoint", with " work" for calls of `ProcessGroups.agree`: an
    "error" there is one of the work before it."""

    rank: int
    thread: str
    number: int
    kind: str


@dataclass(frozen=True, slots=True)
class Case:
    words: list[str]
    record: str
    plant: Plant | None = None

    @staticmethod
    def from_json(text: str) -> Case:
        fields = json.loads(text)
        plant = fields.pop("plant")
        return Case(**fields, plant=None if plant is None else Plant(**plant))


class Counter:
    """Counts calls by thread, and plants the case's fault before one of them."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.calls: dict[str, list[str]] = {}  # places of the calls of each thread, in order
        self.rank = int(os.environ["RANK"])
        self.is_nested = threading.local()

    def wrapped(self, name: str, call: Callable) -> Callable:
        def counted(*args: object, **named: object) -> object:
            # Some of torch's own collectives call others.
            if getattr(self.is_nested, "value", False):
                return call(*args, **named)
            error = self.before(name)
            if error is not None:
                if name != "agree":
                    raise_as_cogfast(error)
                args = (args[0], error if args[1] is None else args[1])
            self.is_nested.value = name != "agree"
            try:
                return call(*args, **named)
            finally:
                self.is_nested.value = False

        return counted

    def before(self, name: str) -> RuntimeError | None:
        thread = thread_kind() + " work" * (name == "agree")
        plant, calls = self.case.plant, self.calls.setdefault(thread, [])
        calls.append(f"{place()} {name}")
        number = len(calls) - 1
        if plant is None or (plant.rank, plant.thread, plant.number) != (self.rank, thread, number):
            return None
        print(f"planted on rank {self.rank} before {calls[-1]}", file=sys.stderr, flush=True)
        if plant.kind == "stop":
            os.kill(os.getpid(), signal.SIGUSR1)
            return None
        return RuntimeError(f"planted on rank {self.rank} before {calls[-1]}")


def thread_kind() -> str:
    return "checkpoint" if threading.current_thread().name.startswith("checkpoint") else "main"


def place() -> str:
    """Return the part of the run, and the line outside of process_groups.py that leads to the call."""
    frame, line, part = sys._getframe(), "", "start"
    while frame is not None:
        stem = Path(frame.f_code.co_filename).stem
        if "/cogfast/" in frame.f_code.co_filename:
            if not line and stem != "process_groups":
                line = f"{stem}.py:{frame.f_lineno}"
            if f"{stem}.{frame.f_code.co_name}" in PARTS:
                part = PARTS[f"{stem}.{frame.f_code.co_name}"]
                break
        frame = frame.f_back
    return f"{part}: {line}"


# Errors that cogfast itself raises are printed in one line.
_COGFAST: dict[str, Any] = {"__name__": "cogfast.planted"}
exec("def raise_as_cogfast(error): raise error", _COGFAST)
raise_as_cogfast = _COGFAST["raise_as_cogfast"]


class CountedOps:
    """torch.ops._c10d_functional, which tensor and context parallelism call."""

    def __init__(self, counter: Counter, ops: object) -> None:
        self._counter, self._ops = counter, ops

    def __getattr__(self, name: str) -> Callable:
        call = getattr(self._ops, name)
        return call if "wait" in name else self._counter.wrapped(name, call)


def main() -> None:
    case = Case.from_json(sys.argv[1])
    counter = Counter(case)
    ProcessGroups.agree = counter.wrapped("agree", ProcessGroups.agree)
    for name in ENTRIES:
        setattr(dist, name, counter.wrapped(name, getattr(dist, name)))
    for module in (tensor_parallel, context_parallel):
        module._ops = CountedOps(counter, module._ops)
    sys.argv = ["cogfast", *case.words]
    try:
        status = cogfast()
    finally:
        if case.plant is None:
            with open(f"{case.record}-{counter.rank}.json", "w") as file:
                json.dump(counter.calls, file)
    sys.exit(status)


if __name__ == "__main__":
    main()

"""A rank that waits forever ends when another rank, or the store of the first torchrun, is gone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cogfast.train.distributed.process_watch import is_of_another_rank
from tests.support.tiny_run import ROOT, launch_ranks

WAITING = """
import os, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from cogfast.train.distributed import process_watch
process_watch._INTERVAL, process_watch._GRACE, process_watch._SILENCE = 0.1, 0.5, 2.0
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timedelta(seconds=20))
machines = {"here": {0: os.getpid(), 1: int(sys.argv[2])}}
if sys.argv[3] == "listens":
    machines["there"] = {2: 0, 3: 0}
watch = process_watch.ProcessWatch(0, machines, store)
if sys.argv[3] == "left":
    watch.stop()
print("waits", flush=True)
time.sleep(2 if sys.argv[3] == "left" else 60)
"""


def waiting(port: int, sibling: int, how: str = "stays") -> subprocess.Popen:
    """Start a rank 0 that is in a collective that does not end."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(port), str(sibling), how],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "waits\n"
    return process


def test_a_rank_that_waits_for_a_dead_one_ends() -> None:
    """A rank on the same machine reports it to other machines, which cannot see its process."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    sibling = subprocess.Popen(["sleep", "60"])
    near, far = waiting(store.port, sibling.pid), waiting(store.port, os.getpid())
    left = waiting(store.port, sibling.pid, "left")
    time.sleep(0.5)
    assert near.poll() is None and far.poll() is None
    sibling.kill()
    sibling.wait()
    for process in (near, far):
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.endswith("cogfast: rank 0 ends: rank 1 is gone\n")
    _, errors = left.communicate(timeout=20)  # it has left the others in peace
    assert (left.returncode, errors) == (0, "")


def test_a_rank_ends_when_a_machine_falls_silent() -> None:
    """No process is left to report it; machines whose heartbeat counts up are fine."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rank = waiting(store.port, os.getpid(), "listens")
    end = time.monotonic() + 3
    while time.monotonic() < end:
        store.add("there", 1)
        time.sleep(0.1)
    assert rank.poll() is None
    _, errors = rank.communicate(timeout=20)
    assert rank.returncode == 1
    assert errors.endswith("cogfast: rank 0 ends: no heartbeat from ranks 2, 3 (there)\n")


def test_a_rank_ends_when_the_first_torchrun_is_gone() -> None:
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import time; from torch.distributed import TCPStore; "
            "s = TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
            "print(s.port, flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    rank = waiting(int(server.stdout.readline()), os.getpid())
    server.kill()
    server.wait()
    _, errors = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert errors.endswith("cogfast: rank 0 ends: the store of the first torchrun is gone\n")


STARTING = """
import sys, time
import cogfast.__main__ as command
from cogfast.train.distributed import process_watch
process_watch._INTERVAL = 0.1

def train(arguments):
    print("imports", "torch" in sys.modules, flush=True)
    time.sleep(60)

command._COMMANDS["train"] = train
command.main(["train"])
"""


def test_a_rank_ends_when_its_torchrun_is_gone_before_it_joined(tmp_path: Path) -> None:
    """The rank watches before it imports torch, and so before it can wait for the store."""
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])",
            STARTING,
        ],
        cwd=ROOT,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "1", "RANK": "3"},
        stdout=subprocess.PIPE,
        stderr=(tmp_path / "errors").open("w"),
        text=True,
    )
    assert launcher.stdout.readline() == "imports False\n"
    launcher.kill()
    assert launcher.stdout.read() == ""  # to its end, when the rank has closed it, too
    assert (tmp_path / "errors").read_text() == "cogfast: rank 3 ends: torchrun is gone\n"


LOST = {
    "closed": "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:552] Connection closed by peer [127.0.0.1]:1",
    "closed, without its place": "Connection closed by peer [127.0.0.1]:28102",
    "reset": "[../pair.cc:537] Read error [127.0.0.1]:26025: Connection reset by peer.",
    "late": "[../unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
    "late pair": "Application timeout caused pair closure",
    "of a step": "[enforce fail at /pytorch/third_party/gloo/gloo/allreduce.cc:12] ptr != nullptr",
}


@pytest.mark.parametrize("case", LOST)
def test_a_broken_connection_is_of_another_rank(case: str) -> None:
    """The cause is found if a library wrapped the error or raised another one while it cleaned up."""
    error = RuntimeError(LOST[case])
    assert is_of_another_rank(error)
    wrapped = RuntimeError("cannot reduce the gradients")
    wrapped.__cause__ = error
    assert is_of_another_rank(wrapped)
    try:
        try:
            raise error
        finally:
            {}["a handle that is gone"]
    except KeyError as met:
        assert is_of_another_rank(met)


def test_errors_of_this_rank_are_its_own() -> None:
    import torch.distributed as dist

    assert is_of_another_rank(dist.DistBackendError("NCCL error: remote process exited"))
    own = (
        RuntimeError("CUDA out of memory"),
        OSError(32, "Broken pipe"),
        ValueError("closed by peer.mp4 is no video"),
    )
    assert not any(map(is_of_another_rank, own))


ONE_IS_LATE = """
import sys, time, torch
import torch.distributed as dist
from cogfast.train.distributed.process_groups import start_processes
groups = start_processes(timeout_s=2)
if groups.is_main:
    try:
        dist.all_reduce(torch.zeros(1))
    except RuntimeError as error:
        print("ends:", error, flush=True)
dist.barrier(groups.control)
"""


def test_a_collective_waits_as_long_as_it_is_given() -> None:
    """Decisions, whose group has its own limit, still work after that."""
    done = launch_ranks(2, "-c", ONE_IS_LATE)
    assert re.search(r"ends: .*(timed? ?out|timeout).*2000 ?ms", done, re.IGNORECASE), done

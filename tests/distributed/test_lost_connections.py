"""A rank ends with its torchrun or when another one stops, and knows a connection that a rank has broken."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cogfast.distributed import lost_ranks
from cogfast.distributed.lost_ranks import is_of_another_rank
from tests.support.ranks.forked import run_forked, start_ranks
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import ROOT, free_port, launch_ranks

STARTING = """
import sys, time
import cogfast.__main__ as command

def train(arguments):
    print("imports", "torch" in sys.modules, flush=True)
    time.sleep(60)

command._COMMANDS["train"] = train
command.main(["train"])
"""


PORTS = "from tests.support.tiny_run import *; print([free_port() for _ in range(50)], flush=True); input()"


def test_no_two_launches_of_tests_are_given_one_port() -> None:
    """Processes test at the same time, and none of their launches listens yet. Connections have other ports."""
    command, pipe = [sys.executable, "-c", PORTS], subprocess.PIPE
    start = lambda: subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
    with start() as one, start() as other:
        ports = [json.loads(process.stdout.readline()) for process in (one, other)]
        ports = [*ports[0], *ports[1], *(free_port() for _ in range(50))]
        one.communicate("\n")
        other.communicate("\n")
    assert len({*ports}) == 150 and max(ports) < 32_768


def test_a_rank_that_starts_without_its_torchrun_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun may be killed before the rank asks to end with it: no store listens any more."""
    from torch.distributed import TCPStore

    monkeypatch.setattr(lost_ranks, "_SECONDS_TO_STORE", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    lost_ranks.check_store()  # not started by torchrun
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    line = "torchrun's store at 127.0.0.1:<...>: torchrun has ended"
    assert_refused(lost_ranks.check_store, line, RuntimeError)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    lost_ranks.check_store()
    store.set("rank", "0")  # it serves others as before
    assert store.get("rank") == b"0"


def test_a_rank_ends_when_its_torchrun_is_gone_before_it_joined(tmp_path: Path) -> None:
    """Before it imports torch, and so before it can wait for the store."""
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
    assert (tmp_path / "errors").read_text() == ""


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
from cogfast.distributed.process_groups import start_processes
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


ONE_STOPS = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from cogfast.distributed import lost_ranks
from cogfast.distributed.process_groups import start_processes
lost_ranks._BETWEEN_BEATS, lost_ranks.SILENCE = 0.1, timedelta(seconds=2)
lost_ranks.PATIENCE = timedelta(seconds=2)
groups = start_processes()
if groups.rank == int(sys.argv[1]):
    time.sleep(3)  # work for which the other rank waits
dist.barrier(groups.control)
print("works", flush=True)
if groups.rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
groups.close()
"""


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_rank_that_stops_ends_the_other_and_long_work_does_not(tmp_path: Path, rank: int) -> None:
    output = tmp_path / "output"
    ranks = start_ranks(["-c", ONE_STOPS, str(rank)], 2, free_port(), output)
    other = ranks[1 - rank]
    other.join(120)
    ranks[rank].kill()
    ranks[rank].join()
    text = output.read_text()
    assert other.exitcode == 1 and text.count("works") == 2, text
    line = f"cogfast: rank {1 - rank} ends: rank {rank} has stopped: no sign of it for 2 s\n"
    assert line in text


ONE_ENDS = """
import os, time
from cogfast.distributed import lost_ranks
from cogfast.distributed.process_groups import start_processes
lost_ranks._BETWEEN_BEATS, lost_ranks._SECONDS_TO_FAIL = 0.1, 0.5
groups = start_processes()
groups.gather(None)
if groups.is_main:
    time.sleep(60)  # such as for a device that waits for the other rank
os._exit(7)
"""


def test_a_rank_that_does_not_notice_a_lost_one_ends(tmp_path: Path) -> None:
    output = tmp_path / "output"
    ranks = start_ranks(["-c", ONE_ENDS], 2, free_port(), output)
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [1, 7], output.read_text()
    assert "cogfast: rank 0 ends: another rank failed" in output.read_text()


TWO_IDLE = """
import os, signal, sys, time
from datetime import timedelta
from cogfast.distributed import lost_ranks
from cogfast.distributed.process_groups import start_processes
from cogfast.extensions.elastic import ranks
lost_ranks._BETWEEN_BEATS = ranks._BETWEEN_QUESTIONS = 0.1
for module in (lost_ranks, ranks):
    module.SILENCE = module.PATIENCE = timedelta(seconds=1)
launch = ranks.Ranks.join()
os.environ["WORLD_SIZE"] = "2"  # ranks 2 and 3 idle
groups = start_processes(launch=launch) if launch.rank < 2 else None
if launch.rank == int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGSTOP)
if groups is None:
    sys.exit(0 if launch.idle() else 7)
time.sleep(1.5)  # longer than a sign of a rank may take
groups.close()
"""


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.soak)])
def test_idle_ranks_end_with_rank_0_alone(tmp_path: Path, rank: int) -> None:
    """An idle rank that has stopped ends neither the run nor the other idle rank."""
    output = tmp_path / "output"
    ranks = start_ranks(["-c", TWO_IDLE, str(rank)], 4, free_port(), output)
    others = [each for number, each in enumerate(ranks) if number != rank]
    for each in others:
        each.join(30)
    ranks[rank].kill()
    ranks[rank].join()
    wanted = [0, 0, 0] if rank == 3 else [1, 7, 7]
    assert [each.exitcode for each in others] == wanted, output.read_text()


ONE_FAILS_BEFORE = """
import os, sys
from cogfast.__main__ import main
from cogfast.distributed.process_groups import OtherRankError, start_processes
if os.environ["RANK"] == sys.argv[1]:
    sys.exit(main(["train", "--base", "missing.yaml"]))
try:
    start_processes()
except OtherRankError as error:
    print(f"ends: {error}\\n", end="", flush=True)  # in one piece: ranks share the pipe
"""


@pytest.mark.parametrize("is_served", [True, False], ids=["torchrun's store", "rank 0's store"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_rank_before_the_start_ends_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, is_served: bool
) -> None:
    """Such as a file that one machine lacks. The others would wait for that rank for half an hour."""
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if is_served else None
    if store is not None:
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    port, output = free_port() if store is None else store.port, tmp_path / "output"
    ranks = start_ranks(["-c", ONE_FAILS_BEFORE, str(rank)], 3, port, output)
    for each in ranks:
        each.join(60)
    text, why = output.read_text(), "--base missing.yaml: no such file; "
    assert [each.exitcode for each in ranks] == [2 if n == rank else 0 for n in range(3)], text
    assert text.count(f"ends: rank {rank} failed: {why}") == 2, text


def test_ranks_with_different_values_end(tmp_path: Path) -> None:
    program = """
import os
from cogfast.distributed.process_groups import start_processes
groups = start_processes()
groups.check_same({"args.local_cache": os.environ["RANK"], "data.fps": float("nan")})
try:
    groups.check_same({"args.train_data": ["x" * 999, f"of {groups.rank}"]})
except Exception as error:
    print(error, flush=True)
try:
    groups.check_same({"args.seed": 1} if groups.is_main else {"args.seed": 2, "args.lr": "x" * 999})
except Exception as error:
    print(f"{groups.rank}: {type(error).__name__}: {error}", flush=True)
groups.close()
"""
    lines = launch_ranks(2, "-c", program)
    assert "1: ValueError: args.lr='xxx" in lines and "xxx, but None on rank 0; give" in lines
    assert "0: OtherRankError: rank 1 failed: ValueError: args.lr='" in lines
    assert "xxx', 'of 1'], but xxx" in lines and "xxx', 'of 0'] on rank 0; give" in lines


FAILS_AT_FIRST = """
import os, sys
from cogfast.__main__ import main
from cogfast.distributed.process_groups import start_processes
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.exit(main(["train", "--base", "missing.yaml"]))
groups = start_processes()
# One write, since both ranks print at the same time.
os.write(1, f"started {groups.gather(groups.rank)}\\n".encode())
groups.close()
"""


def test_ranks_that_torchrun_restarts_do_not_end_with_the_error_before() -> None:
    """Its store keeps what earlier ranks have written."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    program = ["--max-restarts=1", "--no-python", sys.executable, "-c", FAILS_AT_FIRST]
    done = run_forked([*torchrun, *program], timeout=120)
    assert done.returncode == 0 and done.stdout.count("started [0, 1]") == 2, done.stdout


def test_ranks_train_from_their_own_copies_of_one_address(run: Run, tmp_path: Path) -> None:
    base = run.with_args(save_interval=1).train(steps=1)
    words = [f"args.load=file://{base.path}", f"args.local_cache={tmp_path / 'cache'}"]
    two = run.into(tmp_path / "two").with_words("deepspeed.train_micro_batch_size_per_gpu=2")
    two.launch(2, *words)
    assert len(two.losses) == 4


OWN_GROUP = """
import os, sys
import torch.distributed as dist
from cogfast.__main__ import main
dist.init_process_group("gloo", init_method="tcp://127.0.0.1:" + sys.argv[1], rank=int(os.environ["RANK"]), world_size=2)
sys.exit(main(["train", "--base", "missing.yaml"]))
"""


def test_an_error_with_a_process_group_of_the_users_ends_at_once(tmp_path: Path) -> None:
    """No rank waits for them in the store, where rank 0 would wait for the others."""
    output = tmp_path / "output"
    ranks = start_ranks(["-c", OWN_GROUP, str(free_port())], 2, free_port(), output)
    for rank in ranks:
        rank.join(30)
    assert [rank.exitcode for rank in ranks] == [2, 2], output.read_text()


ONE_IS_MISSING = """
import logging
from cogfast.distributed import lost_ranks
from cogfast.distributed.process_groups import start_processes
logging.basicConfig(level=logging.INFO)
lost_ranks._BETWEEN_LINES = 0.5
start_processes(timeout_s=2)
"""


def test_a_rank_that_waits_for_others_says_so(tmp_path: Path) -> None:
    """Such as one for which a shell still has the variables of a launch."""
    output = tmp_path / "output"
    (rank, other) = start_ranks(["-c", ONE_IS_MISSING], 2, free_port(), output)
    other.kill()
    rank.join(60)
    text = output.read_text()
    assert rank.exitcode != 0 and "1 of 2 ranks have started; waiting for the others at 127" in text
    assert "OtherRankError: 1 of 2 ranks have started in 2 s" in text

"""Two torchruns of two processes each, as on two machines, connect over loopback: they train as one
process does, each ends when the other is gone, and a second launch resumes."""

import os
import re
from pathlib import Path

import psutil
import pytest
import torch

from cogfast.distributed.lost_ranks import OTHER_RANK
from tests.support.interrupted.kills import SECONDS_TO_END, newest_step
from tests.support.ranks.forked import Forked
from tests.support.runs import Run
from tests.support.tiny_run import free_port, wait_for

STEPS = 60
# Two layouts of four processes with a global batch of four.
COPIES = ["deepspeed.train_micro_batch_size_per_gpu=1"]
PAIRS = ["deepspeed.train_micro_batch_size_per_gpu=2", "args.model_parallel_size=2"]


def meeting_point(how: str, machine: int, port: int) -> list[str]:
    """Return the arguments of docs/launch.md's two kinds of rendezvous, with this host and a free port."""
    return {
        "static": [f"--node_rank={machine}", "--master_addr=127.0.0.1", f"--master_port={port}"],
        "c10d": ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{port}", "--rdzv_id=my-run"],
    }[how]


def start_machines(how: str, run: Run, processes: int = 2) -> list[Forked]:
    """Start a torchrun for each of two machines."""
    port, environment = free_port(), {**os.environ, "OMP_NUM_THREADS": "1"}
    agents = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc_per_node={processes}"]
    command = ["-m", "cogfast", *run.command("--seed", "1", "--resume", "auto")]
    return [
        Forked([*agents, *meeting_point(how, machine, port), *command], environment)
        for machine in range(2)
    ]


def wait_for_step(save: Path, step: int, machines: list[Forked]) -> None:
    def is_there() -> bool:
        for machine in machines:
            assert machine.poll() is None, machine.communicate()[0]
        return newest_step(save) >= step

    wait_for(is_there, machines[0])


def lose_the_second(machines: list[Forked]) -> None:
    """Kill one machine: the ranks of the other one end, and last print that a rank failed."""
    trees = [psutil.Process(machine.pid).children(recursive=True) for machine in machines]
    for process in (psutil.Process(machines[1].pid), *trees[1]):
        process.kill()
    _, alive = psutil.wait_procs(trees[0], timeout=SECONDS_TO_END)
    assert not alive, f"{alive} stayed behind"
    assert machines[0].wait(timeout=SECONDS_TO_END) != 0
    machines[1].wait()
    log, _ = machines[0].communicate()
    assert OTHER_RANK in log.rpartition("Root Cause")[2], log
    assert "cogfast/train/" not in log, "a traceback"


@pytest.mark.soak
def test_a_lost_machine_is_named(run: Run, tmp_path: Path) -> None:
    run = run.with_args(save_interval=1, train_iters=100_000)
    two, save = "deepspeed.train_micro_batch_size_per_gpu=2", tmp_path / "runs"
    machines = start_machines("static", run.with_words(two), processes=1)
    wait_for_step(save, 2, machines)
    lose_the_second(machines)


@pytest.mark.soak
def test_two_machines_train_lose_one_and_resume(run: Run, tmp_path: Path) -> None:
    """One kind of rendezvous trains with dp 4, the other with dp 2 x tp 2. Both reach the last step
    with the losses of one uninterrupted process."""
    run, save = run.with_args(train_iters=STEPS, save_interval=4, seed=1), tmp_path / "runs"
    machines = start_machines("static", run.with_words(*COPIES))
    wait_for_step(save, 4, machines)
    lose_the_second(machines)

    stopped = newest_step(save)
    assert 4 <= stopped < STEPS, "the run was over before machine 1 was gone"
    machines = start_machines("c10d", run.with_words(*PAIRS))
    logs = "".join(machine.communicate(timeout=240)[0] for machine in machines)
    assert [machine.returncode for machine in machines] == [0, 0], logs
    assert "4 processes (dp 2 x tp 2)" in logs
    assert re.search(rf"steps +{stopped} to {STEPS}\n", logs)

    found, wanted = run.losses, run.into(tmp_path / "one").train().losses
    assert len(found) == STEPS
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)

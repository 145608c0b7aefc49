"""args.elastic with real torchruns on loopback: machines are lost and come back, and the run continues with
the weights, bit for bit, of runs that were started with these ranks from these checkpoints."""

import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
import torch

from cogfast.extensions.stores import store
from cogfast.model.weights.checkpoint_manifest import newest_checkpoint
from tests.support.interrupted.kills import newest_step
from tests.support.ranks.forked import Forked
from tests.support.runs import Run
from tests.support.s3_server import s3_server
from tests.support.tiny_run import (
    assert_same,
    free_port,
    launch_ranks,
    read_run_weights,
    write_clips,
)

pytestmark = pytest.mark.soak

# The settings that docs/launch.md recommends
SETTINGS = "keep_alive_interval=2,keep_alive_max_attempt=3,last_call_timeout=5"
STORE = """
import signal, sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
signal.pause()
"""
MICRO = "deepspeed.train_micro_batch_size_per_gpu"


class Cluster:
    """torchruns of one launch, whose rendezvous is in the first of them or in a process of its own."""

    def __init__(self, folder: Path, words: Sequence[str], nodes: str, has_store: bool = False):
        self.folder, self.nodes = folder, nodes
        self.save: Path | str = folder / "runs"
        run = Run(write_clips(folder / "data"), folder).with_words(*words)
        self.words = run.with_args(save_interval=2, keep_last=0, seed=1).command()
        self.port, self.settings = free_port(), SETTINGS
        self.machines: list[Forked] = []
        self.store: Forked | None = None
        if has_store:
            self.store = Forked(["-c", STORE, str(self.port)], os.environ)
            self.settings += ",is_host=0"

    def add(self, processes: int = 2, is_first: bool = False) -> Forked:
        """Start a torchrun with so many ranks. is_first: they come before those of all others."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = ["-m", "torch.distributed.run", f"--nnodes={self.nodes}", "--rdzv_id=run"]
        command += [f"--nproc_per_node={processes}", "--max_restarts=5", "--rdzv_backend=c10d"]
        command += [f"--rdzv_endpoint=127.0.0.1:{self.port}", f"--rdzv_conf={self.settings}"]
        # torchrun orders machines by their addresses.
        command.append(f"--local_addr=127.0.0.{1 if is_first else 2 + len(self.machines)}")
        words = ["-m", "cogfast", *self.words, f"args.save={self.save}"]
        self.machines.append(Forked([*command, *words], environment))
        time.sleep(1.0)  # so that the first one hosts the rendezvous
        return self.machines[-1]

    def log(self) -> str:
        files = (Path(machine._output.name) for machine in self.machines)
        return "\n=====\n".join(file.read_text(errors="replace") for file in files)

    def wait(self, what: Callable[[], object], seconds: float = 90) -> None:
        end = time.monotonic() + seconds
        while not what():
            if time.monotonic() > end:
                raise AssertionError(f"timed out:\n{self.log()}")
            time.sleep(0.05)

    def wait_for_save(self) -> None:
        """Wait for two more checkpoints."""
        step = newest_step(self.save)
        self.wait(lambda: newest_step(self.save) >= step + 4)

    def wait_for_end(self, *machines: int) -> None:
        self.wait(lambda: all(self.machines[m].poll() is not None for m in machines))
        assert not any(self.machines[m].returncode for m in machines), self.log()

    def kill(self, machine: int) -> None:
        """kill -9 of a torchrun alone: its ranks end with it."""
        ranks = psutil.Process(self.machines[machine].pid).children(recursive=True)
        psutil.Process(self.machines[machine].pid).kill()
        _, alive = psutil.wait_procs(ranks, timeout=10)
        assert not alive

    def close(self) -> None:
        for process in [*self.machines, *([self.store] if self.store else [])]:
            if process.poll() is None:
                tree = psutil.Process(process.pid)
                for each in [tree, *tree.children(recursive=True)]:
                    each.kill()

    def continued_by_hand(
        self, ranks: int, start: str, steps: int, words: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Return the weights of a run on `ranks` ranks, without args.elastic, from a copy of a checkpoint."""
        copy = self.folder / f"by-hand-{start}"
        shutil.copytree(self.checkpoint(start), copy / "checkpoints" / start)
        (copy / "checkpoints" / "latest").write_text(start)
        own = [f"args.run_folder={copy}", f"args.train_iters={steps}", "args.elastic=off"]
        words = ["-m", "cogfast", *self.words, *own, *words, "--resume", "latest"]
        launch_ranks(ranks, *words)
        return read_run_weights(newest_checkpoint(copy))

    def weights(self, step: str) -> dict[str, torch.Tensor]:
        return read_run_weights(self.checkpoint(step))

    def checkpoint(self, step: str) -> Path:
        # A machine that joins while the first one starts ends that run, whose folder has no checkpoint.
        (found,) = Path(self.save).glob(f"*/checkpoints/{step}")
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*words: str, nodes: str = "1:2", has_store: bool = False) -> Cluster:
        made.append(Cluster(tmp_path, words, nodes, has_store))
        return made[-1]

    yield make
    for one in made:
        one.close()


def resumed(log: str) -> list[str]:
    """The names of the checkpoints from which a run has resumed."""
    return re.findall(r"resumed .*/(\d+) at step", log)


LAYOUTS = {
    "dp 4": (f"{MICRO}=1",),
    "ZeRO-3": (f"{MICRO}=1", "args.zero_stage=3"),
    "tp 2": (f"{MICRO}=2", "args.model_parallel_size=2"),
    "cp 2": (f"{MICRO}=2", "args.context_parallel_size=2"),
}


TWICE = ["args.gradient_accumulation_steps=2"]  # on the two ranks that are left


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lost_machine_comes_back(cluster: Callable[..., Cluster], layout: str) -> None:
    pair = cluster(*LAYOUTS[layout], "args.elastic=shrink", "args.train_iters=100000")
    pair.add(), pair.add()
    pair.wait_for_save()
    killed = time.monotonic()
    pair.kill(1)
    pair.wait(lambda: len(resumed(pair.log())) == 1)
    pair.wait(lambda: "\nstep " in pair.log().rpartition("resumed")[2])
    print(
        f"{layout}: trains again {time.monotonic() - killed:.1f} s after the kill", file=sys.stderr
    )
    assert "args.elastic=shrink: 2 ranks train, 4 before; global batch 4 = dp" in pair.log()
    pair.wait_for_save()
    pair.add(is_first=True)  # rank 0 moves to it
    pair.wait(lambda: len(resumed(pair.log())) == 2)
    first, second = resumed(pair.log())
    pair.wait_for_save()
    assert "args.elastic=shrink: 4 ranks train, 2 before" in pair.log()
    assert_same(pair.weights(second), pair.continued_by_hand(2, first, int(second), TWICE))
    last = f"{newest_step(pair.save):08d}"
    assert_same(pair.weights(last), pair.continued_by_hand(4, second, int(last), ()))


def test_a_lost_machine_of_a_run_in_a_store(
    cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two machines whose only common place is the store. That of rank 0 is lost."""
    with s3_server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        pair = cluster(f"{MICRO}=1", "args.elastic=shrink", "args.train_iters=100000")
        pair.save = f"{server.url}/runs"
        for machine in range(2):
            monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / f"cache-{machine}"))
            pair.add(is_first=machine == 1)
        pair.wait(lambda: len(saved(pair.save)) > 1)
        killed = time.monotonic()
        pair.kill(1)
        left = Path(pair.machines[0]._output.name)
        pair.wait(lambda: "\nstep " in left.read_text())
        print(f"trains again {time.monotonic() - killed:.1f} s after the kill", file=sys.stderr)
        (start,) = resumed(pair.log())
        last = saved(pair.save)[-1]
        pair.wait(lambda: saved(pair.save)[-1] > last)
        assert "args.elastic=shrink: 2 ranks train, 4 before; global batch 4 = dp" in pair.log()
        pair.close()
        last = saved(pair.save)[-1]
        pair.save = tmp_path / "copy"
        for url in store.find(f"{server.url}/runs"):
            file = pair.save / url.removeprefix(f"{server.url}/runs/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(store.read(url))
        assert_same(pair.weights(last), pair.continued_by_hand(2, start, int(last), TWICE))


def saved(url: str) -> list[str]:
    """The names of the complete checkpoints in a store."""
    return sorted(re.findall(r"(\d+)/manifest.json", "\n".join(store.find(url))))


def test_the_machine_of_rank_0_is_lost_and_the_idle_one_continues(
    cluster: Callable[..., Cluster],
) -> None:
    """The rendezvous is in a process of its own. The second machine's rank idles at first."""
    words = (f"{MICRO}=1", "deepspeed.train_batch_size=4", "args.elastic=shrink")
    pair = cluster(*words, "args.train_iters=60", has_store=True)
    pair.add(2), pair.add(1)
    pair.wait_for_save()
    assert "2 ranks train; global batch 4" in pair.log()
    assert "1 rank idles" in pair.log()
    pair.kill(0)
    pair.wait_for_end(1)
    log = pair.log()
    assert "args.elastic=shrink: 1 rank trains, 2 before; global batch 4 = dp 1 x batch 1" in log
    (start,) = resumed(log)
    alone = ["args.gradient_accumulation_steps=4", "deepspeed.train_batch_size=4"]
    assert_same(pair.weights("00000060"), pair.continued_by_hand(1, start, 60, alone))


def test_an_idle_rank_ends_with_the_run(cluster: Callable[..., Cluster]) -> None:
    words = (f"{MICRO}=1", "deepspeed.train_batch_size=4", "args.elastic=shrink")
    pair = cluster(*words, "args.train_iters=6")
    pair.add(2), pair.add(1)
    pair.wait_for_end(0, 1)
    assert newest_step(pair.save) == 6


def test_ranks_wait_for_as_many_as_before(cluster: Callable[..., Cluster]) -> None:
    words = (f"{MICRO}=1", "deepspeed.train_batch_size=4", "args.elastic=wait")
    pair = cluster(*words, "args.train_iters=60")
    pair.add(3)
    pair.wait(lambda: "args.elastic=wait: 3 ranks are here, 2 of which divide the" in pair.log())
    pair.add(1)
    pair.wait_for_save()
    pair.kill(1)
    pair.wait(lambda: "waiting until as many as before (4) can train" in pair.log())
    step = newest_step(pair.save)
    time.sleep(5)
    assert newest_step(pair.save) == step
    pair.add(1)
    pair.wait_for_end(0, 2)
    assert newest_step(pair.save) == 60


def test_a_lost_rank_of_a_model_is_restarted(cluster: Callable[..., Cluster]) -> None:
    words = (f"{MICRO}=4", "args.model_parallel_size=2", "args.elastic=shrink")
    pair = cluster(*words, "args.train_iters=40")
    pair.add(1), pair.add(1)
    pair.wait_for_save()
    (rank,) = psutil.Process(pair.machines[1].pid).children()
    rank.kill()
    pair.wait_for_end(0, 1)
    (start,) = resumed(pair.log())
    assert_same(pair.weights("00000040"), pair.continued_by_hand(2, start, 40, ()))


def test_a_machine_that_is_asked_to_end_loses_no_step(cluster: Callable[..., Cluster]) -> None:
    pair = cluster(f"{MICRO}=1", "args.elastic=shrink", "args.train_iters=200")
    pair.add(), pair.add()
    pair.wait_for_save()
    pair.machines[1].send_signal(signal.SIGTERM)
    pair.wait_for_end(0)
    assert pair.machines[1].wait(30) != 0
    log = pair.log()
    (stopped,), (start,) = re.findall(r"stopped at step (\d+) of", log), resumed(log)
    assert int(start) == int(stopped)
    assert "2 ranks train, 4 before" in log
    assert newest_step(pair.save) == 200

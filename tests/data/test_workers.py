"""Reading processes end only by the trainer's signal, and when the trainer ends."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cogfast.distributed.stop_signals import STOP_SIGNALS
from tests.support.video_files import sat_folder

# Prints the workers' process ids, then executes commands: "read" five batches, "end" a worker.
SCRIPT = """
    import os, signal, sys
    from cogfast.data import workers
    from cogfast.data import batches
    from cogfast.data.datasets import VideoFolder
    from cogfast.data.global_order import GlobalOrder

    workers.start_method = lambda: {method!r}
    if __name__ == "__main__":
        data = VideoFolder({folder!r}, [32, 48], 8, 9)
        loader = batches.BatchLoader(
            data, GlobalOrder(2, 0, 2), micro_batch=2, num_workers=2, prefetch_factor=1
        )
        pids = [worker.pid for worker in loader._batches._results._workers]
        next(loader)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, set())  # the trainer's mask is restored
        print(*pids, flush=True)
        for line in sys.stdin:
            if line == "read\\n":
                for _ in range(5):
                    next(loader)
            else:
                os.kill(pids[0], signal.SIGTERM)
            print("done", flush=True)
"""


class Trainer:
    """A process that reads with two workers, and the workers' process ids."""

    def __init__(self, folder: Path, method: str) -> None:
        script = folder / "trainer.py"
        script.write_text(textwrap.dedent(SCRIPT.format(method=method, folder=str(folder))))
        self.process = subprocess.Popen(
            [sys.executable, script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )
        self.workers = [int(pid) for pid in self.process.stdout.readline().split()]

    def send(self, line: str) -> str:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline()


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.soak)])
def test_only_the_trainer_ends_a_worker(method, tmp_path):
    """With CUDA the trainer uses forkserver: the workers' parent is then another process."""
    trainer = Trainer(sat_folder(tmp_path, 2), method)
    assert len(trainer.workers) == 2
    for worker in trainer.workers:
        for number in STOP_SIGNALS:  # a terminal's Ctrl-C comes to every process
            os.kill(worker, number)
    assert trainer.send("read") == "done\n"
    assert all(_is_running(worker) for worker in trainer.workers)
    assert trainer.send("end") == "done\n"
    assert _wait_for_end(trainer.workers[:1], seconds=5)
    assert _is_running(trainer.workers[1])
    trainer.process.kill()
    trainer.process.wait()
    # A worker checks every 2 s that the trainer is alive.
    assert _wait_for_end(trainer.workers, seconds=15), "a worker outlives a trainer that was killed"


def _wait_for_end(processes: list[int], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(map(_is_running, processes)):
        time.sleep(0.05)
    return not any(map(_is_running, processes))


def _is_running(pid: int) -> bool:
    # A zombie has ended, but its parent has not waited for it.
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False

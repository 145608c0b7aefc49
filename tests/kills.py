"""Kills of a run under torchrun: of everything, of one rank, or of torchrun itself."""

from __future__ import annotations

import subprocess

import psutil

KILLS = ("all", "rank 0", "rank 1", "torchrun")
SECONDS_TO_END = 30


def kill(process: subprocess.Popen, what: str) -> str:
    """kill -9 `what`; whatever is left must end by itself. Returns the output."""
    launcher = psutil.Process(process.pid)
    ranks = {f"rank {rank.environ()['RANK']}": rank for rank in launcher.children()}
    everything = [*launcher.children(recursive=True), launcher]
    targets = {"all": everything, "torchrun": [launcher]}.get(what) or [ranks[what]]
    for target in targets:
        target.kill()
    _, alive = psutil.wait_procs([p for p in everything if p != launcher], timeout=SECONDS_TO_END)
    assert not alive, f"{what} was killed, and {alive} stayed"
    output, _ = process.communicate(timeout=SECONDS_TO_END)
    assert process.returncode != 0
    return output

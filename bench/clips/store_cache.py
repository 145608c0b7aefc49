"""Measure how fast workers of `cogfast cache` fill a latent cache in an S3 store, with an encoder that only waits.

    python -m bench.clips.store_cache [--workers 1 2 4] [--clips N] [--kib N] [--rate CLIPS_PER_SECOND]

Each worker is a process that shares nothing with the others but the store, as those of separate machines. The
store is small_s3.py on this machine, whose CPU time is not counted. --rate: of the encoder of one
worker; 0: as fast as it is called.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from cogfast.data.cache.entries import NUMBERS, Entries
from cogfast.data.cache.keys import hash_text
from cogfast.train.caching.command import _CacheRun, _Work

_URL = "s3://bucket/cache"


class FakeRun(_CacheRun):
    """Writes entries of `kib` KiB at `rate` clips a second."""

    def __init__(self, clips: int, kib: int, rate: float) -> None:
        device = torch.device("cpu")
        self.groups: Any = SimpleNamespace(
            rank=0, world_size=1, is_main=True, device=device, gather=lambda value: [value]
        )
        self.clips: Any = [SimpleNamespace(bucket=0, is_control=False)] * clips
        self.rate, self.start, self.price = rate, time.monotonic(), None
        values = torch.randn(16, kib * 32).bfloat16()
        self.entry = {"mean": values, **{name: torch.tensor(8) for name in NUMBERS}}

    def _encode_clips(self, work: _Work, batches: Iterator[Sequence[str]]) -> Iterator[dict]:
        next_at = time.monotonic()
        for batch in batches:
            next_at = max(next_at, time.monotonic()) + (len(batch) / self.rate if self.rate else 0)
            time.sleep(max(0.0, next_at - time.monotonic()))
            yield dict.fromkeys(batch, self.entry)


def work(number: int, clips: int, kib: int, rate: float) -> None:
    """Do what one worker does."""
    run, entries = FakeRun(clips, kib, rate), Entries(_URL, "video", {})
    entries.create()
    keys = {hash_text(str(i)): i for i in range(clips)}
    there = entries.keys()
    missing = {key: i for key, i in keys.items() if key not in there}
    sys.stdin.readline()  # all begin together
    start, cpu = time.monotonic(), time.process_time()
    run._encode("clip", _Work(entries, missing), 8, number * 2**30 // 4)
    print(time.monotonic() - start, time.process_time() - cpu)


def measure(workers: int, options: argparse.Namespace) -> str:
    root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bench.clips.small_s3", str(root), str(port), "1"]
    server = subprocess.Popen(command)
    given = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_DEFAULT_REGION": "us-east-1"}
    given |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    try:
        words = [str(each) for each in (options.clips, options.kib, options.rate)]
        command = [sys.executable, "-m", "bench.clips.store_cache", "--worker", *words]
        started = [
            subprocess.Popen(
                [*command, str(number)],
                env={**os.environ, **given},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for number in range(workers)
        ]
        while (root / ".log").stat().st_size < 2 * workers if (root / ".log").exists() else True:
            time.sleep(0.2)
        time.sleep(1)
        before = (root / ".log").read_bytes()
        for worker in started:
            assert worker.stdin is not None
            worker.stdin.write(b"\n")
            worker.stdin.flush()
        answers = [worker.communicate()[0].split() for worker in started]
        seconds = max(float(answer[0]) for answer in answers)
        found = (root / ".log").read_bytes()[len(before) :]
        entries = len(list(root.rglob("*.safetensors")))
        assert entries == options.clips, entries
        cpu = sum(float(answer[1]) for answer in answers)
        counts = {letter: found.count(letter) for letter in (b"P", b"L")}
        return (
            f"{workers} workers: {entries / seconds:.0f} clips/s, "
            f"{counts[b'P'] / entries:.2f} PUT and {counts[b'L'] / entries:.3f} listings a clip, "
            f"{1000 * cpu / entries:.2f} ms CPU of the workers a clip"
        )
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--clips", type=int, default=4000)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        clips, kib, rate, number = options.worker
        work(int(number), int(clips), int(kib), float(rate))
        return
    torch.set_num_threads(1)
    for workers in options.workers:
        print(measure(workers, options), flush=True)


if __name__ == "__main__":
    main()

"""Measure the start of a run on many clips by phase: seconds, and memory that the process holds after it.

    python -m bench.checks.start FOLDER [--clips 1000000] [--folders 10000] [--trust-index] [--fake-headers]

Missing clips are made in FOLDER: hard links to tiny mp4s, which a manifest lists. No model is built, and no clip
is decoded. --fake-headers: open no file in a first start. Under torchrun, each rank does its part.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import time
from pathlib import Path

import psutil

from cogfast.config import load_config
from cogfast.data.sources import headers
from cogfast.distributed.process_groups import start_processes
from cogfast.train.assembly import assemble_order
from cogfast.train.preflight.header_scan import survey_datasets
from tests.support.runs import datasets_of
from tests.support.video_files import constant_rate, write_clip

_LINKS = 60_000  # to one file; ext4 allows 65,000
_CAPTION = "a clip of the folder, whose caption has about as many words as a short one has"


def make(folder: Path, clips: int, folders: int) -> Path:
    """Make the clips and their manifest, if they are not there."""
    manifest = folder / f"clips-{clips}.jsonl"
    if manifest.exists():
        return manifest
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(clips):
        source = folder / f"source-{i // _LINKS}.mp4"
        if i % _LINKS == 0:
            write_clip(source, constant_rate(9, 8), size=(32, 48))
        name = f"clips/{i % folders:05d}/video_{i:08d}.mp4"
        if i < folders:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.link(source, folder / name)
        rows.append(json.dumps({"path": name, "caption": f"{_CAPTION} {i}"}) + "\n")
    manifest.write_text("".join(rows))
    return manifest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--clips", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=10_000)
    parser.add_argument("--trust-index", action="store_true")
    parser.add_argument("--fake-headers", action="store_true")
    given = parser.parse_args()
    manifest = make(given.folder, given.clips, given.folders)
    if given.fake_headers:
        headers.probe = lambda source, num_bytes: headers.Header(9, 8.0, 32, 48)
    groups = start_processes()
    words = [f"args.train_data=[{manifest}]", "data.target=cogfast.data.datasets.VideoManifest",
             "data.params.video_size=[32,48]", "data.params.fps=8", "data.params.max_num_frames=9"]  # fmt: skip
    if given.trust_index:
        words.append("data.params.trust_index=true")
    config = load_config([Path("cogfast/configs/cogvideox_2b.yaml")], words)
    args = config.run.args
    before = psutil.Process().memory_info().rss
    start = time.perf_counter()

    def report(what: str) -> None:
        nonlocal start
        seconds = time.perf_counter() - start
        ctypes.CDLL(None).malloc_trim(0)  # on CPUs cogfast tells malloc to keep what is freed
        memory = psutil.Process().memory_info()
        held = (memory.rss - before) / given.clips
        print(
            f"rank {groups.rank} {what}: {seconds:.1f} s, {held:.0f} bytes a clip held", flush=True
        )
        start = time.perf_counter()

    datasets = datasets_of(config, args, groups)
    report("list")
    datasets, _ = survey_datasets(datasets, args, groups, 512)
    report("headers")
    order = assemble_order(datasets.train, 1, 512)
    order.index(10**6, 3)
    report("order")
    groups.close()


if __name__ == "__main__":
    main()

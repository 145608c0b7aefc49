"""`cogfast cache`, killed again and again and started twice at once: entries are whole or not there."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cogfast.extensions.cache.entries import Entries
from tests.extensions.cache.test_cache import contents
from tests.support.runs import Run
from tests.support.tiny_run import CHANNELS, Started, start, write_clips_with_vae
from tests.support.tiny_run import run as launch

# One clip at a time: in float32 the result depends on how many are encoded together.
ALONE = "args.batch_size=1"


def straight(run: Run, cache: Path) -> dict[str, bytes]:
    """Return the files of an uninterrupted run, which has as many threads as those that are killed."""
    done = launch(run.cached_in(cache).command(ALONE, name="cache"))
    assert done.returncode == 0, done.stdout
    return contents(cache)


def kill(processes: list[Started], count: Callable[[], int], more: int, delay: float) -> bool:
    """Kill processes some seconds after the cache has that many entries more; whether it was in time."""
    goal = count() + more
    while count() < goal and any(p.poll() is None for p in processes):
        time.sleep(0.005)
    time.sleep(delay)
    is_in_time = all(process.poll() is None for process in processes)
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    return is_in_time


def check_kills(
    data: Path, tmp_path: Path, num_kills: int, num_writers: int, longest: float
) -> int:
    """Kill all writers of one cache at random moments; every file is that of a straight run, always.

    Returns how many kills came before the end.
    """
    run, cache = Run(data, tmp_path).with_vae().of("5b_i2v"), tmp_path / "killed"
    expected = straight(run, tmp_path / "straight")
    arguments = run.cached_in(cache).command(ALONE, name="cache")
    draw, num_in_time = random.Random(0), 0
    for _ in range(num_kills):
        writers = [start(arguments) for _ in range(num_writers)]
        num = lambda: len(contents(cache))
        num_in_time += kill(writers, num, draw.randint(0, 3), draw.uniform(0, longest))
        found = contents(cache)
        assert found.items() <= expected.items()
    writers = [start(arguments) for _ in range(num_writers)]
    outputs = [writer.communicate()[0] for writer in writers]
    assert [writer.poll() for writer in writers] == [0] * num_writers, outputs
    assert contents(cache) == expected
    return num_in_time


@pytest.mark.soak
def test_kills_of_two_writers_at_once_leave_nothing_half(tmp_path: Path) -> None:
    data = write_clips_with_vae(tmp_path / "data", 8, CHANNELS)
    check_kills(data, tmp_path, num_kills=3, num_writers=2, longest=0.1)


@pytest.mark.soak
def test_twenty_kills_of_two_writers_at_once(tmp_path: Path) -> None:
    data = write_clips_with_vae(tmp_path / "data", 120, CHANNELS)
    assert check_kills(data, tmp_path, num_kills=20, num_writers=2, longest=0.1) >= 15


def test_temporary_files_are_no_entries(tmp_path: Path) -> None:
    """A start removes those of a killed process, once no process can be writing them."""
    entries = Entries(tmp_path, "video", {})
    entries.create()
    entries.write_bad("aa1", "broken")
    old, new = (
        Path(entries.folder, "aa", f"aa2.safetensors.{x}.incomplete") for x in ("old", "new")
    )
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert entries.keys() == {"aa1": True} and not entries.has("aa2")
    entries.create()
    assert new.exists() and not old.exists()

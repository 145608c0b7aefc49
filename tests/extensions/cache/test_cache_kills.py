"""`cogfast cache`, killed again and again and started twice at once: entries are whole or not there."""

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

# One clip at a time: in float32 the result depends on how many are encoded together.
ALONE = "args.batch_size=1"


def kill(processes: list[Started], count: Callable[[], int], more: int, delay: float) -> bool:
    """Kill processes some seconds after the cache has that many entries more; whether it was in time."""
    goal = count() + more
    while count() < goal and any(p.poll() is None for p in processes):
        time.sleep(0.005)
    time.sleep(delay)
    is_in_time = all(process.poll() is None for process in processes)
    for process in processes:
        if process.poll() is None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:  # it has just been forked, and leads no group yet
                os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    return is_in_time


def check_kills(
    folder: Path,
    cache: Path | str,
    entries_of: Callable[..., dict[str, bytes]],
    count: Callable[[], int],
    num_kills: int,
) -> int:
    """Kill both writers of one cache at random moments; every file is that of a straight run, always.

    entries_of: returns the entries of a cache there. count: of its files, without reading them. Returns
    how many kills came before the end.
    """
    data = write_clips_with_vae(folder / "data", 6 * num_kills, CHANNELS)
    run = Run(data, folder).with_vae().of("5b_i2v")
    # It has as many threads as the writers.
    run.cached_in(folder / "straight").launch(1, ALONE, name="cache")
    expected = contents(folder / "straight")
    arguments = run.cached_in(cache).command(ALONE, name="cache")
    draw, num_in_time = random.Random(0), 0
    for _ in range(num_kills):
        writers = [start(arguments) for _ in range(2)]
        num_in_time += kill(writers, count, draw.randint(0, 3), draw.uniform(0, 0.1))
        assert entries_of(cache).items() <= expected.items()
    writers = [start(arguments) for _ in range(2)]
    outputs = [writer.communicate()[0] for writer in writers]
    assert [writer.poll() for writer in writers] == [0, 0], outputs
    assert entries_of(cache) == expected
    return num_in_time


@pytest.mark.soak
def test_twenty_kills_of_two_writers_at_once(tmp_path: Path) -> None:
    cache = tmp_path / "killed"
    count = lambda: sum(1 for _ in cache.rglob("*.safetensors"))
    assert check_kills(tmp_path, cache, contents, count, num_kills=20) >= 15


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

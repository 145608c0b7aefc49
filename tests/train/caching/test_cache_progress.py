"""`cogfast cache` logs the progress of all ranks at a cost that does not grow with the data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cogfast.data.cache.shards import Shard
from cogfast.train.caching import progress as cache_progress
from cogfast.train.caching.progress import CacheProgress
from cogfast.train.distributed.process_groups import start_processes


def test_all_ranks_are_counted_and_no_file_is_looked_for_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="cogfast")
    monkeypatch.setattr(cache_progress, "_SECONDS_PER_LINE", 0.0)
    shards = [Shard(f"video-{i:05}.safetensors", "s", ["k"] * 8) for i in range(300)]
    dealt = [shards[rank::3] for rank in range(3)]
    groups = dataclasses.replace(start_processes(), world_size=3)
    exists, num_looks = Path.exists, 0

    def counted(path: Path) -> bool:
        nonlocal num_looks
        num_looks += 1
        return exists(path)

    monkeypatch.setattr(Path, "exists", counted)
    with CacheProgress(groups, tmp_path, "clip", dealt) as progress:
        for number in range(100):
            (tmp_path / dealt[1][number].file).touch()  # the third rank is stuck
            progress.add(8)
            assert f"encoded {16 * (number + 1)} of 2400 clips" in caplog.messages[-1]
    assert num_looks == 2 * 100 + 99

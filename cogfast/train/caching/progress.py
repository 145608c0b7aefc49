"""Shows the progress of `cogfast cache`: a bar on a terminal, else a log line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cogfast.data.cache.shards import Shard
from cogfast.schema.values import counted
from cogfast.train.distributed.process_groups import ProcessGroups
from cogfast.train.run.terminal import open_bar

logger = logging.getLogger(__name__)

_SECONDS_PER_LINE = 30.0  # between log lines


class CacheProgress:
    """Counts what all ranks have encoded; rank 0 shows it.

    what: "clip" or "caption". shards: for each rank, its shards in the order in which it writes them.
    """

    def __init__(
        self, groups: ProcessGroups, folder: Path, what: str, shards: Sequence[Sequence[Shard]]
    ) -> None:
        self.folder, self.what = folder, what
        self.total = sum(len(shard.keys) for of_rank in shards for shard in of_rank)
        # Reversed, so that the last item is a rank's next shard: only that file has to be polled.
        self.others = [list(reversed(s)) for rank, s in enumerate(shards) if rank != groups.rank]
        self.done = self.done_by_others = 0
        self.is_shown = groups.is_main and self.total > 0
        self.bar = None

    def __enter__(self) -> CacheProgress:
        self.start = self.last_line = time.monotonic()
        if self.is_shown:
            self.bar = open_bar(f"{self.what}s", self.total)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.is_shown and kind is None:
            seconds = time.monotonic() - self.start
            number = counted(self.done, self.what)
            logger.info("encoded %s on rank 0, %.2f/s", number, self.done / seconds)

    def add(self, number: int) -> None:
        """Count what this rank has encoded."""
        self.done += number
        if not self.is_shown:
            return
        # Rank 0 learns of the other ranks' shards from their files, without communication.
        for left in self.others:
            while left and (self.folder / left[-1].file).exists():
                self.done_by_others += len(left.pop().keys)
        done = self.done + self.done_by_others
        now = time.monotonic()
        rate = done / (now - self.start)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=f"{rate:.2f}/s")
        elif now - self.last_line >= _SECONDS_PER_LINE:
            self.last_line = now
            left = (self.total - done) / rate / 60
            text = "encoded %d of %s, %.2f/s, %.1f minutes left"
            logger.info(text, done, counted(self.total, self.what), rate, left)

"""How far `cogfast cache` is: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from cogfast.data.latent_cache import Shard
from cogfast.train.process_groups import ProcessGroups
from cogfast.train.progress_bar import open_bar

logger = logging.getLogger(__name__)

_SECONDS_PER_LINE = 30.0  # of the log


class CacheProgress:
    """What all ranks have encoded of `shards`, told by rank 0; `mine` are this rank's."""

    def __init__(
        self,
        groups: ProcessGroups,
        folder: Path,
        what: str,
        shards: Sequence[Shard],
        mine: Sequence[Shard],
    ) -> None:
        own = {shard.file for shard in mine}
        self.others = [(folder / s.file, len(s.keys)) for s in shards if s.file not in own]
        self.what, self.total = what, sum(len(shard.keys) for shard in shards)
        self.done = 0
        self.is_shown = groups.is_main and self.total > 0
        self.bar = None

    def __enter__(self) -> CacheProgress:
        self.start = self.last_line = time.monotonic()
        if self.is_shown:
            self.bar = open_bar(self.what, self.total)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.is_shown and kind is None:
            seconds = time.monotonic() - self.start
            logger.info("encoded %d %s: %.2f/s here", self.done, self.what, self.done / seconds)

    def add(self, number: int) -> None:
        """Count what this rank has encoded."""
        self.done += number
        if not self.is_shown:
            return
        done = self.done + sum(number for path, number in self.others if path.exists())
        now = time.monotonic()
        rate = done / (now - self.start)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=done, note=f"{rate:.2f}/s")
        elif now - self.last_line >= _SECONDS_PER_LINE:
            self.last_line = now
            left = (self.total - done) / rate / 60
            text = "%d of %d %s encoded, %.2f/s, %.1f minutes left"
            logger.info(text, done, self.total, self.what, rate, left)

"""Writes what a run itself adds to its page: its facts at the start, and the page while it trains."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from cogfast.config import Config
from cogfast.core.files import WriteError, write_text
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.schema.merged_config import DEFAULT
from cogfast.train.run.page.document import page_of_run, write_page
from cogfast.train.run.page.record import FACTS, Facts, read_run

logger = logging.getLogger(__name__)

NAME = "index.html"


class RunPage:
    """The page in a run's folder. A failure to write it is logged once; training continues."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.has_failed = False

    def write(self, history: Sequence[Mapping]) -> None:
        """Write the page. history: the lines of metrics.jsonl."""
        try:
            path = self.folder / NAME
            write_page(path, page_of_run(read_run(self.folder, history), path))
        # A page is worth no run: whatever a damaged folder or a full disk raises is logged.
        except Exception as error:
            if not self.has_failed:
                logger.warning(
                    "the page of the run is not written (%s: %s); training continues",
                    type(error).__name__,
                    error,
                )
            self.has_failed = True
        else:
            self.has_failed = False


def write_facts(folder: Path, config: Config, dataset: SizedDataset, **numbers: int) -> None:
    """Write the facts of a run that its page shows and no other file has; a full disk is logged.

    numbers: num_steps, global_batch and num_trained.
    """
    buckets: list[tuple[str, int]] = []
    left_out = 0
    if isinstance(dataset, CaptionedVideos) and dataset.clips.buckets is not None:
        # sync: none, an array of NumPy
        counts = Counter(dataset.clips.buckets.tolist())
        sizes = dataset.settings.sizes
        buckets = [(str(size), counts[number]) for number, size in enumerate(sizes)]
        left_out = counts[-1]
    facts = Facts(
        num_samples=len(dataset),
        buckets=buckets,
        left_out=left_out,
        allow_import=list(config.allow_import),
        origins={key: origin for key, origin in config.origins.items() if origin != DEFAULT},
        **numbers,
    )
    try:
        write_text(folder / FACTS, json.dumps(asdict(facts), indent=1) + "\n")
    except WriteError as error:
        logger.warning("%s; training continues", error)

"""Writes the page of a run while it trains."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from cogfast.core.addresses import shown
from cogfast.core.files import WriteError, write_text
from cogfast.core.keys import DEFAULT
from cogfast.extensions.page.page import NAME, page_of, write_page
from cogfast.extensions.page.record import FACTS, Facts, read_run
from cogfast.train.run.parts import Parts
from cogfast.train.run.trackers import Trackers
from cogfast.train.watchers.watcher import Watcher

logger = logging.getLogger(__name__)

_SECONDS = 60.0  # between two pages that log lines write, at least


class RunPage(Watcher):
    """The page in a run's folder. A failure to write it is logged once; training continues."""

    def __init__(self, parts: Parts, trackers: Trackers) -> None:
        self.parts, self.trackers = parts, trackers
        self.folder, self.next_write = parts.folder.path, -math.inf  # the first line writes a page
        self.has_failed = False

    def at_start(self) -> None:
        if self.trackers.is_main:
            write_facts(self.parts)

    def after_log(self, line: Mapping) -> None:
        if time.perf_counter() >= self.next_write:
            self.write()

    def after_save(self, step: int, path: Path) -> None:
        self.write()

    def after_evaluation(
        self, step: int, losses: Mapping[str, float], samples: Path | None
    ) -> None:
        self.write()

    def close(self, error: BaseException | None) -> None:
        if self.trackers.history:
            self.write(is_active=False)

    def write(self, is_active: bool = True) -> None:
        """Write the page, on rank 0. is_active: the page reloads itself."""
        self.next_write = time.perf_counter() + _SECONDS
        if not self.trackers.is_main:
            return
        try:
            path = self.folder / NAME
            record = read_run(self.folder, self.trackers.history)
            write_page(path, page_of([record], path, is_active))
            self.has_failed = False
        # A page is worth no run: whatever a damaged folder or a full disk raises is logged.
        except Exception as error:
            if not self.has_failed:
                text = "the page of the run is not written (%s: %s); training continues"
                logger.warning(text, type(error).__name__, error)
            self.has_failed = True


def write_facts(parts: Parts) -> None:
    """Write the facts of a run that its page shows and no other file has; a full disk is logged."""
    launch, model, data, run = parts.launch, parts.model, parts.data, parts.launch.run
    used, stated = launch.args.model_dump(), run.sections["args"]
    used["attention_backend"] = model.attention_backend or launch.args.attention_backend
    effective: dict[str, object] = {
        f"args.{key}": value for key, value in used.items() if value != stated.get(key)
    }
    if (adapters := model.transformer.config.adapters) is not None:
        effective["adapters"] = adapters
    facts = Facts(
        origins={key: origin for key, origin in run.origins.items() if origin != DEFAULT},
        allow_import=list(run.allow_import),
        effective=effective,
        num_samples=len(data.datasets.train),
        num_steps=data.num_steps,
        global_batch=data.global_batch,
        num_trained=model.num_trained,
        shows_ema=parts.shows_ema,
    )
    try:
        path, plain = parts.folder.path / FACTS, shown(asdict(facts))
        write_text(path, json.dumps(plain, indent=1, default=str) + "\n")
    except WriteError as error:
        logger.warning("%s; training continues", error)

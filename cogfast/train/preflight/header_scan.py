"""Scans the headers of all videos before training: finds unreadable ones and assigns buckets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TypeGuard

import numpy as np

from cogfast.core.values import counted
from cogfast.data.bad_samples import BadSampleLog
from cogfast.data.buckets import Survey, in_buckets, join_surveys, survey, table
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.data.sources.clip_list import PackedStrings
from cogfast.data.sources.headers import index_of, read_headers
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.stores.store import check_local_cache
from cogfast.train.assembly import Datasets
from cogfast.train.keys import TrainKeys

logger = logging.getLogger(__name__)

_NUM_LOGGED = 20  # unreadable samples that are logged one by one


def survey_datasets(
    datasets: Datasets, args: TrainKeys, groups: ProcessGroups, global_batch: int
) -> tuple[Datasets, dict[str, str]]:
    """Return the data sets with buckets assigned, and {name: reason} of unusable samples.

    Each rank reads the headers of its share of the samples. ValueError if more than
    args.max_bad_fraction are unreadable, or if ranks have found different samples.
    """
    train, valid = datasets.train, datasets.valid
    _check_same(train, args.key("train_data"), groups)
    _check_same(valid, args.key("valid_data"), groups)
    if args.latent_cache is None:
        # A file that does not fit would end the rank that reads it, perhaps after days.
        groups.on_all(lambda: _check_copies(train, valid))
    if not any(_needs_scan(dataset, args) for dataset in (train, valid)):
        return datasets, {}
    survey = lambda each: _survey_on_all(each, groups) if _needs_scan(each, args) else None
    found = [survey(train), survey(valid)]
    bad: dict[str, str] = {}
    if found[0] is not None:
        assert isinstance(train, CaptionedVideos), "only these are scanned"
        bad = {train.name(i): reason for i, reason in found[0].reasons.items()}
        # In memory, since the folder of the run does not exist yet.
        log = BadSampleLog(None, len(train), args.max_bad_fraction)
        log.reasons.update(bad)
        notes = found[0].notes
        if short := notes.too_short(len(train), train.settings):
            short += f" (first: {train.name(notes['short'][3])})"
            if not log.limit >= len(bad) < len(train):
                others = counted(len(bad) - notes["short"][0], "other clip")
                kept = f"{index_of(train.clips)[0].path} keeps the lengths that were found"
                raise ValueError(f"{short}; {others} unusable; {kept}; remove it if they are wrong")
            if groups.is_main:
                logger.warning("%s; they are left out", short)
        log.check()
        if groups.is_main:
            for line in notes.lines(len(train), train.settings, train.name):
                logger.warning("%s", line)
        train = in_buckets(train, found[0])
        if train.settings.buckets is not None:
            logger.info(table(train, found[0], global_batch))
    if found[1] is not None:
        assert isinstance(valid, CaptionedVideos), "only these are scanned"
        valid = in_buckets(valid, found[1])
        if found[1].reasons:
            first, reason = next(iter(found[1].reasons.items()))
            what = "cannot use %d of %s, first: %s: %s"
            total = counted(len(valid), "held-out video")
            logger.warning(what, len(found[1].reasons), total, valid.name(first), reason)
    return Datasets(train, valid), bad


def _check_copies(*datasets: SizedDataset | None) -> None:
    """Raise StoreError if the local cache cannot hold a file of the data sets."""
    lists = [dataset.clips for dataset in datasets if isinstance(dataset, CaptionedVideos)]
    if largest := max((clips.largest_copy for clips in lists), default=0):
        check_local_cache(largest)


def _survey_on_all(dataset: CaptionedVideos, groups: ProcessGroups) -> Survey:
    """Survey a data set; all ranks have the same result."""
    ends = (len(dataset) * r // groups.world_size for r in (groups.rank, groups.rank + 1))
    gather = lambda make: groups.gather(groups.on_all(make))
    of_rank = {"is_main": groups.is_main, "is_first": groups.local_rank == 0}
    read = partial(read_headers, gather=gather, **of_rank)
    return join_surveys(groups.gather(groups.on_all(lambda: survey(dataset, range(*ends), read))))


def log_pictures(dataset: SizedDataset, order: GlobalOrder) -> None:
    """Log the share of steps that train on pictures; warn if all do."""
    if not isinstance(dataset, CaptionedVideos):
        return
    share = order.share(dataset.settings.picture_buckets)
    if share == 1:
        logger.warning(
            "only pictures are trained, from which the model learns no motion, and may lose it; add clips, "
            "and their sizes to data.params.buckets"
        )
    elif share:
        text = "pictures: %.1f%% of the steps, at most %s in a step"
        logger.info(text, 100 * share, counted(order.most_slots, "sample"))


def _check_same(dataset: SizedDataset | None, key: str, groups: ProcessGroups) -> None:
    """Raise ValueError on all ranks if they have found different samples: a data set of a user's own
    lists files itself on each, and what it finds decides the order of the samples and the number of steps."""
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(dataset, CaptionedVideos):
        clips = dataset.clips
        for column in (*clips.columns.values(), *(one.files for one in clips.others.values())):
            for array in column.arrays if isinstance(column, PackedStrings) else (column,):
                values = np.ascontiguousarray("-" if array is None else array)
                # An array of Python's objects has their addresses.
                digest.update((values.astype(str) if values.dtype.hasobject else values).data)
    found = groups.gather((0 if dataset is None else len(dataset), digest.hexdigest()))
    for rank, (number, _) in enumerate(found):
        if found[rank] != found[0]:
            text = f"{key}: rank 0 finds {counted(found[0][0], 'sample')}, and rank {rank} finds {number}"
            raise ValueError(f"{text}, or others; give all ranks the same files and captions")


def _needs_scan(dataset: SizedDataset | None, args: TrainKeys) -> TypeGuard[CaptionedVideos]:
    if not isinstance(dataset, CaptionedVideos):
        return False
    # Buckets are chosen by the videos' sizes, and masks must fit their clips.
    is_read = dataset.settings.buckets is not None or "mask" in dataset.others
    return args.latent_cache is None or is_read


def record_bad(folder: Path, bad: Mapping[str, str], num_samples: int) -> None:
    """Write the unusable samples to the run's bad_samples.jsonl, where training adds its own."""
    log = BadSampleLog(folder / "bad_samples.jsonl", num_samples, max_bad_fraction=1.0)
    for number, (name, reason) in enumerate(bad.items()):
        log.add(name, reason, is_logged=number < _NUM_LOGGED)
    if len(bad) > _NUM_LOGGED:
        logger.warning("cannot use %s; see the list in %s", counted(len(bad), "video"), log.file)

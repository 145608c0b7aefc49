"""Scans the headers of all videos before training: finds unreadable ones and assigns buckets."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from cogfast.config.arguments import TrainArguments
from cogfast.config.values import counted
from cogfast.data.bad_samples import BadSampleLog
from cogfast.data.buckets import Survey, in_buckets, survey, table
from cogfast.data.datasets import CaptionedVideos, SizedDataset
from cogfast.data.global_order import GlobalOrder
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.train.assembly import Datasets

logger = logging.getLogger(__name__)

_NUM_LOGGED = 20  # unreadable samples that are logged one by one


def survey_datasets(
    datasets: Datasets, args: TrainArguments, groups: ProcessGroups, global_batch: int
) -> tuple[Datasets, dict[str, str]]:
    """Return the data sets with buckets assigned, and {name: reason} of unusable samples.

    Rank 0 reads the headers. ValueError if more than args.max_bad_fraction are unreadable, or if ranks
    have found different samples.
    """
    train, valid = datasets.train, datasets.valid
    _check_same(train, "args.train_data", groups)
    _check_same(valid, "args.valid_data", groups)
    if not any(_needs_scan(dataset, args) for dataset in (train, valid)):
        return datasets, {}
    found: list[Survey | None] = groups.on_main(
        lambda: [
            survey(d) if _needs_scan(d, args) else None for d in (datasets.train, datasets.valid)
        ]
    )
    bad: dict[str, str] = {}
    if found[0] is not None:
        assert isinstance(train, CaptionedVideos), "only these are scanned"
        bad = {train.name(i): reason for i, reason in found[0].reasons.items()}
        # In memory, since the folder of the run does not exist yet.
        log = BadSampleLog(None, len(train), args.max_bad_fraction)
        log.reasons.update(bad)
        log.check()
        if found[0].slow:
            logger.warning(
                "frames will be duplicated in %d of %s with a lower frame rate than configured "
                "(data.params.fps=%g, or a manifest's fps), first: %s",
                len(found[0].slow),
                counted(len(train), "video"),
                train.settings.fps,
                train.name(found[0].slow[0]),
            )
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
    """Raise ValueError on all ranks if they have found different samples: each lists files itself,
    and what it finds decides the order of the samples and the number of steps."""
    if dataset is None or groups.world_size == 1:
        return
    digest = hashlib.blake2b(digest_size=8)
    if isinstance(dataset, CaptionedVideos):
        for name in (name for other in dataset.clips.others.values() for name in other.files):
            digest.update(name.encode("utf-8", "surrogatepass"))
        for i, caption in enumerate(dataset.captions):
            text = f"{dataset.name(i)}\0{caption}\0"
            digest.update(text.encode("utf-8", "surrogatepass"))
    found = groups.gather((len(dataset), digest.hexdigest()))
    other = next((rank for rank, of_rank in enumerate(found) if of_rank != found[0]), None)
    if other is not None:
        raise ValueError(
            f"{key}: rank 0 finds {counted(found[0][0], 'sample')}, and rank {other} finds "
            f"{found[other][0]}, or others; give all ranks the same files and captions"
        )


def _needs_scan(dataset: SizedDataset | None, args: TrainArguments) -> TypeGuard[CaptionedVideos]:
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

"""Which bucket each clip of a data set gets, and the table of what is in them.

A bucket is a size [frames, rows, columns]. A clip gets the one that loses least of it: the product of
the share of its time that is shown, the share of its picture that the crop leaves and the share of
its sharpness (the scale, where it is below 1) is largest; among equals that of the fewest pixels.
Buckets that the clip is too short for are out, unless data.params.short_clips=pad and it is too short
for all: then the one that repeats the fewest frames.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.headers import Header, read_headers
from cogfast.data.video.clip import Span, frames_within, select_frames
from cogfast.data.video.settings import Bucket, ClipSettings
from cogfast.schema.values import printable

_SLOW = 0.95  # of data.params.fps; 7.99 for 8 is the same
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Survey:
    """buckets: int16 [n], each sample's of the settings' sizes, -1 where it can be in none; reasons:
    {sample: why} of these. slow: samples of videos with fewer frames per second than asked for, where
    frames are chosen by their times."""

    buckets: np.ndarray
    reasons: Mapping[int, str]
    slow: Sequence[int] = ()


def survey(dataset: CaptionedVideos) -> Survey:
    """Look at the headers of all videos of a data set."""
    clips, sizes = dataset.clips, dataset.settings.sizes
    reasons: dict[int, str] = {}
    buckets = np.full(len(clips), -1, dtype=np.int16)
    seen: dict[tuple, int | str] = {}  # many clips are alike
    slow = []
    for i, header in enumerate(read_headers(clips)):
        if header.reason:
            reasons[i] = header.reason
            continue
        span = None if clips.spans is None else tuple(clips.spans[i].tolist())
        settings = dataset.settings_of_rate(i)
        key = (header, span, settings.fps)
        if key not in seen:
            seen[key] = choose(header, settings, sizes, span)
        if isinstance(seen[key], str):
            reasons[i] = seen[key]
        else:
            buckets[i] = seen[key]
            if settings.frame_selection == "timestamp" and header.fps < _SLOW * settings.fps:
                slow.append(i)
    return Survey(buckets, reasons, slow)


def choose(
    header: Header, settings: ClipSettings, sizes: tuple[Bucket, ...], span: Span | None = None
) -> int | str:
    """The number of a video's bucket, or why it can be in none."""
    times = np.arange(header.num_frames) / header.fps
    try:
        times = times[frames_within(times, span)]
    except ValueError as error:
        return str(error)
    best, reason = None, ""
    for number, size in sorted(enumerate(sizes), key=lambda pair: pair[1]):
        try:
            selection = select_frames(times, header.fps, settings.of(size))
        except ValueError as error:
            reason = reason or str(error)  # the shortest bucket's
            continue
        available = len(times) / header.fps * settings.fps  # frames at the clip's rate
        kept = kept_share(header.height, header.width, size) * min(1, size.num_frames / available)
        rank = (selection.num_padded, -round(kept, 9), size.num_frames * size.height * size.width)
        if best is None or rank < best[0]:
            best = rank, number
    return reason if best is None else best[1]


def kept_share(height: int, width: int, size: Bucket) -> float:
    """What scaling and cropping to a bucket leave of a frame's picture and sharpness, 0 to 1."""
    scale = max(size.height / height, size.width / width)
    shown = (size.height / scale) * (size.width / scale) / (height * width)
    return shown * min(1.0, scale)


def in_buckets(dataset: CaptionedVideos, found: Survey) -> CaptionedVideos:
    """The data set with each clip in its bucket, where the settings name buckets."""
    if dataset.settings.buckets is None:
        return dataset
    return dataset.with_clips(replace(dataset.clips, buckets=found.buckets))


def table(dataset: CaptionedVideos, found: Survey, global_batch: int) -> str:
    """Lines: bucket, clips; what is left out, and why, with an example of each reason."""
    sizes = dataset.settings.sizes
    counts = Counter(found.buckets.tolist())
    rows = ["buckets (frames x rows x columns): clips"]
    for number, size in enumerate(sizes):
        note = ""
        if 0 < counts[number] < global_batch:
            times = -(-global_batch // counts[number])
            note = f"  (fewer than a step's {global_batch}: each up to {times} times in one)"
        rows.append(f"  {size!s:<16} {counts[number]:>9}{note}")
    if found.reasons:
        rows.append(f"  {'left out':<16} {len(found.reasons):>9}")
    kinds: dict[str, list[int]] = {}
    for sample, reason in found.reasons.items():
        kinds.setdefault(_NUMBER.sub("N", reason), []).append(sample)
    for samples in sorted(kinds.values(), key=len, reverse=True)[:10]:
        first = samples[0]
        rows.append(
            f"    {len(samples):>7}  {printable(dataset.name(first))}: {found.reasons[first]}"
        )
    return "\n".join(rows)

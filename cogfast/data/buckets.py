"""Assigns each clip of a data set to a bucket, and prints the table of bucket sizes.

A bucket is a size [frames, rows, columns]. A clip gets the bucket that keeps most of it. The score is
the product of three shares: of the clip's duration, of its picture after the crop, and of its
sharpness (the scale factor, if below 1). Ties go to the bucket with the fewest pixels. Buckets longer
than the clip are excluded; if all are and data.params.short_clips=pad, the clip gets the bucket that
repeats the fewest frames. Pictures, and no videos of several frames, get buckets of one frame.
"""

from __future__ import annotations

import filecmp
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

import cogfast.extensions.stores.store as store
from cogfast.core.values import counted, printable
from cogfast.data.bad_samples import BadSample
from cogfast.data.clip_notes import ClipNotes
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import TYPES, ClipList, member_of
from cogfast.data.sources.folders import ADD_BUCKET
from cogfast.data.sources.headers import Header, read_headers
from cogfast.data.video.clip import Bucket, ClipSettings, Span, frames_within, select_frames

ReadHeaders = Callable[[ClipList, range, bool], Sequence[Header | None]]  # trust_index is the last
_NAMES = {"image": "picture", "video": "video"}
_SAME = 0.02  # by which the rates and shapes of a clip and its control may differ
_SLOW = 0.95  # fraction of data.params.fps; 7.99 fps still counts as 8
_CUT = 0.5  # percent of the picture up to which a crop is not worth a line
_SAME_SPEED = 0.05  # difference up to which a speed is not worth a line
_NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass(frozen=True, slots=True)
class Survey:
    """The bucket of every sample, or of some.

    buckets: int16 [n], indices into the settings' sizes, -1 for samples that fit none. reasons:
    {sample: why it fits none}. refused: those of them that can be read nevertheless. notes: of all.
    """

    buckets: np.ndarray
    reasons: Mapping[int, str]
    refused: Mapping[int, str] = field(default_factory=dict)
    notes: ClipNotes = field(default_factory=ClipNotes)


def survey(
    dataset: CaptionedVideos, samples: range | None = None, read: ReadHeaders = read_headers
) -> Survey:
    """Read the headers of videos and choose a bucket for each sample. A sample whose control or mask does not
    fit its clip gets none.

    samples: which of the data set, such as the share of a rank; None: all. read: reads their headers.
    """
    clips, settings = dataset.clips, dataset.settings
    samples = range(len(clips)) if samples is None else samples
    reasons: dict[int, str] = {}
    buckets = np.full(len(samples), -1, dtype=np.int16)
    refused, notes = {}, ClipNotes()

    @cache  # many clips have equal headers
    def of(header: Header, span: Span | None, fps: float) -> tuple[int | str, dict[str, float]]:
        own = replace(settings, fps=fps)
        bucket = choose(header, own, settings.sizes, span)
        return bucket, facts_of(header, own, bucket, span)

    headers = read(clips, samples, settings.trust_index)
    of_others = {
        name: read(other.clips, samples, settings.trust_index)
        for name, other in dataset.others.items()
    }
    for place, (i, header) in enumerate(zip(samples, headers, strict=True)):
        assert header is not None, f"sample {i} has a file"
        stated = "" if clips.types is None else TYPES[clips.types[i]]
        kind, problem = "image" if header.is_picture else "video", header.reason
        if not problem and stated not in ("", kind):
            found = f"the file is a {_NAMES[kind]}; set type to {kind}"
            problem = f"its row has type {stated}, but {found}"
        try:
            if len(clips.others) > len(dataset.others):
                dataset.read_tensors(i, are_headers_enough=True)
        except BadSample as error:
            problem = problem or error.reason
        for name, of_other in of_others.items():
            other = of_other[place]
            if not problem and other is not None:
                problem = other_problem(dataset, name, i, header, other)
        if problem:
            reasons[i] = problem
            if not header.reason:
                refused[i] = problem
            continue
        # NaN is not equal to itself: only one object of it is found in the cache.
        seconds = None if clips.spans is None else clips.spans[i].tolist()
        span = seconds and tuple(math.nan if math.isnan(each) else each for each in seconds)
        bucket, facts = of(header, span, dataset.settings_at_own_rate(i).fps)
        for fact, value in facts.items():
            notes.add(fact, 1, value, value, i)
        if isinstance(bucket, str):
            reasons[i] = bucket
        else:
            buckets[place] = bucket
    return Survey(buckets, reasons, refused, notes)


def facts_of(
    header: Header, settings: ClipSettings, bucket: int | str, span: Span | None
) -> dict[str, float]:
    """Return what ClipNotes counts of a clip: {kind: value}. bucket: what `choose` returned."""
    if isinstance(bucket, str):
        if "short_clips=pad" not in bucket:  # for another reason than its length
            return {}
        last = (len(_times(header, span)) - 1) / header.fps
        # The last frame that is read may be shown half of its time early.
        return {"short": last + 1 / header.fps, "fitting": int(last * settings.fps + 1.5 + 1e-6)}
    size, facts = settings.sizes[bucket], dict.fromkeys(header.notes.split(), 0.0)
    cut = 100 * (1 - shown_share(header.height, header.width, size))
    if settings.resize == "crop" and cut > _CUT:
        facts["cut"] = cut
    if header.is_picture or size.num_frames == 1:
        return facts
    selection = select_frames(_times(header, span), header.fps, settings.for_bucket(size))
    if selection.num_padded:
        facts["padded"] = selection.num_padded
    if settings.frame_selection == "timestamp":
        return facts | ({"slow": header.fps} if header.fps < _SLOW * settings.fps else {})
    step = np.diff(selection.indices[:2]).sum() / header.fps * settings.fps
    return facts | ({"speed": step} if abs(step - 1) > _SAME_SPEED else {})


def join_surveys(parts: Sequence[Survey]) -> Survey:
    """Join the surveys of consecutive samples."""
    notes, reasons, refused = ClipNotes(), {}, {}
    for part in parts:
        for kind, found in part.notes.items():
            notes.add(kind, *found)
        reasons |= part.reasons
        refused |= part.refused
    return Survey(np.concatenate([part.buckets for part in parts]), reasons, refused, notes)


def other_problem(
    dataset: CaptionedVideos, kind: str, index: int, clip: Header, other: Header
) -> str:
    """Say why the control or mask of a sample does not fit its clip; "" if it does."""
    name = dataset.others[kind].paths[index]
    shapes = [f"{one.height}x{one.width}" for one in (clip, other)]
    is_of_all = kind == "mask" and other.is_picture  # one picture for all frames
    if other.reason:
        problem = other.reason
    elif other.is_picture != clip.is_picture and not is_of_all:
        kinds = [_NAMES["image" if one.is_picture else "video"] for one in (other, clip)]
        problem = f"is a {kinds[0]}, and the file is a {kinds[1]}; give a {kinds[1]}"
    elif not other.is_picture and (
        abs(other.num_frames - clip.num_frames) > 1 or abs(other.fps / clip.fps - 1) > _SAME
    ):
        numbers = [f"{counted(h.num_frames, 'frame')} at {h.fps:g} fps" for h in (other, clip)]
        problem = f"has {numbers[0]}, the clip {numbers[1]}; give one of the same length and rate"
    elif not have_same_shape(other, clip):
        problem = f"is {shapes[1]}, the clip {shapes[0]}; give one of the same shape"
    elif other == clip and _are_equal(dataset.clips, kind, index):
        # The loss would fall, and the model would learn to copy its input.
        problem = "is the clip itself; give a video that is made of it, such as its edges or depth"
    else:
        return ""
    return f"its {kind} {name} {problem}"


def have_same_shape(one: Header, other: Header) -> bool:
    return abs(one.width * other.height / (one.height * other.width) - 1) <= _SAME


def _are_equal(clips: ClipList, kind: str, index: int) -> bool:
    """Return whether a further video of a sample has the bytes of its clip."""
    others = clips.others[kind]
    one, other = clips.files[index], others.files[index]
    member, of_other = member_of(clips, index), member_of(others, index)
    try:
        if member and of_other:
            read = clips.read_member
            return member[1] == of_other[1] and read(one, member) == read(other, of_other)
        if store.is_url(one) and store.is_url(other):
            about = clips.versions.get(one)
            return about is not None and about == clips.versions.get(other)
        return filecmp.cmp(one, other, shallow=False)
    except (OSError, BadSample):
        return False  # what cannot be read is reported when it is


def _times(header: Header, span: Span | None) -> np.ndarray:
    """The times of the frames within `span`; ValueError if there is none."""
    # The header has no frame times; a constant frame rate is close enough to choose a size.
    times = np.arange(header.num_frames) / header.fps
    return times[frames_within(times, span)]


def choose(
    header: Header, settings: ClipSettings, sizes: tuple[Bucket, ...], span: Span | None = None
) -> int | str:
    """Return the index in `sizes` of a video's bucket, or the reason why none fits."""
    numbered = sorted(enumerate(sizes), key=lambda pair: pair[1])
    pictures = [pair for pair in numbered if pair[1].num_frames == 1]
    if header.is_picture:
        if span is not None and not np.isnan(span).all():
            return "a picture, of which start and end select nothing; leave them out"
        kept = lambda pair: round(kept_share(header.height, header.width, pair[1]), 9)
        best = max(pictures, key=kept, default=None)  # the smallest of equals
        return best[0] if best else f"a picture, not a video; to train on pictures, {ADD_BUCKET}"
    try:
        times = _times(header, span)
    except ValueError as error:
        return str(error)
    # A video that is too short for the other buckets does not become a picture.
    if len(times) > 1 and len(pictures) < len(sizes):
        numbered = [pair for pair in numbered if pair not in pictures]
    available = len(times) / header.fps * settings.fps  # frames at the clip's rate
    ranks, reasons = {}, []
    # Shortest bucket first: the reason for a clip that is too short names the least it needs.
    for number, size in numbered:
        try:
            selection = select_frames(times, header.fps, settings.for_bucket(size))
        except ValueError as error:
            reasons.append(str(error))
            continue
        kept = kept_share(header.height, header.width, size) * min(1, size.num_frames / available)
        # Rounding makes scores that differ by float noise a tie, decided by the pixel count.
        ranks[number] = selection.num_padded, -round(kept, 9), math.prod(size)
    return min(ranks, key=ranks.__getitem__) if ranks else reasons[0]


def kept_share(height: int, width: int, size: Bucket) -> float:
    """The share of a frame's picture and sharpness that scaling and cropping keep, 0 to 1."""
    scale = max(size.height / height, size.width / width)
    return shown_share(height, width, size) * min(1.0, scale)


def shown_share(height: int, width: int, size: Bucket) -> float:
    """The share of a frame's picture that is left when it covers `size` and the centre is cropped, 0 to 1."""
    # The crop cuts one axis only: the other is scaled to fit exactly.
    scale = max(size.height / height, size.width / width)
    return (size.height / scale) * (size.width / scale) / (height * width)


def in_buckets(dataset: CaptionedVideos, found: Survey) -> CaptionedVideos:
    """Return the data set with its buckets assigned, if the settings configure buckets."""
    if dataset.settings.buckets is None:
        dataset.refused = found.refused
        return dataset
    return dataset.with_clips(replace(dataset.clips, buckets=found.buckets))


def table(dataset: CaptionedVideos, found: Survey, global_batch: int) -> str:
    """Format the number of clips per bucket and left out, with an example of each reason."""
    sizes = dataset.settings.sizes
    counts = Counter(found.buckets.tolist())
    rows = ["buckets (frames x rows x columns): clips"]
    for number, size in enumerate(sizes):
        note, of_step = "", global_batch * dataset.settings.batches[number]
        if 0 < counts[number] < of_step:
            times = -(-of_step // counts[number])
            note = f"  (fewer than a step's {of_step}: each up to {times} times in one)"
        rows.append(f"  {size!s:<16} {counts[number]:>9}{note}")
    if found.reasons:
        rows.append(f"  {'left out':<16} {len(found.reasons):>9}")
    # Reasons that differ only in their numbers are one kind.
    kinds: dict[str, list[int]] = {}
    for sample, reason in found.reasons.items():
        kinds.setdefault(_NUMBER.sub("N", reason), []).append(sample)
    for samples in sorted(kinds.values(), key=len, reverse=True)[:10]:
        name, reason = printable(dataset.name(samples[0])), found.reasons[samples[0]]
        rows.append(f"    {len(samples):>7}  {name}: {reason}")
    return "\n".join(rows)

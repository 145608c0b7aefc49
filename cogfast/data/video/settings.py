"""How a video is turned into a clip: `data.params` of the YAML, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

from cogfast.config.values import Range
from cogfast.data.video.dali import VideoBackend, check_backend
from cogfast.data.video.reader import ReaderName
from cogfast.data.video.transform import FrameSelection, Resize

ShortClips = Literal["skip", "pad"]
# Limits of data.params; what a model accepts is checked against the model.
Side = Annotated[int, Range(1, 2**16)]  # rows, columns, or frames of a bucket
FramesPerSecond = Annotated[float, Range(0.01, 1000)]
NumFrames = Annotated[int, Range(1, 10**5)]
SkippedFrames = Annotated[float, Range(0, 10**6)]
Mebibytes = Annotated[int, Range(0, 2**24)]


class Bucket(NamedTuple):
    """The size of a clip, in frames and pixels."""

    num_frames: int
    height: int  # rows
    width: int  # columns

    def __str__(self) -> str:
        return "x".join(map(str, self))


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipSettings:
    """How a video file is turned into a clip: data.params of the YAML.

    ListedVideos (data/datasets.py) says what each field means.
    """

    video_size: tuple[int, int]  # rows, columns
    fps: float
    max_num_frames: int
    skip_frms_num: float = 0.0
    frame_selection: FrameSelection = "timestamp"
    short_clips: ShortClips | None = None
    resize: Resize = "crop"
    video_backend: VideoBackend = "auto"
    keep_decoded_mib: int = 0
    buckets: tuple[Bucket, ...] | None = None

    def __post_init__(self) -> None:
        # object.__setattr__: the dataclass is frozen. A YAML gives lists; 16.0 is 16, also in the key of
        # a latent cache.
        object.__setattr__(self, "video_size", checked_size(self.video_size))
        object.__setattr__(self, "buckets", checked_buckets(self.buckets))
        if float(self.fps).is_integer():
            object.__setattr__(self, "fps", int(self.fps))
        # A library that is missing is reported here, before any reading process starts.
        check_backend(self.video_backend)

    @property
    def cpu_reader(self) -> ReaderName:
        """The library that reads on the CPU."""
        return "decord" if self.video_backend == "decord" else "pyav"

    @property
    def skips_short_clips(self) -> bool:
        if self.short_clips is None:
            return self.frame_selection == "timestamp"
        return self.short_clips == "skip"

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """The buckets; without buckets, the one size of all clips."""
        return self.buckets or (Bucket(self.max_num_frames, *self.video_size),)

    def for_bucket(self, bucket: Bucket) -> ClipSettings:
        """Return the settings of a clip in a bucket."""
        size = bucket.height, bucket.width
        if (bucket.num_frames, size) == (self.max_num_frames, self.video_size):
            return self
        return replace(self, max_num_frames=bucket.num_frames, video_size=size)


def checked_size(size: Sequence[int]) -> tuple[int, int]:
    """Check data.params.video_size; ValueError if it is not [rows, columns]."""
    if len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
        raise ValueError(
            f"data.params.video_size={list(size)} must be [rows, columns], e.g. [480, 720]"
        )
    rows, columns = size
    return rows, columns


def checked_buckets(buckets: Sequence[Sequence[int]] | None) -> tuple[Bucket, ...] | None:
    """Check data.params.buckets; ValueError if an entry is invalid or listed twice."""
    if not buckets:
        return None
    for i, bucket in enumerate(buckets):
        if len(bucket) != 3 or not all(isinstance(v, int) and v > 0 for v in bucket):
            raise ValueError(
                f"data.params.buckets[{i}]={list(bucket)} must be [frames, rows, columns], e.g. "
                "[49, 480, 720]"
            )
        if list(bucket) in [list(other) for other in buckets[:i]]:
            raise ValueError(f"data.params.buckets[{i}]={list(bucket)} is listed twice; remove it")
    return tuple(Bucket(*bucket) for bucket in buckets)

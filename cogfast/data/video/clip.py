"""Reads one clip as `data.params` of the YAML says, and conditioning images."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cogfast.core.values import counted
from cogfast.data.bad_samples import BadSample
from cogfast.data.video.picture import holds_picture, read_pixels
from cogfast.data.video.reader import ReaderName, Refusal, check_file, open_video
from cogfast.data.video.transform import (
    FrameSelection,
    Resize,
    Selection,
    resize_and_center_crop,
    select_frames_sat,
    select_frames_timestamp,
    select_frames_uniform,
    stretch_picture,
)
from cogfast.extensions.table import hook

logger = logging.getLogger(__name__)

VideoBackend = Literal["auto", "dali", "decord", "pyav"]
Clip = tuple[Tensor, Selection]  # uint8 [F, 3, rows, columns]
# Given times and rate of all frames, returns the indices of the frames to decode, and the selection
Choose = Callable[[np.ndarray, float], tuple[np.ndarray, Selection]]
Span = tuple[float, float]  # start and end of a part of a video, seconds since its first frame
ShortClips = Literal["skip", "pad"]
_ROUNDED = 0.5  # seconds by which the end of a part may be beyond the video's, since tables have rounded ones


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
    bucket_batch: Sequence[int] | None = None
    trust_index: bool = False

    def __post_init__(self) -> None:
        # object.__setattr__: the dataclass is frozen. A YAML gives lists; 16.0 is 16, also in cache keys.
        object.__setattr__(self, "video_size", checked_size(self.video_size))
        object.__setattr__(self, "buckets", checked_buckets(self.buckets))
        checked_batches(self.bucket_batch, self.buckets or ())
        if float(self.fps).is_integer():
            object.__setattr__(self, "fps", int(self.fps))
        # A library that is missing is reported here, before any reading process starts.
        if self.video_backend == "dali":
            find_device_reader(self.video_backend)

    @property
    def cpu_reader(self) -> ReaderName:
        """The library that reads on the CPU."""
        return "decord" if self.video_backend == "decord" else "pyav"

    @property
    def skips_short_clips(self) -> bool:
        by_default = "skip" if self.frame_selection == "timestamp" else "pad"
        return (self.short_clips or by_default) == "skip"

    @property
    def sizes(self) -> tuple[Bucket, ...]:
        """The buckets; without buckets, the one size of all clips."""
        return self.buckets or (Bucket(self.max_num_frames, *self.video_size),)

    @property
    def batches(self) -> tuple[int, ...]:
        """The factors of args.batch_size, one for each of the sizes."""
        return tuple(self.bucket_batch or (1,) * len(self.sizes))

    @property
    def picture_buckets(self) -> list[int]:
        """The indices of the sizes of one frame."""
        return [number for number, size in enumerate(self.sizes) if size.num_frames == 1]

    def for_bucket(self, bucket: Bucket) -> ClipSettings:
        """Return the settings of a clip in a bucket."""
        return replace(self, max_num_frames=bucket.num_frames, video_size=bucket[1:])


def checked_size(size: Sequence[int]) -> tuple[int, int]:
    """Check data.params.video_size; ValueError if it is not [rows, columns]."""
    if len(size) != 2 or not all(isinstance(v, int) and v > 0 for v in size):
        rule = "must be [rows, columns], e.g. [480, 720]"
        raise ValueError(f"data.params.video_size={list(size)} {rule}")
    return size[0], size[1]


def checked_buckets(buckets: Sequence[Sequence[int]] | None) -> tuple[Bucket, ...] | None:
    """Check data.params.buckets; ValueError if an entry is invalid or listed twice."""
    if not buckets:
        return None
    found: list[Bucket] = []
    for i, bucket in enumerate(buckets):
        shown = f"data.params.buckets[{i}]={list(bucket)}"
        if len(bucket) != 3 or not all(isinstance(v, int) and v > 0 for v in bucket):
            raise ValueError(f"{shown} must be [frames, rows, columns], e.g. [49, 480, 720]")
        if Bucket(*bucket) in found:
            raise ValueError(f"{shown} is listed twice; remove it")
        found.append(Bucket(*bucket))
    return tuple(found)


def checked_batches(given: Sequence[int] | None, sizes: Sequence[Any]) -> list[int]:
    """Check data.params.bucket_batch, and return its number for each of the sizes."""
    if given is not None and len(given) != len(sizes):
        text = f"data.params.bucket_batch={list(given)} must have one number for each entry of data.params.buckets"
        raise ValueError(f"{text}, which has {len(sizes)}; use 1 for clips")
    return list(given or [1] * len(sizes))


def select_frames(times: np.ndarray, fps: float, settings: ClipSettings) -> Selection:
    """Select the frames of a clip.

    times: when the video's frames are shown, float64 seconds [n]. fps: the video's frame rate.
    Raises ValueError if the video is too short and `settings` does not pad.
    """
    num_frames, skip = settings.max_num_frames, settings.skip_frms_num
    if settings.frame_selection == "timestamp":
        selection = select_frames_timestamp(times, settings.fps, num_frames, int(skip))
    elif settings.frame_selection == "sat":
        selection = select_frames_sat(len(times), fps, settings.fps, num_frames, skip)
    else:
        selection = select_frames_uniform(len(times), num_frames)
    if selection.num_padded and settings.skips_short_clips:
        # Computed from the times, because the container's frame rate may be wrong.
        has = len(times) / fps if len(times) == 1 else np.ptp(times) * len(times) / (len(times) - 1)
        fps, need = len(times) / max(has, 1e-9), num_frames / settings.fps
        digits = 1 if f"{has:.1f}" != f"{need:.1f}" else 2
        text = f"{counted(len(times), 'frame')} at {fps:g} fps = {has:.{digits}f} s, need {need:.{digits}f} s"
        raise ValueError(f"{text} (data.params.short_clips=pad repeats the last frame)")
    return selection


def frames_within(times: np.ndarray, span: Span | None) -> slice:
    """The range of frames of a part of a video. times: of all frames. span: nan means no bound."""
    if span is None:
        return slice(0, len(times))
    start, end = span
    # Half a frame of tolerance, since spans are often rounded.
    half = 0.5 * (times[-1] - times[0]) / max(1, len(times) - 1)
    first = 0 if np.isnan(start) else int(np.searchsorted(times, start - half))
    last = len(times) if np.isnan(end) else int(np.searchsorted(times, end - half))
    if first >= last:
        raise ValueError(f"no frame from {start:g} to {end:g} s; the video ends at {times[-1]:.2f}")
    if end - times[-1] - 2 * half >= _ROUNDED:
        text = f"end={end:g} is beyond the video, which ends at {times[-1] + 2 * half:.2f} s"
        raise ValueError(f"{text}; start and end are seconds, and no numbers of frames")
    return slice(first, last)


class DeviceReader(Protocol):
    """Reads clips into tensors on `device`, in threads of the training process.

    reason_unavailable: why it cannot run here; None if it can. on_device: the context of work with its tensors.
    read_clip: reads a clip without its padding, by `on_cpu` if it cannot decode the file.
    """

    device: torch.device

    def __init__(self, device: torch.device) -> None: ...
    @staticmethod
    def reason_unavailable() -> str | None: ...
    def on_device(self) -> AbstractContextManager[None]: ...
    def read_clip(
        self, path: str, settings: ClipSettings, choose: Choose, on_cpu: Callable[[], Clip]
    ) -> Clip: ...


def find_device_reader(backend: VideoBackend) -> type[DeviceReader] | None:
    """Return the class that reads clips on the device; None if the CPU decodes. ValueError if it is configured, but
    cannot run."""
    if backend not in ("auto", "dali"):
        return None
    found, reason = None, "there is no GPU"
    if backend == "dali" or torch.cuda.is_available():
        found = hook("video_reader")  # type[DeviceReader]
        reason = found.reason_unavailable() if found else "its extension is not installed"
    if reason is None:
        return found
    if backend == "dali":
        text = f"data.params.video_backend=dali: {reason}"
        raise ValueError(f"{text}; auto uses PyAV where DALI cannot run")
    logger.info("videos are decoded by PyAV, not by DALI: %s", reason)
    return None


@cache
def _reader_of_process(backend: VideoBackend) -> DeviceReader | None:
    """The first call must come from the thread whose current CUDA device is the process's."""
    if (kind := find_device_reader(backend)) is None:
        return None
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if is_gpu else torch.device("cpu")
    logger.info("videos are decoded by DALI on %s, or by PyAV if DALI cannot", device)
    return kind(device)


def device_reader(backend: VideoBackend) -> DeviceReader | None:
    """The process's reader of clips on its device; None if the CPU decodes, and in reading processes."""
    return None if get_worker_info() is not None else _reader_of_process(backend)


def on_readers_device(backend: VideoBackend) -> AbstractContextManager:
    """Context in which to make a sample: DeviceReader.on_device if there is one, else empty."""
    reader = device_reader(backend)
    return nullcontext() if reader is None else reader.on_device()


def read_clip(path: str, settings: ClipSettings, span: Span | None = None) -> Clip:
    """Read the clip [F, 3, rows, columns] uint8 of (a part of) a video file; a picture has one frame.

    With a DeviceReader it is on the process's device. Call within on_readers_device.
    """

    def choose(times: np.ndarray, fps: float) -> tuple[np.ndarray, Selection]:
        try:
            part = frames_within(times, span)
            selection = select_frames(times[part], fps, settings)
        except ValueError as error:
            raise BadSample(path, str(error)) from None
        return selection.indices[: selection.num_frames] + part.start, selection

    reader = device_reader(settings.video_backend)
    on_cpu = lambda: _read_on_cpu(path, settings, choose)
    if settings.max_num_frames == 1 and check_file(path) and holds_picture(path):
        clip = read_image(path, settings.video_size, settings.resize)[None]
        selection = Selection(np.zeros(1, int), 1)
    elif reader is None:
        clip, selection = on_cpu()
    else:
        clip, selection = reader.read_clip(path, settings, choose, on_cpu)
    if selection.num_padded:
        clip = torch.cat([clip, clip[-1:].expand(selection.num_padded, -1, -1, -1)])
    return (clip if reader is None else clip.to(reader.device)), selection


def _read_on_cpu(path: str, settings: ClipSettings, choose: Choose) -> Clip:
    is_stretched = settings.resize == "stretch"
    # FFmpeg squeezes frames in the step that converts them to RGB.
    video = open_video(path, settings.cpu_reader, settings.video_size if is_stretched else None)
    # Closed here and not by the garbage collector: see VideoReader.close.
    try:
        chosen, selection = choose(video.times, video.fps)
        # Scale each part before the next is decoded: full-size frames of a clip take much memory.
        parts = [
            part.permute(0, 3, 1, 2).contiguous()
            if is_stretched
            else resize_and_center_crop(part, settings.video_size, video.look.pixel_aspect)
            for part in video.parts(chosen.tolist())
        ]
    except Refusal as error:
        raise BadSample(path, str(error)) from None
    finally:
        video.close()
    return torch.cat(parts), selection


def read_image(path: str, size: tuple[int, int], resize: Resize = "crop") -> Tensor:
    """Read a picture [3, rows, columns] uint8, resized as clips are."""
    check_file(path)
    try:
        return resize_picture(read_pixels(path), size, resize)
    except ValueError as error:
        raise BadSample(path, f"{path}: {error}") from None  # it may not be the clip's own file


def resize_picture(pixels: Tensor, size: tuple[int, int], resize: Resize) -> Tensor:
    """Resize a picture [H, W, 3] uint8 as clips are, to [3, rows, columns] uint8."""
    if resize == "stretch":
        return stretch_picture(pixels, size)
    return resize_and_center_crop(pixels[None], size)[0]


@contextmanager
def named_bytes(data: bytes, suffix: str) -> Iterator[str]:
    """Context manager: a path at which libraries can open `data`, which stays in memory."""
    with open(os.memfd_create("clip" + suffix), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"

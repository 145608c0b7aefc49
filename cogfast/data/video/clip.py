"""One clip: its frames chosen, read, scaled and cropped; and the image of image-to-video."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.video.dali import DaliRefusal, DaliVideo, dali_of_this_process
from cogfast.data.video.file import check_file, one_line
from cogfast.data.video.reader import VideoReader, open_video
from cogfast.data.video.settings import ClipSettings
from cogfast.data.video.transform import (
    Selection,
    resize_and_center_crop,
    select_frames_sat,
    select_frames_timestamp,
    select_frames_uniform,
)

# Not all that Pillow knows: for EPS it starts Ghostscript, which runs what the file says.
_PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")

Span = tuple[float, float]  # seconds from the first frame: a part of a video


def select_frames(times: np.ndarray, fps: float, settings: ClipSettings) -> Selection:
    """The frames that make the clip of a video whose frames are shown at `times`, float64 seconds
    [n], `fps` of them per second; ValueError, which says why, where it is too short."""
    num_frames, skip = settings.max_num_frames, settings.skip_frms_num
    if settings.frame_selection == "timestamp":
        selection = select_frames_timestamp(times, settings.fps, num_frames, int(skip))
    elif settings.frame_selection == "sat":
        selection = select_frames_sat(len(times), fps, settings.fps, num_frames, skip)
    else:
        selection = select_frames_uniform(len(times), num_frames)
    if selection.num_padded and settings.skips_short_clips:
        # As the times say it, which need not be what the container says of the rate.
        has = len(times) / fps if len(times) == 1 else np.ptp(times) * len(times) / (len(times) - 1)
        fps, need = len(times) / max(has, 1e-9), num_frames / settings.fps
        digits = 1 if f"{has:.1f}" != f"{need:.1f}" else 2
        raise ValueError(
            f"{len(times)} frames at {fps:g} fps = {has:.{digits}f} s, need {need:.{digits}f} s "
            "(data.params.short_clips=pad repeats the last frame)"
        )
    return selection


def frames_within(times: np.ndarray, span: Span | None) -> slice:
    """The frames, of those shown at `times`, that are in a part of the video; nan: no bound."""
    if span is None:
        return slice(0, len(times))
    start, end = span
    half = 0.5 * (times[-1] - times[0]) / max(1, len(times) - 1)  # of a frame: what rounding takes
    first = 0 if np.isnan(start) else int(np.searchsorted(times, start - half))
    last = len(times) if np.isnan(end) else int(np.searchsorted(times, end - half))
    if first >= last:
        raise ValueError(f"no frame from {start:g} to {end:g} s, the video ends at {times[-1]:.2f}")
    return slice(first, last)


def read_clip(
    path: str, settings: ClipSettings, span: Span | None = None
) -> tuple[Tensor, Selection]:
    """The clip [F, 3, rows, columns] uint8 of a video file or of a part of it, and its selection.

    It lies on the device of the process where DALI reads, decoded by it or, where it cannot, by
    PyAV; to be called within on_readers_device.
    """
    dali = dali_of_this_process(settings.video_backend)
    video = None if dali is None else dali.open(path)
    if video is None:
        clip, selection = _read_on_cpu(path, settings, span)
        return (clip if dali is None else clip.to(dali.device)), selection
    chosen, selection = _choose(video, settings, span)
    try:
        return _padded(dali.read(video, chosen, settings.video_size), selection), selection
    except DaliRefusal as refusal:
        clip, selection = _read_on_cpu(path, settings, span)
        dali.note_refusal(video, refusal)
        return clip.to(dali.device), selection


def _read_on_cpu(path: str, settings: ClipSettings, span: Span | None) -> tuple[Tensor, Selection]:
    video = open_video(path, settings.cpu_reader)
    try:
        chosen, selection = _choose(video, settings, span)
        parts = [
            resize_and_center_crop(part, settings.video_size)
            for part in video.parts(chosen.tolist())
        ]
    finally:
        video.close()
    return _padded(torch.cat(parts), selection), selection


def _choose(
    video: VideoReader | DaliVideo, settings: ClipSettings, span: Span | None
) -> tuple[np.ndarray, Selection]:
    """The frames to decode, and the selection; padded frames are copied, not decoded."""
    try:
        part = frames_within(video.times, span)
        selection = select_frames(video.times[part], video.fps, settings)
    except ValueError as error:
        raise BadSample(video.path, str(error)) from None
    num_real = len(selection.indices) - selection.num_padded
    return selection.indices[:num_real] + part.start, selection


def _padded(clip: Tensor, selection: Selection) -> Tensor:
    if not selection.num_padded:
        return clip
    return torch.cat([clip, clip[-1:].expand(selection.num_padded, -1, -1, -1)])


def read_image(source: str | bytes, name: str, size: tuple[int, int]) -> Tensor:
    """A picture [3, rows, columns] uint8, from its file or its bytes, covered and cropped as clips."""
    if isinstance(source, str):
        check_file(source)
    try:
        pixels = read_pixels(source)
    except ValueError as error:
        raise BadSample(name, str(error)) from None
    return resize_and_center_crop(pixels[None], size)[0]


def read_pixels(source: str | bytes) -> Tensor:
    """All pixels of a picture, uint8 RGB [H, W, 3], turned as they are to be shown; ValueError, which
    says why, where it cannot be read."""
    from PIL import Image, ImageOps

    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=_PICTURES) as image:
            return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB")))
    # Pillow's readers raise many kinds for damaged files.
    except Exception as error:
        what = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({one_line(error)})"
        kinds = ", ".join(_PICTURES[:-1]) + f" or {_PICTURES[-1]}"
        raise ValueError(f"not a readable picture{what}; use {kinds}") from None


@contextmanager
def named_bytes(data: bytes, suffix: str) -> Iterator[str]:
    """A path under which readers find `data` while the context lasts; in memory on Linux."""
    if sys.platform == "linux":
        descriptor = os.memfd_create("clip" + suffix)
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            yield f"/proc/self/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.NamedTemporaryFile(suffix=suffix) as file:
        file.write(data)
        file.flush()
        yield file.name

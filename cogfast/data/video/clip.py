"""Reads one clip: selects, decodes and resizes its frames. Also reads conditioning images."""

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

from cogfast.config.values import counted
from cogfast.data.bad_samples import BadSample
from cogfast.data.video.dali import DaliRefusal, DaliVideo, dali_of_this_process
from cogfast.data.video.file import check_file, one_line
from cogfast.data.video.reader import VideoReader, open_video
from cogfast.data.video.settings import ClipSettings
from cogfast.data.video.transform import (
    Resize,
    Selection,
    resize_and_center_crop,
    select_frames_sat,
    select_frames_timestamp,
    select_frames_uniform,
    stretch_picture,
)

# Only some of Pillow's formats: for EPS it starts Ghostscript, which executes code in the file.
_PICTURES = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")

Span = tuple[float, float]  # start and end of a part of a video, seconds since its first frame


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
        raise ValueError(
            f"{counted(len(times), 'frame')} at {fps:g} fps = {has:.{digits}f} s, need {need:.{digits}f} s "
            "(data.params.short_clips=pad repeats the last frame)"
        )
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
    return slice(first, last)


def read_clip(
    path: str, settings: ClipSettings, span: Span | None = None
) -> tuple[Tensor, Selection]:
    """Read the clip [F, 3, rows, columns] uint8 of a video file or of a part of it.

    With DALI the clip lies on the process's device; PyAV decodes the files that DALI cannot. Call
    within on_readers_device.
    """
    dali = dali_of_this_process(settings.video_backend)
    video = None if dali is None else dali.open(path)
    if dali is None or video is None:
        clip, selection = _read_on_cpu(path, settings, span)
        return (clip if dali is None else clip.to(dali.device)), selection
    chosen, selection = _choose(video, settings, span)
    try:
        clip = dali.read(video, chosen, settings.video_size, settings.resize)
        return _padded(clip, selection), selection
    except DaliRefusal as refusal:
        # If PyAV cannot read the file either, this raises, and the refusal does not count.
        clip, selection = _read_on_cpu(path, settings, span)
        dali.note_refusal(video, refusal)
        return clip.to(dali.device), selection


def _read_on_cpu(path: str, settings: ClipSettings, span: Span | None) -> tuple[Tensor, Selection]:
    is_stretched = settings.resize == "stretch"
    # FFmpeg squeezes frames in the step that converts them to RGB.
    size = settings.video_size if is_stretched else None
    video = open_video(path, settings.cpu_reader, size)
    # Closed here and not by the garbage collector: see VideoReader.close.
    try:
        chosen, selection = _choose(video, settings, span)
        # Scale each part before the next is decoded: full-size frames of a clip take much memory.
        parts = [
            part.permute(0, 3, 1, 2).contiguous()
            if is_stretched
            else resize_and_center_crop(part, settings.video_size)
            for part in video.parts(chosen.tolist())
        ]
    finally:
        video.close()
    return _padded(torch.cat(parts), selection), selection


def _choose(
    video: VideoReader | DaliVideo, settings: ClipSettings, span: Span | None
) -> tuple[np.ndarray, Selection]:
    """Return the indices of the frames to decode, and the selection.

    The indices leave out padding, which is copied from the last frame.
    """
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


def read_image(
    source: str | bytes, name: str, size: tuple[int, int], resize: Resize = "crop"
) -> Tensor:
    """Read a picture [3, rows, columns] uint8, resized as clips are.

    source: a path, or the content of the file. name: the sample's, for errors.
    """
    if isinstance(source, str):
        check_file(source)
    try:
        pixels = read_pixels(source)
    except ValueError as error:
        raise BadSample(name, str(error)) from None
    return resize_picture(pixels, size, resize)


def resize_picture(pixels: Tensor, size: tuple[int, int], resize: Resize) -> Tensor:
    """Resize a picture [H, W, 3] uint8 as clips are, to [3, rows, columns] uint8."""
    if resize == "stretch":
        return stretch_picture(pixels, size)
    return resize_and_center_crop(pixels[None], size)[0]


def read_pixels(source: str | bytes) -> Tensor:
    """Read all pixels of a picture, uint8 RGB [H, W, 3], rotated for display.

    Raises ValueError if the picture cannot be read.
    """
    from PIL import Image, ImageOps

    file = io.BytesIO(source) if isinstance(source, bytes) else source
    try:
        with Image.open(file, formats=_PICTURES) as image:
            return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB")))
    # Pillow's readers raise many types of exceptions for damaged files.
    except Exception as error:
        what = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({one_line(error)})"
        kinds = ", ".join(_PICTURES[:-1]) + f" or {_PICTURES[-1]}"
        raise ValueError(f"not a readable image{what}; use {kinds}") from None


@contextmanager
def named_bytes(data: bytes, suffix: str) -> Iterator[str]:
    """Context manager: a path at which libraries can open `data`. On Linux it stays in memory."""
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

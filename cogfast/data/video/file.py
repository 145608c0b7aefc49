"""A video file: opened by PyAV, and what its container says without a frame being decoded."""

from __future__ import annotations

import io
import os
import re
import stat
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cogfast.data.bad_samples import BadSample

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

MOST_PIXELS = 2**26  # of a frame: 8192 x 8192
MOST_FRAMES = 2**24  # of a video: three days at 60 per second
# FFmpeg's demuxers that read the file alone. Others (HLS, concat, DASH, SDP) open whatever files and
# addresses the file names. The pictures are here so that the reason can name them.
_FORMATS = (
    *("mov", "matroska", "avi", "mpegts", "mpeg", "mpegvideo", "m4v", "h264", "hevc", "obu", "ivf"),
    *("flv", "asf", "ogg", "gif", "mxf", "dv", "nut", "yuv4mpegpipe"),
    *("png_pipe", "jpeg_pipe", "webp_pipe", "bmp_pipe", "tiff_pipe"),
)


def check_file(path: str) -> int:
    """The bytes of a file; BadSample where nothing can be read, or for ever, as from a pipe."""
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadSample(path, f"cannot be opened ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadSample(path, "not a file but a folder, pipe or device")
    if found.st_size == 0:
        raise BadSample(path, "the file is empty (0 bytes)")
    return found.st_size


def one_line(error: BaseException) -> str:
    """The telling line of a library's message, without its stack and source positions."""
    text = str(error.args[1] if len(error.args) > 1 else error)  # (number, text, ...) of FFmpeg
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line).strip()[:200]


def decode_errors() -> tuple[type[Exception], ...]:
    import av

    return (av.error.FFmpegError, ValueError, OSError)


def open_container(source: str | io.BufferedReader, is_probed: bool = False) -> InputContainer:
    """By PyAV; what tags say in other encodings makes no video unreadable. is_probed: FFmpeg
    decodes frames for what the decoder will say again, which takes as long as several of a clip."""
    import av

    options = {"format_whitelist": ",".join(_FORMATS), "max_pixels": str(MOST_PIXELS)}
    if isinstance(source, str):
        # Else FFmpeg takes a name such as "http:x.mp4" for an address.
        source, options["protocol_whitelist"] = "file:" + source, "file"
    if not is_probed:
        options["skip_frame"] = "all"
    try:
        return av.open(source, options=options, metadata_errors="ignore")
    except av.error.ArgumentError:
        raise ValueError("damaged, or not mp4, mov, mkv, webm, avi, ts or the like") from None


def video_stream(path: str, container: InputContainer) -> av.VideoStream:
    """The stream to decode; BadSample where there is none."""
    if not container.streams.video:
        raise BadSample(path, "no video stream in it (truncated, or never there)")
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise BadSample(path, "no decoder for its video (damaged, or of a codec FFmpeg lacks)")
    if container.format.name.endswith("_pipe"):  # FFmpeg's name for a picture by its content
        raise BadSample(path, f"a picture ({stream.codec_context.name}), not a video")
    height, width = stream.height or 0, stream.width or 0
    if height * width > MOST_PIXELS:
        raise BadSample(
            path, f"frames of {height} x {width} pixels; {MOST_PIXELS} at most are read"
        )
    stream.thread_type = "NONE"  # workers are the parallelism
    return stream


def open_video_file(path: str, is_probed: bool = False) -> InputContainer:
    """With a video stream in it."""
    try:
        container = open_container(path, is_probed)
    except decode_errors() as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None
    try:
        video_stream(path, container)
    except BadSample:
        container.close()
        raise
    return container


class Packet(NamedTuple):
    """An encoded frame. pts, dts: when it is shown and decoded, in ticks of the stream."""

    pts: int | None
    dts: int | None
    is_keyframe: bool
    is_discard: bool  # it is there to decode others, and is not shown


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What a container says of its frames, none of which is decoded for it.

    times, fps: as VideoReader's. codec: its name. packets: in the order of decoding. shown: the
    packet of each of the n frames.
    """

    path: str
    times: np.ndarray
    fps: float
    codec: str
    num_bytes: int
    packets: list[Packet]
    shown: list[int]

    @property
    def num_discarded(self) -> int:
        return sum(packet.is_discard for packet in self.packets)


def read_header(path: str) -> VideoHeader:
    """By PyAV. What fails is a BadSample."""
    check_file(path)
    with closing(open_video_file(path)) as container:
        return header_of(path, container)


def header_of(path: str, container: InputContainer) -> VideoHeader:
    stream = container.streams.video[0]
    try:
        packets = [
            Packet(p.pts, p.dts, p.is_keyframe, p.is_discard)
            for p in container.demux(stream)
            if p.pts is not None or p.size  # the last says that there are no more
        ]
    except decode_errors() as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None
    # Packets come in decoding order, frames in the order of their times; decord counts from 0.
    shown = [i for i, p in enumerate(packets) if p.pts is not None and not p.is_discard]
    shown.sort(key=lambda i: packets[i].pts)
    base, rate = stream.time_base, stream.average_rate
    if not shown or base is None:
        raise BadSample(path, "no frame in it")
    # frames: 0 where the format does not say; the index has no frames that an edit list cuts off.
    expected = min(stream.frames, len(stream.index_entries))
    if len(packets) < expected:
        raise BadSample(path, f"truncated: {len(packets)} of {expected} frames are there")
    ticks = np.array([packets[i].pts for i in shown], dtype=np.int64)
    if len(ticks) > 1 and ticks[0] == ticks[-1]:
        raise BadSample(path, f"its {len(ticks)} frames are all shown at the same time")
    times = (ticks - ticks[0]) * float(base)
    return VideoHeader(
        path=path,
        times=times,
        fps=float(rate) if rate else len(times) / max(float(times[-1]), 1e-3),
        codec=stream.codec_context.name,
        num_bytes=container.size,
        packets=packets,
        shown=shown,
    )


def first_frame(path: str) -> av.VideoFrame:
    """The frame as decoded, which says more than the container. What fails is a BadSample."""
    with closing(open_video_file(path)) as container:
        try:
            return next(container.decode(video=0))
        except (StopIteration, *decode_errors()) as error:
            raise BadSample(path, f"not a readable video ({one_line(error)})") from None

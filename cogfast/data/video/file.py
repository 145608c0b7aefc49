"""Opens video files with PyAV and reads their containers without decoding a frame."""

from __future__ import annotations

import io
import os
import re
import stat
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cogfast.core.files import LFS, is_lfs_pointer
from cogfast.data.bad_samples import BadSample

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from numpy.typing import NDArray

MAX_PIXELS = 2**26  # per frame: 8192 x 8192
MAX_FRAMES = 2**24  # per video: three days at 60 per second
# FFmpeg's demuxers that read only the file itself. Others (HLS, concat, DASH, SDP) open any file or
# URL that the file names. Pictures are included so that the error can say what the file is.
_FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,m4v,h264,hevc,obu,ivf,flv,asf,ogg,gif,mxf,dv,nut,"
    "yuv4mpegpipe,png_pipe,jpeg_pipe,webp_pipe,bmp_pipe,tiff_pipe"
)
# FFmpeg's numbers of linear and logarithmic light, PQ, SMPTE 428 and HLG, and of BT.2020's and P3's colours
_HDR_TRANSFERS, _WIDE_PRIMARIES = {8, 9, 10, 16, 17, 18}, {9, 11, 12}
_MOST_LONG = 64  # side of a frame by the other one: scaled until it covers a clip, more would fill the memory
_MOST_STRETCHED = 8.0  # width of a pixel by its height, or the inverse; more is a damaged header


class Refusal(ValueError):
    """A picture or video that can be read, but that is not trained on."""


def check_sides(rows: float, columns: float) -> None:
    if max(rows, columns) > _MOST_LONG * min(rows, columns):
        why = f"one side more than {_MOST_LONG} times as long as the other"
        raise Refusal(f"{rows:.0f} x {columns:.0f} pixels, {why}; crop it")


def check_file(path: str) -> int:
    """Return the size of a file in bytes; BadSample if it is empty or not a regular file.

    A pipe would block the reader.
    """
    try:
        found = os.stat(path)
    except OSError as error:
        raise BadSample(path, f"cannot be opened ({error.strerror})") from None
    if not stat.S_ISREG(found.st_mode):
        raise BadSample(path, "not a file but a folder, pipe or device")
    if found.st_size == 0:
        raise BadSample(path, "the file is empty (0 bytes)")
    if found.st_size < 1024 and is_lfs_pointer(path):
        raise BadSample(path, LFS)
    return found.st_size


def one_line(error: BaseException) -> str:
    """The first line of a library's error message, without stack and source positions."""
    # FFmpeg's errors have the arguments (number, text, ...).
    text = str(error.args[1] if len(error.args) > 1 else error)
    line = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", line).strip()[:200]


def decode_errors() -> tuple[type[Exception], ...]:
    """The exceptions that PyAV raises for damaged files."""
    from av.error import FFmpegError

    return (FFmpegError, ValueError, OSError)


def open_container(source: str | io.BufferedReader, is_probed: bool = False) -> InputContainer:
    """Open a video with PyAV.

    is_probed: let FFmpeg decode frames to find stream properties. The decoder reports these anyway,
    and probing takes as long as decoding several frames.
    """
    import av
    from av.error import ArgumentError

    options = {"format_whitelist": _FORMATS, "max_pixels": str(MAX_PIXELS)}
    if isinstance(source, str):
        # FFmpeg takes a name such as "http:x.mp4" for a URL unless "file:" precedes it.
        source, options["protocol_whitelist"] = "file:" + source, "file"
    if not is_probed:
        options["skip_frame"] = "all"
    # Tags in other encodings than UTF-8 do not make a video unreadable.
    try:
        return av.open(source, "r", options=options, metadata_errors="ignore")
    except ArgumentError:
        raise ValueError(
            "damaged, or not a supported format (mp4, mov, mkv, webm, avi, ts, ...)"
        ) from None


def moving_streams(container: InputContainer) -> list[av.VideoStream]:
    """The video streams but for attached pictures (the cover of an album), of which players show the default one."""
    every = container.streams.video
    found = [s for s in every if not s.disposition & s.disposition.attached_pic] or every
    return sorted(found, key=lambda s: not s.disposition & s.disposition.default)


def video_stream(path: str, container: InputContainer) -> av.VideoStream:
    """The stream to decode; BadSample if there is none, or if it cannot be decoded."""
    if not container.streams.video:
        raise BadSample(path, "no video stream in it (truncated, or not a video)")
    stream = moving_streams(container)[0]
    if stream.codec_context is None:
        raise BadSample(
            path, "no decoder for its video (damaged, or a codec that FFmpeg does not have)"
        )
    if container.format.name.endswith("_pipe"):  # FFmpeg's name of its picture formats
        raise BadSample(path, f"an image ({stream.codec_context.name}), not a video")
    height, width = stream.height or 0, stream.width or 0
    if height * width > MAX_PIXELS:
        raise BadSample(path, f"frames of {height} x {width} pixels; at most {MAX_PIXELS} are read")
    stream.thread_type = "NONE"  # workers are the parallelism
    return stream


def open_video_file(path: str, is_probed: bool = False) -> InputContainer:
    """Open a video file; BadSample if that fails."""
    try:
        return open_container(path, is_probed)
    except decode_errors() as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None


class Packet(NamedTuple):
    """An encoded frame. pts, dts: when to show and to decode it, in the stream's time base."""

    pts: int | None
    dts: int | None
    is_keyframe: bool
    is_discard: bool  # needed to decode other frames, but not shown


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """The frames of a video as its container lists them.

    times, fps: as in VideoReader. packets: in decoding order. shown: for each of the n frames, in
    display order, the index of its packet.
    """

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
    """Read the header of a video file with PyAV; BadSample if that fails."""
    check_file(path)
    with closing(open_video_file(path)) as container:
        return header_of(path, container)


def header_of(path: str, container: InputContainer) -> VideoHeader:
    """Read the header of an open video. path: its name, for errors."""
    stream = video_stream(path, container)
    try:
        packets = [
            Packet(p.pts, p.dts, p.is_keyframe, p.is_discard)
            for p in container.demux(stream)
            if p.pts is not None or p.size  # the last one is an empty end marker
        ]
    except decode_errors() as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None
    # Packets come in decoding order; frames are numbered by their times, as in decord.
    shown = sorted((p.pts, i) for i, p in enumerate(packets) if not (p.pts is None or p.is_discard))
    base, rate = stream.time_base, stream.average_rate
    if not shown or base is None:
        raise BadSample(path, "no frame in it")
    # stream.frames is 0 if the format has no count, and includes frames that an edit list cuts off;
    # the index does not include these.
    expected = min(stream.frames, len(stream.index_entries))
    if len(packets) < expected:
        raise BadSample(path, f"truncated: {len(packets)} of {expected} frames are there")
    ticks = np.array([pts for pts, _ in shown], dtype=np.int64)
    if len(ticks) > 1 and ticks[0] == ticks[-1]:
        raise BadSample(path, f"its {len(ticks)} frames are all shown at the same time")
    times = (ticks - ticks[0]) * float(base)
    return VideoHeader(
        times=times,
        fps=float(rate) if rate else len(times) / max(float(times[-1]), 1e-3),
        codec=stream.codec_context.name,
        num_bytes=container.size,
        packets=packets,
        shown=[i for _, i in shown],
    )


class Look(NamedTuple):
    """How players show the decoded frames of a video: first transposed, then flipped.

    pixel_aspect: width of a shown pixel by its height. notes: what is not applied, as NOTES of clip_notes.py.
    """

    is_transposed: bool = False
    flips_rows: bool = False
    flips_columns: bool = False
    pixel_aspect: float = 1.0
    notes: tuple[str, ...] = ()

    def turned(self, pixels: NDArray) -> NDArray:
        """Return a decoded frame [H, W, 3] as it is shown."""
        pixels = pixels.swapaxes(0, 1) if self.is_transposed else pixels
        return pixels[:: -1 if self.flips_rows else 1, :: -1 if self.flips_columns else 1]


def look_of(frame: av.VideoFrame, stream: av.VideoStream) -> Look:
    """Return how players show a frame that was just decoded."""
    get: Any = frame.side_data.get
    found = get("DISPLAYMATRIX")
    # (x, y) is shown at (a x + c y, b x + d y).
    a, b, _, c, d = (1, 0, 0, 0, 1) if found is None else np.frombuffer(found, np.int32)[:5]
    is_transposed = abs(int(a)) < abs(int(b))
    rows, columns = (b, c) if is_transposed else (d, a)
    # The container's aspect precedes that of the codec, which some decoders know only now.
    aspect = float(stream.sample_aspect_ratio or stream.codec_context.sample_aspect_ratio or 1)
    aspect = aspect if 1 / _MOST_STRETCHED <= aspect <= _MOST_STRETCHED else 1.0
    is_hdr = frame.color_trc in _HDR_TRANSFERS or frame.color_primaries in _WIDE_PRIMARIES
    notes = {
        "hdr": is_hdr or get("DOVI_RPU_BUFFER") is not None,
        "interlaced": frame.interlaced_frame,
        # FFmpeg's own decoders of VP8 and VP9 drop the transparency that Matroska notes.
        "alpha": "alpha_mode" in stream.metadata
        or any(c.is_alpha for c in frame.format.components),
        "streams": len(moving_streams(stream.container)) > 1,  # pyright: ignore[reportArgumentType]
    }
    aspect = 1 / aspect if is_transposed else aspect
    found = tuple(name for name, is_found in notes.items() if is_found)
    return Look(is_transposed, bool(rows < 0), bool(columns < 0), aspect, found)


def first_frame(path: str) -> tuple[av.VideoFrame, Look]:
    """Decode the first frame, which has properties that the container lacks; BadSample on errors."""
    with closing(open_video_file(path)) as container:
        stream = video_stream(path, container)
        try:
            frame = next(container.decode(stream))
        except (StopIteration, *decode_errors()) as error:
            raise BadSample(path, f"not a readable video ({one_line(error)})") from None
        return frame, look_of(frame, stream)

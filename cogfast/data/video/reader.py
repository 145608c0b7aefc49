"""Stop 1 of nine: reads the frame times of a video file, and the pixels of chosen frames.

PyAV is the default; decord, which upstream uses, can be configured. Both return the same pixels bit
for bit. A reader is opened for each sample. All failures are raised as BadSample.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import stat
import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cogfast.core.files import LFS, is_lfs_pointer
from cogfast.data.bad_samples import BadSample

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from numpy.typing import NDArray

ReaderName = Literal["pyav", "decord"]

_FRAMES_AT_ONCE = 4  # that decord decodes in one call
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
        text = "damaged, or not a supported format (mp4, mov, mkv, webm, avi, ts, ...)"
        raise ValueError(text) from None


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
        why = "no decoder for its video (damaged, or a codec that FFmpeg does not have)"
        raise BadSample(path, why)
    if container.format.name.endswith("_pipe"):  # FFmpeg's name of its picture formats
        raise BadSample(path, f"an image ({stream.codec_context.name}), not a video")
    height, width = stream.height or 0, stream.width or 0
    if height * width > MAX_PIXELS:
        raise BadSample(path, f"frames of {height} x {width} pixels; at most {MAX_PIXELS} are read")
    stream.thread_type = "NONE"  # workers are the parallelism
    return stream


def open_video_file(path: str, is_probed: bool = False) -> InputContainer:
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
    if len(packets) < (expected := min(stream.frames, len(stream.index_entries))):
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


class VideoReader(ABC):
    """An open video file. times: seconds since the first frame, for each frame, float64 [n]."""

    path: str
    times: np.ndarray
    fps: float  # mean frame rate
    look = Look()  # of the frames that `parts` has yielded last

    def __len__(self) -> int:
        return len(self.times)

    @abstractmethod
    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        """Yield the frames at `indices`, a few at a time: [f, H, W, 3] uint8 RGB.

        Frames have the video's size, or the one that the reader was opened with. `indices` must not
        decrease. Few frames at a time, so that they stay in the CPU caches until
        they are scaled down.
        """

    def read(self, indices: Sequence[int]) -> Tensor:
        """Return all frames at `indices`, [F, H, W, 3]."""
        return torch.cat(list(self.parts(indices)))

    @abstractmethod
    def close(self) -> None:
        """Free the decoder now.

        A decord reader must not be left to the garbage collector: in a process forked meanwhile the
        collector waits for decoding threads that do not exist there.
        """


def open_video(
    path: str, reader: ReaderName = "pyav", size: tuple[int, int] | None = None
) -> VideoReader:
    """Open a video file with the library `reader`.

    size: rows and columns to which frames are squeezed; None leaves them as they are.
    """
    if reader == "decord" and importlib.util.find_spec("decord") is None:
        raise ValueError("reader=decord: decord is not installed; install it, or use reader=pyav")
    check_file(path)
    if reader == "pyav":
        return PyAVReader(path, size)
    # decord would open other files that a playlist names; first_frame refuses such formats.
    return DecordReader(path, size, first_frame(path)[1])


class DecordReader(VideoReader):
    """decord with one thread: workers are the parallelism, and each thread costs memory.

    decord fails for some widths below 100 columns, for which it takes the padding of a row for a
    fourth channel (dmlc/decord issue 336).
    """

    def __init__(self, path: str, size: tuple[int, int] | None, look: Look) -> None:
        import decord

        decord.logging.set_level(decord.logging.QUIET)  # the exceptions hold the same messages
        self.path, self.look = path, look
        self._errors = (decord.DECORDError, RuntimeError, IndexError, OSError, AssertionError)
        self._errors += (UnicodeEncodeError,)  # for a path that is not valid UTF-8
        rows, columns = size or (-1, -1)  # -1: the video's own
        try:
            self._reader = decord.VideoReader(
                path, ctx=decord.cpu(0), width=columns, height=rows, num_threads=1
            )
            shown = self._reader.get_frame_timestamp(range(len(self._reader)))  # [n, 2] start, end
            self.fps = float(self._reader.get_avg_fps())
        except self._errors as error:
            self._free(error)
            raise BadSample(path, f"not a readable video ({one_line(error)})") from None
        self.times = shown[:, 0].astype(np.float64)

    def _free(self, error: BaseException) -> None:
        """Free decord's reader, to which the frames of the exception's traceback refer."""
        self._reader = None
        traceback.clear_frames(error.__traceback__)

    def close(self) -> None:
        self._reader = None

    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        for i in range(0, len(indices), _FRAMES_AT_ONCE):
            part = list(indices[i : i + _FRAMES_AT_ONCE])
            assert self._reader is not None, "the reader is closed"
            try:
                found = self._reader.get_batch(part)
            except self._errors as error:
                self._free(error)
                reason = f"frames {part[0]}..{part[-1]} of {len(self)} do not decode"
                raise BadSample(self.path, f"{reason} ({one_line(error)})") from None
            # It is a tensor if the process has called decord.bridge.set_bridge("torch"), as CogVideo's
            # diffusers trainer does when it is imported.
            frames = found if isinstance(found, Tensor) else torch.from_numpy(found.asnumpy())
            # decord turns frames as their upper edge is shown, and does not mirror them.
            is_mirrored = sum(self.look[:3]) % 2
            yield frames.flip(2 if self.look.is_transposed else 1) if is_mirrored else frames


class PyAVReader(VideoReader):
    """PyAV, which decodes from the keyframe before a wanted frame and skips frames not needed.

    If the packets' pts do not identify frames, or a wanted frame is not returned, it decodes the
    file from the start and counts frames.
    """

    def __init__(self, path: str, size: tuple[int, int] | None = None) -> None:
        from av.video.reformatter import VideoReformatter

        self.path = path
        self._reformatter = VideoReformatter()  # for all frames: each builds its own tables
        self._stretch = None if size is None else FrameStretcher(size)
        self._container: Any = open_video_file(path)  # None once it is closed, so that it is freed
        self._header = header_of(path, self._container)
        self.times, self.fps = self._header.times, self._header.fps
        self._delay = _delay(self._header.packets)
        self._size: tuple[int, int] | None = None  # columns, rows of the first frame asked for

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None

    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        assert list(indices) == sorted(indices), f"{indices=} decrease"
        left = list(reversed(indices))  # a stack: the next index is the last
        # Frames that this leaves are counted from the start, and what fails there is reported.
        with suppress(*decode_errors()):
            yield from self._by_pts(left)
        if left:
            yield from self._by_count(left)

    def _by_pts(self, left: list[int]) -> Iterator[Tensor]:
        """Yield the frames at `left`, last index first, and remove their indices from it."""
        packets, shown = self._header.packets, self._header.shown
        stream = moving_streams(self._container)[0]
        # Some formats, such as AVI, store frames in decoding order without times of display.
        if self._delay is None or (self._delay == 0 and stream.codec_context.reorder_depth > 0):
            return
        places = [shown[index] for index in reversed(left)]
        wanted = {packets[place].pts for place in places}
        for first, last in _runs(packets, places):
            # A run from the middle of the file counts only if the decoder confirms the keyframe.
            is_sound = first == 0
            for frame in self._decode(first, last, wanted):
                if frame.pts == packets[first].pts:
                    is_sound = is_sound or frame.key_frame
                if is_sound and left and frame.pts == packets[shown[left[-1]]].pts:
                    yield from self._copies(frame, left, look_of(frame, stream))

    def _decode(self, first: int, last: int, wanted: set[int | None]) -> Iterator[av.VideoFrame]:
        """Decode packets `first` to `last`; yields at least the frames whose pts are in `wanted`."""
        start, end = self._header.packets[first], self._header.packets[last]
        stream = moving_streams(self._container)[0]
        context = stream.codec_context
        at = start.pts if start.dts is None else start.dts
        assert at is not None and self._delay is not None, "packets without pts are counted"
        self._container.seek(at, stream=stream)
        # Set here because open_container does not probe: see _delay.
        context.reorder_depth = max(context.reorder_depth, self._delay)
        has_begun = False  # seeking may stop at an earlier packet
        for packet in self._container.demux(stream):
            has_begun = has_begun or packet.pts == start.pts
            if not has_begun:
                continue
            # NONREF skips frames that no other frame needs. In HEVC a frame of a higher temporal
            # layer may still need them; in H.264 none does.
            if self._header.codec == "h264":
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            yield from packet.decode()
            if packet.pts == end.pts:
                yield from context.decode(None)  # frames that the decoder has buffered
                return

    def _by_count(self, left: list[int]) -> Iterator[Tensor]:
        """Yield as `_by_pts` does, but decode and count all frames from the start of the file."""
        number = 0
        with closing(open_video_file(self.path, is_probed=True)) as container:
            stream = video_stream(self.path, container)
            try:
                for frame in container.decode(stream):
                    if left[-1] == number:
                        yield from self._copies(frame, left, look_of(frame, stream))
                    if not left:
                        return
                    number += 1
                why = "the file ends early"
            except decode_errors() as error:
                why = one_line(error)
        raise BadSample(self.path, f"frame {number} of {len(self)} does not decode ({why})")

    def _copies(self, frame: av.VideoFrame, left: list[int], look: Look) -> Iterator[Tensor]:
        """Yield a frame [1, H, W, 3], as players show it, as often as it is next in `left`."""
        self.look = look
        if self._stretch is not None:
            pixels = self._stretch(frame, self.look)
        else:
            # Frames of one video may differ in size, for instance in recordings of video calls.
            self._size = self._size or (frame.width, frame.height)
            rgb = self._reformatter.reformat(frame, *self._size, format="rgb24", threads=1)
            pixels = np.ascontiguousarray(self.look.turned(rgb.to_ndarray()))
        index = left[-1]
        while left and left[-1] == index:
            yield torch.from_numpy(pixels)[None]
            left.pop()


def _delay(packets: Sequence[Packet]) -> int | None:
    """The reordering delay: the largest number of packets that precede one shown before them.

    None if pts are missing or repeated. FFmpeg finds the delay by probing, which open_container omits.
    """
    pts = [packet.pts for packet in packets if packet.pts is not None]
    if len(set(pts)) < len(packets):
        return None
    return int(np.max(np.arange(len(pts)) - np.argsort(np.argsort(pts))))


def _runs(packets: Sequence[Packet], places: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges (first, last) of packets to decode for those at `places`, in display order."""
    pts = [packet.pts or 0 for packet in packets]  # none is None
    keyframes = [i for i, p in enumerate(packets) if p.is_keyframe and not p.is_discard]
    runs: list[tuple[int, int]] = []
    for place in places:
        # A keyframe may be followed by frames that are shown before it and refer to earlier frames.
        before = reversed(keyframes[: bisect_right(keyframes, place)])
        first = next((k for k in before if pts[k] <= pts[place]), 0)
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = min(runs[-1][0], first), max(runs[-1][1], place)
        else:
            runs.append((first, place))
    return runs


class FrameStretcher:
    """Squeezes decoded frames to RGB of `size` (rows, columns) with FFmpeg's `scale`: resize=stretch.

    decord builds the same chain of filters, so the pixels are those of CogVideo's diffusers trainer.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self._rows, self._columns = size
        self._kind: tuple = ()  # of the frames that self._graph was built for

    def __call__(self, frame: av.VideoFrame, look: Look) -> np.ndarray:
        """Return the frame, turned as players show it, as uint8 [rows, columns, 3]."""
        from av.filter import Graph

        # Frames of one video may differ in size, and a graph takes one kind of frames.
        kind = (frame.width, frame.height, frame.format.name, look)
        if kind != self._kind:
            self._graph, self._kind = Graph(), kind
            self._graph.threads = 1  # workers are the parallelism
            first = self._graph.add_buffer(
                width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1)
            )
            # cclock_flip transposes a frame and turns nothing.
            chain = [("transpose", "cclock_flip")] * look.is_transposed
            chain += [("vflip",)] * look.flips_rows + [("hflip",)] * look.flips_columns
            chain.append(("scale", f"{self._columns}:{self._rows}:flags=bilinear"))
            chain += [("format", "rgb24"), ("buffersink", None)]
            self._graph.link_nodes(first, *(self._graph.add(*step) for step in chain)).configure()
        self._graph.vpush(frame)
        return np.ascontiguousarray(self._graph.vpull().to_ndarray())

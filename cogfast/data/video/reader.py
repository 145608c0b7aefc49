"""Stop 1 of nine: an open video file: when each frame is shown, and the pixels of chosen frames.

PyAV reads, or decord where it is asked for, as upstream does; both give the same pixels bit for
bit. A reader lives as long as one sample. What fails is a BadSample.
"""

from __future__ import annotations

import importlib.util
import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.video.file import (
    Packet,
    check_file,
    decode_errors,
    header_of,
    one_line,
    open_video_file,
)

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

ReaderName = Literal["pyav", "decord"]

_FRAMES_AT_ONCE = 4  # by decord


class VideoReader(ABC):
    """An open file. times: seconds from the first frame to each of the n, float64 [n]."""

    path: str
    times: np.ndarray
    fps: float  # mean rate

    def __len__(self) -> int:
        return len(self.times)

    @abstractmethod
    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        """The frames at `indices`, which must not decrease, a few at a time: [f, H, W, 3] uint8
        RGB. Full-size frames are many bytes, and few of them stay in the processor's caches."""

    def read(self, indices: Sequence[int]) -> Tensor:
        """All of them: [F, H, W, 3]."""
        return torch.cat(list(self.parts(indices)))

    @abstractmethod
    def close(self) -> None:
        """Let the decoder go now. A decord reader that some exception's traceback keeps alive hangs
        a forked process, whose garbage collector waits for decoding threads that it does not have.
        """


def open_video(path: str, reader: ReaderName = "pyav") -> VideoReader:
    """The file's reader; `reader` names the library."""
    if reader not in ("pyav", "decord"):
        raise ValueError(f"reader={reader!r} is not known; use pyav or decord")
    if reader == "decord" and importlib.util.find_spec("decord") is None:
        raise ValueError("reader=decord: decord is not installed; install it, or use reader=pyav")
    check_file(path)
    if reader == "pyav":
        return PyAVReader(path)
    open_video_file(path).close()  # refuses formats that name other files, which decord would open
    return DecordReader(path)


class DecordReader(VideoReader):
    """decord with one thread: workers are the parallelism, and many threads cost memory each.

    Some widths below 100 columns it gives up on, where it takes the padding of a row for a fourth
    channel (dmlc/decord issue 336).
    """

    def __init__(self, path: str) -> None:
        import decord

        decord.logging.set_level(decord.logging.QUIET)  # the report says it once
        self.path = path
        self._errors = (
            *(decord.DECORDError, RuntimeError, IndexError, OSError, AssertionError),
            UnicodeEncodeError,  # of a path that is no UTF-8
        )
        try:
            self._reader = decord.VideoReader(path, ctx=decord.cpu(0), num_threads=1)
            shown = self._reader.get_frame_timestamp(range(len(self._reader)))  # [n, 2] start, end
            self.fps = float(self._reader.get_avg_fps())
        except self._errors as error:
            self._let_go(error)
            raise BadSample(path, f"not a readable video ({one_line(error)})") from None
        self.times = shown[:, 0].astype(np.float64)

    def _let_go(self, error: BaseException) -> None:
        """Free decord's reader, which the frames of its exception would keep alive in a cycle."""
        self._reader = None
        traceback.clear_frames(error.__traceback__)

    def close(self) -> None:
        self._reader = None

    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        for i in range(0, len(indices), _FRAMES_AT_ONCE):
            part = list(indices[i : i + _FRAMES_AT_ONCE])
            try:
                frames = torch.from_numpy(self._reader.get_batch(part).asnumpy())
            except self._errors as error:
                self._let_go(error)
                reason = f"frames {part[0]}..{part[-1]} of {len(self)} do not decode"
                raise BadSample(self.path, f"{reason} ({one_line(error)})") from None
            yield frames


class PyAVReader(VideoReader):
    """PyAV, decoding from the keyframe before a frame that is asked for, and on the way only what
    other frames need. Where their pts do not tell which frame is which, or one does not come out,
    all is decoded from the start of the file, and frames are counted."""

    def __init__(self, path: str) -> None:
        from av.video.reformatter import VideoReformatter

        self.path = path
        self._reformatter = VideoReformatter()  # one for all frames: each keeps its own tables
        self._container: InputContainer | None = open_video_file(path)
        try:
            self._header = header_of(path, self._container)
        except BadSample:
            self.close()
            raise
        self.times, self.fps = self._header.times, self._header.fps
        self._delay = _delay(self._header.packets)
        self._size: tuple[int, int] | None = None  # columns, rows of the first frame asked for

    def close(self) -> None:
        if self._container is not None:
            self._container.close()
            self._container = None

    def parts(self, indices: Sequence[int]) -> Iterator[Tensor]:
        assert list(indices) == sorted(indices), f"{indices=} go back"
        left = list(reversed(indices))
        with suppress(*decode_errors()):
            yield from self._by_pts(left)
        if left:
            yield from self._by_count(left)

    def _by_pts(self, left: list[int]) -> Iterator[Tensor]:
        """The frames at `left`, whose last one comes next, and which loses those that came."""
        packets, shown = self._header.packets, self._header.shown
        # Some files, as AVI, have the order of decoding for that of showing.
        if self._delay is None or (self._delay == 0 and self._context.reorder_depth > 0):
            return
        places = [shown[index] for index in reversed(left)]
        wanted = {packets[place].pts for place in places}
        for first, last in _runs(packets, places):
            is_sound = first == 0  # else where the decoder, too, takes the packet for a keyframe
            for frame in self._decode(first, last, wanted):
                if frame.pts == packets[first].pts:
                    is_sound = is_sound or frame.key_frame
                if is_sound and left and frame.pts == packets[shown[left[-1]]].pts:
                    yield from self._copies(frame, left)

    def _decode(self, first: int, last: int, wanted: set[int]) -> Iterator[av.VideoFrame]:
        """Frames of packets `first` to `last`, all that are wanted among them."""
        start, end = self._header.packets[first], self._header.packets[last]
        stream, context = self._container.streams.video[0], self._context
        self._container.seek(start.pts if start.dts is None else start.dts, stream=stream)
        context.reorder_depth = max(context.reorder_depth, self._delay)
        has_begun = False  # seeking may end before the place
        for packet in self._container.demux(stream):
            has_begun = has_begun or packet.pts == start.pts
            if not has_begun:
                continue
            # In H.264 "not referred to" is exact; in HEVC a higher temporal layer may do so.
            if self._header.codec == "h264":
                context.skip_frame = "DEFAULT" if packet.pts in wanted else "NONREF"
            yield from packet.decode()
            if packet.pts == end.pts:
                yield from context.decode(None)  # those that the decoder holds back
                return

    def _by_count(self, left: list[int]) -> Iterator[Tensor]:
        """As _by_pts, of all frames from the file's start."""
        number = 0
        with closing(open_video_file(self.path, is_probed=True)) as container:
            try:
                for frame in container.decode(video=0):
                    if left[-1] == number:
                        yield from self._copies(frame, left)
                    if not left:
                        return
                    number += 1
                why = "the file ends early"
            except decode_errors() as error:
                why = one_line(error)
        raise BadSample(self.path, f"frame {number} of {len(self)} does not decode ({why})")

    def _copies(self, frame: av.VideoFrame, left: list[int]) -> Iterator[Tensor]:
        """A frame [1, H, W, 3] for each time that it is next in `left`, turned as it is to be shown;
        decord does that too."""
        # Frames of one video may have several sizes: a recording of a call, say.
        self._size = self._size or (frame.width, frame.height)
        rgb = self._reformatter.reformat(frame, *self._size, format="rgb24", threads=1)
        pixels = np.ascontiguousarray(np.rot90(rgb.to_ndarray(), frame.rotation // 90))
        index = left[-1]
        while left and left[-1] == index:
            yield torch.from_numpy(pixels)[None]
            left.pop()

    @property
    def _context(self) -> av.VideoCodecContext:
        return self._container.streams.video[0].codec_context


def _delay(packets: Sequence[Packet]) -> int | None:
    """The most packets that come before one that is shown before them; None where pts do not say
    which frame is which. FFmpeg would find it out by decoding (open_container)."""
    pts = [packet.pts for packet in packets]
    if None in pts or len(set(pts)) < len(pts):
        return None
    return int(np.max(np.arange(len(pts)) - np.argsort(np.argsort(pts))))


def _runs(packets: Sequence[Packet], places: Sequence[int]) -> list[tuple[int, int]]:
    """First and last packets to decode for those at `places`, which are in the order of showing."""
    keyframes = [i for i, p in enumerate(packets) if p.is_keyframe and not p.is_discard]
    runs: list[tuple[int, int]] = []
    for place in places:
        # Behind a keyframe may come frames that are shown before it, and need those before it.
        before = reversed(keyframes[: bisect_right(keyframes, place)])
        first = next((k for k in before if packets[k].pts <= packets[place].pts), 0)
        if runs and first <= runs[-1][1] + 1:
            runs[-1] = min(runs[-1][0], first), max(runs[-1][1], place)
        else:
            runs.append((first, place))
    return runs

"""Stop 1 of nine: an open video file: when each frame is shown, and the pixels of chosen frames.

decord reads; PyAV does where decord is not installed or does not know the file's format. Both give
the same pixels bit for bit. A reader lives as long as one sample. What fails is a BadSample.
"""

from __future__ import annotations

import importlib.util
import io
import os
import re
import stat
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample

if TYPE_CHECKING:
    import av

ReaderName = Literal["auto", "decord", "pyav"]


class VideoReader(Protocol):
    """An open file. times: seconds from the first frame to each of the n, float64 [n]."""

    path: str
    times: np.ndarray
    fps: float  # mean rate

    def __len__(self) -> int: ...

    def read(self, indices: Sequence[int]) -> Tensor:
        """Frames [F, H, W, 3] uint8 RGB at `indices`, which must not decrease."""

    def close(self) -> None:
        """Let the decoder go now. A decord reader that some exception's traceback keeps alive hangs
        a forked process, whose garbage collector waits for decoding threads that it does not have.
        """


def open_video(path: str, reader: ReaderName = "auto") -> VideoReader:
    """The file's reader; `reader` names the library, "auto" tries decord, then PyAV."""
    if reader not in ("auto", "decord", "pyav"):
        raise ValueError(f"reader={reader!r} is not known; use auto, decord or pyav")
    has_decord = importlib.util.find_spec("decord") is not None
    if reader == "decord" and not has_decord:
        raise ValueError("reader=decord: decord is not installed; install it, or use reader=pyav")
    check_file(path)
    if reader == "pyav" or not has_decord:
        return PyAVReader(path)
    try:
        return DecordReader(path, pyav_helps=reader == "auto")
    except BadSample:
        if reader == "decord":
            raise
        return PyAVReader(path)  # knows newer codecs, and says better what is wrong


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


class DecordReader:
    """decord with one thread: workers are the parallelism, and many threads cost memory each.

    pyav_helps: PyAV reads what decord gives up on, such as some widths below 100 columns, where it
    takes the padding of a row for a fourth channel (dmlc/decord issue 336).
    """

    def __init__(self, path: str, pyav_helps: bool = False) -> None:
        import decord

        decord.logging.set_level(decord.logging.QUIET)  # the report says it once
        self.path = path
        self._pyav_helps = pyav_helps
        self._pyav: PyAVReader | None = None
        self._errors = (
            *(decord.DECORDError, RuntimeError, IndexError, OSError, AssertionError),
            UnicodeEncodeError,  # of a path that is no UTF-8; PyAV takes it
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
        if self._pyav is not None:
            self._pyav.close()

    def __len__(self) -> int:
        return len(self.times)

    def read(self, indices: Sequence[int]) -> Tensor:
        if self._pyav is not None:
            return self._pyav.read(indices)
        try:
            frames = self._reader.get_batch(list(indices))
            return torch.from_numpy(frames.asnumpy())
        except self._errors as error:
            self._let_go(error)
            reason = f"frames {indices[0]}..{indices[-1]} of {len(self)} do not decode"
            failure = BadSample(self.path, f"{reason} ({one_line(error)})")
        if not self._pyav_helps:
            raise failure
        self._pyav = PyAVReader(self.path)
        return self._pyav.read(indices)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoHeader:
    """What a container says of its frames, none of which is decoded for it.

    times, fps: as VideoReader's. codec: its name. num_discarded: frames that are there to decode
    others and are not shown.
    """

    path: str
    times: np.ndarray
    fps: float
    codec: str
    num_bytes: int
    num_discarded: int


def read_header(path: str) -> VideoHeader:
    """By PyAV. What fails is a BadSample."""
    import av

    check_file(path)
    try:
        with open_container(path) as container:
            stream = video_stream(path, container)
            packets = [(p.pts, p.is_discard) for p in container.demux(stream) if p.pts is not None]
            base, rate, num_frames = stream.time_base, stream.average_rate, stream.frames
            codec, num_bytes = stream.codec_context.name, container.size
    except (av.error.FFmpegError, ValueError, OSError) as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None
    if not packets or base is None:
        raise BadSample(path, "no frame in it")
    if len(packets) < num_frames:  # 0 where the format does not say
        raise BadSample(path, f"truncated: {len(packets)} of {num_frames} frames are there")
    # Packets come in decoding order, frames in the order of their times; decord counts from 0.
    ticks = np.sort(np.array([pts for pts, _ in packets], dtype=np.int64))
    if len(ticks) > 1 and ticks[0] == ticks[-1]:
        raise BadSample(path, f"its {len(ticks)} frames are all shown at the same time")
    times = (ticks - ticks[0]) * float(base)
    return VideoHeader(
        path=path,
        times=times,
        fps=float(rate) if rate else len(packets) / max(float(np.ptp(times)), 1e-3),
        codec=codec,
        num_bytes=num_bytes,
        num_discarded=sum(is_discard for _, is_discard in packets),
    )


def first_frame(path: str) -> av.VideoFrame:
    """The frame as decoded, which says more than the container. What fails is a BadSample."""
    import av

    try:
        with open_container(path) as container:
            return next(container.decode(video_stream(path, container)))
    except (StopIteration, av.error.FFmpegError, ValueError, OSError) as error:
        raise BadSample(path, f"not a readable video ({one_line(error)})") from None


class PyAVReader:
    """PyAV, decoding from the start of the file up to the last frame asked for."""

    def __init__(self, path: str) -> None:
        import av
        from av.video.reformatter import VideoReformatter

        self.path = path
        self._errors = (av.error.FFmpegError, ValueError, OSError)
        self._reformatter = VideoReformatter()  # one for all frames: each keeps its own tables
        header = read_header(path)
        self.times, self.fps = header.times, header.fps
        self._frames = _decode(path)
        self._next = 0  # index of the frame that comes next
        self._last: av.VideoFrame | None = None  # the one before it
        self._size: tuple[int, int] | None = None  # columns, rows of the first frame asked for

    def close(self) -> None:
        self._frames.close()

    def __len__(self) -> int:
        return len(self.times)

    def _pixels(self, frame: av.VideoFrame) -> Tensor:
        """[H, W, 3], turned as it is to be shown; decord does that too."""
        # Frames of one video may have several sizes: a recording of a call, say.
        self._size = self._size or (frame.width, frame.height)
        shown = self._reformatter.reformat(frame, *self._size, format="rgb24", threads=1)
        rgb = shown.to_ndarray()
        return torch.from_numpy(np.ascontiguousarray(np.rot90(rgb, frame.rotation // 90)))

    def read(self, indices: Sequence[int]) -> Tensor:
        assert list(indices) == sorted(indices), f"{indices=} go back"
        if indices[0] < self._next - 1:
            self.close()
            self._next, self._frames = 0, _decode(self.path)
        out: list[Tensor] = []
        try:
            for index in indices:
                while self._next <= index:
                    self._last = next(self._frames)
                    self._next += 1
                out.append(self._pixels(self._last))
        except (StopIteration, *self._errors) as error:
            why = "the file ends early" if isinstance(error, StopIteration) else one_line(error)
            reason = f"frame {self._next} of {len(self)} does not decode ({why})"
            raise BadSample(self.path, reason) from None
        return torch.stack(out)


def open_container(source: str | io.BufferedReader) -> av.container.InputContainer:
    """By PyAV; what tags say in other encodings makes no video unreadable."""
    import av

    return av.open(source, metadata_errors="ignore")


def video_stream(path: str, container: av.container.InputContainer) -> av.VideoStream:
    """The stream to decode; BadSample where there is none."""
    if not container.streams.video:
        raise BadSample(path, "no video stream in it (truncated, or never there)")
    stream = container.streams.video[0]
    if container.format.name.endswith("_pipe"):  # FFmpeg's name for a picture by its content
        raise BadSample(path, f"a picture ({stream.codec_context.name}), not a video")
    stream.thread_type = "NONE"  # workers are the parallelism
    return stream


def _decode(path: str) -> Generator[av.VideoFrame, None, None]:
    """The frames of a file, in order; holds it open until closed or exhausted."""

    with open_container(path) as container:
        yield from container.decode(video_stream(path, container))

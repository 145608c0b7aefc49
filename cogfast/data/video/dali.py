"""Clips decoded, scaled and cropped on the GPU by DALI, in the training process.

What a clip is, and which frames it has, is decided as for PyAV (clip_transform); a clip here is
the same up to the rounding of colours. Each reading thread has a pipeline of its own, so that clips
are decoded beside each other and a file that DALI gives up on costs no other: PyAV reads that one.
DALI without a GPU decodes VP8, VP9 and MJPEG alone. Frames that change their size within a video are
not told by its header: DALI may read them wrongly, where PyAV scales them to the first one's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from cogfast.data.bad_samples import BadSample
from cogfast.data.video.file import first_frame, read_header
from cogfast.data.video.transform import cover_size

logger = logging.getLogger(__name__)

VideoBackend = Literal["auto", "dali", "decord", "pyav"]

_MOST_BYTES = 2**29  # DALI takes whole files; PyAV seeks in longer ones
# Red and blue in luma, by FFmpeg's number of the colour matrix. DALI takes all for the first.
_LUMA = {5: (0.299, 0.114), 1: (0.2126, 0.0722), 9: (0.2627, 0.0593)}
_FRAMES_AT_ONCE = 4  # in float32: those of a whole clip, of all threads, are many GiB
_NUM_SUFFICIENT = 3  # good files of a kind that DALI refuses before it is no longer asked


def _why_not() -> str | None:
    """What DALI lacks for decoding on this machine's GPU; None where nothing."""
    if not torch.cuda.is_available():
        return "there is no GPU"
    return _why_no_package() or _why_no_driver()


@functools.cache
def _why_no_package() -> str | None:
    try:
        importlib.import_module("nvidia.dali")
    except ImportError as error:
        return f"DALI does not import ({error}); pip install nvidia-dali-cuda130"
    return None


@functools.cache
def _why_no_driver() -> str | None:
    try:
        ctypes.CDLL("libnvcuvid.so.1")
    except OSError:
        return (
            "the driver's decoder libnvcuvid.so.1 is not there; a container gets it with "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
        )
    return None


def check_backend(backend: VideoBackend) -> None:
    """ValueError where DALI is asked for and cannot run."""
    if backend != "dali":
        return
    reason = _why_no_package() or (_why_no_driver() if torch.cuda.is_available() else None)
    if reason is not None:
        raise ValueError(
            f"data.params.video_backend=dali: {reason}; auto takes PyAV where DALI cannot run"
        )


def dali_of_this_process(backend: VideoBackend) -> DaliReader | None:
    """The process's reader where `backend` means DALI; None in reading processes, which have no
    device, and where the CPU reads."""
    return None if get_worker_info() is not None else _reader(backend)


def on_readers_device(backend: VideoBackend) -> AbstractContextManager:
    """For all that makes a sample: where DALI reads, its on_device."""
    dali = dali_of_this_process(backend)
    return nullcontext() if dali is None else dali.on_device()


@functools.cache
def _reader(backend: VideoBackend) -> DaliReader | None:
    """The first call comes from the thread whose current device is the process's."""
    if backend == "auto":
        reason = _why_not()
        if reason is not None:
            logger.info("videos are decoded by PyAV: no DALI, since %s", reason)
            return None
    elif backend != "dali":
        return None
    check_backend("dali")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
    logger.info("videos are decoded by DALI on %s, by PyAV where DALI cannot", device)
    return DaliReader(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class DaliVideo:
    """A file that DALI is to read. times, fps: as VideoReader's. kind: by which decoders refuse.
    colour_matrix: FFmpeg's number of it."""

    path: str
    times: np.ndarray
    fps: float
    height: int
    width: int
    kind: str
    colour_matrix: int


class DaliRefusal(Exception):
    """DALI cannot decode a file; its text says why."""


class DaliReader:
    """Reads clips into tensors on `device`, from any number of threads."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One stream for what all threads copy: memory that is freed is used again in its order.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._idle: deque[Callable[..., Tensor]] = deque()  # pipelines that no thread uses
        self._refusals: dict[str, int] = {}  # kind -> how many good files of it DALI refused
        self._known: set[str] = set()  # kinds of which DALI has decoded a file

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Torch's work inside is done on the readers' stream, and over at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()  # sync: of a reading thread, the trainer does not wait

    def open(self, path: str) -> DaliVideo | None:
        """What the file is; None where PyAV is to read it, or to say what is wrong with it."""
        try:
            header, first = read_header(path), first_frame(path)
        except BadSample:
            return None
        kind = f"{header.codec} {first.format.name} {first.width}x{first.height}"
        if kind not in self._known and self._refusals.get(kind, 0) >= _NUM_SUFFICIENT:
            return None
        # DALI shows frames as they are stored, and would not count those left out.
        if header.num_bytes > _MOST_BYTES or header.num_discarded or first.rotation:
            return None
        return DaliVideo(
            path=path,
            times=header.times,
            fps=header.fps,
            height=first.height,
            width=first.width,
            kind=kind,
            colour_matrix=int(first.colorspace),
        )

    def read(self, video: DaliVideo, indices: np.ndarray, target: tuple[int, int]) -> Tensor:
        """Frames at `indices` as uint8 [F, 3, rows, columns], the target covered and the middle
        kept; DaliRefusal where DALI cannot decode the file."""
        try:
            encoded = np.fromfile(video.path, np.uint8)
        except OSError as error:
            raise DaliRefusal(str(error)) from None
        try:
            run = self._idle.pop()
        except IndexError:
            run = _pipeline(self.device)
        size = cover_size(video.height, video.width, target)
        try:
            with self.on_device():
                clip = run(encoded, indices, size, target)
                if video.colour_matrix in _LUMA and video.colour_matrix != 5:
                    clip = _recolour(clip, video.colour_matrix)
        except RuntimeError as error:  # DALI's pipeline is of no use after one
            raise DaliRefusal(_reason(error)) from None
        self._idle.append(run)
        self._known.add(video.kind)
        return clip

    def note_refusal(self, video: DaliVideo, refusal: DaliRefusal) -> None:
        """To be called once PyAV has read the file: a broken one says nothing of its kind.
        Where DALI decodes some of a kind it is asked for each, so that who reads a file does not
        depend on which were read before."""
        times = self._refusals[video.kind] = self._refusals.get(video.kind, 0) + 1
        if times == 1:
            logger.warning(
                "videos of the kind %s that DALI cannot decode are read by PyAV (%s)",
                *(video.kind, refusal),
            )


def _pipeline(device: torch.device) -> Callable[..., Tensor]:
    """A DALI pipeline as a function of (file's bytes, indices, scaled size, cropped size)."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch.torch_utils import to_torch_tensor

    is_gpu = device.type == "cuda"

    @pipeline_def(
        batch_size=1,
        num_threads=1,
        device_id=device.index if is_gpu else None,
        prefetch_queue_depth=1,  # batches are read ahead by threads
    )
    def define():
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        frames = fn.external_source(name="frames", dtype=types.INT32, ndim=1)
        size, rows, columns = (
            fn.external_source(name=name, dtype=types.FLOAT, ndim=ndim)
            for name, ndim in (("size", 1), ("rows", 0), ("columns", 0))
        )
        # Pinned, the threads of all pipelines would share the first cores.
        video = fn.decoders.video(
            encoded,
            frames=frames,
            device="mixed" if is_gpu else "cpu",
            pad_mode="none",
            affine=False,
        )
        video = fn.resize(video, size=size, interp_type=types.INTERP_CUBIC, antialias=True)
        return fn.crop_mirror_normalize(
            video,
            crop_h=rows,
            crop_w=columns,
            rounding="truncate",  # as resize_and_center_crop
            dtype=types.UINT8,
            output_layout="FCHW",
        )

    pipeline = define()
    pipeline.build()

    def run(
        encoded: np.ndarray, indices: np.ndarray, size: tuple[int, int], target: tuple[int, int]
    ) -> Tensor:
        for name, value in (
            ("encoded", encoded),
            ("frames", np.asarray(indices, np.int32)),
            ("size", np.array(size, np.float32)),
            ("rows", np.array(target[0], np.float32)),
            ("columns", np.array(target[1], np.float32)),
        ):
            pipeline.feed_input(name, [value])
        (out,) = pipeline.run(torch.cuda.current_stream(device)) if is_gpu else pipeline.run()
        # On the device: DALI's memory is not torch's to keep.
        return to_torch_tensor(out[0], copy=True)

    return run


def _recolour(clip: Tensor, colour_matrix: int) -> Tensor:
    """What DALI made RGB of with BT.601's matrix, as with the one that the file names; in place."""
    wrong, right = (_to_rgb(*_LUMA[number]) for number in (5, colour_matrix))
    change = torch.from_numpy(right @ np.linalg.inv(wrong)).to(clip.device, torch.float32)
    for frames in clip.split(_FRAMES_AT_ONCE):
        colours = torch.einsum("ij,fjhw->fihw", change, frames.to(torch.float32))
        frames.copy_(colours.round_().clamp_(0, 255))
    return clip


def _to_rgb(red: float, blue: float) -> np.ndarray:
    """From (luma, blue - luma, red - luma), each scaled to its range, to RGB."""
    luma = np.array([red, 1 - red - blue, blue])
    blue_row = (np.array([0, 0, 1]) - luma) / (2 * (1 - blue))
    red_row = (np.array([1, 0, 0]) - luma) / (2 * (1 - red))
    return np.linalg.inv(np.stack([luma, blue_row, red_row]))


def _reason(error: RuntimeError) -> str:
    """The telling line of DALI's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    after = lines[lines.index("encountered:") + 1 :] if "encountered:" in lines else lines
    return (after or [type(error).__name__])[0].removeprefix("Error: ")[:200]

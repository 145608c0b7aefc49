"""Decodes, scales and crops clips on the GPU with DALI, in the training process.

The frames of a clip are selected as for PyAV (transform.py); its pixels are equal up to the rounding
of colours. Each reading thread has its own pipeline, so that clips are decoded in parallel and a file
that DALI cannot decode does not affect others; PyAV reads it. Without a GPU DALI decodes only VP8,
VP9 and MJPEG. If the frame size changes within a video, which the header does not show, DALI may
read it wrongly; PyAV scales all frames to the size of the first.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cogfast.data.bad_samples import BadSample
from cogfast.data.video.clip import Choose, Clip, ClipSettings
from cogfast.data.video.reader import first_frame, read_header
from cogfast.data.video.transform import Resize, cover_size

logger = logging.getLogger(__name__)

_MAX_BYTES = 2**29  # DALI loads whole files; PyAV, which seeks, reads longer ones
# Weights of red and blue in luma, by FFmpeg's number of the colour matrix (BT.601, BT.709, BT.2020).
# DALI assumes BT.601 for all videos.
_LUMA = {5: (0.299, 0.114), 1: (0.2126, 0.0722), 9: (0.2627, 0.0593)}
_FRAMES_AT_ONCE = 4  # recoloured in float32; whole clips in all threads would take many GiB
_NUM_SUFFICIENT = 3  # refused valid files after which DALI is not tried for their kind again


@dataclass(frozen=True, kw_only=True, slots=True)
class DaliVideo:
    """A file that DALI is to read.

    times, fps: as in VideoReader. kind: codec, pixel format and size; files of a kind are usually
    all decoded or all refused. colour_matrix: FFmpeg's number.
    """

    path: str
    times: np.ndarray
    fps: float
    height: int
    width: float  # of a shown frame, in heights of a pixel
    kind: str
    colour_matrix: int


class DaliRefusal(Exception):
    """Raised if DALI cannot decode a file; the text gives the reason."""


class DaliReader:
    """Reads clips into tensors on `device`, from any number of threads: a DeviceReader (data/video/clip.py)."""

    @staticmethod
    @functools.cache
    def reason_unavailable() -> str | None:
        """Without a GPU it decodes on the CPU, without the driver."""
        try:
            importlib.import_module("nvidia.dali")
        except ImportError as error:
            return f"DALI cannot be imported ({error}); pip install nvidia-dali-cuda130"
        try:
            if torch.cuda.is_available():
                ctypes.CDLL("libnvcuvid.so.1")
        except OSError:
            fix = "in a container set NVIDIA_DRIVER_CAPABILITIES=compute,utility,video"
            return f"the driver's decoder libnvcuvid.so.1 is missing; {fix}"
        return None

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One stream for all threads, so that the allocator can reuse freed memory in stream order.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Pipelines that no thread is using.
        self._idle: dict[Resize, deque[Callable]] = {"crop": deque(), "stretch": deque()}
        self._refusals = Counter[str]()  # {kind: number of valid files that DALI refused}
        self._known: set[str] = set()  # kinds of which DALI has decoded a file

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Run torch's work inside on the readers' stream, and wait for it at the end."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
            self._stream.synchronize()  # sync: blocks only the reading thread, not the trainer

    def read_clip(
        self, path: str, settings: ClipSettings, choose: Choose, on_cpu: Callable[[], Clip]
    ) -> Clip:
        if (video := self.open(path)) is None:
            return on_cpu()
        chosen, selection = choose(video.times, video.fps)
        try:
            return self.read(video, chosen, settings.video_size, settings.resize), selection
        except DaliRefusal as refusal:
            # If PyAV cannot read the file either, this raises, and the refusal does not count.
            read = on_cpu()
            self.note_refusal(video, refusal)
            return read

    def open(self, path: str) -> DaliVideo | None:
        """Read the header of a file; None if PyAV is to read the file, or to report its fault."""
        try:
            header, (first, look) = read_header(path), first_frame(path)
        except BadSample:
            return None
        kind = f"{header.codec} {first.format.name} {first.width}x{first.height}"
        if kind not in self._known and self._refusals[kind] >= _NUM_SUFFICIENT:
            return None
        # DALI ignores rotation, counts discarded frames as shown ones, and may take another stream.
        is_other = any(look[:3]) or "streams" in look.notes
        is_cut = any(packet.is_discard for packet in header.packets)
        if header.num_bytes > _MAX_BYTES or is_other or is_cut:
            return None
        return DaliVideo(
            path=path,
            times=header.times,
            fps=header.fps,
            height=first.height,
            width=first.width * look.pixel_aspect,
            kind=kind,
            colour_matrix=int(first.colorspace),
        )

    def read(
        self,
        video: DaliVideo,
        indices: np.ndarray,
        target: tuple[int, int],
        resize: Resize = "crop",
    ) -> Tensor:
        """Read the frames at `indices`, resized to the target as `resize` says.

        Returns uint8 [F, 3, rows, columns]. Raises DaliRefusal if DALI cannot decode the file.
        """
        try:
            encoded = np.fromfile(video.path, np.uint8)
        except OSError as error:
            raise DaliRefusal(str(error)) from None
        # deque's methods are atomic, so threads share the list without a lock.
        try:
            run = self._idle[resize].pop()
        except IndexError:
            run = _pipeline(self.device, resize)
        size = target if resize == "stretch" else cover_size(video.height, video.width, target)
        try:
            with self.on_device():
                clip = run(encoded, indices, size, target)
                if video.colour_matrix in _LUMA and video.colour_matrix != 5:
                    clip = _recolour(clip, video.colour_matrix)
        except RuntimeError as error:  # a pipeline cannot be used after an error, so it is dropped
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            # The cause follows this line.
            after = lines[lines.index("encountered:") + 1 :] if "encountered:" in lines else lines
            reason = (after or [type(error).__name__])[0].removeprefix("Error: ")[:200]
            raise DaliRefusal(reason) from None
        self._idle[resize].append(run)
        self._known.add(video.kind)
        return clip

    def note_refusal(self, video: DaliVideo, refusal: DaliRefusal) -> None:
        """Count a file that DALI refused and PyAV has read. Broken files must not be counted."""
        # `open` skips DALI only for kinds of which it has decoded no file, so that the decoder of
        # other files does not depend on the order of reading.
        self._refusals[video.kind] += 1
        if self._refusals[video.kind] == 1:
            text = "videos of the kind %s that DALI cannot decode are read by PyAV (%s)"
            logger.warning(text, video.kind, refusal)


def _pipeline(device: torch.device, resize: Resize) -> Callable[..., Tensor]:
    """Build a DALI pipeline: a function of (file's bytes, indices, scaled size, cropped size)."""
    # DALI is optional: `make test-dali` installs it.
    from nvidia.dali import fn, pipeline_def, types  # pyright: ignore[reportMissingImports]
    from nvidia.dali.plugin.pytorch.torch_utils import (  # pyright: ignore[reportMissingImports]
        to_torch_tensor,
    )

    is_gpu = device.type == "cuda"

    @pipeline_def(
        batch_size=1,
        num_threads=1,
        device_id=device.index if is_gpu else None,
        prefetch_queue_depth=1,  # ThreadedReads reads ahead
    )
    def define():
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
        frames = fn.external_source(name="frames", dtype=types.INT32, ndim=1)
        size = fn.external_source(name="size", dtype=types.FLOAT, ndim=1)
        rows = fn.external_source(name="rows", dtype=types.FLOAT, ndim=0)
        columns = fn.external_source(name="columns", dtype=types.FLOAT, ndim=0)
        # affine=False: with pinned threads all pipelines would share the first cores.
        device = "mixed" if is_gpu else "cpu"
        video = fn.decoders.video(
            encoded, frames=frames, device=device, pad_mode="none", affine=False
        )
        # The filters of resize_and_center_crop and of FFmpeg's `scale`, which PyAV's frames go
        # through. FFmpeg's has a wider support if it scales down, as with antialiasing here.
        kind = types.INTERP_CUBIC if resize == "crop" else types.INTERP_LINEAR
        video = fn.resize(video, size=size, interp_type=kind, antialias=True)
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
        pipeline.feed_input("encoded", [encoded])
        pipeline.feed_input("frames", [np.asarray(indices, np.int32)])
        for name, value in (("size", size), ("rows", target[0]), ("columns", target[1])):
            pipeline.feed_input(name, [np.array(value, np.float32)])
        (out,) = pipeline.run(torch.cuda.current_stream(device)) if is_gpu else pipeline.run()
        # Copy on the device, because DALI reuses its output memory.
        return to_torch_tensor(out[0], copy=True)

    return run


def _recolour(clip: Tensor, colour_matrix: int) -> Tensor:
    """Correct RGB that DALI computed with BT.601's matrix for the file's own; in place."""
    wrong, right = (_to_rgb(*_LUMA[number]) for number in (5, colour_matrix))
    change = torch.from_numpy(right @ np.linalg.inv(wrong)).to(clip.device, torch.float32)
    for frames in clip.split(_FRAMES_AT_ONCE):
        colours = torch.einsum("ij,fjhw->fihw", change, frames.to(torch.float32))
        frames.copy_(colours.round_().clamp_(0, 255))
    return clip


def _to_rgb(red: float, blue: float) -> np.ndarray:
    """The matrix from (luma, blue - luma, red - luma), each scaled to its range, to RGB."""
    luma = np.array([red, 1 - red - blue, blue])
    blue_row = (np.array([0, 0, 1]) - luma) / (2 * (1 - blue))
    red_row = (np.array([1, 0, 0]) - luma) / (2 * (1 - red))
    return np.linalg.inv(np.stack([luma, blue_row, red_row]))

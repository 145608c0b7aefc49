"""Squeezes frames and pictures to a size, as CogVideo's diffusers trainer does: resize=stretch.

Its videos are scaled by decord, which uses the bilinear filter of FFmpeg's `scale`, and its pictures
by cv2.resize. Both change the aspect ratio.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    import av
    from av.filter import Graph

# FFmpeg's transposition for a number of counterclockwise quarter turns.
_TURNS = {0: (), 1: ("cclock",), 2: ("clock", "clock"), 3: ("clock",)}


class FrameStretcher:
    """Converts decoded frames to RGB of `size` (rows, columns) with FFmpeg's `scale`.

    This is the chain of filters that decord builds, so the pixels are decord's.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        self._rows, self._columns = size
        self._graph: Graph | None = None
        self._kind: tuple = ()  # of the frames that the graph was built for

    def __call__(self, frame: av.VideoFrame) -> np.ndarray:
        """Return the frame, rotated for display, as uint8 [rows, columns, 3]."""
        turns = frame.rotation // 90 % 4
        # Frames of one video may differ in size, and a graph takes one kind of frames.
        kind = (frame.width, frame.height, frame.format.name, turns)
        if self._graph is None or kind != self._kind:
            self._graph, self._kind = self._build(frame, turns), kind
        self._graph.vpush(frame)
        return np.ascontiguousarray(self._graph.vpull().to_ndarray())

    def _build(self, frame: av.VideoFrame, turns: int) -> Graph:
        from av.filter import Graph

        graph = Graph()
        graph.threads = 1  # workers are the parallelism
        first = graph.add_buffer(
            width=frame.width, height=frame.height, format=frame.format, time_base=Fraction(1)
        )
        chain = [("transpose", direction) for direction in _TURNS[turns]]
        chain.append(("scale", f"{self._columns}:{self._rows}:flags=bilinear"))
        chain += [("format", "rgb24"), ("buffersink", None)]
        graph.link_nodes(first, *(graph.add(*step) for step in chain)).configure()
        return graph


def stretch_picture(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Squeeze a picture [H, W, 3] uint8 to [3, rows, columns] uint8.

    Bilinear without antialiasing, as cv2.resize, from which it differs by at most one level.
    """
    picture = pixels.permute(2, 0, 1)[None].float()
    if picture.shape[2:] != size:
        picture = F.interpolate(picture, size=size, mode="bilinear", antialias=False)
    return picture[0].round().to(torch.uint8).contiguous()

"""Stop 2 of nine: which frames of a video make the clip, and their size.

`timestamp` picks by the times at which frames are shown and so keeps the configured fps; `sat` and
`uniform` repeat the index arithmetic of CogVideo's sat/data_video.py and finetune/datasets, whose
integer strides change the speed (30 fps asked for 8 gives 10).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from cogfast.shapes import TEMPORAL_COMPRESSION

FrameSelection = Literal["timestamp", "sat", "uniform"]


@dataclass(frozen=True, slots=True)
class Selection:
    """indices: the frames of the clip, as many as were asked for; num_frames: those before the
    padding with copies of the last one."""

    indices: np.ndarray
    num_frames: int

    @property
    def num_padded(self) -> int:
        return max(0, len(self.indices) - self.num_frames)


def _padded(indices: np.ndarray, num_frames: int) -> np.ndarray:
    """`indices` cut to `num_frames`, or lengthened with the last one."""
    missing = max(0, num_frames - len(indices))
    return np.concatenate([indices[:num_frames], np.repeat(indices[-1:], missing)])


def select_frames_timestamp(
    times: np.ndarray, fps: float, num_frames: int, skip: int = 0
) -> Selection:
    """The frames nearest to the times start + k/fps, k = 0 .. num_frames-1.

    times: seconds [n], rising. skip: frames left out at either end, as far as the clip is long
    enough to spare them: 49 frames at 8 fps are wanted whole although SAT's files say skip 3.
    A clip may end up to half an output frame before the last time asked for; what is missing
    beyond that is padded.
    """
    n, half = len(times), 0.5 / fps
    needed = (num_frames - 1) / fps - half
    first = min(int(skip), (n - 1) // 2)
    while first > 0 and times[n - 1 - first] - times[first] < needed:
        first -= 1
    last = n - 1 - first
    wanted = times[first] + np.arange(num_frames) / fps
    num_real = int(np.count_nonzero(wanted <= times[last] + half + 1e-6))
    wanted = wanted[:num_real]
    after = np.clip(np.searchsorted(times, wanted), first, last)
    before = np.maximum(after - 1, first)
    # In a tie the earlier frame; a hundredth of a frame absorbs the rounding of float32 times.
    is_after = times[after] - wanted < wanted - times[before] - 0.01 * half
    return Selection(_padded(np.where(is_after, after, before), num_frames), num_real)


def select_frames_sat(length: int, clip_fps: float, fps: float, num_frames: int, skip: float = 3):
    """SFTDataset's frames of a video of `length` frames, or ValueError where it would fail."""
    start = int(skip)
    kept = num_frames
    if length / clip_fps * fps > num_frames:
        end = int(start + num_frames / fps * clip_fps)
        stride = (end - start) // num_frames
        if stride == 0:
            raise ValueError(
                f"{clip_fps:g} fps is below fps={fps:g}, for which frame_selection=sat has no stride"
            )
        indices = np.arange(start, end, stride)
        if indices[-1] >= length:  # upstream reads to the clip's end and indexes beyond it
            raise ValueError(
                f"{length} frames, frame_selection=sat reads up to frame {indices[-1]} "
                f"(skip_frms_num={skip:g})"
            )
    elif length > num_frames:
        end = int(length - skip)
        indices = np.arange(start, end, max((end - start) // num_frames, 1))
    else:
        spare = int(length - skip) - start
        remainder = spare % TEMPORAL_COMPRESSION
        kept = spare - (remainder - 1 if remainder else TEMPORAL_COMPRESSION - 1)
        if start + kept > length:
            kept = 0
        indices = np.arange(start, start + kept)
    if len(indices) == 0:
        raise ValueError(f"{length} frames, none left after skip_frms_num={skip:g} at either end")
    return Selection(_padded(indices, num_frames), kept)


def select_frames_uniform(length: int, num_frames: int) -> Selection:
    """The diffusers trainer's frames: a whole stride over the video, its rate and fps unused."""
    indices = np.arange(0, length, max(length // num_frames, 1))
    return Selection(_padded(indices, num_frames), min(length, num_frames))


def cover_size(height: int, width: int, target: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns after scaling so that the target (rows, columns) is just covered."""
    rows, columns = target
    if width / height > columns / rows:
        return rows, int(width * rows / height)
    return int(height * columns / width), columns


def resize_and_center_crop(frames: Tensor, target: tuple[int, int]) -> Tensor:
    """Frames [F, H, W, 3] uint8 -> [F, 3, rows, columns] uint8, the target covered, middle kept.

    Antialiased bicubic in torch's own uint8 arithmetic, as torchvision's v2 resize. Its v1 resize,
    which SAT calls, goes through float32, without clamping what overshoots between the two passes: up
    to 9 levels apart in natural video, 25 at the edges of white text, and 5 to 30 times slower.
    """
    _, height, width, _ = frames.shape
    rows, columns = target
    size = cover_size(height, width, target)
    video = frames.permute(0, 3, 1, 2)  # [F, 3, H, W] in channels-last memory, the fast path
    if size != (height, width):
        video = F.interpolate(video, size=size, mode="bicubic", antialias=True)
    top, left = (size[0] - rows) // 2, (size[1] - columns) // 2
    return video[:, :, top : top + rows, left : left + columns].contiguous()

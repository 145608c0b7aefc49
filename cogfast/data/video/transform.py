"""Stop 2 of nine: selects the frames of a clip, and scales and crops them.

`timestamp` selects frames by the times at which they are shown, which keeps the configured fps.
`sat` and `uniform` repeat the index arithmetic of CogVideo's sat/data_video.py and finetune/datasets,
whose integer strides change the speed (with fps=8, a 30 fps video yields 10 fps).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cogfast.core.shapes import TEMPORAL_COMPRESSION
from cogfast.core.values import counted
from cogfast.data.video.reader import check_sides

FrameSelection = Literal["timestamp", "sat", "uniform"]
Resize = Literal["crop", "stretch"]


@dataclass(frozen=True, slots=True)
class Selection:
    """The frames of a clip.

    indices: frames of the video, padded with copies of the last one to the requested number.
    num_frames: number of frames before padding.
    """

    indices: np.ndarray
    num_frames: int

    @property
    def num_padded(self) -> int:
        return max(0, len(self.indices) - self.num_frames)


def _padded(indices: np.ndarray, num_frames: int) -> np.ndarray:
    """Cut `indices` to `num_frames`, or repeat the last one up to it."""
    missing = max(0, num_frames - len(indices))
    return np.concatenate([indices[:num_frames], np.repeat(indices[-1:], missing)])


def select_frames_timestamp(
    times: np.ndarray, fps: float, num_frames: int, skip: int = 0
) -> Selection:
    """Select the frames nearest to the times start + k/fps, k = 0 .. num_frames-1.

    times: seconds [n], increasing. skip: number of frames to leave out at each end. Fewer are left
    out if the clip would otherwise be too short: a clip of exactly 49 frames at 8 fps is used whole
    although SAT's configs set skip_frms_num to 3. A video may end up to half an output frame before
    the last requested time; frames beyond that are padded.
    """
    n, half = len(times), 0.5 / fps
    needed = (num_frames - 1) / fps - half
    first = min(int(skip), (n - 1) // 2)
    # Leave out fewer frames until the rest is long enough.
    while first > 0 and times[n - 1 - first] - times[first] < needed:
        first -= 1
    last = n - 1 - first
    wanted = times[first] + np.arange(num_frames) / fps
    # A microsecond absorbs the rounding of both sums.
    num_real = int(np.count_nonzero(wanted <= times[last] + half + 1e-6))
    wanted = wanted[:num_real]
    after = np.clip(np.searchsorted(times, wanted), first, last)
    before = np.maximum(after - 1, first)
    # Ties go to the earlier frame. The tolerance of 1% absorbs the rounding of float32 times.
    is_after = times[after] - wanted < wanted - times[before] - 0.01 * half
    return Selection(_padded(np.where(is_after, after, before), num_frames), num_real)


def select_frames_sat(length: int, clip_fps: float, fps: float, num_frames: int, skip: float = 3):
    """Select frames as SAT's SFTDataset does, from `length` frames at `clip_fps` per second.

    Raises ValueError where SFTDataset fails.
    """
    start = int(skip)
    kept = num_frames
    # Long enough at the configured rate: a whole stride, which may change the speed.
    if length / clip_fps * fps > num_frames:
        end = int(start + num_frames / fps * clip_fps)
        stride = (end - start) // num_frames
        if stride == 0:
            rule = "and frame_selection=sat does not repeat frames"
            raise ValueError(f"{clip_fps:g} fps is below fps={fps:g}, {rule}")
        indices = np.arange(start, end, stride)
        if indices[-1] >= length:  # SFTDataset fails with an index beyond the end
            text = f"reads up to frame {indices[-1]} (skip_frms_num={skip:g})"
            raise ValueError(f"{counted(length, 'frame')}, but frame_selection=sat {text}")
    elif length > num_frames:
        end = int(length - skip)
        indices = np.arange(start, end, max((end - start) // num_frames, 1))
    else:
        # SFTDataset keeps 4N + 1 frames, as the autoencoder needs, and pads the rest.
        spare = int(length - skip) - start
        remainder = spare % TEMPORAL_COMPRESSION
        kept = spare - (remainder - 1 if remainder else TEMPORAL_COMPRESSION - 1)
        if start + kept > length:
            kept = 0
        indices = np.arange(start, start + kept)
    if len(indices) == 0:
        text = f"of which none is left after skip_frms_num={skip:g} at either end"
        raise ValueError(f"{counted(length, 'frame')}, {text}")
    return Selection(_padded(indices, num_frames), kept)


def select_frames_uniform(length: int, num_frames: int) -> Selection:
    """Select frames as the diffusers trainer does: an integer stride, whatever the frame rates."""
    indices = np.arange(0, length, max(length // num_frames, 1))
    return Selection(_padded(indices, num_frames), min(length, num_frames))


def cover_size(height: int, width: float, target: tuple[int, int]) -> tuple[int, int]:
    """The smallest size (rows, columns) with the same aspect ratio that covers the target."""
    check_sides(height, width)
    # The longer side is truncated, as torchvision's resize does.
    rows, columns = target
    if width / height > columns / rows:
        return rows, int(width * rows / height)
    return int(height * columns / width), columns


def resize_and_center_crop(frames: Tensor, target: tuple[int, int], aspect: float = 1.0) -> Tensor:
    """Scale frames [F, H, W, 3] uint8 to cover the target and crop the centre.

    aspect: width of a pixel by its height. Returns [F, 3, rows, columns] uint8. Uses torch's antialiased bicubic uint8 kernel, as
    torchvision's v2 resize does. SAT uses torchvision's v1 resize, which computes in float32 without
    clamping between the two passes: it differs by up to 9 levels in natural video and 25 at the
    edges of white text, and is 5 to 30 times slower.
    """
    _, height, width, _ = frames.shape
    rows, columns = target
    size = cover_size(height, width * aspect, target)
    video = frames.permute(0, 3, 1, 2)  # [F, 3, H, W] in channels-last memory, the fast path
    if size != (height, width):
        video = F.interpolate(video, size=size, mode="bicubic", antialias=True)
    top, left = (size[0] - rows) // 2, (size[1] - columns) // 2
    return video[:, :, top : top + rows, left : left + columns].contiguous()


def stretch_picture(pixels: Tensor, size: tuple[int, int]) -> Tensor:
    """Squeeze a picture [H, W, 3] uint8 to [3, rows, columns] uint8: resize=stretch.

    Bilinear without antialiasing, as cv2.resize of CogVideo's diffusers trainer, from which it differs
    by at most one level.
    """
    picture = pixels.permute(2, 0, 1)[None].float()
    if picture.shape[2:] != size:
        picture = F.interpolate(picture, size=size, mode="bilinear", antialias=False)
    return picture[0].round().to(torch.uint8).contiguous()

"""Writes videos: mp4 files, and contact sheets that show many videos in one picture."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cogfast.core.files import write_whole

if TYPE_CHECKING:
    from PIL import Image

_CRF = "18.0"  # of x264: its quality, lower is better
_NUM_FRAMES, _FRAME_WIDTH = 6, 176  # of each video in a contact sheet
_MOST_ROWS = 12  # of a contact sheet
_GAP = 6  # pixels between them
_FONT_SIZE = 15
_LINE = _FONT_SIZE + 4


def to_frames(video: Tensor | np.ndarray) -> np.ndarray:
    """Convert a video to uint8 [F, H, W, 3], from the same or from [3, F, H, W] in [-1, 1]. ValueError
    for numbers that are not finite."""
    if isinstance(video, np.ndarray):
        video = torch.from_numpy(video)
    if video.dtype == torch.uint8:
        if video.ndim != 4 or video.shape[-1] != 3:
            raise ValueError(f"uint8 video of shape {list(video.shape)}; give [F, H, W, 3]")
        return video.cpu().numpy()
    if video.ndim != 4 or video.shape[0] != 3:
        raise ValueError(f"video of shape {list(video.shape)}; give [3, F, H, W] in [-1, 1]")
    # Truncation instead of rounding would darken the video by half a level.
    pixels = video.detach().float().cpu()
    if pixels.numel() and not all(extreme.isfinite() for extreme in pixels.aminmax()):
        text = "the video has NaN or infinite pixels: its weights are damaged, or overflow in fp16"
        raise ValueError(f"{text}; check them, or sample in bf16 or float32")
    return pixels.clamp(-1, 1).add(1).mul(127.5).round().to(torch.uint8).permute(1, 2, 3, 0).numpy()


def write_video(path: str | Path, video: Tensor | np.ndarray, fps: float) -> None:
    """Write uint8 [F, H, W, 3] or [3, F, H, W] in [-1, 1] as an H.264 mp4 (yuv420p).

    The format needs an even height and width: an odd one is padded with its last row or column. The file
    gets its name only when it is complete.
    """
    frames = to_frames(video)
    if len(frames) == 0 or fps <= 0:
        raise ValueError(f"{path}: {len(frames)} frames at fps={fps}; give at least one, fps > 0")
    _, height, width, _ = frames.shape
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: _encode(draft, frames, fps))


def _encode(path: Path, frames: np.ndarray, fps: float) -> None:
    import av
    from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=_rate(fps))
        stream.height, stream.width = frames.shape[1:3]
        # The only format that all players and browsers decode.
        stream.pix_fmt = "yuv420p"
        # FFmpeg converts RGB by BT.601's matrix; the rest is what clips are read as. Without tags players take
        # BT.709's matrix for large videos.
        colours = stream.codec_context
        colours.colorspace, colours.color_range = Colorspace.ITU601, ColorRange.MPEG
        colours.color_primaries, colours.color_trc = ColorPrimaries.BT709, ColorTrc.BT709
        # With several threads x264's output is not deterministic, nor is its macroblock tree on
        # processors with AVX-512: equal frames gave up to 9 different files in 60 trials.
        stream.options = {"crf": _CRF, "threads": "1", "x264-params": "mbtree=0"}
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())  # flush buffered packets


def _rate(fps: float) -> Fraction:
    """The exact frame rate: 23.976, 29.97 and 59.94 stand for 24, 30 and 60 times 1000/1001."""
    whole = round(fps * 1.001)
    if abs(fps * 1.001 - whole) < 1e-3 and fps != whole:
        return Fraction(whole * 1000, 1001)
    # mp4 stores a fraction: whole rates and 7.5 are exact, others the nearest small one.
    return Fraction(fps).limit_denominator(1001)


def contact_sheet(
    path: str | Path, videos: Sequence[Tensor | np.ndarray], captions: Sequence[str]
) -> None:
    """Write a PNG that shows, for every video, its caption above evenly spaced frames."""
    from PIL import Image, ImageDraw, ImageFont

    assert len(videos) == len(captions) > 0, f"{len(videos)=}, {len(captions)=}"
    font = ImageFont.load_default(_FONT_SIZE)
    strips = [_frames_of(video) for video in videos]
    width = max(map(len, strips)) * (_FRAME_WIDTH + _GAP) + _GAP  # of a column
    letters = round((width - 2 * _GAP) / font.getlength("x"))  # in a line
    wrap = lambda text: textwrap.wrap(text, letters, max_lines=3, placeholder="…")
    texts = [wrap(caption) or [""] for caption in captions]
    pairs = [*zip(texts, strips, strict=True)]
    heights = [len(lines) * _LINE + strip[0].height + 2 * _GAP for lines, strip in pairs]
    # Columns of equal numbers of videos: a sheet of one column would be a thread.
    number = math.ceil(len(videos) / math.ceil(len(videos) / _MOST_ROWS))
    columns = [heights[i : i + number] for i in range(0, len(heights), number)]
    sheet = Image.new("RGB", (width * len(columns), max(map(sum, columns)) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (lines, strip) in enumerate(pairs):
        left, top = k // number * width + _GAP, _GAP + sum(columns[k // number][: k % number])
        for i, line in enumerate(lines):
            draw.text((left, top + i * _LINE), line, fill="black", font=font)
        for i, picture in enumerate(strip):
            sheet.paste(picture, (left + i * (_FRAME_WIDTH + _GAP), top + len(lines) * _LINE))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda draft: sheet.save(draft, format="PNG"))


def _frames_of(video: Tensor | np.ndarray) -> list[Image.Image]:
    """Up to six evenly spaced frames of a video, small and of one width."""
    from PIL import Image

    frames = to_frames(video)
    chosen = np.unique(np.linspace(0, len(frames) - 1, _NUM_FRAMES).round().astype(int))
    scale = _FRAME_WIDTH / frames.shape[2]
    size = (_FRAME_WIDTH, max(1, round(frames.shape[1] * scale)))
    # Enlarged pixels stay sharp; interpolation would look like a blur made by the model.
    how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BICUBIC
    return [Image.fromarray(frames[i]).resize(size, how) for i in chosen]

"""Videos out: mp4 files that players show, and contact sheets that a person takes in at a glance."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_NUM_COLUMNS = 6  # frames of a video on a contact sheet
_FRAME_WIDTH = 176  # pixels of a frame on it
_GAP = 6
_FONT_SIZE = 15
_LINE = _FONT_SIZE + 4


def to_frames(video: Tensor | np.ndarray) -> np.ndarray:
    """uint8 [F, H, W, 3] from that, or from a tensor [3, F, H, W] in [-1, 1]."""
    if isinstance(video, np.ndarray):
        video = torch.from_numpy(video)
    if video.dtype == torch.uint8:
        if video.ndim != 4 or video.shape[-1] != 3:
            raise ValueError(f"uint8 video of shape {list(video.shape)}; give [F, H, W, 3]")
        return video.cpu().numpy()
    if video.ndim != 4 or video.shape[0] != 3:
        raise ValueError(f"video of shape {list(video.shape)}; give [3, F, H, W] in [-1, 1]")
    levels = video.detach().float().cpu().clamp(-1, 1).add(1).mul(127.5).round()
    return levels.to(torch.uint8).permute(1, 2, 3, 0).numpy()


def write_video(
    path: str | Path, video: Tensor | np.ndarray, fps: float, crf: float = 18.0
) -> None:
    """H.264 mp4 (yuv420p) of uint8 [F, H, W, 3] or [3, F, H, W] in [-1, 1].

    crf: x264's quality, lower is better. The format needs even sides: an odd one repeats its last
    row or column. The file appears under its name only when it is complete.
    """
    import av

    frames = to_frames(video)
    if len(frames) == 0 or fps <= 0:
        raise ValueError(f"{path}: {len(frames)} frames at fps={fps}; give at least one, fps > 0")
    _, height, width, _ = frames.shape
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with av.open(str(unfinished), "w", format="mp4") as container:
            stream = container.add_stream("libx264", rate=_rate(fps))
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": str(crf)}
            for picture in frames:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _rate(fps: float) -> Fraction:
    """The exact rate: 23.976, 29.97 and 59.94 mean 24, 30 and 60 times 1000/1001."""
    whole = round(fps * 1.001)
    if abs(fps * 1.001 - whole) < 1e-3 and fps != whole:
        return Fraction(whole * 1000, 1001)
    return Fraction(fps).limit_denominator(1001)


def contact_sheet(
    path: str | Path,
    videos: Sequence[Tensor | np.ndarray],
    captions: Sequence[str],
    num_columns: int = _NUM_COLUMNS,
) -> None:
    """A PNG with one row per video: its caption, and up to `num_columns` frames spread over it."""
    from PIL import Image, ImageDraw, ImageFont

    assert len(videos) == len(captions) > 0, f"{len(videos)=}, {len(captions)=}"
    font = ImageFont.load_default(_FONT_SIZE)
    rows = []
    for video, caption in zip(videos, captions, strict=True):
        frames = to_frames(video)
        chosen = np.unique(np.linspace(0, len(frames) - 1, num_columns).round().astype(int))
        scale = _FRAME_WIDTH / frames.shape[2]
        size = (_FRAME_WIDTH, max(1, round(frames.shape[1] * scale)))
        # Enlarged pixels stay crisp; a blur would look like the model's.
        how = Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.BICUBIC
        rows.append((caption, [Image.fromarray(frames[i]).resize(size, how) for i in chosen]))
    most = max(len(pictures) for _, pictures in rows)
    width = _GAP + most * (_FRAME_WIDTH + _GAP)
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    texts = [_wrap(caption, width - 2 * _GAP, measure, font) for caption, _ in rows]
    heights = [
        len(lines) * _LINE + pictures[0].height + 2 * _GAP
        for lines, (_, pictures) in zip(texts, rows, strict=True)
    ]
    sheet = Image.new("RGB", (width, sum(heights) + _GAP), "white")
    draw = ImageDraw.Draw(sheet)
    top = _GAP
    for lines, (_, pictures), height in zip(texts, rows, heights, strict=True):
        for i, line in enumerate(lines):
            draw.text((_GAP, top + i * _LINE), line, fill="black", font=font)
        for i, picture in enumerate(pictures):
            place = (_GAP + i * (_FRAME_WIDTH + _GAP), top + len(lines) * _LINE)
            sheet.paste(picture, place)
        top += height
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    sheet.save(unfinished, format="PNG")
    os.replace(unfinished, path)


def _wrap(text: str, width: int, draw, font, max_lines: int = 3) -> list[str]:
    """Lines of `text` at most `width` pixels wide; a long text ends in an ellipsis."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if not lines[-1] or draw.textlength(longer, font=font) <= width:
            lines[-1] = longer
        elif len(lines) < max_lines:
            lines.append(word)
        else:
            lines[-1] = lines[-1][:-1] + "…"
            break
    return lines

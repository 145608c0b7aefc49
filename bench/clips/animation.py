"""Draw sampled videos and their captions as one animated picture, for the README."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SCALE = 3  # nearest neighbour, so that every sampled pixel stays visible
_GAP = 8  # pixels between videos
_TEXT_HEIGHT = 20
_PAPER, _INK = (255, 255, 255), (36, 36, 36)


def write_animation(
    path: Path, videos: Sequence[np.ndarray], captions: Sequence[str], fps: float, columns: int = 4
) -> None:
    """Write an animated WebP that shows all videos at once, each above its caption, in an endless loop.

    videos: uint8 [F, H, W, 3], all of one shape.
    """
    num_frames, height, width, _ = videos[0].shape
    if any(video.shape != videos[0].shape for video in videos):
        raise ValueError(
            "write_animation: the videos must have the same shape; sample them together"
        )
    cell_width = _SCALE * width + _GAP
    cell_height = _SCALE * height + _TEXT_HEIGHT + _GAP
    rows = -(-len(videos) // columns)  # rounded up
    page = Image.new("RGB", (columns * cell_width + _GAP, rows * cell_height + _GAP), _PAPER)
    font = ImageFont.load_default(size=13)
    places = [
        (_GAP + i % columns * cell_width, _GAP + i // columns * cell_height)
        for i in range(len(videos))
    ]
    # The captions are drawn once: only the videos change from page to page.
    draw = ImageDraw.Draw(page)
    for (x, y), caption in zip(places, captions, strict=True):
        center = x + _SCALE * width / 2
        draw.text((center, y + _SCALE * height + 4), caption, fill=_INK, font=font, anchor="ma")
    pages = []
    for frame in range(num_frames):
        shown = page.copy()
        for place, video in zip(places, videos, strict=True):
            picture = Image.fromarray(video[frame])
            shown.paste(picture.resize((_SCALE * width, _SCALE * height), Image.NEAREST), place)
        pages.append(shown)
    pages[0].save(
        path, save_all=True, append_images=pages[1:], duration=round(1000 / fps), loop=0, quality=90
    )

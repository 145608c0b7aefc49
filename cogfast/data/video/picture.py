"""Reads pictures: their sizes from the header, and their pixels."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cogfast.core.files import open_regular
from cogfast.data.video.reader import MAX_PIXELS, Refusal, check_sides, one_line

# Only some of Pillow's formats: for EPS it starts Ghostscript, which executes code in the file.
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")
# The first bytes of files; WebP's are below.
_STARTS = (b"\x89PNG", b"\xff\xd8\xff", b"BM", b"II*\0", b"MM\0*", b"GIF8")
_ORIENTATION, _TURNED = 0x0112, (5, 6, 7, 8)  # EXIF's tag, and its values for a quarter turn


def holds_picture(source: str | io.BufferedReader) -> bool:
    """Whether a file has the content of a picture, whatever its name; no if it cannot be read."""
    try:
        if isinstance(source, str):
            with open_regular(source) as file:
                start = file.read(12)
        else:
            start = source.read(12)
            source.seek(0)
    except OSError:
        return False
    return start.startswith(_STARTS) or (start[:4] == b"RIFF" and start[8:] == b"WEBP")


def picture_size(source: str | io.BufferedReader) -> tuple[int, int] | None:
    """Return rows and columns of a picture as it is shown, from its header; None for an animated GIF,
    which is read as a video. ValueError if it cannot be trained on."""
    with _opened(source) as image:
        # A JPEG may have further pictures, such as a map of depths.
        number = image.n_frames if image.format in ("PNG", "WEBP", "TIFF", "GIF") else 1
        if number > 1 and image.format == "GIF":
            return None
        if number > 1:
            what = f"{image.format} of {number} frames or pages, not a still picture"
            raise Refusal(f"a {what}; convert it to a still picture, or to .mp4")
        columns, rows = image.size
        # Pillow turns TIFF itself. It would decode a PNG to find EXIF data behind its pixels.
        has_exif = image.format != "TIFF" and (image.format != "PNG" or "exif" in image.info)
        is_turned = has_exif and image.getexif().get(_ORIENTATION) in _TURNED
        return (columns, rows) if is_turned else (rows, columns)


def read_pixels(source: str | bytes) -> Tensor:
    """Read all pixels of a picture, uint8 RGB [H, W, 3], rotated for display.

    Raises ValueError if the picture cannot be read.
    """
    from PIL import ImageOps

    with _opened(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
        return torch.from_numpy(np.array(ImageOps.exif_transpose(image).convert("RGB")))


@contextmanager
def _opened(source: Any) -> Iterator[Any]:
    """Open a picture with Pillow; ValueError in the block for whatever Pillow raises there."""
    from PIL import Image

    try:
        with Image.open(source, formats=_FORMATS) as image:
            columns, rows = image.size
            if rows * columns > MAX_PIXELS:
                text = f"a picture of {rows} x {columns} pixels; at most {MAX_PIXELS} are read"
                raise Refusal(f"{text}; scale it down")
            check_sides(rows, columns)
            # Pillow clips these at 255, which makes them white.
            if image.mode.startswith(("I", "F")):
                text = f"a picture of mode {image.mode}, more than 8 bits of grey"
                raise Refusal(f"{text}; save it with 8 bits per channel")
            yield image
    except Refusal:
        raise
    # Pillow's readers raise many types of exceptions for damaged files.
    except Exception as error:
        what = "" if isinstance(error, Image.UnidentifiedImageError) else f" ({one_line(error)})"
        kinds = ", ".join(_FORMATS[:-1]) + f" or {_FORMATS[-1]}"
        raise ValueError(f"not a readable image{what}; use {kinds}") from None

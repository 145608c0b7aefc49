"""Clips of coloured shapes that move, with captions: a data set that a CPU can learn in minutes.

`python -m bench.clips.sample_clips FOLDER` writes FOLDER/videos/*.mp4 (H.264, 64x64, 9 frames at
8 per second) and FOLDER/labels/*.txt, the layout of SAT's trainer. Four colours, three shapes and
four directions make 48 captions. Four captions are held out, to test whether a model combines what it
learned.
"""

from __future__ import annotations

import sys
from fractions import Fraction
from itertools import product
from pathlib import Path

import numpy as np

from cogfast.core.slot_random import random_unit

SIZE = 64  # pixels
NUM_FRAMES = 9
FPS = 8
RADIUS = 18.0  # pixels
SPEED = 2.0  # pixels per frame
JITTER = 3.0  # pixels; the largest random offset of a path, in each direction
BACKGROUND = (24, 24, 32)
COLOURS = {
    "red": (220, 50, 47),
    "green": (60, 180, 75),
    "blue": (60, 110, 240),
    "yellow": (240, 210, 50),
}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {
    "right": (1, 0),
    "left": (-1, 0),
    "down": (0, 1),
    "up": (0, -1),
}  # (x, y); y points down
HELD_OUT = (
    ("red", "square", "up"),
    ("green", "circle", "left"),
    ("blue", "triangle", "right"),
    ("yellow", "circle", "down"),
)
_OVERSAMPLING = 4  # points per pixel side, for smooth edges


def caption_of(colour: str, shape: str, direction: str) -> str:
    """Return the caption of one combination."""
    return f"a {colour} {shape} moves {direction}"


def combinations() -> list[tuple[str, str, str]]:
    """Return all 48 (colour, shape, direction), including the held-out ones."""
    return list(product(COLOURS, SHAPES, DIRECTIONS))


def _coverage(shape: str, x: float, y: float) -> np.ndarray:
    """Return the covered share of each pixel, [SIZE, SIZE] in [0, 1], for a shape centred at (x, y)."""
    fine = (np.arange(SIZE * _OVERSAMPLING) + 0.5) / _OVERSAMPLING
    dx, dy = fine[None, :] - x, fine[:, None] - y
    if shape == "circle":
        inside = dx**2 + dy**2 <= RADIUS**2
    elif shape == "square":
        side = RADIUS * np.pi**0.5 / 2  # a square with the area of the circle
        inside = np.maximum(abs(dx), abs(dy)) <= side
    else:
        inside = (abs(dy) <= RADIUS) & (abs(dx) <= (dy + RADIUS) / 2)  # the tip is at the top
    return inside.reshape(SIZE, _OVERSAMPLING, SIZE, _OVERSAMPLING).mean(axis=(1, 3))


def render_clip(
    colour: str, shape: str, direction: str, offset: tuple[float, float] = (0.0, 0.0)
) -> np.ndarray:
    """Render one clip, uint8 [F, H, W, 3]. The path is centred in the frame and moved by `offset` (x, y)."""
    frames = np.empty((NUM_FRAMES, SIZE, SIZE, 3), dtype=np.uint8)
    step_x, step_y = DIRECTIONS[direction]
    foreground, background = np.array(COLOURS[colour], float), np.array(BACKGROUND, float)
    for i in range(NUM_FRAMES):
        travelled = SPEED * (i - (NUM_FRAMES - 1) / 2)
        x = SIZE / 2 + offset[0] + step_x * travelled
        y = SIZE / 2 + offset[1] + step_y * travelled
        covered = _coverage(shape, x, y)[..., None]
        frames[i] = np.rint(covered * foreground + (1 - covered) * background)
    return frames


def _write_mp4(path: Path, frames: np.ndarray) -> None:
    """Write frames, uint8 [F, H, W, 3], as H.264, with the same bytes on every call."""
    import av

    with av.open(str(path), "w", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream("libx264", rate=Fraction(FPS))
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        # x264 is not by default deterministic on such short clips: its macroblock tree and its assembly
        # code changed the bytes of up to a third of the clips between two calls (x264 of PyAV 18).
        stream.options = {"crf": "16", "threads": "1", "x264-params": "mbtree=0:no-asm=1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def write_sample_clips(folder: str | Path, num_copies: int = 4, seed: int = 0) -> list[Path]:
    """Write `num_copies` clips of every combination that is not held out; return the mp4 paths."""
    folder = Path(folder)
    for name in ("videos", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    paths = []
    for colour, shape, direction in combinations():
        if (colour, shape, direction) in HELD_OUT:
            continue
        for copy in range(num_copies):
            name = f"{colour}-{shape}-{direction}-{copy}"
            draw = [random_unit("sample clips", seed, name, axis) for axis in "xy"]
            offset = (JITTER * (2 * draw[0] - 1), JITTER * (2 * draw[1] - 1))
            path = folder / "videos" / f"{name}.mp4"
            _write_mp4(path, render_clip(colour, shape, direction, offset))
            caption = caption_of(colour, shape, direction)
            (folder / "labels" / f"{name}.txt").write_text(caption + "\n")
            paths.append(path)
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m bench.clips.sample_clips FOLDER")
    write_sample_clips(sys.argv[1])

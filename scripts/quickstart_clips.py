"""The quickstart's clips of coloured shapes that move, and the score of videos by their captions.

Four colours, three shapes and four directions make 48 captions, which a CPU can learn in minutes. Four
captions are held out, to test whether a model combines what it learned. Colour, shape and direction
are recognized in uint8 frames; what cannot be recognized is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
# Half the distance between the background and the nearest palette entry, so that the outline is where
# the shape covers half a pixel.
_FOREGROUND_DISTANCE = 100.0  # in RGB, 0 to 442
_COLOUR_DISTANCE = 80.0  # grey is 101 from green, so that noise has no colour
_MIN_AREA = 60  # pixels; the smallest shape covers 648
_MIN_PIXELS_IN_LINE = 3  # a row or column with fewer is a speck outside the shape
_TRIANGLE_RATIO = 0.6  # area of the upper half over the lower: triangle 0.33, others 1
_SQUARE_FILL = 0.89  # of the bounding box: square 1, circle 0.79
_MIN_SPEED = 0.5  # pixels per frame; the clips move at 2


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


def write_clips(folder: str | Path, num_copies: int = 4, seed: int = 0) -> list[Path]:
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


@dataclass(frozen=True, slots=True)
class Look:
    """The recognized properties of a video, None where one cannot be recognized."""

    colour: str | None
    shape: str | None
    direction: str | None

    @classmethod
    def from_caption(cls, caption: str) -> Look:
        """Parse a caption such as `a red circle moves right`."""
        known = [w for w in caption.split() if w in COLOURS or w in SHAPES or w in DIRECTIONS]
        if len(known) != 3:
            raise ValueError(
                f"caption {caption!r} must name one colour, one shape and one direction, "
                "as in 'a red circle moves right'"
            )
        colour, shape, direction = known
        return cls(colour, shape, direction)


def foreground(frames: np.ndarray) -> np.ndarray:
    """Return the mask, bool [F, H, W], of pixels of a uint8 video that differ from the background."""
    difference = frames.astype(np.float32) - np.array(BACKGROUND, np.float32)
    return np.sqrt((difference**2).sum(axis=-1)) > _FOREGROUND_DISTANCE


def see_colour(frames: np.ndarray, mask: np.ndarray) -> str | None:
    """Return the palette entry nearest to the median foreground pixel."""
    if mask.sum() < _MIN_AREA:
        return None
    median = np.median(frames[mask].astype(np.float32), axis=0)
    distances = {name: float(np.linalg.norm(median - rgb)) for name, rgb in COLOURS.items()}
    nearest = min(distances, key=distances.__getitem__)
    return nearest if distances[nearest] <= _COLOUR_DISTANCE else None


def see_shape(mask: np.ndarray) -> str | None:
    """Return the shape that most frames of the mask [F, H, W] show."""
    votes = Counter(filter(None, map(_see_shape_of_frame, mask)))
    return votes.most_common(1)[0][0] if votes else None


def _see_shape_of_frame(mask: np.ndarray) -> str | None:
    """Recognize the shape in the mask [H, W] of one frame by its bounding box."""
    rows = np.flatnonzero(mask.sum(axis=1) >= _MIN_PIXELS_IN_LINE)
    columns = np.flatnonzero(mask.sum(axis=0) >= _MIN_PIXELS_IN_LINE)
    if mask.sum() < _MIN_AREA or rows.size == 0 or columns.size == 0:
        return None
    box = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    half = box.shape[0] // 2
    if half == 0:
        return None
    top, bottom = box[:half].sum(), box[-half:].sum()
    # A triangle has most of its area at the bottom; a circle leaves the corners of its box empty.
    if top < _TRIANGLE_RATIO * bottom:
        return "triangle"
    return "square" if box.mean() > _SQUARE_FILL else "circle"


def see_direction(mask: np.ndarray) -> str | None:
    """Return the direction in which the centre of the shape moves fastest, from masks [F, H, W]."""
    times = np.flatnonzero(mask.sum(axis=(1, 2)) >= _MIN_AREA)
    if times.size < 3:
        return None
    middles = np.array([np.argwhere(mask[t]).mean(axis=0) for t in times])  # [seen frames, (y, x)]
    # A line through all frames: noise in single frames does not change the direction.
    down, right = np.polyfit(times, middles, deg=1)[0]  # pixels per frame
    if max(abs(down), abs(right)) < _MIN_SPEED:
        return None
    if abs(right) > abs(down):
        return "right" if right > 0 else "left"
    return "down" if down > 0 else "up"


def look_at(frames: np.ndarray) -> Look:
    """Recognize all three properties of a video, uint8 [F, H, W, 3]."""
    mask = foreground(frames)
    return Look(see_colour(frames, mask), see_shape(mask), see_direction(mask))


@dataclass(frozen=True, slots=True)
class Scores:
    """Shares of videos, 0 to 1, that agree with their captions."""

    colour: float
    shape: float
    motion: float
    num_videos: int

    @property
    def has_learned(self) -> bool:
        """True if the model that sampled these videos has learned the clips."""
        # Shape is the noisiest of the three: it varies by 0.06 between two sets of samples.
        return self.colour >= 0.9 and self.motion >= 0.8 and self.shape >= 0.6

    def __str__(self) -> str:
        return f"colour {self.colour:.2f}  shape {self.shape:.2f}  motion {self.motion:.2f}"


def score(videos: Sequence[np.ndarray], captions: Sequence[str]) -> Scores:
    """Compare videos ([F, H, W, 3] uint8 each) with their captions."""
    if len(videos) != len(captions) or not videos:
        raise ValueError(f"{len(videos)} videos and {len(captions)} captions; give one for each")
    pairs = [(look_at(v), Look.from_caption(c)) for v, c in zip(videos, captions, strict=True)]
    return Scores(
        colour=float(np.mean([seen.colour == wanted.colour for seen, wanted in pairs])),
        shape=float(np.mean([seen.shape == wanted.shape for seen, wanted in pairs])),
        motion=float(np.mean([seen.direction == wanted.direction for seen, wanted in pairs])),
        num_videos=len(pairs),
    )


def read_frames(path: str | Path) -> np.ndarray:
    """Read all frames of an mp4, uint8 [F, H, W, 3]."""
    import av

    with av.open(str(path)) as container:
        return np.stack([f.to_ndarray(format="rgb24") for f in container.decode(video=0)])

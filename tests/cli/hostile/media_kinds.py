"""Damaged and odd media files for test_media.py; each kind writes a file named as an mp4 clip.

A clip has 9 frames at 8 per second. Frame i is grey with level 20 + 20 * i, so that a test can
identify the frames that were read.
"""

import os
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

NUM_FRAMES, FPS, SIDE = 9, 8, 32
LEVELS = [20 + 20 * i for i in range(NUM_FRAMES)]
_KEY = "00112233445566778899aabbccddeeff"


def encode(
    path: Path,
    kind: str = "mp4",
    codec: str = "libx264",
    pixels: str = "yuv420p",
    size: tuple[int, int] = (SIDE, SIDE),
    ticks: Sequence[int] = range(NUM_FRAMES),
    rate: Fraction = Fraction(FPS),
    options: dict[str, str] | None = None,
    **flags: str,
) -> None:
    """Write a clip whose frame i is shown at tick ticks[i] of 1/rate seconds."""
    with av.open(str(path), "w", format=kind, options=flags) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = size[1], size[0], pixels
        stream.options = options or ({"crf": "12"} if codec == "libx264" else {})
        for i, tick in enumerate(ticks):
            grey = np.full((*size, 3), LEVELS[i % NUM_FRAMES], np.uint8)
            frame = av.VideoFrame.from_ndarray(grey, format="rgb24").reformat(format=pixels)
            frame.pts, frame.time_base = tick, 1 / rate
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def made(*arguments: object, **named: object) -> Callable[[Path], None]:
    return lambda path: encode(path, *arguments, **named)


def patched(change: Callable[[bytearray], None], **named: str) -> Callable[[Path], None]:
    """Return a function that writes a clip and then changes some of its bytes."""

    def make(path: Path) -> None:
        encode(path, **named)
        data = bytearray(path.read_bytes())
        change(data)
        path.write_bytes(data)

    return make


def cut(share: float, **named: str) -> Callable[[Path], None]:
    def keep(data: bytearray) -> None:
        del data[int(share * len(data)) :]

    return patched(keep, **named)


def _box(data: bytearray, name: bytes) -> int:
    """The offset of the content of an mp4 box."""
    return data.index(name) + 4


def put(name: bytes, offset: int, number: int) -> Callable[[bytearray], None]:
    """Write a 32-bit number into a box."""
    return lambda data: struct.pack_into(">I", data, _box(data, name) + offset, number)


def renamed(name: bytes, other: bytes) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[:] = data.replace(name, other)

    return change


def _all_times(delta: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        start = _box(data, b"stts")
        for i in range(int.from_bytes(data[start + 4 : start + 8], "big")):
            struct.pack_into(">I", data, start + 12 + 8 * i, delta)

    return change


def _noise(data: bytearray) -> None:
    start = _box(data, b"mdat")
    end = data.index(b"moov") - 4
    data[start:end] = np.random.default_rng(0).bytes(end - start)


def _rotated(data: bytearray) -> None:
    """Set the matrix of the track to a rotation by 90 degrees."""
    start = _box(data, b"tkhd") + 40
    struct.pack_into(">9i", data, start, 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)


def _audio(path: Path) -> None:
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def _written(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data)


def _picture(path: Path) -> None:
    Image.new("RGB", (48, 32)).save(path, "png")


_FAST = {"movflags": "faststart"}
# Odd files that must be read like any other: the nine levels are returned.
READ: dict[str, Callable[[Path], None]] = {
    "with an edit list": made(options={"crf": "12", "x264-params": "bframes=3:keyint=9"}),
    "MPEG-TS": made("mpegts"),
    "odd sizes": made("matroska", "ffv1", size=(33, 47)),
    "rotated": patched(_rotated),
    "alpha of VP9": made("webm", "libvpx-vp9", "yuva420p"),
    "10 bits": made(pixels="yuv420p10le"),
    "negative times": made("matroska", ticks=range(-3, 6)),
    "a variable rate": made(ticks=[8 * i + i % 2 for i in range(12)], rate=Fraction(64)),
    "much behind it": lambda path: (encode(path), os.truncate(path, 2**26))[0],
}
# Files that must be recorded as bad, each with a reason.
BAD: dict[str, Callable[[Path], None]] = {
    **{f"cut at {share:.0%}": cut(share) for share in (0.05, 0.6)},
    **{f"cut at {share:.0%}, index first": cut(share, **_FAST) for share in (0.3, 0.97)},
    "zero bytes": _written(b""),
    "a pipe": lambda path: os.mkfifo(path),
    "a link to itself": lambda path: path.symlink_to(path),
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "text": _written(b"no video\n" * 99),
    "a picture": _picture,
    "audio alone": _audio,
    "one frame": made(ticks=[0]),
    "all at one time": patched(_all_times(0)),
    "a duration of years": patched(_all_times(2**31 - 1)),
    "4 billion frames in the index": patched(put(b"stsz", 8, 2**32 - 1)),
    "an unknown codec": patched(renamed(b"avc1", b"zzzz")),
    "encrypted": made(
        encryption_scheme="cenc-aes-ctr", encryption_key=_KEY, encryption_kid=_KEY
    ),
    "noise behind a header": patched(_noise),
    "noise": _written(np.random.default_rng(1).bytes(5000)),
    "a playlist": _written(b"#EXTM3U\n#EXTINF:9,\n0.mp4\n#EXT-X-ENDLIST\n"),
}  # fmt: skip
# Files that may be read, recorded as bad or not listed at all; none may end a run.
EITHER: dict[str, Callable[[Path], None]] = {
    "4 billion frames in the times": patched(put(b"stts", 8, 2**32 - 1)),
    "cut at 99%": cut(0.99),
    "a folder": lambda path: path.mkdir(),
    "65,535 x 65,535 in the header": patched(put(b"avc1", 24, 2**32 - 1)),
}

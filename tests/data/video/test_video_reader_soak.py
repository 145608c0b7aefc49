"""Soak tests of the video reader.

Files of random encoders, containers and options: chosen frames equal those of a whole decode. Files
with random damage: each is either read or a bad sample.
"""

import os
import random
from pathlib import Path

import av
import numpy as np
import pytest

from cogfast.data.bad_samples import BadSample
from cogfast.data.sources.headers import probe
from cogfast.data.video.clip import ClipSettings, read_clip
from cogfast.data.video.reader import open_video
from tests.support.video_files import constant_rate, decode_all, write_clip

pytestmark = pytest.mark.soak

NUM_FILES, NUM_DAMAGED = 200, 2000
CONTAINERS = {
    "libx264": ("mp4", "mkv", "mov", "ts", "avi"),
    "libx265": ("mp4", "mkv", "ts"),
    "libvpx-vp9": ("webm", "mkv", "mp4"),
    "libvpx": ("webm",),
    "libsvtav1": ("mp4", "mkv"),
    "mpeg4": ("mp4", "mkv", "avi"),
    "mpeg2video": ("mkv", "ts"),
}
RATES = {"mpeg2video": (24, 25, 30)}


def options(codec: str, rng: random.Random) -> dict[str, str]:
    choose = lambda name, *values: f"{name}={rng.choice(values)}"
    if codec == "libx264":
        codec_options = [choose("keyint", 1, 5, 12, 30, 250), choose("bframes", 0, 1, 3, 8)]
        codec_options += [choose("b-pyramid", "none", "strict", "normal"), choose("ref", 1, 3, 6)]
        codec_options += [choose("open-gop", 0, 1), choose("weightp", 0, 2), choose("slices", 1, 4)]
        codec_options += rng.choice(([], [], [], ["intra-refresh=1"], ["tff=1"], ["bff=1"]))
        preset = rng.choice(("ultrafast", "veryfast", "medium"))
        return {"x264-params": ":".join([*codec_options, "threads=1"]), "preset": preset}
    if codec == "libx265":
        codec_options = [
            choose("keyint", 5, 30, 250),
            choose("bframes", 0, 4),
            choose("open-gop", 0, 1),
        ]
        codec_options += [choose("temporal-layers", 0, 1), "log-level=none", "pools=none"]
        return {"x265-params": ":".join(codec_options), "preset": "ultrafast"}
    if codec == "libsvtav1":
        return {"preset": "12", "svtav1-params": "lp=1"}
    if codec.startswith("libvpx"):
        speed = {"deadline": "realtime", "cpu-used": "8"}
        return {**speed, "g": rng.choice(("5", "30")), "lag-in-frames": rng.choice(("0", "16"))}
    return {"g": rng.choice(("5", "12")), "bf": rng.choice(("0", "2"))}


def test_random_files(tmp_path: Path) -> None:
    num_read = 0
    for seed in range(NUM_FILES):
        rng = random.Random(seed)
        codec = rng.choice([*CONTAINERS, *["libx264"] * 6])
        path = tmp_path / f"{seed}.{rng.choice(CONTAINERS[codec])}"
        number, fps = rng.randint(1, 70), rng.choice(RATES.get(codec, (8, 10, 25, 30, 60)))
        times = constant_rate(number, fps)
        if path.suffix in (".mp4", ".mkv", ".webm", ".mov") and rng.random() < 0.3:
            times = np.cumsum(np.random.default_rng(seed).uniform(1 / 60, 1 / 9, number))
        try:
            write_clip(path, times, codec=codec, options=options(codec, rng))
            expected = decode_all(path)
        except (av.error.FFmpegError, OSError):  # options that do not go together, or no encoder
            continue
        video = open_video(str(path))
        assert len(video) == len(expected), (seed, path.suffix, codec)
        for _ in range(4):
            indices = sorted(rng.choices(range(len(video)), k=rng.randint(1, 12)))
            assert np.array_equal(video.read(indices).numpy(), expected[indices]), (seed, indices)
        video.close()
        path.unlink()
        num_read += 1
    assert num_read > 0.8 * NUM_FILES


def damaged(whole: bytes, rng: random.Random) -> bytes:
    data, place = bytearray(whole), rng.randrange(len(whole))
    how = rng.choice(("bits", "head", "cut", "zeros", "inserted"))
    if how == "bits":
        for _ in range(rng.choice((1, 5, 50))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "head":
        for _ in range(rng.choice((1, 5))):
            data[rng.randrange(min(len(data), 900))] = rng.randrange(256)
    elif how == "cut":
        del data[place:]
    elif how == "zeros":
        data[place : place + 200] = bytes(200)
    else:
        data[place:place] = rng.randbytes(7)
    return bytes(data)


def test_random_damage(tmp_path: Path) -> None:
    settings = ClipSettings(video_size=(32, 48), fps=8, max_num_frames=17)
    whole = []
    for codec, ending in (("libx264", "mp4"), ("libx264", "mkv"), ("libx264", "ts"),
                          ("libx265", "mp4"), ("libvpx-vp9", "webm"), ("mpeg4", "avi")):  # fmt: skip
        path = write_clip(tmp_path / f"{codec}.{ending}", constant_rate(40, 10), codec=codec)
        whole.append((path.suffix, path.read_bytes()))
    num_read = 0
    for seed in range(NUM_DAMAGED):
        rng = random.Random(seed)
        ending, data = rng.choice(whole)
        path = tmp_path / f"damaged{ending}"
        path.write_bytes(damaged(data, rng))
        probe(str(path), os.path.getsize(path))
        try:
            clip, _ = read_clip(str(path), settings)
        except BadSample:
            continue
        assert clip.shape == (17, 3, 32, 48), seed
        num_read += 1
    assert 0.2 * NUM_DAMAGED < num_read < 0.8 * NUM_DAMAGED

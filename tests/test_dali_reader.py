"""DALI against PyAV and decord, on a CPU, where it decodes VP9: frames, pixels, fall-backs, batches.

`make test-dali` installs DALI and runs this file.
"""

from __future__ import annotations

import importlib.util
import logging
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from cogfast.data import dali_reader
from cogfast.data.batches import BatchLoader
from cogfast.data.clip import read_clip
from cogfast.data.clip_settings import ClipSettings
from cogfast.data.clip_transform import resize_and_center_crop, select_frames_timestamp
from cogfast.data.dali_reader import DaliReader
from cogfast.data.datasets import VideoFolder
from cogfast.data.video_reader import open_video
from tests.video_files import RATES, constant_rate, decode_all, write_clip

HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
WITH_DALI = pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed: make test-dali")
# Levels of 255. Flat colours differ by the one or two that FFmpeg's conversion to RGB rounds off,
# sharp edges by more, where chroma is upsampled otherwise; scaled down, by less.
MOST_OFF, MOST_OFF_SCALED_DOWN, MOST_OFF_ON_AVERAGE = 75, 40, 2.5


def _settings(backend: str, **changes: object) -> ClipSettings:
    params = {"video_size": (32, 48), "fps": 8, "max_num_frames": 13, "video_backend": backend}
    return ClipSettings(**{**params, **changes})


def _vp9(path: Path, times: np.ndarray, size: tuple[int, int] = (96, 128)) -> Path:
    return write_clip(path, times, size=size, codec="libvpx-vp9")


def _colours(path: Path, *, matrix: int = 2, turned: int = 0, size=(96, 128)) -> Path:
    """Five frames of coloured areas, whose matrix the file names as FFmpeg numbers them."""
    height, width = size
    picture = np.zeros((height, width, 3), np.uint8)
    picture[:, : width // 3] = (200, 30, 60)
    picture[: height // 2, width // 3 :] = (20, 180, 40)
    picture[height // 2 :, width // 3 :] = (30, 60, 190)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libvpx-vp9", rate=8)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.colorspace = matrix
        stream.options = {"crf": "10"}
        if turned:
            stream.set_display_rotation(turned)
        for _ in range(5):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def _assert_near(ours: torch.Tensor, decords: torch.Tensor, most: int) -> None:
    assert ours.dtype == torch.uint8 and ours.shape == decords.shape
    off = (ours.int() - decords.int()).abs()
    assert off.max() <= most and off.float().mean() <= MOST_OFF_ON_AVERAGE, (
        f"{off.max()} levels at most, {off.float().mean():.2f} on average"
    )


@pytest.fixture
def dali() -> DaliReader:
    return DaliReader(torch.device("cpu"))


@WITH_DALI
@pytest.mark.parametrize("rate", RATES)
def test_frames_are_those_of_the_timestamps(rate, dali, tmp_path):
    """Each frame is the source frame that is shown nearest to k/8 s, told by its level of grey."""
    path = _vp9(tmp_path / "a.mp4", RATES[rate])
    with av.open(str(path)) as container:
        shown = np.array([frame.time for frame in container.decode(video=0)])
    nearest = [int(abs(shown - shown[0] - k / 8).argmin()) for k in range(13)]
    video = dali.open(str(path))
    chosen = select_frames_timestamp(video.times, 8, 13).indices
    assert chosen.tolist() == nearest
    clip = dali.read(video, chosen, (64, 64))
    assert clip.shape == (13, 3, 64, 64)
    levels = decode_all(path)[:, -20:, 32:96].mean(axis=(1, 2, 3))  # the block moves at the top
    read = clip[:, :, -10:].float().mean(dim=(1, 2, 3)).numpy()
    assert abs(read - levels[nearest]).max() < 1.5  # neighbours are 8 apart
    own = open_video(str(path), "decord").read(chosen.tolist())
    _assert_near(clip, resize_and_center_crop(own, (64, 64)), MOST_OFF_SCALED_DOWN)


@WITH_DALI
@pytest.mark.parametrize("target", [(64, 64), (32, 80), (96, 40), (96, 128), (120, 90)], ids=str)
@pytest.mark.parametrize("matrix", [2, 1, 9], ids=["no matrix", "BT.709", "BT.2020"])
def test_pixels_are_near_pyavs(target, matrix, dali, tmp_path):
    """Scaled, cropped in the middle, and of the colours that the file's matrix means."""
    path = _colours(tmp_path / "a.mp4", matrix=matrix)
    ours = dali.read(dali.open(str(path)), np.array([0, 3]), target)
    own = resize_and_center_crop(open_video(str(path)).read([0, 3]), target)
    is_smaller = target[0] < 96 and target[1] < 128
    _assert_near(ours, own, MOST_OFF_SCALED_DOWN if is_smaller else MOST_OFF)


@WITH_DALI
def test_colours_of_another_matrix_are_far_off(dali, tmp_path):
    """Without the correction: the test above would tell."""
    path = _colours(tmp_path / "a.mp4", matrix=1)
    right = resize_and_center_crop(open_video(str(path)).read([0]), (96, 128)).float()
    named = dali.open(str(path))
    unnamed = dali.open(str(_colours(tmp_path / "b.mp4")))
    assert (named.colour_matrix, unnamed.colour_matrix) == (1, 2)
    wrong = dali.read(unnamed, np.array([0]), (96, 128)).float()
    assert (wrong - right).abs().mean() > 3 * MOST_OFF_ON_AVERAGE


@WITH_DALI
def test_what_dali_cannot_decode_is_pyavs(dali, tmp_path, caplog):
    """H.264 on a CPU, frames that are turned, what is no video."""
    for name in "abcde":
        write_clip(tmp_path / f"{name}.mp4", constant_rate(30, 15))
    _colours(tmp_path / "turned.mp4", turned=90)
    (tmp_path / "text.mp4").write_text("not a video")
    with caplog.at_level(logging.WARNING, logger="cogfast"):
        for name in "abcde":
            video = dali.open(str(tmp_path / f"{name}.mp4"))
            if name in "abc":
                assert dali.read(video, np.array([0, 1]), (32, 48)) is None
            else:
                assert video is None  # the kind is known by now
    assert caplog.text.count("PyAV reads it, not DALI") == 3
    assert "from here on all h264 yuv420p 64x48" in caplog.text
    assert dali.open(str(tmp_path / "turned.mp4")) is None
    assert dali.open(str(tmp_path / "text.mp4")) is None
    for name in ("a", "turned"):
        settings = {"max_num_frames": 5}
        ours, _ = read_clip(str(tmp_path / f"{name}.mp4"), _settings("dali", **settings))
        own, _ = read_clip(str(tmp_path / f"{name}.mp4"), _settings("pyav", **settings))
        assert torch.equal(ours, own)


@WITH_DALI
def test_a_broken_file_costs_no_other(dali, tmp_path):
    good = _vp9(tmp_path / "good.mp4", constant_rate(20, 10))
    bad = tmp_path / "bad.mp4"
    content = bytearray(good.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 400] = bytes(400)
    before = dali.read(dali.open(str(good)), np.arange(20), (32, 48))
    bad.write_bytes(content)
    video = dali.open(str(bad))
    if video is not None:
        dali.read(video, np.arange(20), (32, 48))
    assert torch.equal(dali.read(dali.open(str(good)), np.arange(20), (32, 48)), before)


def _folder(root: Path) -> Path:
    """VP9 clips of SAT's layout: two broken, one too short, one of another codec."""
    (root / "labels").mkdir(parents=True)
    for i in range(12):
        path = root / f"videos/{i:02}.mp4"
        if i == 5:
            write_clip(path, constant_rate(20, 10), size=(96, 128))
        else:
            _vp9(path, constant_rate(8 if i == 4 else 20, 10), size=(96, 112 + 16 * (i % 2)))
        (root / f"labels/{i:02}.txt").write_text(f"clip {i:02}\n")
    (root / "videos/01.mp4").write_text("not a video")
    whole = (root / "videos/02.mp4").read_bytes()
    (root / "videos/02.mp4").write_bytes(whole[: len(whole) // 2])
    return root


@WITH_DALI
@pytest.mark.parametrize("num_workers", [1, 4])
def test_batches_are_those_of_reading_processes(num_workers, tmp_path):
    folder, seen = _folder(tmp_path / "d"), {}
    for backend in ("decord", "dali"):
        data = VideoFolder(folder, (32, 48), 8, 13, video_backend=backend, short_clips="skip")
        file = tmp_path / f"{backend}.jsonl"
        with BatchLoader(
            data,
            data.order(3, 8),
            micro_batch=2,
            accumulation=2,
            dp_rank=1,
            dp_size=2,
            start_step=1,
            num_steps=4,
            num_workers=num_workers,
            bad_samples_path=file,
            max_bad_fraction=0.3,
        ) as loader:
            seen[backend] = list(loader), set(loader.bad_samples.reasons), loader.num_padded
    assert seen["dali"][1:] == seen["decord"][1:] and len(seen["dali"][1]) == 3
    assert len(seen["dali"][0]) == 8
    for ours, own in zip(seen["dali"][0], seen["decord"][0], strict=True):
        assert ours.keys() == own.keys()
        assert [path for path, _ in ours["bad"]] == [path for path, _ in own["bad"]]
        for key in ("step", "slots", "txt", "paths"):
            assert ours[key] == own[key]
        for key in ("fps", "num_frames"):
            assert torch.equal(ours[key], own[key])
        _assert_near(ours["mp4"], own["mp4"], MOST_OFF_SCALED_DOWN)


@WITH_DALI
def test_errors_come_in_their_place_and_close_is_prompt(tmp_path):
    data = VideoFolder(_folder(tmp_path), (32, 48), 8, 13, video_backend="dali")
    loader = BatchLoader(data, data.order(0, 1), micro_batch=1, max_bad_fraction=0.1)
    batches = []
    with pytest.raises(ValueError, match=r"[23]/12 videos unreadable \(>10%\)"):
        for batch in loader:
            batches.append(batch)
    assert [batch["step"] for batch in batches] == list(range(len(batches)))
    loader = BatchLoader(data, data.order(0, 1), micro_batch=1, max_bad_fraction=1.0)
    next(loader)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 2 and list(loader) == []


def test_auto_says_why_pyav_reads(caplog):
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, it may be DALI")
    dali_reader._reader.cache_clear()
    with caplog.at_level(logging.INFO, logger="cogfast"):
        for _ in range(2):
            assert dali_reader.dali_of_this_process("auto") is None
    assert caplog.text.count("videos are decoded by PyAV: no DALI, since there is no GPU") == 1


@pytest.mark.skipif(bool(HAS_DALI), reason="DALI is installed")
def test_dali_asked_for_and_missing():
    with pytest.raises(
        ValueError,
        match=r"data.params.video_backend=dali: DALI does not import \(.*; pip install .*; auto",
    ):
        _settings("dali")

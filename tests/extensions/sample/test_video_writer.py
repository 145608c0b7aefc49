"""Videos that are written and read back with PyAV; incomplete files never get their name."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from cogfast.extensions.sample import writer
from cogfast.extensions.sample.writer import contact_sheet, write_video
from tests.support.video_files import decode_all


def _moving_square(num_frames: int, height: int, width: int) -> np.ndarray:
    frames = np.full((num_frames, height, width, 3), (24, 24, 32), np.uint8)
    for i in range(num_frames):
        frames[i, 8:24, 2 * i : 2 * i + 16] = (220, 40, 40)
    return frames


@pytest.mark.parametrize(
    "height, width", [(48, 64), (47, 63), (33, 64)], ids=["even", "odd", "odd rows"]
)
def test_round_trip(height, width, tmp_path):
    frames = _moving_square(9, height, width)
    write_video(tmp_path / "new/v.mp4", frames, fps=8)
    decoded = decode_all(tmp_path / "new/v.mp4")
    assert decoded.shape == (9, height + height % 2, width + width % 2, 3)
    inside = decoded[:, :height, :width].astype(int)
    # Colour is stored at half the resolution, so its edges blur and flat areas keep their colour.
    assert np.abs(inside - frames).mean() < 3
    assert np.abs(inside[4, 12:20, 12:20] - (220, 40, 40)).max() < 12
    with av.open(str(tmp_path / "new/v.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.codec_context.name, stream.pix_fmt) == ("h264", "yuv420p")
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["v.mp4"]


def test_the_same_frames_are_the_same_bytes(tmp_path):
    """x264 wrote several files from one noisy disc that moves, where the processor has AVX-512."""
    noise = np.random.default_rng(0).normal(0, 3, (9, 64, 64, 3))
    rows, columns = np.mgrid[:64, :64]
    disc = [(columns - 12 - 5 * i) ** 2 + (rows - 32) ** 2 < 90 for i in range(9)]
    frames = np.where(np.stack(disc)[..., None], (200, 30, 30), (230, 230, 230)) + noise
    files = set()
    for _ in range(30):
        write_video(tmp_path / "v.mp4", frames.clip(0, 255).astype(np.uint8), fps=8)
        files.add((tmp_path / "v.mp4").read_bytes())
    assert len(files) == 1


@pytest.mark.parametrize(
    "fps, exact", [(8, (8, 1)), (29.97, (30000, 1001)), (12.5, (25, 2)), (24, (24, 1))]
)
def test_rate(fps, exact, tmp_path):
    write_video(tmp_path / "v.mp4", _moving_square(6, 32, 32), fps)
    with av.open(str(tmp_path / "v.mp4")) as container:
        rate = container.streams.video[0].average_rate
        times = [float(f.pts * f.time_base) for f in container.decode(video=0)]
    assert (rate.numerator, rate.denominator) == exact
    np.testing.assert_allclose(times, np.arange(6) * exact[1] / exact[0], atol=1e-4)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_pixels_that_are_not_finite_are_refused(value, tmp_path):
    video = torch.zeros(3, 2, 16, 16)
    video[1, 1, 3, 4] = value
    with pytest.raises(ValueError, match="the video has NaN or infinite pixels"):
        write_video(tmp_path / "v.mp4", video, fps=8)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "v.mp4"
    write_video(path, _moving_square(3, 32, 32), 8)
    old = path.read_bytes()
    with pytest.raises(ValueError, match="0 frames at fps=8"):
        write_video(path, np.zeros((0, 32, 32, 3), np.uint8), 8)
    monkeypatch.setattr(writer, "_CRF", "best")
    with pytest.raises(Exception, match="crf|Invalid|option"):
        write_video(path, _moving_square(3, 32, 32), 8)
    assert path.read_bytes() == old
    assert [p.name for p in tmp_path.iterdir()] == ["v.mp4"]


def test_contact_sheet(tmp_path):
    squares = _moving_square(25, 48, 80)
    grey = torch.zeros(3, 2, 48, 80)
    long = "a red square moves right over a dark floor and does so for a very long time " * 8
    contact_sheet(tmp_path / "sheet.png", [squares, grey, grey], ["a red square", long, ""])
    sheet = np.asarray(Image.open(tmp_path / "sheet.png").convert("RGB")).astype(int)
    height, width, _ = sheet.shape
    assert width == 6 * 176 + 7 * 6
    red = (np.abs(sheet - (220, 40, 40)).max(axis=2) < 8).nonzero()
    assert red[0].max() < height / 3  # only in the first row of videos
    # frames 0, 5, 10, 14, 19, 24: the square's left edge at 2 px a frame, enlarged 176/80
    lefts = []
    for column in range(6):
        begin = 6 + column * 182
        inside = red[1][(red[1] >= begin) & (red[1] < begin + 176)]
        lefts.append(inside.min() - begin)
    assert np.abs(np.array(lefts) - np.array([0, 5, 10, 14, 19, 24]) * 2 * 2.2).max() < 3
    greys = (np.abs(sheet - 128).max(axis=2) == 0).sum(axis=1)
    assert sorted(set(greys)) == [0, 2 * 176]  # two frames a row, nothing drawn over them
    assert (sheet[:22, :100].sum(axis=2) < 100).sum() > 50  # the caption's letters


def test_many_videos_are_in_columns(tmp_path: Path) -> None:
    """Columns have equal numbers, and each video is in its place."""
    videos = [np.full((2, 8, 12, 3), 7 * i, np.uint8) for i in range(30)]
    contact_sheet(tmp_path / "sheet.png", videos, [str(i) for i in range(30)])
    with Image.open(tmp_path / "sheet.png") as sheet:
        width, height = sheet.size
        pixels = np.asarray(sheet)
    contact_sheet(tmp_path / "one.png", videos[:10], [str(i) for i in range(10)])
    with Image.open(tmp_path / "one.png") as one:
        assert (width, height) == (3 * one.width, one.height)
        first = np.asarray(one)
    assert np.array_equal(pixels[:, : first.shape[1]], first)
    for i, video in enumerate(videos):
        of_column = pixels[:, i // 10 * first.shape[1] : (i // 10 + 1) * first.shape[1]]
        rows = of_column[i % 10 * (height - 6) // 10 : (i % 10 + 1) * (height - 6) // 10]
        assert (rows == video[0, 0, 0]).all(-1).any()

"""Frame selection compared with upstream's indices and with the clock; resizing with Pillow."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw

from cogfast.data.video.transform import (
    cover_size,
    resize_and_center_crop,
    select_frames_sat,
    select_frames_timestamp,
    select_frames_uniform,
)


@pytest.fixture(scope="module")
def rows(golden):
    return json.loads((golden / "frame_selection.json").read_text())


def _expand(segments: list[list[int]]) -> list[int]:
    return [first + step * k for first, step, count in segments for k in range(count)]


def test_sat_every_row(rows):
    num_errors = 0
    for fps, num_frames, skip, clip_fps, length, _, kept, expected in rows["sft"]:
        arguments = length, rows["clip_fps_values"][clip_fps], fps, num_frames, skip
        if kept is None:
            num_errors += 1
            with pytest.raises(ValueError, match="fps is below|reads up to frame|none is left"):
                select_frames_sat(*arguments)
            continue
        selection = select_frames_sat(*arguments)
        assert selection.indices.tolist() == _expand(expected), arguments
        assert selection.num_frames == kept, arguments
    assert num_errors == 800  # of 5,696 rows


def test_uniform_every_row(rows):
    (with_resize,) = (v for k, v in rows["finetune"].items() if k.startswith("with_resize"))
    for num_frames, length, expected in with_resize:
        selection = select_frames_uniform(length, num_frames)
        assert selection.indices.tolist() == _expand(expected), (num_frames, length)
        assert selection.num_padded == max(0, num_frames - length)


@pytest.mark.parametrize("fps", [8, 16])
@pytest.mark.parametrize("clip_fps", [12, 16, 24, 25, 30000 / 1001, 30, 50, 60])
def test_timestamp_keeps_the_fps(clip_fps, fps):
    times = np.arange(2000) / clip_fps
    indices = select_frames_timestamp(times, fps, 49).indices
    late = times[indices] - np.arange(49) / fps
    assert np.abs(late).max() <= 0.5 / clip_fps + 1e-9  # the nearest frame, and no drift
    rate = 48 / (times[indices[-1]] - times[indices[0]])
    assert rate == pytest.approx(fps, rel=0.5 / clip_fps * fps / 48 + 1e-9)


def test_timestamp_by_hand():
    # 30 fps for 8: every 3.75th frame; 2*3.75 = 7.5 is a tie, which the earlier frame wins.
    indices = select_frames_timestamp(np.arange(100) / 30, 8, 9).indices
    assert indices.tolist() == [0, 4, 7, 11, 15, 19, 22, 26, 30]
    # float32 times, as decord gives them, choose the same.
    rounded = (np.arange(100) / 30).astype(np.float32).astype(np.float64)
    assert select_frames_timestamp(rounded, 8, 9).indices.tolist() == indices.tolist()


def test_timestamp_variable_rate():
    times = np.cumsum(np.random.default_rng(0).uniform(1 / 60, 1 / 12, 400))
    times -= times[0]
    wanted = times[3] + np.arange(49) / 8
    indices = select_frames_timestamp(times, 8, 49, skip=3).indices
    nearest = np.abs(times[:, None] - wanted).min(axis=0)
    np.testing.assert_allclose(np.abs(times[indices] - wanted), nearest, atol=1e-3)


def test_timestamp_skip_yields_to_the_clip():
    long, exact = np.arange(60) / 8, np.arange(49) / 8
    assert select_frames_timestamp(long, 8, 49, skip=3).indices.tolist() == list(range(3, 52))
    assert select_frames_timestamp(exact, 8, 49, skip=3).indices.tolist() == list(range(49))
    # 53 frames can spare two at either end.
    fewer = select_frames_timestamp(np.arange(53) / 8, 8, 49, skip=3)
    assert fewer.indices.tolist() == list(range(2, 51))


def test_timestamp_pads_short_clips():
    short = select_frames_timestamp(np.arange(31) / 24, 8, 49)
    # Frame 30, at 1.25 s = 10/8 s, is the last one.
    assert short.indices.tolist() == [*range(0, 31, 3), *[30] * 38]
    assert (short.num_frames, short.num_padded) == (11, 38)
    assert select_frames_timestamp(np.zeros(1), 8, 5).indices.tolist() == [0] * 5
    assert select_frames_timestamp(np.zeros(1), 8, 1).num_padded == 0


def test_resize_and_crop_sizes(rows):
    for row in rows["resize_crop"]:
        (height, width), target = row["in_hw"], tuple(row["target_hw"])
        size = cover_size(height, width, target)
        assert list(size) == row["resize"]
        top, left, *_ = row["crop"]
        assert [(size[0] - target[0]) // 2, (size[1] - target[1]) // 2] == [top, left]


@pytest.mark.parametrize(
    "size, target",
    [((272, 640), (96, 160)), ((180, 120), (64, 96)), ((40, 60), (60, 90)), ((48, 64), (48, 64))],
    ids=["down, wide", "down, tall", "up", "same"],
)
def test_resize_is_antialiased_bicubic(size, target):
    generator = torch.Generator().manual_seed(0)
    rough = torch.rand(3, 3, *(s // 4 for s in size), generator=generator)
    smooth = F.interpolate(rough, size=size, mode="bilinear").mul(255).to(torch.uint8)
    frames = smooth.permute(0, 2, 3, 1).contiguous()
    out = resize_and_center_crop(frames, target)
    assert out.shape == (3, 3, *target) and out.dtype == torch.uint8 and out.is_contiguous()
    rows, columns = cover_size(*size, target)
    top, left = (rows - target[0]) // 2, (columns - target[1]) // 2
    window = slice(top, top + target[0]), slice(left, left + target[1])
    for frame, ours in zip(frames.numpy(), out.permute(0, 2, 3, 1).numpy(), strict=True):
        pillow = np.asarray(Image.fromarray(frame).resize((columns, rows), Image.BICUBIC))
        difference = np.abs(pillow[window].astype(int) - ours.astype(int))
        assert difference.max() <= 2  # both round twice, each at most one level from exact
    # torchvision's v1 resize of uint8 tensors: through float32, clamped and rounded.
    exact = F.interpolate(
        smooth.float(), size=(rows, columns), mode="bicubic", antialias=True
    ).clamp(0, 255)[:, :, window[0], window[1]]
    assert (exact.round() - out.float()).abs().max() <= 1
    assert (exact - out.float()).mean().abs() < 0.05  # and without a bias


def _text_on_black() -> torch.Tensor:
    picture = Image.new("RGB", (640, 360))
    for row in range(0, 360, 20):
        ImageDraw.Draw(picture).text((4, row), "The quick brown fox jumps over it " * 4, "white")
    return torch.from_numpy(np.array(picture))[None]


@pytest.mark.parametrize("kind, on_average", [("text", 0.5), ("noise", 0.3)])
def test_how_far_the_resize_is_from_sats(kind, on_average):
    """See docs/differences.md: cogfast clamps overshooting values between the two passes."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(0, 256, (1, 360, 640, 3), generator=generator, dtype=torch.uint8)
    frames = _text_on_black() if kind == "text" else noise
    for target in ((240, 360), (480, 720)):
        size = cover_size(360, 640, target)
        top, left = (size[0] - target[0]) // 2, (size[1] - target[1]) // 2
        window = (..., slice(top, top + target[0]), slice(left, left + target[1]))
        pixels = frames.permute(0, 3, 1, 2).float()
        theirs = F.interpolate(pixels, size=size, mode="bicubic", antialias=True)
        theirs = theirs.clamp(0, 255).round()[window]
        off = (theirs - resize_and_center_crop(frames, target).float()).abs()
        assert off.mean() < on_average and off.max() <= 30, (target, off.mean(), off.max())

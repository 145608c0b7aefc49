"""The lists of CogVideo's diffusers trainer: what it takes is taken, and faults name file and line."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from cogfast.config import load_config
from cogfast.data.bad_samples import BadSample
from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoList
from tests.support.tiny_run import write_config
from tests.support.video_files import constant_rate, decode_all, sat_folder, write_clip

RATES = [16.0, 29.97, 9.99]
CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}
GOOD = {"videos.txt": "videos/00.mp4\nvideos/01.mp4\n", "prompts.txt": "a\nb\n"}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Two clips of 9 frames, and a picture."""
    root = sat_folder(tmp_path_factory.mktemp("lists"), 2)
    Image.new("RGB", (48, 32)).save(root / "first.png")
    return root


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (
            {"videos.txt": "videos/00.mp4\n", "prompts.txt": "a\nb\n"},
            {},
            r"videos.txt has 1 lines and .*prompts.txt 2, without blank ones; give each video one line "
            "with its caption",
        ),
        (
            {"videos.txt": "a.mp4\n\nb.mp4\nc.mp4", "prompts.txt": "a\nb\n\nc"},
            {},
            "prompts.txt and .*videos.txt have blank lines in different places, first in line 2",
        ),
        ({"videos.txt": "\n", "prompts.txt": ""}, {}, "lists no video"),
        (
            GOOD | {"images.txt": "first.png\n"},
            {"image_column": "images.txt"},
            r"videos.txt has 2 lines and .*images.txt 1, without blank ones; give each video one "
            "line with its image",
        ),
        (
            {"videos.txt": "videos/00.mp4\n\nvideos/07.mp4\n", "prompts.txt": "a\nb\n"},
            {},
            r"videos.txt: line 3: .*videos/07.mp4 does not exist \(1 of 2 files are missing\); correct "
            "the path, which is relative to the list",
        ),
        (
            GOOD | {"images.txt": "first.png\nsecond.png\n"},
            {"image_column": "images.txt"},
            r"images.txt: line 2: .*second.png does not exist \(1 of 2 files",
        ),
        (
            GOOD,
            {"caption_column": "prompt.txt"},
            r"caption_column=prompt.txt: .*/prompt.txt does not exist; did you mean prompts.txt\?",
        ),
        (
            {"video.txt": "videos/00.mp4\n", "prompts.txt": "a\n"},
            {},
            r"video_column=videos.txt: .*/videos.txt does not exist; did you mean video.txt\?",
        ),
        (
            GOOD,
            {"image_column": "pictures/all.txt"},
            r"image_column=all.txt: .*pictures/all.txt does not exist; set it to the file",
        ),
    ],
    ids=["counts", "gaps", "empty", "images", "video", "image", "name", "other name", "folder"],
)
def test_faults_are_named(files, options, message, clips):
    for name, text in files.items():
        (clips / name).write_text(text)
    try:
        with pytest.raises(ValueError, match=message) as error:
            VideoList(clips, **CLIP, **options)
    finally:
        for name in files:
            (clips / name).unlink()
    assert "\n" not in str(error.value)


def test_nothing_is_dropped_that_their_trainer_takes(tmp_path):
    """Videos of 1 to 40 frames at odd rates; its frames are range(0, n, n // F)[:F], then the last."""
    kinds = [(1, 8), (5, 30), (9, 60), (17, 24), (40, 1)]
    for i, (frames, fps) in enumerate(kinds):
        write_clip(tmp_path / f"{i}.mp4", constant_rate(frames, fps), size=(32, 48))
    (tmp_path / "videos.txt").write_text("".join(f"{i}.mp4\n" for i in range(len(kinds))))
    (tmp_path / "prompts.txt").write_text("\n".join("abcde"))
    before = sorted(tmp_path.iterdir())
    data = VideoList(tmp_path, **CLIP, frame_selection="uniform", short_clips="pad")
    found = survey(data)
    assert not found.reasons and len(data) == len(kinds)
    for i, (frames, _) in enumerate(kinds):
        chosen = list(range(0, frames, max(frames // 9, 1)))[:9]
        chosen += [chosen[-1]] * (9 - len(chosen))
        wanted = torch.from_numpy(decode_all(tmp_path / f"{i}.mp4")[chosen]).permute(0, 3, 1, 2)
        assert torch.equal(data[i]["video"], wanted)
    found = {*tmp_path.iterdir()} - {*before}  # theirs writes first_frames/
    assert [path.name for path in found] == [".cogfast-index"]


def test_frames_by_time_skip_and_count_short_clips(tmp_path):
    """data.params of `cogfast finetune --fps 8`: timestamps, and clips too short are left out."""
    for i, (frames, fps) in enumerate([(27, 24), (9, 24), (9, 8)]):
        write_clip(tmp_path / f"{i}.mp4", constant_rate(frames, fps), size=(32, 48))
    (tmp_path / "videos.txt").write_text("0.mp4\n1.mp4\n2.mp4\n")
    (tmp_path / "prompts.txt").write_text("a\nb\nc\n")
    data = VideoList(tmp_path, **CLIP, frame_selection="timestamp", short_clips="skip")
    found = survey(data)
    assert (
        list(found.reasons) == [1]
        and "9 frames at 24 fps = 0.4 s, need 1.1 s" in (found.reasons[1])
    )
    frames = decode_all(tmp_path / "0.mp4")[:25:3]
    assert torch.equal(data[0]["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))


def test_rates_need_not_be_whole(tmp_path):
    """`cogfast finetune --fps 16` sets 16.0; 29.97 is the rate of NTSC."""
    config = write_config(tmp_path / "c.yaml", tmp_path)
    rates = [load_config([config], [f"data.params.fps={fps}"]).data.params.fps for fps in RATES]
    assert rates == RATES
    with pytest.raises(ValueError, match="data.params.fps=0 must be a number from 0.01 to 1000"):
        load_config([config], ["data.params.fps=0"])
    write_clip(tmp_path / "0.mp4", constant_rate(30, 30000 / 1001), size=(32, 48))
    (tmp_path / "videos.txt").write_text("0.mp4\n")
    (tmp_path / "prompts.txt").write_text("a\n")
    whole, ntsc, slow = (VideoList(tmp_path, **(CLIP | {"fps": fps})) for fps in RATES)
    assert type(whole.settings.fps) is int  # 16.0 has the cache key of 16
    frames = torch.from_numpy(decode_all(tmp_path / "0.mp4")).permute(0, 3, 1, 2)
    assert torch.equal(ntsc[0]["video"], frames[:9])
    assert torch.equal(slow[0]["video"], frames[:27:3]) and slow[0]["fps"] == 9.99


def test_images_of_a_list(tmp_path):
    sat_folder(tmp_path, 2)
    (tmp_path / "videos.txt").write_text("videos/00.mp4\nvideos/01.mp4\n")
    (tmp_path / "prompts.txt").write_text("a\n\n")
    (tmp_path / "images.txt").write_text("0.png\n1.jpg\n")
    for i, name in enumerate(("0.png", "1.jpg")):
        Image.new("RGB", (48, 32), (200, 10 * i, 0)).save(tmp_path / name, quality=95)
    options = {**CLIP, "image_column": "images.txt", "allow_empty_captions": True}
    data = VideoList(tmp_path, **options)
    assert list(data.captions) == ["a", ""]
    assert (data[0]["images"] == torch.tensor([200, 0, 0], dtype=torch.uint8)[:, None, None]).all()
    assert data[1]["images"].shape == (3, 32, 48)
    (tmp_path / "1.jpg").write_bytes(b"no picture")
    with pytest.raises(BadSample, match="not a readable image") as error:
        data[1]
    assert error.value.path.endswith("videos/01.mp4")

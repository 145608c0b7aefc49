"""The lists of CogVideo's diffusers trainer: what it takes is taken, and faults name file and line."""

import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from cogfast.data.bad_samples import BadSample
from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoList
from tests.support.refusals import assert_refused, refusals
from tests.support.video_files import constant_rate, decode_all, sat_folder, write_clip

RATES = [16.0, 29.97, 9.99]
CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """Two clips of 9 frames, and a picture."""
    root = sat_folder(tmp_path_factory.mktemp("lists"), 2)
    Image.new("RGB", (48, 32)).save(root / "first.png")
    return root


@refusals(Path(__file__).with_name("refusals.txt"), "lists")
def test_faults_are_named(refusal, clips, tmp_path):
    shutil.copytree(clips, tmp_path, dirs_exist_ok=True)
    options = {}
    for word in refusal.fill(nl="\n").words:
        name, _, text = word.partition("=")
        if name.startswith("--"):
            options[name[2:]] = text
        else:
            (tmp_path / name).write_text(text)
    assert_refused(lambda: VideoList(tmp_path, **CLIP, **options), refusal.line)


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
    assert list(found.reasons) == [1]
    assert "9 frames at 24 fps = 0.4 s, need 1.1 s" in found.reasons[1]
    frames = decode_all(tmp_path / "0.mp4")[:25:3]
    assert torch.equal(data[0]["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))


def test_rates_need_not_be_whole(run, tmp_path):
    """`cogfast finetune --fps 16` sets 16.0; 29.97 is the rate of NTSC."""
    rates = [run.config(f"data.params.fps={fps}").data.params.fps for fps in RATES]
    assert rates == RATES
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
    assert error.value.reason.startswith(f"{tmp_path / '1.jpg'}: not a readable image")

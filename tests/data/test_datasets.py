"""Both folder layouts: which files are found, which frames are returned, what is refused."""

import os
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader, to_device
from cogfast.data.datasets import VideoFolder, VideoShards
from cogfast.data.global_order import GlobalOrder
from cogfast.data.sources.clip_list import PackedStrings
from cogfast.data.video.clip import ClipSettings, read_clip
from cogfast.data.video.transform import resize_and_center_crop
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.refusals import assert_refused
from tests.support.video_files import (
    BIKES,
    BUNNY,
    CARPHONE,
    constant_rate,
    decode_all,
    sat_folder,
    write_clip,
)

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


def test_sat_folder(tmp_path):
    sat_folder(tmp_path / "a", 2)
    sat_folder(tmp_path / "b/deeper", 1)
    write_clip(tmp_path / "a/beside.mp4", constant_rate(9, 8))
    (tmp_path / "a/beside.txt").write_text("  beside it \nsecond line\n")
    data = VideoFolder([str(tmp_path / "a"), str(tmp_path / "b")], **CLIP)
    found = {
        path.removeprefix(f"{tmp_path}/"): txt
        for path, txt in zip(data.paths, data.captions, strict=True)
    }
    assert found == {
        "a/beside.mp4": "beside it",
        "a/videos/00.mp4": "clip 00",
        "a/videos/01.mp4": "clip 01",
        "b/deeper/videos/00.mp4": "clip 00",
    }
    sample = data[2]
    frames = decode_all(tmp_path / "a/videos/01.mp4")  # [9, 48, 48, 3], cropped to the middle
    assert torch.equal(sample["video"], torch.from_numpy(frames[:, 8:40]).permute(0, 3, 1, 2))
    assert {k: v for k, v in sample.items() if k != "video"} == {
        "txt": "clip 01",
        "fps": 8,
        "num_frames": 9,
        "path": str(tmp_path / "a/videos/01.mp4"),
        "num_padded": 0,
    }


def test_label_names_as_sat_and_where_sat_would_miss(tmp_path):
    """SAT replaces "videos" anywhere in the path, also in the name of a parent folder."""
    sat_folder(tmp_path / "my_videos/set", 1)
    assert list(VideoFolder(tmp_path / "my_videos/set", **CLIP).captions) == ["clip 00"]
    assert list(VideoFolder(tmp_path / "my_videos/set/videos", **CLIP).captions) == ["clip 00"]
    label = tmp_path / "my_labels/set/labels/00.txt"  # the label that SAT itself would read
    label.parent.mkdir(parents=True)
    label.write_text("as SAT")
    assert list(VideoFolder(tmp_path / "my_videos/set", **CLIP).captions) == ["as SAT"]


@pytest.mark.parametrize("clip", ["bikes", "bigbuckbunny", "carphone"])
def test_real_clips_by_the_clock(clip):
    """The sample holds the frames nearest to k/8 s, decoded by PyAV and resized."""
    path = str({"bikes": BIKES, "bigbuckbunny": BUNNY, "carphone": CARPHONE}[clip])
    fps = {"bikes": 25, "bigbuckbunny": 25, "carphone": 30000 / 1001}[clip]
    settings = ClipSettings(video_size=(64, 96), fps=8, max_num_frames=25)
    frames, selection = read_clip(path, settings)
    times = np.arange(120) / fps
    # in ties the earlier
    nearest = np.abs(times[:, None] - np.arange(25) / 8 + 1e-6).argmin(axis=0)
    assert selection.indices.tolist() == nearest.tolist()
    whole = torch.from_numpy(decode_all(path)[nearest])
    aspect = 128 / 117 if clip == "carphone" else 1.0  # of its pixels, as ffprobe shows it
    assert torch.equal(frames, resize_and_center_crop(whole, (64, 96), aspect))


@pytest.mark.parametrize(
    "selection, short_clips, expected",
    [
        ("timestamp", None, "31 frames at 24 fps = 1.3 s, need 6.1 s .*short_clips=pad"),
        ("timestamp", "pad", [*range(0, 31, 3), *[30] * 38]),
        ("sat", None, [*range(3, 28), *[27] * 24]),  # 25 = 4k+1 frames from frame 3 on
        ("sat", "skip", "31 frames at 24 fps = 1.3 s, need 6.1 s"),
        ("uniform", None, [*range(31), *[30] * 18]),
    ],
)
def test_short_clip(selection, short_clips, expected, tmp_path):
    write_clip(tmp_path / "videos/x.mp4", constant_rate(31, 24))
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels/x.txt").write_text("short")
    given = {"video_size": [48, 64], "fps": 8, "max_num_frames": 49, "skip_frms_num": 3}
    data = VideoFolder(tmp_path, **given, frame_selection=selection, short_clips=short_clips)
    if isinstance(expected, str):
        with pytest.raises(BadSample, match=expected) as error:
            data[0]
        assert error.value.path == str(tmp_path / "videos/x.mp4")
        return
    sample = data[0]
    frames = decode_all(tmp_path / "videos/x.mp4")[expected]
    assert torch.equal(sample["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))
    assert sample["num_padded"] == expected.count(expected[-1]) - 1
    assert sample["num_frames"] == 49 - sample["num_padded"]


@pytest.mark.parametrize(
    "num_frames, fps, reason",
    [(20, 4, "4 fps is below fps=8"), (10, 8, "reads up to frame"), (6, 8, "none is left")],
)
def test_clips_on_which_sat_fails_are_bad_samples(num_frames, fps, reason, tmp_path):
    write_clip(tmp_path / "x.mp4", constant_rate(num_frames, fps))
    (tmp_path / "x.txt").write_text("x")
    data = VideoFolder(tmp_path, **CLIP, skip_frms_num=3, frame_selection="sat")
    with pytest.raises(BadSample, match=reason):
        data[0]


def test_captions_are_required(tmp_path):
    sat_folder(tmp_path, 9)
    for i in range(6):
        (tmp_path / f"labels/0{i}.txt").unlink()
    line = "6/9 videos without a label file: <...>/labels/00.txt, <...>04.txt, ...; add"
    assert_refused(lambda: VideoFolder(tmp_path, **CLIP), line)
    for i in range(6):
        (tmp_path / f"labels/0{i}.txt").write_text("\n" if i == 2 else "x")
    line = "1/9 label files without a caption <...>02.txt; <...>allow_empty_captions=true"
    assert_refused(lambda: VideoFolder(tmp_path, **CLIP), line)
    (tmp_path / "labels/05.txt").unlink()
    data = VideoFolder(tmp_path, **CLIP, allow_empty_captions=True)
    assert [i for i, caption in enumerate(data.captions) if not caption] == [2, 5]


def test_missing_and_empty_folders(tmp_path):
    (tmp_path / "x.avi").write_bytes(b"")
    for sources, line in (
        ([f"{tmp_path}/nowhere"], f"^{tmp_path}/nowhere: no such folder; set it to the folder of"),
        ([], "data_dir=[] must list at least one source; give a"),
        (tmp_path, "1/1 videos without a label file: <...>x.txt"),
    ):
        assert_refused(lambda sources=sources: VideoFolder(sources, **CLIP), line)


def test_unread_files_of_a_folder_are_logged(tmp_path, caplog):
    sat_folder(tmp_path, 4)
    (tmp_path / "videos/01.mp4").rename(tmp_path / "videos/01.MOV")
    (tmp_path / "labels/02.txt").write_text("the caption\n\nand more\n")
    (tmp_path / "labels/03.txt").write_text("the caption\n\n")
    (tmp_path / "readme.txt").write_text("no label")
    others = [f"{tmp_path}/{name}" for name in ("cover.jpg", "raw.mov", "videos/00.mkv")]
    for name in others:  # a picture, a video without a caption, and the source of an .mp4
        Path(name).write_bytes(b"x")
    data = VideoFolder(tmp_path, **CLIP)
    assert list(data.captions) == ["clip 00", "clip 01", "the caption", "the caption"]
    labels = f"{tmp_path}/labels"
    assert [message.removeprefix(f"{tmp_path}: ") for message in caplog.messages] == [
        "not read: 3 files (pictures, unless you add [1, rows, columns] to data.params.buckets; other formats "
        f"without a label or beside an .mp4): {', '.join(others)}",
        f"only the first line is read of 1 label file with several lines: {labels}/02.txt",
    ]


NO_DATA = [".hidden/x", ".ipynb_checkpoints/x", "__MACOSX/x", "lost+found/x", "a/@eaDir/x"]
NO_DATA += ["a/.trashed", "runs/sft/samples/step-1/x", "runs/sft/x", "samples/x"]


@pytest.mark.parametrize("layout", ["folder", "tar", "bucket"])
def test_what_is_no_data_is_left_out_and_counted(layout, tmp_path, caplog):
    """One rule names them: the folders of runs (here also that of the data), hidden ones, those of an operating system."""
    root, place = str(tmp_path / "d"), str(tmp_path / "d")
    if layout == "bucket":
        root = place = f"file://{tmp_path}/d"
    files = {f"{name}.{end}": b"x" for name in ("a/good", *NO_DATA) for end in ("mp4", "txt")}
    files |= {"runs/sft/training_config.yaml": b"", "training_config.yaml": b""}
    files |= {f"runs/sft/{i}.mp4": b"x" for i in range(20)}  # they have no labels
    if layout == "tar":
        place = str(_tar(tmp_path / "s.tar", files))
    for name in files if layout != "tar" else ():
        with fsspec.open(f"{root}/{name}", "wb", auto_mkdir=True) as file:
            file.write(files[name])
    for _ in range(2):  # the second time from the index of the shard
        data = (VideoShards if layout == "tar" else VideoFolder)([place], **CLIP)
        assert [path[-10:] for path in data.paths] == ["a/good.mp4"]
    found = [text for text in caplog.messages if "left out" in text]
    assert len(found) == 2 and f"left out {len(NO_DATA) + 20} files in folders of runs" in found[0]


def test_packed_strings():
    strings = ["", "a", "ein schöner Tag", "一个红色的圆", "\udcff.mp4", ""]
    packed = PackedStrings(strings)
    assert list(packed) == strings and packed[-2] == strings[-2] and len(packed) == 6
    with pytest.raises(IndexError):
        packed[6]
    assert list(PackedStrings([])) == []


def test_links_capitals_and_leftovers(tmp_path):
    """Every video is found once, whatever links lead to it; loops of links end."""
    sat_folder(tmp_path / "disk", 1)
    data = tmp_path / "data"
    (data / "labels").mkdir(parents=True)
    (data / "videos").symlink_to(tmp_path / "disk/videos")
    (data / "again").symlink_to(data)
    (tmp_path / "disk/videos/._00.mp4").write_bytes(b"macOS")
    write_clip(tmp_path / "disk/videos/A b é.mp4", constant_rate(9, 8)).rename(
        tmp_path / "disk/videos/A b é.MP4"
    )
    (data / "labels/00.txt").write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")
    (data / "labels/A b é.txt").write_text("one\u2028caption", encoding="utf-8")
    found = VideoFolder(data, **CLIP)
    assert [path.removeprefix(f"{data}/videos/") for path in found.paths] == ["00.mp4", "A b é.MP4"]
    assert list(found.captions) == ["first", "one\u2028caption"]
    assert found[1]["video"].shape == (9, 3, 32, 48)


def test_a_name_that_is_not_utf8(tmp_path):
    sat_folder(tmp_path, 1)
    for name in ("videos/00.mp4", "labels/00.txt"):
        path = os.fsencode(tmp_path / name)
        os.rename(path, path.replace(b"00.", b"\xff."))
    data, expected = VideoFolder(tmp_path, **CLIP), sat_folder(tmp_path / "plain", 1)
    assert torch.equal(data[0]["video"], VideoFolder(expected, **CLIP)[0]["video"])


def test_a_caption_that_cannot_be_read(tmp_path):
    sat_folder(tmp_path, 1)
    label, line = (
        tmp_path / "labels/00.txt",
        "labels/00.txt: cannot be read (it is not a regular file)",
    )
    label.unlink()
    label.mkdir()
    assert_refused(lambda: VideoFolder(tmp_path, **CLIP), line)
    label.rmdir()
    os.mkfifo(label)
    assert_refused(lambda: VideoFolder(tmp_path, **CLIP), line)


def test_decoded_clips_are_kept_up_to_the_limit(tmp_path, monkeypatch):
    decoded = []

    def counted(path, *others):
        decoded.append(path)
        return read_clip(path, *others)

    monkeypatch.setattr("cogfast.data.datasets.read_clip", counted)
    clip = {"video_size": [128, 192], "fps": 8, "max_num_frames": 9}  # 0.63 MiB
    plain = VideoFolder(sat_folder(tmp_path, 3), **clip)
    expected = [plain[i] for i in range(3)]
    kept = VideoFolder(tmp_path, **clip, keep_decoded_mib=1)  # enough for one clip of three
    for wanted in (0, 1, 2, 0, 1, 2):
        sample = kept[wanted]
        assert torch.equal(sample.pop("video"), expected[wanted]["video"])
        assert sample == {k: v for k, v in expected[wanted].items() if k != "video"}
    assert [path[-6:-4] for path in decoded[3:]] == ["00", "01", "02", "01", "02"]


def test_kept_clips_stay_as_they_were(tmp_path):
    data = VideoFolder(sat_folder(tmp_path, 2), **CLIP, keep_decoded_mib=1)
    before = [data[i]["video"].clone() for i in range(2)]
    order = GlobalOrder(2, seed=1, global_batch=1)
    for batch in BatchLoader(data, order, micro_batch=1, num_steps=4, num_workers=0):
        to_device(batch, "cpu")["mp4"].zero_()
        batch["mp4"].zero_()
        batch["txt"].clear()
    assert all(torch.equal(data[i]["video"], before[i]) for i in range(2))
    assert [data[i]["txt"] for i in range(2)] == ["clip 00", "clip 01"]

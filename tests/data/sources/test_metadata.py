"""Metadata of Hugging Face, finetrainers, VideoX-Fun and CogKit as sources, and what is refused."""

from __future__ import annotations

import csv
import io
import json
import logging
from pathlib import Path

import pytest
import torch
from PIL import Image

from cogfast.data.datasets import VideoFolder, VideoList, VideoManifest
from tests.support.video_files import constant_rate, decode_all, write_clip

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


@pytest.fixture(scope="module")
def clips(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("clips")
    for name in ("a", "b"):
        write_clip(root / f"{name}.mp4", constant_rate(9, 8), size=(32, 48))
    return root


def _folder(root: Path, clips: Path, inner: str = "") -> Path:
    """A folder with the clips a.mp4 and b.mp4 in `inner`."""
    (root / inner).mkdir(parents=True, exist_ok=True)
    for name in ("a.mp4", "b.mp4"):
        (root / inner / name).symlink_to(clips / name)
    return root


def _lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _table(rows: list[dict]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


HUGGING_FACE = [{"file_name": "a.mp4", "text": "one"}, {"file_name": "b.mp4", "text": "two"}]
VIDEOX_FUN = [
    {"file_path": "train/b.mp4", "text": "two", "type": "video", "width": 48, "height": 32},
    {"file_path": "train/0.jpg", "text": "a picture", "type": "image", "width": 48, "height": 32},
    {"file_path": "train/a.mp4", "text": "one", "type": "video", "width": 48, "height": 32},
]
SOURCES = {
    "Hugging Face, jsonl": ("", "metadata.jsonl", _lines(HUGGING_FACE), "one two"),
    "Hugging Face, csv": ("", "metadata.csv", _table(HUGGING_FACE), "one two"),
    "Hugging Face, a split": ("train", "train/metadata.csv", _table(HUGGING_FACE), "one two"),
    "finetrainers": (
        "videos",
        "metadata.csv",
        "file_name,caption,id\nvideos/a.mp4,one,7\nvideos/b.mp4,two,9\n",
        "one two",
    ),
    "VideoX-Fun": ("train", "metadata.json", json.dumps(VIDEOX_FUN, indent=2), "two one"),
    "CogKit, text-to-video": (
        "train",
        "train/metadata.jsonl",
        _lines([{"file_name": "b.mp4", "prompt": "two"}, {"file_name": "a.mp4", "prompt": "one"}]),
        "two one",
    ),
    "others": ("", "metadata.json", '[{"media_path": "a.mp4", "prompt": "one"}]', "one"),
}


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("is_folder", [True, False], ids=["folder", "file"])
def test_metadata_as_their_trainers_write_it(kind, is_folder, clips, tmp_path):
    inner, name, text, captions = SOURCES[kind]
    root = _folder(tmp_path / "data", clips, inner)
    (root / name).write_text(text)
    source = str(root if is_folder else root / name)
    assert VideoManifest.missing_source("args.train_data", source) is None
    data = VideoManifest([source], **CLIP)
    assert list(data.captions) == captions.split()
    own = {"one": "a.mp4", "two": "b.mp4"}
    for i, caption in enumerate(data.captions):
        assert Path(data.paths[i]) == root / inner / own[caption]
    frames = decode_all(data.paths[0])
    assert torch.equal(data[0]["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))


def _cogkit(root: Path, clips: Path, *, has_images: bool = True) -> Path:
    """CogKit's layout of image-to-video: three tables joined by id, each in an order of its own."""
    train = _folder(root, clips, "train/videos") / "train"
    (train / "metadata.jsonl").write_text(
        _lines([{"id": 1, "prompt": "two"}, {"id": 0, "prompt": "one"}])
    )
    (train / "videos/metadata.jsonl").write_text(
        _lines([{"file_name": "a.mp4", "id": 0}, {"file_name": "b.mp4", "id": 1}])
    )
    if has_images:
        (train / "images").mkdir()
        for name, level in (("x.png", 50), ("y.png", 150)):
            Image.new("RGB", (48, 32), (level, 0, 0)).save(train / "images" / name)
        (train / "images/metadata.jsonl").write_text(
            _lines([{"file_name": "x.png", "id": 1}, {"file_name": "y.png", "id": 0}])
        )
    return root


@pytest.mark.parametrize("source", ["", "train", "train/metadata.jsonl"])
def test_cogkits_three_tables(source, clips, tmp_path):
    data = VideoManifest([str(_cogkit(tmp_path, clips) / source)], **CLIP)
    videos = [Path(path).name for path in data.paths]
    assert list(zip(data.captions, videos, strict=True)) == [("two", "b.mp4"), ("one", "a.mp4")]
    assert [int(data[i]["images"][0].float().mean()) for i in range(2)] == [50, 150]
    assert not data[0]["images"][1:].any()


def test_cogkit_without_images_takes_first_frames(clips, tmp_path):
    data = VideoManifest([str(_cogkit(tmp_path, clips, has_images=False))], **CLIP)
    assert list(data.captions) == ["two", "one"] and "images" not in data[0]


@pytest.mark.parametrize(
    ("file", "rows", "message"),
    [
        (
            "metadata.jsonl",
            [{"id": 0, "prompt": "one"}, {"id": 7, "prompt": "two"}],
            r"metadata.jsonl: line 2: id=7 is not in .*videos/metadata.jsonl; give each sample",
        ),
        (
            "metadata.jsonl",
            [{"id": 0, "prompt": "one"}, {"id": 0, "prompt": "two"}],
            "metadata.jsonl: line 2: id=0 is listed twice",
        ),
        (
            "metadata.jsonl",
            [{"id": 0, "prompt": "one"}],
            r"videos/metadata.jsonl: id=1 is not in .*train/metadata.jsonl \(1 such file\)",
        ),
        (
            "metadata.jsonl",
            [{"prompt": "one"}, {"id": 1, "prompt": "two"}],
            r"metadata.jsonl: line 1: id=None is not in .*videos/metadata.jsonl",
        ),
        (
            "images/metadata.jsonl",
            [{"file_name": "x.png", "id": 1}],
            r"metadata.jsonl: line 2: id=0 is not in .*images/metadata.jsonl",
        ),
        (
            "videos/metadata.jsonl",
            [{"file_name": "a.mp4", "id": 0}, {"file_name": "b.mp4", "id": "0"}],
            "videos/metadata.jsonl: line 2: id=0 is listed twice; give each file an id of its own",
        ),
        (
            "videos/metadata.jsonl",
            [{"file_name": "a.mp4"}],
            "videos/metadata.jsonl: line 1 has no id; add it",
        ),
    ],
)
def test_tables_that_do_not_join(file, rows, message, clips, tmp_path):
    root = _cogkit(tmp_path, clips)
    (root / "train" / file).write_text(_lines(rows))
    with pytest.raises(ValueError, match=message) as error:
        VideoManifest([str(root)], **CLIP)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metadata.json", '{"a": 1}', r"contains an object, but must be a list of objects, \[{...}, ...\]"),
        ("metadata.json", '{"a": 1}\n{"a": 2}', "not JSON .*; name it .jsonl if it has one object"),
        ("metadata.json", "[" * 99999, r"metadata.json: not JSON \("),
        ("metadata.json", "[1]", "metadata.json: entry 1 must be an object with path and caption"),
        (
            "metadata.json",
            '[{"file_path": "a.mp4", "description": "one"}]',
            "1/1 rows of .*metadata.json without a caption: entry 1; add them, in column caption, "
            "prompt or text, or set",
        ),
        (
            "metadata.jsonl",
            '{"name": "a.mp4", "text": "one"}',
            r"line 1 has no path; .* column path \(or one of file_name, file_path, video",
        ),
        (
            "metadata.csv",
            "name,text\na.mp4,one",
            r"line 1 has no column path \('name,text'\); add it to the header \(or one of file_name,",
        ),
        ("metadata.json", '[{"path": "0.jpg", "text": "x", "type": "image"}]', "no sample in it"),
    ],
)  # fmt: skip
def test_metadata_that_is_refused(name, text, message, clips, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        VideoManifest([str(tmp_path)], **CLIP)
    assert "\n" not in str(error.value)


def test_folders_without_one_metadata_file(tmp_path):
    message = "has no metadata.jsonl, metadata.csv or metadata.json, nor has its train/"
    with pytest.raises(ValueError, match=message):
        VideoManifest([str(tmp_path)], **CLIP)
    shown = VideoManifest.missing_source("args.train_data", str(tmp_path))
    assert shown is not None and message in shown
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("path,caption\na.mp4,one\n")
    with pytest.raises(ValueError, match="has metadata.csv and metadata.jsonl; give one of them"):
        VideoManifest([str(tmp_path)], **CLIP)


def test_a_columns_own_name_goes_first(clips, tmp_path, caplog):
    """A column that was read before keeps its meaning where other names are there, too."""
    root = _folder(tmp_path, clips)
    row = {"path": "a.mp4", "video": "b.mp4", "caption": "", "text": "other", "extra": 1}
    (root / "clips.jsonl").write_text(_lines([row]))
    with caplog.at_level(logging.INFO):
        data = VideoManifest([str(root / "clips.jsonl")], **CLIP, allow_empty_captions=True)
    assert data.paths[0].endswith("a.mp4") and list(data.captions) == [""]
    assert "unused columns: extra" in caplog.text


@pytest.mark.parametrize("layout", [VideoFolder, VideoList])
def test_other_layouts_name_the_one_that_reads_metadata(layout, clips, tmp_path):
    root = _folder(tmp_path, clips)
    (root / "metadata.jsonl").write_text(_lines(HUGGING_FACE))
    message = "metadata.jsonl is read with data.target=cogfast.data.datasets.VideoManifest"
    with pytest.raises(ValueError, match=message):
        layout(root, **CLIP)

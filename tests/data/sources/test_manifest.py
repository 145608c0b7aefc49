"""Manifests: every column and the metadata of other trainers; faults are refused with their line."""

import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cogfast.data.bad_samples import BadSample
from cogfast.data.datasets import VideoFolder, VideoList, VideoManifest
from cogfast.data.sources.clip_list import join
from cogfast.data.sources.folders import placed
from cogfast.data.sources.manifest import read_manifest
from cogfast.data.video.clip import frames_within
from cogfast.data.video.transform import resize_and_center_crop
from cogfast.extensions.stores import store
from cogfast.extensions.tar.tar_shards import list_source
from cogfast.train.preflight.data_layout import _layouts_of
from tests.cli.hostile.web_server import web_server
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.video_files import constant_rate, decode_all, sat_folder, write_clip

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


def _csv(tmp_path, text: str, name: str = "data.csv", encoding: str = "utf-8"):
    (tmp_path / name).write_text(text, encoding=encoding)
    return tmp_path / name


OF_THIS_MACHINE = ["/etc/passwd", "~/x.mp4", "$HOME/x.mp4", "file:///etc/passwd"]
OF_THIS_MACHINE += ["FILE:///etc/passwd", "local:///etc/passwd"]
OF_THIS_MACHINE += ["git:///x/repo:x.mp4", "memory://x.mp4"]


@pytest.mark.parametrize("name", OF_THIS_MACHINE)
def test_a_table_in_a_store_names_no_file_of_this_machine(name):
    """Such a table comes from others, and may be made for another machine."""
    line = f"t.csv: line 2: {name} is in no store, but the table is; name it relative to the table"
    assert_refused(lambda: placed("s3://bucket/data", name, "t.csv: line 2"), line)
    for folder in ("/data", "file:///data"):
        placed(folder, name, "")


def test_a_table_in_a_store_names_files_of_stores():
    for place in ("s3://other", "gs://b", "hf://datasets/a/b", "https://github.com"):
        assert placed("s3://bucket/data", f"{place}/x.mp4", "") == f"{place}/x.mp4"
    assert placed("s3://bucket/data", "a/x.mp4", "") == "s3://bucket/data/a/x.mp4"
    for scheme in ("abfss", "s3a", "gcs"):
        assert placed(f"{scheme}://c/data", f"{scheme}://d/x.mp4", "") == f"{scheme}://d/x.mp4"
        assert placed("s3://bucket/data", f"{scheme}://d/x.mp4", "") == f"{scheme}://d/x.mp4"
    for name in ("~a/x.mp4", "$x.mp4", "a$b/~x.mp4"):
        assert placed("s3://bucket/data", name, "") == f"s3://bucket/data/{name}"


@pytest.mark.parametrize("name", ["data.jsonl", "data.CSV", "data.json"])
def test_a_signed_address_of_a_web_server_ends_with_the_name_before_its_query(
    name, tmp_path, monkeypatch, caplog
):
    cache = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    write_clip(tmp_path / "a/1.mp4", constant_rate(9, 8))
    row = {"path": "1.mp4", "caption": "a"}
    texts = {
        "data.jsonl": json.dumps(row),
        "data.CSV": "path,caption\n1.mp4,a",
        "data.json": f"[{json.dumps(row)}]",
    }
    (tmp_path / "a" / name).write_text(texts[name])
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        shard.add(tmp_path / "a/1.mp4", "1.mp4")
    with web_server(tmp_path, missing=403) as web:
        signed = f"{web.address}/a/{name}?sig=x/y.z#q"
        assert [*read_manifest(signed).files] == [f"{web.address}/a/1.mp4"]
        (tmp_path / "a/gone.csv").write_text(f"path,caption\n{web.address}/none?sig=1,a")
        read_manifest(tmp_path / "a/gone.csv")
        assert "correct the address, or renew a signed one, or remove the row" in caplog.text
        assert _layouts_of(signed) == ["VideoManifest"]
        signed = f"{web.address}/s.tar?sig=x/y"
        assert [*list_source(signed, "txt", False).files] == [f"{signed}::1.mp4"]
        kept = "".join(file.read_text() for file in cache.glob("cogfast/shard-*"))
        assert "s.tar~" in kept and "sig=" not in kept
        assert "HEAD /s.meta.jsonl" in web.requests  # its server says nothing of what is not there


def test_no_column_or_list_in_a_store_names_a_file_of_this_machine():
    read = lambda: read_manifest("memory://bucket/data.jsonl", tensors={"flow": (1,)})
    for column in ("path", "image", "control", "mask", "flow"):
        row = {"path": "a.mp4", "caption": "a", "flow": "a.npy", column: "/etc/passwd"}
        store.write("memory://bucket/data.jsonl", json.dumps(row).encode())
        assert_refused(read, "memory://bucket/data.jsonl: line 1: /etc/passwd is in no store")
    for name, text in (("prompts.txt", b"a\n"), ("videos.txt", b"/etc/passwd\n")):
        store.write(f"memory://lists/{name}", text)
    line = "memory://lists/videos.txt: /etc/passwd is in no store"
    assert_refused(lambda: VideoList(["memory://lists"], **CLIP), line)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_every_column(kind, tmp_path):
    """A part of a 24 fps video, from 1 to 2 s, at 16 fps and with an image of its own."""
    write_clip(tmp_path / "v/long.mp4", constant_rate(49, 24), size=(32, 48))
    sat_folder(tmp_path, 1)
    picture = np.random.default_rng(0).integers(0, 256, (40, 80, 3), dtype=np.uint8)
    Image.fromarray(picture).save(tmp_path / "first.png")
    rows = [
        {"path": "v/long.mp4", "caption": 'a "long", one', "start": 1.0, "end": 2.0, "target_fps": 16,
         "image": "first.png", "weight": 2.5, "split": "train"},
        {"path": str(tmp_path / "videos/00.mp4"), "caption": "kürzer", "split": "Val"},
    ]  # fmt: skip
    if kind == "jsonl":
        text = "\n".join(json.dumps(row) for row in rows) + "\n\n"
    else:
        names = list(rows[0])
        quoted = lambda v: '"' + str(v).replace('"', '""') + '"'
        lines = [",".join(names)] + [",".join(quoted(r.get(n, "")) for n in names) for r in rows]
        text = "\n".join(lines)
    file = _csv(tmp_path, text, f"data.{kind}", "utf-8-sig")
    data = VideoManifest([str(file)], **CLIP)
    assert list(data.captions) == ['a "long", one', "kürzer"]
    assert data.clips.weights.tolist() == [2.5, 1.0] and data.clips.splits.tolist() == [0, 1]
    first, second = data[0], data[1]
    # frames 24 to 47 are shown from 1.0 to 2.0 s; every 1/16 s is every 1.5 frames
    frames = decode_all(tmp_path / "v/long.mp4")[[24, 25, 27, 28, 30, 31, 33, 34, 36]]
    assert torch.equal(first["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))
    assert first["fps"] == 16 and first["path"] == f"{tmp_path}/v/long.mp4#t=1,2"
    image = resize_and_center_crop(torch.from_numpy(picture)[None], (32, 48))[0]
    assert torch.equal(first["images"], image)
    folder = VideoFolder(tmp_path / "videos/..", **CLIP, allow_empty_captions=True)
    at = [path.endswith("videos/00.mp4") for path in folder.paths].index(True)
    assert torch.equal(second["video"], folder[at]["video"]) and second["fps"] == 8
    assert torch.equal(second["images"], second["video"][0])  # no image of its own: the first frame
    assert list(data.with_clips(data.clips.in_split("valid")).captions) == ["kürzer"]


def test_frames_within_a_part():
    times = np.arange(10) / 10
    assert frames_within(times, None) == slice(0, 10)
    for start in (0.2999, 0.3001):  # rounded to either side
        assert frames_within(times, (start, 0.6)) == slice(3, 6)
    assert frames_within(times, (np.nan, 0.31)) == slice(0, 3)
    with pytest.raises(ValueError, match="no frame from 5 to 6 s; the video ends at 0.90"):
        frames_within(times, (5.0, 6.0))


def test_parts_of_one_file_have_names(tmp_path):
    write_clip(tmp_path / "x.mp4", constant_rate(12, 8), size=(32, 48))
    file = _csv(tmp_path, "path,caption,start,end\nx.mp4,a,,\nx.mp4,b,1,\nx.mp4,c,9,10\n")
    data = VideoManifest(file, **CLIP)
    assert data[0]["path"] == str(tmp_path / "x.mp4")
    with pytest.raises(BadSample, match="4 frames at 8 fps = 0.5 s, need 1.1 s") as short:
        data[1]
    assert_refused(lambda: data[2], "no frame from 9 to 10 s", BadSample)
    file = _csv(tmp_path, "path,caption,start,end\nx.mp4,a,0,12\nx.mp4,a,0,1.9\n")
    data = VideoManifest(file, **CLIP)
    line = "end=12 is beyond the video, which ends at 1.50 s; start and end are seconds, and no numbers"
    assert_refused(lambda: data[0], line, BadSample)
    assert len(data[1]["video"]) == 9  # rounded
    assert short.value.path == f"{tmp_path}/x.mp4#t=1,"


@refusals(Path(__file__).with_name("refusals.txt"), "csv", "jsonl")
def test_refused(refusal: Refusal, tmp_path: Path) -> None:
    good = '{"path": "x.mp4", "caption": "a"}\n'
    (text,) = refusal.fill(nl="\n", nul="\0", empty="", good=good, deep="[" * 99999).words
    file = _csv(tmp_path, text, f"data.{refusal.base}")
    assert_refused(lambda: VideoManifest(file, **CLIP), refusal.line)


@pytest.mark.parametrize("name", ["data.parquet", "nowhere.csv", "."])
def test_names_that_are_no_manifest(name: str, tmp_path: Path) -> None:
    match = "(not a manifest|no such file|has no .*); give a (.csv|manifest)"
    with pytest.raises(ValueError, match=match):
        VideoManifest(tmp_path / name, **CLIP)


RATES = ["fps", "FPS", "frame_rate"]
SIZES = ["num_frames", "n_frames", "height", "Height", "width", "resolution", "duration", "length"]


@pytest.mark.parametrize("name", RATES + SIZES)
def test_a_column_that_describes_the_file_changes_nothing_and_is_named(name, tmp_path, log):
    """Open-Sora's tables have such columns."""
    write_clip(tmp_path / "x.mp4", constant_rate(30, 24), size=(32, 48))
    found = [
        VideoManifest(_csv(tmp_path, f"path,caption{more}\n"), **CLIP)[0]
        for more in ("\nx.mp4,a", f",{name}\nx.mp4,a,24")
    ]
    assert torch.equal(found[0]["video"], found[1]["video"]) and found[1]["fps"] == 8
    assert f"unused columns: {name}" in log.text
    assert ("target_fps" in log.text) == (name in RATES)


def test_names_as_people_write_them(tmp_path, monkeypatch):
    """A home, a variable, and a name that another system has stored in another Unicode form."""
    monkeypatch.setenv("HOME", str(tmp_path))
    write_clip(tmp_path / "Gr\u00f6\u00dfe.mp4", constant_rate(9, 8), size=(32, 48))
    write_clip(tmp_path / "x.mp4", constant_rate(9, 8), size=(32, 48))
    names = ["~/x.mp4", "$HOME/x.mp4", "Gro\u0308\u00dfe.mp4"]
    table = _csv(tmp_path, "path,caption\n" + "".join(f"{name},a\n" for name in names))
    (tmp_path / "videos.txt").write_text("\n".join(names))
    (tmp_path / "prompts.txt").write_text("a\nb\nc")
    for data in (VideoManifest(table, **CLIP), VideoList(tmp_path, **CLIP)):
        assert [len(data[i]["video"]) for i in range(3)] == [9, 9, 9]


def test_missing_values_as_pandas_writes_them(tmp_path):
    names = ["image", "control", "start", "end", "target_fps", "weight", "split", "prior"]
    text = f"path,caption,{','.join(names)}\nx.mp4,a,{','.join(['nan'] * 8)}\n"
    row = {"path": "x.mp4", "caption": "a"} | dict.fromkeys(names, np.nan)
    for file in (_csv(tmp_path, text), _csv(tmp_path, json.dumps(row), "data.jsonl")):
        found = read_manifest(file)
        assert [*found.captions] == ["a"] and not found.others
        columns = found.images, found.spans, found.fps, found.weights, found.splits, found.prior
        assert columns == (None,) * 6


def test_parts_in_seconds_and_in_frames(tmp_path):
    """Start and end are read, and columns in frames beside them are not needed."""
    file = _csv(tmp_path, "path,caption,start,end,start_frame,end_frame\nx.mp4,a,1,2,25,50\n")
    assert read_manifest(file).spans.tolist() == [[1, 2]]


def test_a_windows_path_is_explained(tmp_path, caplog):
    VideoManifest(_csv(tmp_path, "path,caption\nv\\x.mp4,a\n"), **CLIP)
    assert "or remove the row; write / in place of \\" in caplog.text


def test_lines_and_columns_as_spreadsheets_write_them(tmp_path):
    text = 'path, caption\r\nx.mp4,"a ""long"", one\nof two lines"\r\ny.mp4,one\u2028line\r\n'
    captions = VideoManifest(_csv(tmp_path, text, encoding="utf-8-sig"), **CLIP).captions
    assert list(captions) == ['a "long", one\nof two lines', "one\u2028line"]


def test_weights_that_make_no_epoch_and_another_encoding_are_refused(tmp_path):
    for weight in ("0", "1e300"):
        data = VideoManifest(_csv(tmp_path, f"path,caption,weight\nx.mp4,a,{weight}\n"), **CLIP)
        line = "weights of 1 sample add up to <...> column weight"
        assert_refused(lambda data=data: data.order(0, 1), line)
    file = _csv(tmp_path, "path,caption\r\nx.mp4,ok\r\ny.mp4,Größe", encoding="latin-1")
    assert_refused(lambda: VideoManifest(file, **CLIP), "data.csv: line 3 is not UTF-8 (byte 0xf6)")


HUGGING_FACE = '{"file_name": "a.mp4", "text": "one"}\n{"file_name": "b.mp4", "text": "two"}\n'
OF_A_SPLIT = "file_name,text\na.mp4,one\nb.mp4,two\n"
FINETRAINERS = "file_name,caption,id\nvideos/a.mp4,one,7\nvideos/b.mp4,two,9\n"
COGKIT = '{"file_name": "b.mp4", "prompt": "two"}\n{"media_path": "a.mp4", "prompt": "one"}\n'
VIDEOX_FUN = [
    {"file_path": "train/b.mp4", "text": "two", "type": "video", "width": 48, "height": 32},
    {"file_path": "train/0.jpg", "text": "a picture", "type": "image", "width": 48, "height": 32},
    {"file_path": "train/a.mp4", "text": "one", "type": "video", "width": 48, "height": 32},
]
# {trainer: (folder of the clips, metadata file, its text, captions)}
SOURCES = {
    "Hugging Face": ("", "metadata.jsonl", HUGGING_FACE, "one two"),
    "Hugging Face, a split": ("train", "train/metadata.csv", OF_A_SPLIT, "one two"),
    "finetrainers": ("videos", "metadata.csv", FINETRAINERS, "one two"),
    "VideoX-Fun": ("train", "metadata.json", json.dumps(VIDEOX_FUN, indent=2), "two one"),
    "CogKit": ("train", "train/metadata.jsonl", COGKIT, "two one"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_metadata_as_their_trainers_write_it(kind, tmp_path):
    inner, name, text, captions = SOURCES[kind]
    for clip in ("a.mp4", "b.mp4"):
        write_clip(tmp_path / inner / clip, constant_rate(9, 8), size=(32, 48))
    (tmp_path / name).write_text(text)
    for source in (tmp_path, tmp_path / name):
        assert VideoManifest.missing_source("args.train_data", str(source)) is None
        data = VideoManifest([str(source)], **CLIP)
        assert list(data.captions) == captions.split()
        own = {"one": "a.mp4", "two": "b.mp4"}
        wanted = [tmp_path / inner / own[caption] for caption in data.captions]
        assert list(map(Path, data.paths)) == wanted
    frames = decode_all(data.paths[0])
    assert torch.equal(data[0]["video"], torch.from_numpy(frames).permute(0, 3, 1, 2))


def test_folders_without_one_metadata_file(tmp_path):
    read = lambda: VideoManifest([str(tmp_path)], **CLIP)
    line = "has no metadata.jsonl, metadata.csv or metadata.json, nor has its train/"
    assert_refused(read, line)
    assert line in VideoManifest.missing_source("args.train_data", str(tmp_path))
    for name in ("metadata.csv", "metadata.jsonl"):
        (tmp_path / name).write_text("path,caption\na.mp4,one\n")
    assert_refused(read, "has metadata.csv and metadata.jsonl; give one of them")


def test_a_columns_own_name_goes_first_and_unused_ones_are_logged(tmp_path, log):
    row = {"path": "a.mp4", "video": "b.mp4", "caption": "", "text": "other", "extra": 1}
    data = VideoManifest(
        _csv(tmp_path, json.dumps(row), "clips.jsonl"), **CLIP, allow_empty_captions=True
    )
    assert data.paths[0].endswith("a.mp4") and list(data.captions) == [""]
    assert "unused columns: extra" in log.text


@pytest.mark.parametrize("layout", [VideoFolder, VideoList])
def test_other_layouts_name_the_one_that_reads_metadata(layout, tmp_path):
    write_clip(tmp_path / "a.mp4", constant_rate(9, 8), size=(32, 48))
    (tmp_path / "metadata.jsonl").write_text(HUGGING_FACE)
    line = "metadata.jsonl is read with data.target=cogfast.data.datasets.VideoManifest"
    assert_refused(lambda: layout(tmp_path, **CLIP), line)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_samples_of_the_base_model(kind, tmp_path):
    values = ["true", "False", "", "1"] if kind == "csv" else [True, False, None, 1]
    rows = [{"path": "a.mp4", "caption": "a", "prior": value} for value in values]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    if kind == "csv":
        text = "path,caption,prior\n" + "".join(f"a.mp4,a,{value}\n" for value in values)
    found = read_manifest(_csv(tmp_path, text, f"data.{kind}"))
    assert found.prior.tolist() == [True, False, False, True]
    assert found.take([1, 3]).prior.tolist() == [False, True]
    plain = read_manifest(_csv(tmp_path, "path,caption,priority\na.mp4,a,high\n"))
    assert plain.prior is None and join([plain, found]).prior.tolist()[:2] == [False, True]
    with pytest.raises(ValueError, match="line 2: prior='maybe' must be true or false"):
        read_manifest(_csv(tmp_path, "path,caption,prior\na.mp4,a,Maybe\n"))


def test_a_clip_that_does_not_exist_is_named_with_its_line(tmp_path, caplog):
    (tmp_path / "a.mp4").write_bytes(b"")
    (tmp_path / "data.csv").write_text("path,caption\na.mp4,one\nb.mp4,two\n")
    assert len(read_manifest(tmp_path / "data.csv").files) == 2
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{tmp_path}/data.csv: 1 of 2 rows name a file that does not exist or is refused, first line 3: {tmp_path}/b.mp4; "
        "correct the path, which is relative to the manifest, or remove the row"
    )

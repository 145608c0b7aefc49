"""Tar shards, local and remote: the same samples as from folders; faults are reported."""

import io
import json
import os
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from cogfast.config.components import resolve
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.datasets import VideoFolder, VideoShards
from cogfast.extensions.tar.tar_shards import expand_braces, shards_of
from tests.support.refusals import assert_refused, read_refusals, refusals
from tests.support.video_files import constant_rate, sat_folder, write_clip

TABLE = Path(__file__).with_name("refusals.txt")
CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}


def _tar(path, members: dict[str, bytes]):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture
def shards(tmp_path):
    """Six clips in a folder, and the same in three shards with captions in three places."""
    sat_folder(tmp_path / "folder", 6)
    read = lambda i: (tmp_path / f"folder/videos/0{i}.mp4").read_bytes()
    root = tmp_path / "shards"
    caption = {i: f"clip 0{i}".encode() for i in range(6)}
    _tar(root / "s-0.tar", {"00.mp4": read(0), "00.txt": caption[0], "d/01.mp4": read(1),
                            "d/01.caption": caption[1], "__meta__/x": b"", "d/._01.mp4": b""})  # fmt: skip
    _tar(root / "s-1.tar", {f"0{i}.{k}": v for i in (2, 3)
                            for k, v in (("mp4", read(i)), ("id", b"x"))})  # fmt: skip
    rows = [{"key": f"0{i}", "caption": f"clip  0{i}\n", "duration": 1} for i in (2, 3)]
    (root / "s-1.meta.jsonl").write_text("\n".join(map(json.dumps, rows)))
    name = "04-$#%@&7"
    _tar(root / "s-2.tar", {f"{name}.mp4": read(4), f"{name}.id": b"", "05.webm": read(5),
                            "05.json": b'{"caption": "clip 05"}', "readme": b"no kind"})  # fmt: skip
    (root / "s-2.meta.jsonl").write_text('{"key": "04", "caption": "clip 04"}\n')
    return root


def test_the_samples_of_the_folder(shards):
    folder = VideoFolder(shards.parent / "folder", **CLIP)
    for source in (f"{shards}/s-{{0..2}}.tar", str(shards), f";{shards}"):
        data = VideoShards([source], **CLIP)
        assert list(data.captions) == [f"clip 0{i}" for i in range(6)]
        for i in (0, 3, 4):
            assert torch.equal(data[i]["video"], folder[i]["video"])
    assert data.paths[1] == f"{shards}/s-0.tar::d/01.mp4" == data[1]["path"]
    twice = VideoShards([f"{shards}/s-0.tar;{shards}*2"], **CLIP)
    assert len(twice) == 14 and twice.source_sizes == (14,)


def test_the_index_is_made_once(shards, monkeypatch):
    first = VideoShards([str(shards)], **CLIP)
    opened = []
    really = tarfile.open
    counted = lambda *a, **k: opened.append(a) or really(*a, **k)
    monkeypatch.setattr("cogfast.extensions.tar.tar_shards.tarfile.open", counted)
    again = VideoShards([str(shards)], **CLIP)
    assert not opened and list(again.paths) == list(first.paths)
    assert torch.equal(again[5]["video"], first[5]["video"])
    data = (shards / "s-0.tar").read_bytes()
    _tar(shards / "s-0.tar", {"n.mp4": b"new", "n.txt": b"another"})
    assert len(data) and VideoShards([str(shards)], **CLIP).captions[0] == "another"
    assert len(opened) == 2  # that shard's, and our own writing


def test_the_index_of_a_relative_name_is_that_of_its_file(tmp_path, monkeypatch):
    """Shards of equal size and time in two folders, as unpacked archives have them."""
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        os.utime(_tar(Path("s.tar"), {"x.mp4": b"video", "x.txt": name.encode()}), (1, 1))
        found += VideoShards(["s.tar"], **CLIP).captions
    assert found == ["a", "b"]


def test_a_folder_however_it_is_written(here):
    for name in ("shards/a.tar", "shards/.old/b.tar"):
        (here / name).parent.mkdir(exist_ok=True)
        (here / name).touch()
    for folder in ("shards", "./shards", "./shards/", "shards/.", ".", "./", str(here)):
        assert [name.rpartition("/")[2] for name in shards_of(folder)] == ["a.tar"]


def test_remote_shards(shards):
    memory = fsspec.filesystem("memory")
    for path in shards.iterdir():
        memory.pipe(f"/bucket/{path.name}", path.read_bytes())
    local = VideoShards([str(shards)], **CLIP)
    data = VideoShards(["memory://bucket/s-{0,1,2}.tar"], **CLIP)
    assert list(data.captions) == list(local.captions)
    with BatchLoader(data, data.order(0, 6), micro_batch=6, num_steps=1, num_workers=1) as loader:
        (batch,) = loader
    for text, video in zip(batch["txt"], batch["mp4"], strict=True):
        assert torch.equal(video, local[int(text[-1])]["video"])
    with pytest.raises(ValueError, match="^memory://bucket/no.tar: the shard cannot be read"):
        VideoShards(["memory://bucket/no.tar"], **CLIP)
    with pytest.raises(ValueError, match="^nowhere://x.tar: .*nowhere.*; install the pack"):
        VideoShards(["nowhere://x.tar"], **CLIP)


@pytest.mark.parametrize("at", ["in a video", "in a header", "before the end"])
def test_a_shard_that_ends_early(at, shards, tmp_path, caplog):
    """Complete samples are read; the one that is cut off is a bad sample, and one line is logged."""
    whole = (shards / "s-1.tar").read_bytes()
    with tarfile.open(shards / "s-1.tar") as tar:
        last = tar.getmember("03.mp4")
        end = tar.getmember("03.id").offset_data + 512
    size = {
        "in a video": last.offset_data + last.size // 2,
        "in a header": last.offset + 100,
        "before the end": end,
    }[at]
    (tmp_path / "s-1.tar").write_bytes(whole[:size])
    (tmp_path / "s-1.meta.jsonl").write_bytes((shards / "s-1.meta.jsonl").read_bytes())
    data = VideoShards([str(tmp_path / "s-1.tar")], **CLIP)
    assert caplog.text.count("s-1.tar ends early, after") == 1
    folder = VideoFolder(shards.parent / "folder", **CLIP)
    assert torch.equal(data[0]["video"], folder[2]["video"])
    if at == "in a video":
        with pytest.raises(BadSample, match=r"s-1.tar::03.mp4: the shard ends early: \d+ of"):
            data[1]
    else:
        assert len(data) == (1 if at == "in a header" else 2)


def test_a_caption_behind_the_end_and_later_starts(shards, tmp_path, caplog):
    """A last sample without its caption is dropped, and every start logs the early end."""
    whole = (shards / "s-0.tar").read_bytes()
    with tarfile.open(shards / "s-0.tar") as tar:
        last = tar.getmember("d/01.caption")
    (tmp_path / "x.tar").write_bytes(whole[: last.offset])
    for number in (1, 2):
        assert list(VideoShards([str(tmp_path / "x.tar")], **CLIP).captions) == ["clip 00"]
        assert caplog.text.count("x.tar ends early, after 1 sample; write the sh") == number


def test_unread_members_are_logged(shards, tmp_path, caplog):
    video = (shards.parent / "folder/videos/00.mp4").read_bytes()
    members = {"a.mp4": video, "a.txt": b"a", "v1.5 b.mp4": video, "v1.5 b.txt": b"b"}
    with tarfile.open(_tar(tmp_path / "t/x.tar", members), "a") as tar:
        info = tarfile.TarInfo("a.txt")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"new"))
    (tmp_path / "t/y.tar.gz").write_bytes(b"")
    assert list(VideoShards([str(tmp_path / "t")], **CLIP).captions) == ["new"]
    assert "x.tar has 1 member twice; the later one is read: a.txt" in caplog.text
    text = "x.tar: not read: 1 sample (names up to the first dot) without a video: "
    assert f"{text}v1: 5 b.mp4, 5 b.txt" in caplog.text
    assert f"{tmp_path}/t: not read: 1 compressed shard: {tmp_path}/t/y.tar.gz; d" in caplog.text
    (tmp_path / "t/x.tar").unlink()
    read = lambda: VideoShards([str(tmp_path / "t")], **CLIP)
    line = "t: no .tar file in it, but 1 compressed shard: <...>y.tar.gz; decompress to .tar (gzip"
    assert_refused(read, line)
    os.mkfifo(tmp_path / "t/x.tar")
    assert_refused(read, "x.tar: the shard cannot be read <...>it is not a regular file")


def test_refused(shards, tmp_path):
    (tmp_path / "no.tar").write_bytes(b"no tar" * 200)
    _tar(tmp_path / "empty.tar", {"a.txt": b"a"})
    (tmp_path / "void").mkdir()
    video = (shards.parent / "folder/videos/00.mp4").read_bytes()
    _tar(tmp_path / "latin.tar", {"a.mp4": video, "a.txt": "Größe".encode("latin-1")})
    _tar(tmp_path / "m.tar", {"a.mp4": video})
    (tmp_path / "m.meta.jsonl").write_text('{"key": "a"}\n{"caption": "b"}\n')
    for row in read_refusals(TABLE):
        if row.base == "shards":
            name = row.words[0]
            source = name if name.startswith(";") else str(tmp_path / name)
            assert_refused(lambda source=source: VideoShards([source], **CLIP), row.line)
    for caption in ("old", "new text"):  # the shard stays as it is, and its index too
        (tmp_path / "m.meta.jsonl").write_text(f'{{"key": "a", "caption": "{caption}"}}')
        assert list(VideoShards([str(tmp_path / "m.tar")], **CLIP).captions) == [caption]
    (tmp_path / "m.meta.jsonl").unlink()
    with pytest.raises(ValueError, match=r"1/1 samples without a caption .*m.tar::a.mp4; add them"):
        VideoShards([str(tmp_path / "m.tar")], **CLIP)
    data = VideoShards([str(tmp_path / "m.tar")], **CLIP, allow_empty_captions=True)
    assert data.captions[0] == ""


def _header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """A member's header with a valid checksum and any content."""
    info = tarfile.TarInfo(name)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[124:136] = tarfile.itn(size, 12, tarfile.GNU_FORMAT)
    block[156:157] = kind
    block[148:156] = b"%06o\0 " % tarfile.calc_chksums(bytes(block))[0]
    return bytes(block)


def _pax(**headers: str) -> bytes:
    info = tarfile.TarInfo("a.mp4")
    info.pax_headers = headers
    return info.tobuf(tarfile.PAX_FORMAT)


TEXT = _header("a.txt", 1) + b"a".ljust(512, b"\0")
HEADERS = {
    "a name that leaves": _pax(path="b/../../a.mp4"),
    "an absolute name": _pax(path="/etc/a.mp4"),
    "a link": _header("a.mp4", 0, tarfile.SYMTYPE),
    "a hard link": _header("a.mp4", 0, tarfile.LNKTYPE),
    "a sparse member": _header("a.mp4", 0, tarfile.GNUTYPE_SPARSE),
    "a header of a terabyte": _header("././@PaxHeader", 2**40, tarfile.XHDTYPE),
    "a long name of a terabyte": _header("././@LongLink", 2**40, tarfile.GNUTYPE_LONGNAME),
    "headers of headers": _header("././@PaxHeader", 0, tarfile.XHDTYPE) * 3000,
    "a device": _header("a.mp4", 0, tarfile.CHRTYPE),
    "a pipe": _header("a.mp4", 0, tarfile.FIFOTYPE),
}


def after_a_good_one(header: bytes, file: Path) -> None:
    """A header that is refused at the start of a shard is refused behind a whole sample, too."""
    good = _header("b.mp4", 1) + b"b".ljust(512, b"\0") + TEXT.replace(b"a.txt", b"b.txt")
    file.write_bytes(good + header + bytes(4096))
    with pytest.raises(ValueError):
        VideoShards([str(file)], **CLIP)


@refusals(TABLE, "headers of shards")
def test_hostile_headers(refusal, tmp_path):
    header, file = HEADERS[refusal.words[0]], tmp_path / "x.tar"
    file.write_bytes(header + bytes(4096))
    assert_refused(lambda: VideoShards([str(file)], **CLIP), refusal.line)
    after_a_good_one(header, file)


@pytest.mark.parametrize("name, kind", [("a.mp4", tarfile.REGTYPE), ("x", tarfile.XHDTYPE)])
def test_a_negative_size(tmp_path, name, kind):
    """Which fault it is depends on the version of tarfile."""
    header, file = _header(name, -1024, kind), tmp_path / "x.tar"
    file.write_bytes(header + bytes(4096))
    with pytest.raises(ValueError, match=r"damaged|of -1024 bytes|invalid offset"):
        VideoShards([str(file)], **CLIP)
    after_a_good_one(header, file)


def test_sizes_beyond_the_end(tmp_path):
    """Reading a member allocates at most the shard's size, and at most the limit for members."""
    (tmp_path / "x.tar").write_bytes(TEXT + _header("a.mp4", 2**29) + b"video")
    with pytest.raises(BadSample, match="the shard ends early: 5 of 536870912 bytes are there"):
        VideoShards([str(tmp_path / "x.tar")], **CLIP)[0]
    (tmp_path / "x.tar").write_bytes(TEXT + _header("a.mp4", 2**34) + b"video")
    line = f"a member of {2**34} bytes; at most {2**30} are supported"
    assert_refused(lambda: VideoShards([str(tmp_path / "x.tar")], **CLIP)[0], line, BadSample)
    (tmp_path / "x.tar").write_bytes(_header("a.txt", 2**33) + b"text")
    line = f"a.txt: {2**33} bytes; a caption may have at most 1048576"
    assert_refused(lambda: VideoShards([str(tmp_path / "x.tar")], **CLIP), line)


@pytest.mark.parametrize("name", ["pipe:touch made", "|touch made", "x.tar;touch made", "-x.tar"])
def test_a_name_runs_no_command(name, here):
    """webdataset runs the text after pipe: in a shell."""
    with pytest.raises(ValueError, match="the shard cannot be read|no folder touch made"):
        VideoShards([name], **CLIP)
    assert not list(here.iterdir())
    for chained in ("simplecache::file:///x.tar", f"zip://x.tar::file://{here}/x.zip"):
        with pytest.raises(ValueError, match="a shard's name must not contain ::; rename it"):
            VideoShards([chained], **CLIP)


def test_braces():
    assert expand_braces("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand_braces("{a,b}/{1..2}") == ["a/1", "a/2", "b/1", "b/2"]
    line = "{7} is not a range or list; use {000..099} or {a,b}"
    assert_refused(lambda: expand_braces("a-{7}.tar"), line)
    line = "stands for more than 1000000 shards; correct its braces"
    assert_refused(lambda: expand_braces("a-{0..999999999999}.tar"), line)


def test_sats_class(shards):
    """SAT's names of the params work; those that only its stream needs are accepted and logged."""
    params = {"image_size": [32, 48], "num_frames": 9, "fps": 8, "txt_key": "caption", "seed": 1,
              "shuffle_buffer": 100, "nshards": 9, "meta_names": ["caption"]}  # fmt: skip
    target, arguments = resolve({"target": "data_video.VideoDataset", "params": params})
    assert target is VideoShards and arguments.keys() == {*CLIP, "caption_key"}
    data = target(data_dir=[str(shards)], **arguments)
    assert len(data) == 6
    wrong = {"target": "data_video.VideoDataset", "params": {"include_dirs": "a"}}
    line = "include_dirs='a': args.train_data lists the shards; move it"
    assert_refused(lambda: resolve(wrong), line)


def test_a_mask_may_be_a_picture_or_missing(tmp_path, monkeypatch):
    half = np.zeros((32, 48, 3), np.uint8)
    half[:, 24:] = 255
    Image.fromarray(half).save(tmp_path / "half.png")
    clip = write_clip(tmp_path / "0.mp4", constant_rate(9, 8), size=(32, 48))
    members = {"0.mp4": clip.read_bytes(), "0.txt": b"a"}
    members["0.mask.png"] = (tmp_path / "half.png").read_bytes()
    members |= {"1.mp4": clip.read_bytes(), "1.txt": b"b"}
    _tar(tmp_path / "shards" / "0.tar", members)
    data = VideoShards([str(tmp_path / "shards")], **CLIP)
    mask = data[0]["mask"]
    assert mask.shape == (9, 1, 32, 48)
    assert (mask == torch.from_numpy(half[..., 0] // 255)).all()
    assert data[1]["mask"].all()
    # With DALI, clips are on the device, and one batch has masks of both kinds.
    clip, selection = data._decode(1, data.settings)
    monkeypatch.setattr(data, "_decode", lambda *_: (clip.to("meta"), selection))
    assert data[1]["mask"].device.type == "meta"

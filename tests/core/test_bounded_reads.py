"""Files from elsewhere: pipes, devices and files of any size are refused in one line, in bounded memory."""

import struct
import tarfile
import zlib
from pathlib import Path

import pytest
import torch

from cogfast.core import files
from cogfast.core.files import (
    MOST_BYTES,
    MOST_LINE_BYTES,
    checksum_of,
    is_lfs_pointer,
    lines_of,
    open_regular,
    read_limited,
)
from cogfast.core.run_lock import is_held
from cogfast.data.bad_samples import BadSample, BadSampleLog
from cogfast.data.datasets import VideoManifest, VideoShards
from cogfast.data.sources.arrays import open_array
from cogfast.data.sources.file_index import FileIndex, to_lines
from cogfast.data.sources.folders import text_lines
from cogfast.data.video.picture import holds_picture, picture_size, read_pixels
from cogfast.data.video.transform import resize_and_center_crop
from cogfast.extensions.cache.entry_keys import hash_file
from cogfast.extensions.stores import store
from cogfast.extensions.tar import tar_shards
from cogfast.extensions.tar.tar_shards import expand_braces
from cogfast.train.run.folder import wandb_id
from cogfast.train.watchers.hang import hanging
from tests.cli.hostile.bounds import ODD, bounded, sparse
from tests.support.refusals import assert_refused

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}
READS = {
    "limited": lambda path: read_limited(path),
    "store": lambda path: store.read(str(path)),
    "part": lambda path: store.read(str(path), 0, 10),
    "opened": lambda path: store.open_file(str(path)).read(10),
    "checksum": checksum_of,
    "text": lambda path: text_lines(str(path)),
    "array": lambda path: open_array("flow", str(path), [1]),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("read", READS)
def test_only_regular_files_are_read(here: Path, read: str, kind: str) -> None:
    ODD[kind](here / "x")
    with bounded(), pytest.raises((OSError, ValueError, BadSample)) as refused:
        READS[read](here / "x")
    assert "\n" not in str(refused.value) and "x" in str(refused.value)


@pytest.mark.parametrize("kind", ODD)
def test_what_may_be_absent_counts_as_absent(here: Path, kind: str) -> None:
    path = here / "x"
    ODD[kind](path)
    with bounded():
        assert not is_lfs_pointer(path)
        assert not holds_picture(str(path))
        assert hash_file(str(path)).startswith("unreadable-")
        assert [*FileIndex(path).rows()] == []
        (here / "run.lock").symlink_to(path)
        assert not is_held(here, "process 1")


LARGE = {
    "limited": lambda path: read_limited(path),
    "store": lambda path: store.read(str(path)),
    "jsonl": lambda path: VideoManifest(path, **CLIP),
    "csv": lambda path: VideoManifest(path, **CLIP),
    "json": lambda path: VideoManifest(path, **CLIP),
    "text": lambda path: text_lines(str(path)),
    "W&B's id": lambda path: wandb_id(path.parent),
    "stacks": lambda path: [*hanging(path.parent)],
}
NAMES = {name: f"data.{name}" for name in ("jsonl", "csv", "json")}
NAMES |= {"W&B's id": "wandb_id", "stacks": "rank-0.txt"}


@pytest.mark.parametrize("kind", LARGE)
def test_files_that_are_read_whole_have_a_limit(tmp_path: Path, kind: str) -> None:
    path = tmp_path / NAMES.get(kind, "data.txt")
    sparse(path)
    with bounded(), pytest.raises((ValueError, OSError)) as refused:
        LARGE[kind](path)
    assert path.name in str(refused.value)
    assert any(word in str(refused.value) for word in (str(MOST_BYTES), "1024"))


def test_zeros_are_named_before_the_text_is_decoded(tmp_path: Path, monkeypatch) -> None:
    sparse(tmp_path / "data.jsonl", 2**20)
    line = "line 1 is not UTF-8 (byte 0x00)"
    assert_refused(lambda: VideoManifest(tmp_path / "data.jsonl", **CLIP), line)


def test_a_line_of_a_manifest_has_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"path": "a.mp4", "caption": "a"}\n' + "[" + "[]," * (MOST_LINE_BYTES // 3) + "[]]"
    )
    line = f"data.jsonl: line 2 has over {MOST_LINE_BYTES} characters"
    with bounded(2**28):
        assert_refused(lambda: VideoManifest(path, **CLIP), line)


@pytest.mark.parametrize("start", [b"", to_lines([("a", "1", 2)]) + b"\n", b'["b'])
def test_an_index_ends_at_a_line_without_end(tmp_path: Path, caplog, start: bytes) -> None:
    sparse(tmp_path / ".cogfast-index", start=start)
    with bounded(2**28):
        index = FileIndex(tmp_path / ".cogfast-index")
        assert index.get("a", "1") == ([2] if b"a" in start else None)
        assert index.get("b", "1") is None
    assert f".cogfast-index: it has a line of more than {MOST_LINE_BYTES} bytes" in caplog.text
    assert "remove it" in caplog.text


def test_lines_are_those_of_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 5)
    (tmp_path / "x").write_bytes(b"abcd\n\nab\r\nabc")
    with open_regular(tmp_path / "x") as file:
        assert [*lines_of(file)] == [b"abcd\n", b"\n", b"ab\r\n", b"abc"]
    (tmp_path / "x").write_bytes(b"a\nabcde\n")
    with open_regular(tmp_path / "x") as file, pytest.raises(ValueError, match="more than 5 bytes"):
        [*lines_of(file)]


def test_the_list_of_bad_samples_of_a_run_from_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "bad_samples.jsonl"
    sparse(file, start=b'{"path": "a", "reason": "b"}\n')
    with bounded(2**28):
        assert not BadSampleLog(file, 10).add("a", "b")
        assert BadSampleLog(file, 10).add("c", "d")


@pytest.mark.parametrize(
    "pattern",
    [
        "{000..999}{000..999}{000..999}.tar",
        "{0..1000000}.tar",
        "{0..999999999999}.tar",
        "{0..99999999999999999}.tar",
        "{a,b}" * 20 + ".tar",
        "{a,b}" * 1000 + ".tar",
        "{a,{b,{c,{d,e}}}}" * 6 + ".tar",
        "{" * 5000 + "a,b" + "}" * 5000,
        "{a" + ",a" * 2000 + "}{b" + ",b" * 2000 + "}.tar",
    ],
)
def test_braces_stand_for_a_limited_number_of_shards(pattern: str, monkeypatch) -> None:
    most = 10**6 if pattern.startswith("{000..999}") else 1000  # the others are sooner done
    monkeypatch.setattr(tar_shards, "_MAX_SHARDS", most)
    with bounded():
        assert_refused(lambda: expand_braces(pattern), f"stands for more than {most} shards")


@pytest.mark.parametrize("pattern", ["{1..1}", "{5..2}", "{}", "{" + "1" * 5000 + "..2}"])
def test_braces_that_are_no_range(pattern: str) -> None:
    assert_refused(lambda: expand_braces(f"a-{pattern}.tar"), "is not a range or list")


def test_braces_within_braces() -> None:
    assert expand_braces("{a,{b,c}}{1,2}") == ["a1", "a2", "b1", "b2", "a1", "a2", "c1", "c2"]


@pytest.mark.parametrize("kind", ODD)
def test_a_shard_and_its_captions_are_regular_files(here: Path, monkeypatch, kind: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(here / "cache"))
    ODD[kind](here / "s.tar")
    with bounded(), pytest.raises((ValueError, FileNotFoundError), match=r"s\.tar"):
        VideoShards("s.tar", **CLIP)
    with tarfile.open(here / "t.tar", "w") as tar:
        (here / "0.mp4").write_bytes(b"")
        tar.add(here / "0.mp4", "0.mp4")
    ODD[kind](here / "t.meta.jsonl")
    with bounded(), pytest.raises(ValueError, match=r"t\.meta\.jsonl|without a caption|no caption"):
        VideoShards("t.tar", **CLIP)


def _png(path: Path, rows: int, columns: int) -> None:
    """Write a black picture of grey, without the memory for its pixels."""
    packed = zlib.compress(bytes(rows * (1 + columns)), 1)
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", columns, rows, 8, 0, 0, 0, 0))]
    chunks += [(b"IDAT", packed), (b"IEND", b"")]
    of = lambda n, d: struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(of(name, data) for name, data in chunks))


SIDES = [(1, 200_000), (200_000, 1), (1, 1_000_000), (1, 8_000_000), (8_000_000, 1)]
SIDES += [(2, 30_000_000), (1, 65), (65, 1), (100, 6401)]


@pytest.mark.parametrize(("rows", "columns"), SIDES)
def test_a_picture_whose_sides_differ_too_much(tmp_path: Path, rows: int, columns: int) -> None:
    path = tmp_path / "x.png"
    _png(path, rows, columns)
    line = f"{rows} x {columns} pixels, one side more than 64 times as long as the other; crop it"
    with bounded(2**29):
        for read in (picture_size, read_pixels):
            with pytest.raises(ValueError) as refused:
                read(str(path))
            assert line in str(refused.value) or "at most" in str(refused.value)


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (64, 1), (100, 6400)])
def test_a_long_picture_is_read(tmp_path: Path, rows: int, columns: int) -> None:
    path = tmp_path / "x.png"
    _png(path, rows, columns)
    assert picture_size(str(path)) == (rows, columns)
    with bounded():
        pixels = read_pixels(str(path))[None]
        assert resize_and_center_crop(pixels, (480, 720)).shape == (1, 3, 480, 720)


def test_frames_that_are_longer_than_their_header_says() -> None:
    """A stream may have frames of another size than its container, and pixels that are no squares."""
    frame = torch.zeros(1, 10, 300, 3, dtype=torch.uint8)
    assert resize_and_center_crop(frame, (16, 16)).shape == (1, 3, 16, 16)
    assert_refused(
        lambda: resize_and_center_crop(frame, (16, 16), 8.0), "10 x 2400 pixels, one side"
    )

"""The latent cache: keys, which files are hashed again, damage, and what a cache from elsewhere may hold."""

import hashlib
import os
import tarfile
import tracemalloc
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cogfast.core.files import WriteError
from cogfast.data.bad_samples import BadSample
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.sources.file_index import FileIndex
from cogfast.data.video.clip import ClipSettings
from cogfast.extensions.cache.entries import (
    ENCODE_CHUNKS,
    CachedVideos,
    Entries,
    Spec,
    difference,
    find_entries,
)
from cogfast.extensions.cache.entry_keys import (
    Files,
    Sources,
    hash_file,
    hash_files,
    hash_text,
    sample_key,
    source_files,
)
from tests.cli.hostile.bounds import ODD, bounded, sparse
from tests.support.refusals import assert_refused

VIDEO, TEXT = {"VAE": "v1", "data.params.fps": 8}, {"text encoder": "t1"}
SPECS = {"video": VIDEO, "text": TEXT}
SETTINGS = ClipSettings(video_size=(8, 8), fps=8, max_num_frames=1)
KEYS = [f"{i:02}{i}" for i in range(4)]


def clip(number: float) -> dict[str, torch.Tensor]:
    numbers = {"fps": 8, "num_frames": 1, "num_padded": 0}
    mean = torch.full((2, 1, 1, 1), float(number))
    return {"mean": mean, **{name: torch.tensor(value) for name, value in numbers.items()}}


@pytest.fixture
def videos() -> CaptionedVideos:
    captions = PackedStrings(f"caption {i // 2}" for i in range(4))
    files = PackedStrings(f"{i}.mp4" for i in range(4))
    return CaptionedVideos(ClipList(files=files, captions=captions), SETTINGS)


@pytest.fixture
def cached(tmp_path: Path, videos: CaptionedVideos) -> CachedVideos:
    """Clips that hold their numbers; the last one is a bad sample."""
    entries = {kind: Entries(tmp_path, kind, spec) for kind, spec in SPECS.items()}
    for of_kind in entries.values():
        of_kind.create()
    for i, key in enumerate(KEYS[:3]):
        entries["video"].write(key, clip(i))
    entries["video"].write_bad(KEYS[3], "broken")
    for i in range(2):
        entries["text"].write(hash_text(f"caption {i}"), {"embedding": torch.tensor([i])})
    return CachedVideos(videos, entries, {"video": KEYS})


def path_of(cached: CachedVideos, key: str) -> Path:
    return Path(cached.entries["video"].folder, key[:2], f"{key}.safetensors")


def test_every_sample_gets_its_own(cached: CachedVideos) -> None:
    items = [cached[i] for i in range(3)]
    assert [float(item["latent_mean"][0]) for item in items] == [0, 1, 2]
    assert [int(item["prompt_embedding"]) for item in items] == [0, 0, 1]
    assert [item["path"] for item in items] == list(cached.paths)[:3]
    assert [item["txt"] for item in items] == list(cached.captions)[:3]
    assert (items[0]["fps"], items[0]["num_frames"], items[0]["num_padded"]) == (8, 1, 0)
    assert_refused(lambda: cached[3], "3.mp4: broken", BadSample)
    assert cached.entries["video"].keys() == {key: key == KEYS[3] for key in KEYS}


def test_a_damaged_entry_is_a_bad_sample(cached: CachedVideos) -> None:
    """Cut off, a flipped bit, the file of another key, a folder in its place, and deleted."""
    path = path_of(cached, KEYS[1])
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[-1] ^= 1
    for content in (b"", whole[:5], whole[:-1], flipped, path_of(cached, KEYS[0]).read_bytes()):
        path.write_bytes(content)
        match = rf"{path} is damaged .*delete it and run `cogfast cache` again"
        with pytest.raises(BadSample, match=match):
            cached[1]
    path.unlink()
    with pytest.raises(BadSample, match=r"1.mp4: its video entry is gone .*run `cogfast cache`"):
        cached[1]
    path.mkdir()
    assert_refused(lambda: cached[1], "is damaged", BadSample)
    assert float(cached[0]["latent_mean"][0]) == 0


def test_hostile_entries(cached: CachedVideos) -> None:
    entries, path = cached.entries["video"], path_of(cached, KEYS[1])
    entries.write(KEYS[1], {"another": torch.zeros(1)})
    assert_refused(lambda: cached[1], "it has no mean", BadSample)
    entries.write(KEYS[1], {**clip(1), "fps": torch.zeros(2)})
    assert_refused(lambda: cached[1], "it has no fps", BadSample)
    for metadata in (None, {"checksum": ""}, {"checksum": "x" * 9999}):
        save_file(clip(1), path, metadata)
        assert_refused(lambda: cached[1], "is damaged (checksum mismatch)", BadSample)
    Path(entries.folder, KEYS[3][:2], f"{KEYS[3]}.bad").write_bytes(b"\xff\x1b" * 9999)
    with pytest.raises(BadSample) as refused:
        cached[3]
    assert len(refused.value.reason) < 400


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("ending", [".safetensors", ".bad"])
def test_entries_are_regular_files(cached: CachedVideos, monkeypatch, kind, ending) -> None:
    """One that is none counts as missing, so that `cogfast cache` encodes it again, and no read waits."""
    monkeypatch.chdir(cached.entries["video"].folder)
    number = 1 if ending == ".safetensors" else 3
    path = path_of(cached, KEYS[number]).with_suffix(ending)
    path.unlink()
    ODD[kind](path)
    entries = cached.entries["video"]
    with bounded():
        found = entries.keys()
        assert KEYS[number] not in found or kind == "kernel log"
        assert entries.ask([KEYS[number]]) == {} or kind == "kernel log"
        with pytest.raises((BadSample, OSError)):
            cached[number]


def test_an_entry_that_states_a_huge_size(cached: CachedVideos) -> None:
    path = path_of(cached, KEYS[1])
    header = b'{"mean":{"dtype":"U8","shape":[21474836480],"data_offsets":[0,21474836480]}}'
    sparse(path, 8 + len(header) + 20 * 2**30, len(header).to_bytes(8, "little") + header)
    with bounded():
        assert_refused(lambda: cached[1], "more than 1073741824 bytes", BadSample)


def test_entries_that_are_cut_are_removed(cached: CachedVideos) -> None:
    entries = cached.entries["video"]
    for key, length in zip(KEYS[:2], (-1, 5), strict=True):
        path = path_of(cached, key)
        path.write_bytes(path.read_bytes()[:length])
    assert entries.remove_cut(KEYS[:3]) == KEYS[:2]
    assert entries.keys() == {KEYS[2]: False, KEYS[3]: True}


@pytest.mark.parametrize("then", ["removes", "writes"])
def test_a_cut_entry_that_another_launch_handles_at_the_same_time(
    cached: CachedVideos, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """It has removed it, or written it again, once this one has found it cut."""
    entries, path = cached.entries["video"], path_of(cached, KEYS[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    rename = os.rename

    def rename_late(*names: str) -> None:
        monkeypatch.setattr(os, "rename", rename)
        path.unlink() if then == "removes" else path.write_bytes(whole)
        rename(*names)

    monkeypatch.setattr(os, "rename", rename_late)
    assert entries.remove_cut(KEYS[:2]) == KEYS[:1]
    assert [*path.parent.iterdir()] == ([path] if then == "writes" else [])
    assert entries.remove_cut(KEYS[:2]) == ([] if then == "writes" else KEYS[:1])


def test_hashes_in_a_file_of_zeros(tmp_path: Path, caplog) -> None:
    sparse(tmp_path / "sources.jsonl")
    with bounded(2**28):
        assert Sources(tmp_path).recorded("x") == ""
    assert "sources.jsonl: it has a line of more than" in caplog.text


def test_entries_of_another_spec_are_not_found(tmp_path: Path) -> None:
    entries = Entries(tmp_path, "video", VIDEO)
    entries.create()
    entries.write("ab1", clip(1))
    other: Spec = {**VIDEO, "VAE": "v2"}
    assert difference(tmp_path, "video", VIDEO) == ""
    assert difference(tmp_path, "video", other) == "cache made by VAE v1, the config has v2"
    assert difference(tmp_path, "text", TEXT) == ""
    assert find_entries(tmp_path, "video", other, {"ab1"})[1] == {}
    for content in ("", "[]", "{", "[" * 99999, '{"VAE": 5}' + " " * 99):
        Path(entries.folder, "spec.json").write_text(content)
        text = difference(tmp_path, "video", other)
        assert len(text) < 400 and "\n" not in text


def test_auto_takes_the_way_that_has_most(tmp_path: Path) -> None:
    for way, keys in (
        ("whole", ["ab1"]),
        ("frames", ["ab1", "ab2"]),
        ("tiles", ["x1", "x2", "x3"]),
    ):
        entries = Entries(tmp_path, "video", {**VIDEO, ENCODE_CHUNKS: way})
        entries.create()
        for key in keys:
            entries.write(key, clip(1))
    auto = {**VIDEO, ENCODE_CHUNKS: "auto"}
    found, there = find_entries(tmp_path, "video", auto, {"ab1", "ab2"})
    assert found.spec[ENCODE_CHUNKS] == "frames" and set(there) == {"ab1", "ab2"}
    assert difference(tmp_path, "video", auto) == ""


def test_entries_that_a_listing_lacks_are_asked_for(tmp_path: Path) -> None:
    entries = Entries(tmp_path, "video", VIDEO)
    entries.write("ab1", clip(1))
    entries.write_bad("ab2", "too short")
    assert entries.ask(["ab1", "ab2", "ab3", "ab1"]) == {"ab1": False, "ab2": True}


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(tmp_path))

    entries = Entries(tmp_path, "video", VIDEO)
    entries.create()
    monkeypatch.setattr(os, "scandir", refuse)  # rights do not bind whom tests run as
    assert_refused(lambda: entries.keys(), "latent_cache: <...> cannot be read (Permission den")


def everything(sources: Sources, files: Files) -> None:
    sources.add(hash_files(sources.changed(files), files))


def test_only_files_that_look_changed_are_read_again(tmp_path: Path) -> None:
    """A file with the same size and mtime counts as unchanged, whatever its content."""
    a, b, gone = (str(tmp_path / name) for name in ("a.mp4", "b.mp4", "gone.mp4"))
    files = dict.fromkeys((a, b, gone), ())
    Path(a).write_bytes(b"first")
    Path(b).write_bytes(b"other")
    sources = Sources(tmp_path)
    assert sources.changed(files) == [a, b, gone]
    everything(sources, files)
    sources = Sources(tmp_path)
    assert sources.changed(files) == []
    assert sources.recorded(a) == hash_file(a)
    assert sources.unreadable(files) == [gone]
    before = os.stat(a)
    Path(a).write_bytes(b"2nd: ")
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources.changed(files) == []
    os.utime(b, ns=(0, 0))
    Path(gone).write_bytes(b"here")
    assert sources.changed(files) == [b, gone]
    assert sources.recorded(b) == ""
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    assert hash_file(str(tmp_path / "pipe")).startswith("unreadable-")


def test_the_hashes_of_processes_that_write_at_once_are_kept(tmp_path: Path) -> None:
    names = [str(tmp_path / f"{i}.mp4") for i in range(40)]
    for name in names:
        Path(name).write_text(name)
    if (pid := os.fork()) == 0:
        for name in names[::2]:
            Sources(tmp_path).add(hash_files([name], {name: ()}))
        os._exit(0)
    for name in names[1::2]:
        Sources(tmp_path).add(hash_files([name], {name: ()}))
    os.waitpid(pid, 0)
    assert Sources(tmp_path).changed(dict.fromkeys(names, ())) == []


@pytest.mark.parametrize("text", ["{", "[1]", "[" * 99999, '["%s", 5]', '{"%s": []}', "\xff\0"])
def test_lines_of_sources_that_are_damaged_are_left_out(text: str, tmp_path: Path) -> None:
    file = str(tmp_path / "a.mp4")
    Path(file).write_text("a")
    (tmp_path / "sources.jsonl").write_bytes(text.replace("%s", file).encode("latin-1") + b"\n")
    sources = Sources(tmp_path)
    assert sources.changed({file: ()}) == [file]
    everything(sources, {file: ()})
    assert Sources(tmp_path).recorded(file) == hash_file(file)


def test_a_cache_is_not_written_through_links(tmp_path: Path) -> None:
    """A downloaded folder may hold links to the user's own files."""
    cache, mine = tmp_path / "cache", tmp_path / "mine"
    cache.mkdir()
    mine.write_text("precious")
    (cache / "sources.jsonl").symlink_to(mine)
    with pytest.raises(WriteError, match="sources.jsonl cannot be written"):
        Sources(cache).add([("a", "b", "c")])
    entries = Entries(cache, "video", VIDEO)
    entries.create()
    for name in ("spec.json", "ab/ab1.safetensors"):
        Path(entries.folder, name).parent.mkdir(exist_ok=True)
        Path(entries.folder, name).unlink(missing_ok=True)
        Path(entries.folder, name).symlink_to(mine)
    entries.create()
    entries.write("ab1", clip(1))
    assert mine.read_text() == "precious"


def test_a_remote_shard_that_was_rewritten_is_read_again(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    member = "memory://bucket/x.tar::a.mp4"
    files = {member: (2, 3)}
    memory.pipe("/bucket/x.tar", b"..abc..")
    sources = Sources(tmp_path)
    sources.add(hash_files([member], files))
    assert sources.recorded(member) == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert sources.changed(files) == []
    memory.pipe("/bucket/x.tar", b"..abd..")
    assert sources.changed(files) == [member]


def test_keys_follow_content_parts_rates_and_images(tmp_path: Path) -> None:
    """Keys of files and of members of a tar shard; the location does not count."""
    contents = {"a.mp4": b"one", "b.mp4": b"two", "c.png": b"picture"}
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
            shard.add(tmp_path / name, name)
    with tarfile.open(tmp_path / "s.tar") as shard:
        offsets = {m.name: [m.offset_data, m.size] for m in shard.getmembers()}
    files = [str(tmp_path / f"{name}.mp4") for name in "abaaa"]
    files += [f"{tmp_path / 's.tar'}::{name}.mp4" for name in "ab"]
    number = len(files)
    spans, fps = np.full((number, 2), np.nan), np.full(number, np.nan)
    spans[2], fps[3] = (1.0, np.nan), 4.0
    clips = ClipList(
        files=PackedStrings(files),
        captions=PackedStrings(["caption"] * number),
        images=PackedStrings(["", "", "", "", str(tmp_path / "c.png"), "", ""]),
        spans=spans,
        fps=fps,
        places=np.array([[-1, -1]] * 5 + [offsets[name] for name in ("a.mp4", "b.mp4")]),
    )
    videos, sources = CaptionedVideos(clips, SETTINGS), Sources(tmp_path)
    found = source_files(videos, range(number))
    everything(sources, found)
    assert sources.changed(found) == []
    keys = [sample_key(videos, i, sources) for i in range(number)]
    assert keys[0] == keys[5] and keys[1] == keys[6]
    assert len(set(keys)) == 5  # a part, a rate, and an image of its own have others


def test_a_start_asks_once_for_each_file_and_not_at_all_with_a_trusted_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(tmp_path / f"{i}.mp4") for i in range(5)]
    for name in names:
        Path(name).write_text(name)
    everything(Sources(tmp_path), dict.fromkeys(names[:4], ()))
    Path(names[0]).write_text("changed")
    asked, real = [], os.stat
    monkeypatch.setattr(
        os, "stat", lambda name, **given: (asked.append(name), real(name, **given))[1]
    )
    for trusts, changed in ((False, [names[0], names[4]]), (True, [names[4]])):
        asked.clear()
        assert Sources(tmp_path).changed(dict.fromkeys(names, ()), trusts) == changed
        assert [name for name in asked if name in names] == (names[4:] if trusts else names)


def test_an_index_stays_in_its_file(tmp_path: Path) -> None:
    """Each process of a machine opens it, with a line for each of millions of videos."""
    rows = [(f"/videos/{i:09}.mp4", "1-2", i, "x" * 100) for i in range(5000)]
    rows[7] = (*rows[7][:3], "x" * 10**5)
    FileIndex(tmp_path / "i.jsonl").add(rows)
    tracemalloc.start()
    index = FileIndex(tmp_path / "i.jsonl")
    kept, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 20 * len(rows) + 20_000 and most < 70 * len(rows) + 400_000
    assert [index.get(row[0], "1-2") for row in rows] == [list(row[2:]) for row in rows]
    assert index.get("/videos/0", "1-2") is None and index.get(rows[0][0], "1-3") is None

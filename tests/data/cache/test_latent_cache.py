"""The latent cache: places of samples, which files are hashed again, damage, and the writer lock."""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.cache.dataset import CachedVideos, sample_key, source_files
from cogfast.data.cache.shards import (
    CacheIndex,
    Writer,
    is_being_written,
    is_complete,
    write_shard,
)
from cogfast.data.cache.source_hashes import Sources, hash_file, hash_text
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.video.settings import ClipSettings

VIDEO, TEXT = {"VAE": "v1", "data.params.fps": 8}, {"text encoder": "t1"}
SETTINGS = ClipSettings(video_size=(8, 8), fps=8, max_num_frames=1)


def make(folder: Path, shards: list) -> None:
    """Write shards whose rows hold the lengths of their keys; keys that start with "bad" fail."""
    for shard in shards:
        name = "mean" if shard.kind == "video" else "embedding"
        tensors = {
            f"{row}.{name}": torch.tensor([float(len(key))])
            for row, key in enumerate(shard.keys)
            if not key.startswith("bad")
        }
        rows = [
            {"bad": "broken"}
            if key.startswith("bad")
            else {"fps": 8, "num_frames": 1, "num_padded": 0}
            for key in shard.keys
        ]
        write_shard(folder / shard.file, tensors, rows)


def files_of(index: CacheIndex) -> dict[str, list[str]]:
    return {shard.file: shard.keys for shard in index.shards}


def test_samples_keep_their_places_and_new_ones_are_appended(tmp_path: Path) -> None:
    keys = [f"{i:02}" for i in range(10)]
    index = CacheIndex()
    plan = index.plan("video", VIDEO, keys, tmp_path)
    assert [len(shard.keys) for shard in plan] == [8, 2]
    index.write(tmp_path)
    make(tmp_path, plan[:1])  # the second one is not written yet
    again = CacheIndex.read(tmp_path)
    assert again.plan("video", VIDEO, keys, tmp_path) == plan and again == index
    # One sample of each shard changes: the shard that is written keeps its other samples.
    wanted = ["new a", *keys[1:9], "new b"]
    plan = again.plan("video", VIDEO, wanted, tmp_path)
    assert [shard.keys for shard in plan] == [keys[:8], ["new a", "08", "new b"]]
    places = again.places("video", VIDEO)
    assert places["03"] == ("video-00000.safetensors", 3)
    assert set(wanted) <= places.keys()


def test_a_sample_has_one_place_and_specs_have_their_own(tmp_path: Path) -> None:
    index = CacheIndex()
    index.plan("video", VIDEO, ["a", "b", "a"], tmp_path)
    index.plan("text", TEXT, ["a"], tmp_path)
    other = {**VIDEO, "VAE": "v2"}
    assert index.difference("video", VIDEO) is None
    assert index.difference("video", other) == "cache made by VAE v1, the config has v2"
    index.plan("video", other, ["a"], tmp_path)
    assert list(files_of(index).values()) == [["a", "b"], ["a"], ["a"]]
    assert index.places("video", other) == {"a": ("video-00001.safetensors", 0)}


def test_damaged_files_are_bad_samples_and_written_again(tmp_path: Path) -> None:
    index = CacheIndex()
    (shard,) = index.plan("video", VIDEO, ["a", "b"], tmp_path)
    make(tmp_path, [shard])
    path = tmp_path / shard.file
    whole = path.read_bytes()
    assert is_complete(tmp_path, shard)
    for size in (0, 5, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert not is_complete(tmp_path, shard)
    (tmp_path / "index.jsonl").write_text('{"format": "another"}\n')
    with pytest.raises(ValueError, match=r"index.jsonl contains another, not cogfast-latents-2"):
        CacheIndex.read(tmp_path)
    (tmp_path / "index.jsonl").write_text("not json\n")
    with pytest.raises(ValueError, match=r"index.jsonl contains nothing readable"):
        CacheIndex.read(tmp_path)


def test_shards_of_a_lost_index_are_not_taken_for_others(tmp_path: Path) -> None:
    lost = CacheIndex()
    make(tmp_path, lost.plan("video", VIDEO, ["a", "b"], tmp_path))
    plan = CacheIndex().plan("video", VIDEO, ["new", "a"], tmp_path)
    assert [(shard.file, shard.keys) for shard in plan] == [
        ("video-00001.safetensors", ["new", "a"])
    ]


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)  # rights do not bind whom tests run as
    for read in (Sources, CacheIndex.read):
        with pytest.raises(ValueError, match=r"latent_cache: .* cannot be read \(Permission den"):
            read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", '{"a.mp4": "x", "b.mp4": []}', "\0"])
def test_a_malformed_list_of_sources_is_made_again(text: str, tmp_path: Path) -> None:
    (tmp_path / "sources.json").write_text(text)
    assert Sources(tmp_path).known == {}


def test_only_files_that_look_changed_are_read_again(tmp_path: Path) -> None:
    """A file with the same size and mtime counts as unchanged, whatever its content."""
    a, b, gone = (str(tmp_path / name) for name in ("a.mp4", "b.mp4", "gone.mp4"))
    Path(a).write_bytes(b"first")
    Path(b).write_bytes(b"other")
    sources = Sources(tmp_path)
    assert sources.changed([a, b, gone]) == [a, b, gone]
    sources.known |= sources.hash([a, b, gone])
    sources.write()
    sources = Sources(tmp_path)
    assert sources.changed([a, b, gone]) == []
    assert sources.content(a) == hash_file(a)
    assert sources.content(gone).startswith("unreadable-")
    before = os.stat(a)
    Path(a).write_bytes(b"2nd: ")
    os.utime(a, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert sources.changed([a]) == []
    Path(b).touch()
    os.utime(b, ns=(0, 0))
    Path(gone).write_bytes(b"here")
    assert sources.changed([a, b, gone]) == [b, gone]
    assert sources.content(b) == hash_file(b)
    os.mkfifo(tmp_path / "pipe")  # reading it would never end
    assert sources.content(str(tmp_path / "pipe")).startswith("unreadable-")


def test_a_remote_shard_that_was_rewritten_is_read_again() -> None:
    memory = fsspec.filesystem("memory")
    member, parts = "memory://bucket/x.tar::a.mp4", {"memory://bucket/x.tar::a.mp4": (2, 3)}
    memory.pipe("/bucket/x.tar", b"..abc..")
    sources = Sources(Path("nowhere"))
    sources.known |= sources.hash([member], parts)
    assert sources.recorded(member) == hashlib.blake2b(b"abc", digest_size=16).hexdigest()
    assert sources.changed([member]) == []
    memory.pipe("/bucket/x.tar", b"..abd..")
    assert sources.changed([member]) == [member]


GOOD = {"file": "video-00000.safetensors", "spec": "s", "keys": ["k"]}
HOSTILE_LINES = [
    {**GOOD, "file": "../video-00000.safetensors"},
    {**GOOD, "file": "/etc/video-00000.safetensors"},
    {**GOOD, "file": "video-00000.safetensors/../../x"},
    {**GOOD, "file": "video-x.safetensors"},
    {**GOOD, "file": "video-00000.safetensors\n"},
    {**GOOD, "file": 5},
    {**GOOD, "spec": "none"},
    {**GOOD, "spec": ["s"]},
    {**GOOD, "keys": [5]},
    {**GOOD, "keys": "k"},
    {"file": "video-00000.safetensors"},
    [],
    5,
]


@pytest.mark.parametrize("line", [json.dumps(row) for row in HOSTILE_LINES] + ["{", "[" * 99999])
def test_an_index_must_name_shards_of_its_folder(tmp_path: Path, line: str) -> None:
    header = json.dumps({"format": "cogfast-latents-2", "specs": {"s": {}}})
    (tmp_path / "index.jsonl").write_text(f"{header}\n{json.dumps(GOOD)}\n")
    assert CacheIndex.read(tmp_path).shards[0].keys == ["k"]
    (tmp_path / "index.jsonl").write_text(f"{header}\n{line}\n")
    with pytest.raises(
        ValueError, match=r"index.jsonl contains nothing readable \(.*; remove"
    ) as refused:
        CacheIndex.read(tmp_path)
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize("header", ["", "[]", '{"format": 5}', '{"format": "cogfast-latents-2", '
                                    '"specs": 5}', "\xff", '{"format": "' + 999 * "x" + '"}'])  # fmt: skip
def test_an_index_without_a_header(tmp_path: Path, header: str) -> None:
    (tmp_path / "index.jsonl").write_bytes(header.encode("latin-1"))
    with pytest.raises(ValueError, match=r"index.jsonl contains .*; remove the folder") as refused:
        CacheIndex.read(tmp_path)
    assert len(str(refused.value)) < 500


def test_a_cache_is_not_written_through_links(tmp_path: Path) -> None:
    """A downloaded folder may hold links to the user's own files."""
    cache, mine = tmp_path / "cache", tmp_path / "mine"
    cache.mkdir()
    mine.write_text("precious")
    for name in ("writer", "bad_samples.jsonl"):
        (cache / name).symlink_to(mine)
        with pytest.raises(ValueError, match=rf"{name} is a link, and writing it would"):
            Writer(cache).__enter__()
        (cache / name).unlink()
    assert mine.read_text() == "precious"


def test_hostile_rows(tmp_path: Path, videos: CaptionedVideos) -> None:
    """Shards with valid checksums and malformed rows."""
    from safetensors.torch import save_file

    cache = tmp_path / "cache"
    text, video = planned(cache, videos)
    make(cache, [text])
    number = len(video.keys)
    whole = {"fps": 8, "num_frames": 1, "num_padded": 0}
    mean = {f"{i}.mean": torch.zeros(1) for i in range(number)}
    other = {f"{i}.another": torch.zeros(1) for i in range(number)}
    for tensors, row in (
        (other, whole),
        (mean, {**whole, "fps": "8"}),
        (mean, {"fps": 8}),
        (mean, {"bad": ["x"] * 999}),
    ):
        write_shard(cache / video.file, tensors, [row] * number)
        with pytest.raises(BadSample) as refused:
            CachedVideos(cache, videos, SPECS)[0]
        assert len(refused.value.reason) < 400
    for metadata in (None, {"rows": "5"}, {"rows": "[5]"}, {"rows": "[" * 9999}, {"rows": "[]"}):
        save_file(mean, cache / video.file, metadata)
        with pytest.raises(BadSample, match="damaged .*delete it and run `cogfast cache` again"):
            CachedVideos(cache, videos, SPECS)[0]
        assert not is_complete(cache, video)


def test_sources_that_are_damaged_are_read_again(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_text("a")
    file = str(tmp_path / "a.mp4")
    for text in ("[", "5", "[" * 99999, '{"%s": 5}', '{"%s": []}', '{"%s": [1, 2, 3]}', "\xff"):
        text = text.replace("%s", file)
        (tmp_path / "sources.json").write_bytes(text.encode("latin-1"))
        sources = Sources(tmp_path)
        assert sources.changed([file]) == [file] and not sources.was_unreadable(file)
        assert sources.content(file) == hash_file(file)


def test_one_writer_at_a_time_and_readers_see_it(tmp_path: Path) -> None:
    assert not is_being_written(tmp_path)
    with Writer(tmp_path):
        assert is_being_written(tmp_path)
        with pytest.raises(
            ValueError, match=rf"another .* \(process {os.getpid()} on .*\) is writ"
        ):
            Writer(tmp_path).__enter__()
        os.utime(tmp_path / "writer", (time.time() - 61,) * 2)
        assert not is_being_written(tmp_path)
    assert not list(tmp_path.iterdir())
    # The lock file of a killed writer does not block a new one.
    (tmp_path / "writer").write_text("process 1 on elsewhere\n")
    with Writer(tmp_path):
        assert str(os.getpid()) in (tmp_path / "writer").read_text()


@pytest.fixture
def videos(tmp_path: Path) -> CaptionedVideos:
    """Two folders with the same file names; two of the files have the same content."""
    paths = []
    for folder, content in (("one", "abcc"), ("two", "defg")):
        (tmp_path / folder).mkdir()
        for i, letter in enumerate(content):
            path = tmp_path / folder / f"{i}.mp4"
            path.write_text(letter * (i + 1))
            paths.append(str(path))
    (tmp_path / "one" / "3.mp4").write_text("ccc")
    captions = PackedStrings(f"caption {i // 2}" for i in range(8))
    return CaptionedVideos(ClipList(files=PackedStrings(paths), captions=captions), SETTINGS)


def planned(folder: Path, videos: CaptionedVideos) -> list:
    folder.mkdir(exist_ok=True)
    sources, index = Sources(folder), CacheIndex()
    contents = [sources.content(path) for path in videos.paths]
    texts = [hash_text(caption) for caption in videos.captions]
    plan = index.plan("text", TEXT, texts, folder) + index.plan("video", VIDEO, contents, folder)
    sources.write()
    index.write(folder)
    return plan


SPECS = {"video": VIDEO, "text": TEXT}


def test_every_sample_gets_its_own(tmp_path: Path, videos: CaptionedVideos) -> None:
    cache = tmp_path / "cache"
    plan = planned(cache, videos)
    assert [len(shard.keys) for shard in plan] == [4, 7]
    for shard in plan:
        name = "mean" if shard.kind == "video" else "embedding"
        tensors = {f"{i}.{name}": torch.tensor([i]) for i in range(len(shard.keys))}
        rows = [{"fps": 8, "num_frames": 1, "num_padded": 0}] * len(shard.keys)
        if shard.kind == "video":
            rows = [*rows[:-1], {"bad": "broken"}]
        write_shard(cache / shard.file, tensors, rows)
    cached = CachedVideos(cache, videos, SPECS)
    items = [cached[i] for i in range(7)]
    assert [int(item["latent_mean"]) for item in items] == [0, 1, 2, 2, 3, 4, 5]
    assert [int(item["prompt_embedding"]) for item in items] == [0, 0, 1, 1, 2, 2, 3]
    assert [item["path"] for item in items] == list(videos.paths)[:7]
    assert [item["txt"] for item in items] == list(videos.captions)[:7]
    with pytest.raises(BadSample, match=r"two/3.mp4: broken"):
        cached[7]
    damaged, whole = cache / plan[1].file, (cache / plan[1].file).read_bytes()
    flipped = bytearray(whole)
    flipped[-16] ^= 1  # a bit of the last row but one, whose tensor is a number of 8 bytes
    for content in (whole[:-1], flipped, (cache / plan[0].file).read_bytes()):
        damaged.write_bytes(content)
        with pytest.raises(BadSample, match=r"damaged .*delete it and run `cogfast cache` again"):
            cached[6]
    damaged.write_bytes(flipped)
    assert int(cached[0]["latent_mean"]) == 0  # the others' rows are as they were


def test_unusable_samples_are_counted_in_the_error(tmp_path: Path, videos: CaptionedVideos) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(
        ValueError, match=r"the folder has no cache: 0 of 8 usable; run `cogfast cache`"
    ):
        CachedVideos(cache, videos, SPECS)
    plan = planned(cache, videos)
    with pytest.raises(ValueError, match=r"encoded only 0 of 8 samples, and no `cogfast cache`"):
        CachedVideos(cache, videos, SPECS)
    make(cache, plan)
    CachedVideos(cache, videos, SPECS)
    for kind, name in (("video", "VAE"), ("text", "text encoder")):
        specs = {**SPECS, kind: {**SPECS[kind], name: "other"}}
        made = SPECS[kind][name]
        match = rf"cache made by {name} {made}, the config has other: 0 of 8 usable; run `cogfast"
        with pytest.raises(ValueError, match=match):
            CachedVideos(cache, videos, specs)
    Path(videos.paths[0]).write_text("an edited video")
    with pytest.raises(ValueError, match=r"1 video changed or moved since caching: 7 of 8 usable"):
        CachedVideos(cache, videos, SPECS)


def test_a_file_that_cannot_be_read_is_a_bad_sample(
    tmp_path: Path, videos: CaptionedVideos
) -> None:
    """`cogfast cache` tries it again each time; for training it stays a bad sample."""
    cache, file = tmp_path / "cache", videos.paths[3]
    os.unlink(file)
    os.symlink("/proc/self/mem", file)  # can be opened, but reading fails with an I/O error
    text, video = planned(cache, videos)
    make(cache, [text])
    number = [key.startswith("unreadable-") for key in video.keys].index(True)
    rows = [{"fps": 8, "num_frames": 1, "num_padded": 0}] * len(video.keys)
    tensors = {f"{i}.mean": torch.zeros(1) for i in range(len(rows)) if i != number}
    rows[number] = {"bad": "broken"}
    write_shard(cache / video.file, tensors, rows)
    assert Sources(cache).changed(videos.paths) == [file]
    cached = CachedVideos(cache, videos, SPECS)
    with pytest.raises(BadSample, match=r"one/3.mp4: broken"):
        cached[3]
    assert all(len(cached[i]["latent_mean"]) for i in range(8) if i != 3)


def test_reading_waits_for_a_sample_while_there_is_a_writer(
    tmp_path: Path, videos: CaptionedVideos
) -> None:
    cache = tmp_path / "cache"
    text, video = planned(cache, videos)
    make(cache, [text])
    with Writer(cache):
        cached = CachedVideos(cache, videos, SPECS)
        os.utime(cache / "writer", (time.time() - 61,) * 2)
        with pytest.raises(
            RuntimeError, match=r"video-00000.safetensors, for .*one/0.mp4, is missing"
        ):
            cached[0]
        (cache / "writer").touch()
        pid = os.fork()
        if pid == 0:
            time.sleep(1.0)
            make(cache, [video])
            os._exit(0)
        assert not (cache / video.file).exists()
        assert float(cached[0]["latent_mean"]) == 32  # as long as the key
        os.waitpid(pid, 0)


def test_keys_follow_content_parts_rates_and_images(tmp_path: Path) -> None:
    """Keys of files and of members of a tar shard; the location does not count."""
    contents = {"a.mp4": b"one", "b.mp4": b"two", "c.mp4": b"one", "c.png": b"picture"}
    offsets = {}
    with tarfile.open(tmp_path / "s.tar", "w") as shard:
        for name, content in contents.items():
            (tmp_path / name).write_bytes(content)
            shard.add(tmp_path / name, name)
    with tarfile.open(tmp_path / "s.tar") as shard:
        offsets = {m.name: [m.offset_data, m.size] for m in shard.getmembers()}
    files = [
        str(tmp_path / name) for name in ("a.mp4", "b.mp4", "c.mp4", "a.mp4", "a.mp4", "a.mp4")
    ]
    files += [f"{tmp_path / 's.tar'}::{name}" for name in ("a.mp4", "b.mp4", "c.mp4")]
    number = len(files)
    nothing = [-1, -1]
    places = [nothing * 2] * 6 + [offsets[name] + nothing for name in ("a.mp4", "b.mp4")]
    places.append(offsets["c.mp4"] + offsets["c.png"])
    spans, fps = np.full((number, 2), np.nan), np.full(number, np.nan)
    spans[3], fps[4] = (1.0, np.nan), 4.0
    clips = ClipList(
        files=PackedStrings(files),
        captions=PackedStrings(["caption"] * number),
        images=PackedStrings([""] * 5 + [str(tmp_path / "c.png")] + [""] * 3),
        spans=spans,
        fps=fps,
        places=np.array(places),
    )
    videos, sources = CaptionedVideos(clips, SETTINGS), Sources(tmp_path)
    found = source_files(videos, range(number))
    sources.known |= sources.hash(list(found), found)
    assert sources.changed(found) == []
    keys = [sample_key(videos, i, sources) for i in range(number)]
    one, two = hash_file(files[0]), hash_file(files[1])
    assert keys[:3] == [one, two, one] and keys[6:8] == [one, two]
    assert len(set(keys)) == 5  # a part, a rate, and an image of its own have others
    assert keys[5] == keys[8]

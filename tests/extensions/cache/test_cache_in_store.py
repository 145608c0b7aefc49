"""A latent cache in an object store, against one in a folder."""

import os
from pathlib import Path

import pytest
import torch

from cogfast.data.bad_samples import BadSample
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import ClipList, OtherFiles, PackedStrings
from cogfast.data.video.clip import ClipSettings
from cogfast.extensions.cache.entries import CachedVideos, Entries, difference, folders_of
from cogfast.extensions.cache.entry_keys import Sources, hash_file, hash_files
from cogfast.extensions.stores import store
from cogfast.extensions.stores.store import StoreError, Versions
from tests.extensions.cache.test_latent_cache import VIDEO, clip
from tests.support.refusals import assert_refused
from tests.support.s3_server import Fault, S3Server

KEYS = [f"a{i % 2}{i}" for i in range(6)]


def requests_of(server: S3Server) -> list[str]:
    found = [method for method, _ in server.requests]
    server.requests.clear()
    return found


def write_all(entries: Entries) -> Entries:
    entries.create()
    for number, key in enumerate(KEYS[:5]):
        entries.write(key, clip(number))
    entries.write_bad(KEYS[5], "broken")
    return entries


def test_entries_are_those_of_a_folder(server: S3Server, tmp_path: Path) -> None:
    url = f"{server.url}/entries"
    here, there = (write_all(Entries(cache, "video", VIDEO)) for cache in (tmp_path, url))
    # Names and bytes are equal: a folder may be copied to a store, and back.
    files = {str(p.relative_to(tmp_path)): p.read_bytes() for p in Path(here.folder).rglob("*.*")}
    assert {u.removeprefix(f"{url}/"): store.read(u) for u in store.find(url)} == files
    assert there.keys() == here.keys() == {key: key == KEYS[5] for key in KEYS}
    requests_of(server)
    assert [there.has(key) for key in (*KEYS[::2], "a0none")] == [True] * 3 + [False]
    assert requests_of(server) == ["GET"]
    for _ in range(2):
        for key in KEYS[:5]:
            found, expected = there.read(key), here.read(key)
            assert found.keys() == expected.keys()
            assert all(torch.equal(found[name], expected[name]) for name in found)
    asked = requests_of(server)
    assert asked.count("GET") == 5  # once each
    assert_refused(lambda: there.read(KEYS[5]), "broken$", BadSample)
    with pytest.raises(FileNotFoundError):
        there.read("a0none")
    assert folders_of(url, "video") == [there.folder]
    assert difference(url, "video", VIDEO) == ""
    other = {**VIDEO, "VAE": "v2"}
    assert difference(url, "video", other) == difference(tmp_path, "video", other) != ""


def test_a_damaged_entry_is_read_again_once_it_is_mended(server: S3Server) -> None:
    entries = write_all(Entries(f"{server.url}/damaged", "video", VIDEO))
    # A crash of the machine has cut copies.
    url, mean = entries.path(KEYS[1]), entries.read(KEYS[1])["mean"].clone()
    os.truncate(store.local_copy(url, "-"), 10)
    assert torch.equal(entries.read(KEYS[1])["mean"], mean)
    of_whole = hash_file(url)
    os.truncate(store.local_copy(url, store.stat(url).version), 0)
    assert hash_file(url) == of_whole
    url = f"{entries.folder}/a0/{KEYS[0]}.safetensors"
    whole = store.read(url)
    store.write(url, whole[:-1] + bytes([whole[-1] ^ 1]))
    again = "delete it and run `cogfast cache` again"
    with pytest.raises(BadSample, match=rf"{url} is damaged .*{again}"):
        entries.read(KEYS[0])
    store.write(url, whole)
    assert float(entries.read(KEYS[0])["mean"][0]) == 0


def test_writes_that_fail_leave_nothing(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = write_all(Entries(f"{server.url}/failed", "video", VIDEO))
    server.faults = [Fault(503, method="PUT", times=1)]
    entries.write("a0again", clip(7))
    monkeypatch.setattr(store, "_PATIENCE", 0.3)
    server.faults = [Fault(503, method="PUT")]
    with pytest.raises(StoreError, match="a0never.safetensors: .*asks for fewer requests"):
        entries.write("a0never", clip(8))
    server.faults = []
    assert {*entries.keys()} == {*KEYS, "a0again"}
    server.faults = [Fault(503, method="GET")]
    with pytest.raises(BadSample, match="a0again.safetensors: .*asks for fewer requests"):
        entries.read("a0again")


def test_workers_share_the_hashes_of_videos_in_a_store(server: S3Server, tmp_path: Path) -> None:
    """Each video is read once for all workers. Keys are those of the same videos on a disk."""
    cache = f"{server.url}/hashes"
    urls = [f"{server.url}/videos/{i}.mp4" for i in range(20)]
    for i, url in enumerate(urls):
        store.write(url, bytes([i]))
    files = dict.fromkeys(urls, ())
    requests_of(server)
    one, two = Sources(cache), Sources(cache)
    assert one.changed(files) == two.changed(files) == urls
    assert len(requests_of(server)) <= 8  # listings, not a request for each video
    for start in range(0, 20, 4):
        part = urls[start : start + 4]
        assert one.left(part) == part
        one.add(hash_files(part, files))
        assert two.left(part) == []
    (tmp_path / "7.mp4").write_bytes(bytes([7]))
    assert two.recorded(urls[7]) == hash_file(str(tmp_path / "7.mp4"))
    assert Sources(cache).changed(files) == []

    store.write(urls[3], b"changed")
    late = Sources(cache)
    assert late.changed(files) == [urls[3]]
    # A worker that still has the old version does not give its hash to one that has the new one.
    two.add([(urls[3], "old version", "old hash")])
    assert late.left([urls[3]]) == [urls[3]]
    late.add(hash_files([urls[3]], files))
    (tmp_path / "3.mp4").write_bytes(b"changed")
    assert late.recorded(urls[3]) == hash_file(str(tmp_path / "3.mp4"))
    assert Sources(cache).changed(files) == []


def test_masks_and_tensors_beside_a_cache_are_fetched(server: S3Server, tmp_path: Path) -> None:
    """They are read from their files, and controls are not."""
    urls = {n: [f"{server.url}/{n}/{i}" for i in "ab"] for n in ("mask", "flow", "control")}
    for url in sum(urls.values(), []):
        store.write(url, url.encode())
    others = {
        n: OtherFiles(PackedStrings(each), shape=(1,) if n == "flow" else None)
        for n, each in urls.items()
    }
    names, versions = (
        PackedStrings(["a.mp4", "b.mp4"]),
        Versions(store.stats(sum(urls.values(), []))),
    )
    clips = ClipList(files=names, captions=names, others=others, versions=versions)
    settings = ClipSettings(video_size=(32, 48), fps=8.0, max_num_frames=9)
    entries = {kind: Entries(tmp_path, kind, VIDEO) for kind in ("video", "text")}
    keys = dict.fromkeys(("video", "control"), KEYS[:2])
    CachedVideos(CaptionedVideos(clips, settings), entries, keys).fetch([0, 1])
    for url in (*urls["mask"], *urls["flow"]):
        assert any(url.endswith(path) for _, path in server.requests)
    assert not any("/control/" in path for method, path in server.requests if method == "GET")
    requests_of(server)
    assert [Path(clips.local(url)).read_text() for url in urls["mask"]] == urls["mask"]
    assert requests_of(server) == []

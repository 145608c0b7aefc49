"""Data in a real S3 server: the samples, their order and their faults are those of the same data on a disk."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoFolder, VideoList, VideoManifest, VideoShards
from cogfast.data.sources import headers
from cogfast.data.sources.headers import read_headers
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.stores import store
from cogfast.train.assembly import Datasets
from cogfast.train.keys import TrainKeys
from cogfast.train.preflight.header_scan import survey_datasets
from tests.extensions.tar.test_tar_shards import _tar
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.s3_server import Fault, s3_server
from tests.support.tiny_run import assert_same, write_clips
from tests.support.tiny_run import run as launch
from tests.support.video_files import sat_folder

CLIP = {"video_size": [32, 48], "fps": 8, "max_num_frames": 9}
ALONE = ProcessGroups(0, 1, 0, torch.device("cpu"), None, False)
TENSORS = CLIP | {"tensors": {"flow": [2, 3]}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with four layouts of six clips, and its copy in a bucket: (folder, server)."""
    folder = tmp_path_factory.mktemp("data")
    sat_folder(folder / "sat/b", 3)
    sat_folder(folder / "sat/a/B", 2)
    sat_folder(folder / "sat", 1)
    clips = sorted(str(p.relative_to(folder)) for p in folder.rglob("*.mp4"))
    rows = []
    for i, clip in enumerate(clips):
        np.save(folder / f"{i}.npy", np.full((2, 3), i, np.float32))
        row = {"path": f"./{clip}", "caption": f"c{i}", "flow": f"{i}.npy", "image": ""}
        rows.append(row | ({"control": f"sat/../{clips[0]}"} if i else {"control": clip}))
    Image.fromarray(np.arange(32 * 48 * 3, dtype=np.uint8).reshape(32, 48, 3)).save(
        folder / "first.png"
    )
    rows[1]["image"] = "first.png"
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "lists").mkdir()
    (folder / "lists/videos.txt").write_text("\n".join(f"../{clip}" for clip in clips))
    (folder / "lists/prompts.txt").write_text("\n".join(f"c{i}" for i in range(len(clips))))
    for i in range(2):
        members = {f"{i}{j}.mp4": (folder / clips[3 * i + j]).read_bytes() for j in range(3)}
        _tar(folder / f"shards/s-{i}.tar", members | {f"{i}0.txt": b"a", f"{i}2.txt": b"c"})
        (folder / f"shards/s-{i}.meta.jsonl").write_text(f'{{"key": "{i}1", "caption": "b"}}')
    with s3_server() as server:
        yield folder, server


@pytest.fixture
def bucket(data, monkeypatch, tmp_path):
    folder, server = data
    server.prepare(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "index"))
    monkeypatch.setattr(store, "_PATIENCE", 1.0)
    if not store.find(server.url):
        for file in folder.rglob("*.*"):
            store.upload(file, f"{server.url}/{file.relative_to(folder)}")
    server.requests.clear()
    yield folder, server
    server.faults = []


def _equal(one: dict, other: dict, folder: Path, url: str) -> bool:
    """Whether two samples are the same, up to where their files lie."""
    there = dict(other, path=other["path"].replace(url, str(folder)))
    one = dict(one, path=os.path.normpath(one["path"]))
    equal = lambda a, b: torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return one.keys() == there.keys() and all(equal(v, there[k]) for k, v in one.items())


@pytest.mark.parametrize(
    ("kind", "source", "params"),
    [
        (VideoFolder, "sat", CLIP),
        (VideoFolder, "sat/b/videos", CLIP),
        (VideoManifest, "", TENSORS),
        (VideoManifest, "metadata.jsonl", TENSORS),
        (VideoList, "lists", CLIP),
        (VideoShards, "shards", CLIP),
        (VideoShards, "shards/s-{0..1}.tar", CLIP),
    ],
)
def test_samples_headers_and_order_are_those_of_a_disk(bucket, kind, source, params):
    folder, server = bucket
    name = f"{folder}/{source}" if source else str(folder)
    local, remote = (kind([n], **params) for n in (name, name.replace(str(folder), server.url)))
    names = [path.replace(server.url, str(folder)) for path in remote.paths]
    assert names == [os.path.normpath(path) for path in local.paths]
    assert list(remote.captions) == list(local.captions)
    assert len(server.requests) <= 30
    # The manifest has controls that do not fit, and one that is the clip itself.
    found, on_disk = survey(remote).reasons, survey(local).reasons
    assert list(found) == list(on_disk) == ([*range(6)] if kind is VideoManifest else [])
    assert "clip itself" in found.get(0, "clip itself")
    assert read_headers(remote.clips) == read_headers(local.clips)
    for i in range(len(local)):
        assert _equal(local[i], remote[i], folder, server.url)
    server.requests.clear()
    again = remote.part(range(len(remote)))
    assert _equal(local[0], again[0], folder, server.url)
    assert server.requests == []  # the copies are there, and no version is asked for


def test_a_manifest_on_a_disk_names_addresses(bucket, tmp_path):
    folder, server = bucket
    rows = [{"path": f"{server.url}/sat/b/videos/0{i}.mp4", "caption": f"{i}"} for i in range(4)]
    rows.append({"path": f"{folder}/sat/b/videos/00.mp4", "caption": "4"})
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = VideoManifest([str(tmp_path / "m.jsonl")], **CLIP)
    assert torch.equal(data[0]["video"], data[4]["video"])
    assert_refused(lambda: data[3], "b/videos/03.mp4: no such object", BadSample)
    assert survey(data).reasons == {3: "no such object, or it was refused"}


def test_a_local_cache_that_is_too_small_is_refused_at_the_start(bucket, monkeypatch, tmp_path):
    _, server = bucket
    data = VideoFolder([f"{server.url}/sat"], **CLIP)
    monkeypatch.setenv(store.CACHE_VARIABLE, f"{tmp_path}/cache:1KB")
    match = "^[^ ]*/cache: the local cache is too small: .* set args.local_cache=FOLDER:SIZE "
    for found in (Datasets(data, None), Datasets(data.part([0]), data)):
        with pytest.raises(store.StoreError, match=match):
            survey_datasets(found, TrainKeys(), ALONE, 1)
    assert_refused(lambda: data[0], "too small", BadSample)


def test_workers_read_batches_from_a_store_that_fails_at_times(bucket, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 10.0)
    folder, server = bucket
    local, remote = (VideoFolder([n], **CLIP) for n in (f"{folder}/sat", f"{server.url}/sat"))
    server.faults = [Fault(503, method="GET", times=2), Fault("cut", method="GET", times=1)]
    server.faults.append(Fault(403, path="b/videos/01"))
    batches = {}
    for data in (local, remote):
        order = data.order(0, 2)
        given = {"micro_batch": 2, "num_steps": 3, "num_workers": 2, "max_bad_fraction": 0.5}
        with BatchLoader(data, order, **given) as loader:
            batches[data] = list(loader)
            bad = loader.bad_samples.reasons
    (name,) = bad
    assert name == f"{server.url}/sat/b/videos/01.mp4" and "access denied" in bad[name]
    for one, other in zip(batches[local], batches[remote], strict=True):
        for i, path in enumerate(other["paths"]):
            own = one["paths"][i]
            if own == path.replace(server.url, str(folder)):
                assert torch.equal(one["mp4"][i], other["mp4"][i])
            else:
                assert own.endswith("b/videos/01.mp4")


def test_an_object_that_was_given_up_is_bad_at_once(bucket, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 0.4)
    _, server = bucket
    data = VideoFolder([f"{server.url}/sat/b"], **CLIP)
    server.faults = [Fault(503, method="GET", path="00.mp4")]
    data.fetch([0, 1])
    server.requests = []
    assert_refused(lambda: data[0], "b/videos/00.mp4: planted (503)", BadSample)
    assert server.requests == []
    assert data[1]["num_frames"] == 9
    # The next epoch asks for it again, and so does who reads it without reading ahead.
    data.fetch([0])
    server.faults = []
    data.fetch([0])
    assert data[0]["num_frames"] == 9
    shutil.rmtree(store.local_cache()[0])
    server.faults = [Fault(503, method="GET", path="00.mp4")]
    assert_refused(lambda: data[0], "b/videos/00.mp4: planted (503)", BadSample)
    server.faults = []
    assert data[0]["num_frames"] == 9


def test_a_slow_store_makes_no_sample_bad_that_replaces_another(bucket):
    folder, server = bucket
    local, remote = (VideoFolder([f"{n}/sat/b"], **CLIP) for n in (folder, server.url))
    first, second = (local.order(0, 1).index(0, 0, attempt) for attempt in (0, 1))
    names = [remote.paths[i].rpartition("/sat/")[2] for i in (first, second)]
    server.faults = [Fault(403, path=names[0]), Fault("slow", "GET", names[1], seconds=1.2)]
    given = {"micro_batch": 1, "num_steps": 1, "num_workers": 0, "timeout": 0.8}
    with BatchLoader(remote, remote.order(0, 1), max_bad_fraction=0.9, **given) as loader:
        (batch,) = loader
    assert batch["paths"] == [remote.paths[second]]
    assert torch.equal(batch["mp4"][0], local[second]["video"])


def test_an_object_that_changes_or_has_no_ranges_is_a_bad_sample(bucket):
    folder, server = bucket
    data = VideoFolder([f"{server.url}/sat/b"], **CLIP)
    video = (folder / "sat/b/videos/00.mp4").read_bytes()
    for changed in (video[:-1], video + b"0"):
        store.write(f"{server.url}/sat/b/videos/00.mp4", changed)
        with pytest.raises(BadSample, match="b/videos/00.mp4: changed since it was listed; start"):
            data[0]
    store.write(f"{server.url}/sat/b/videos/00.mp4", video)
    assert torch.equal(data[0]["video"], VideoFolder([str(folder / "sat/b")], **CLIP)[0]["video"])
    shards = VideoShards([f"{server.url}/shards"], **CLIP)
    server.faults = [Fault("no ranges", method="GET")]
    with pytest.raises(BadSample, match=r"s-0.tar::00.mp4: the shard .* must support HTTP ranges"):
        shards[0]
    assert data[1]["num_frames"] == 9  # whole objects need none


@pytest.mark.parametrize(
    ("source", "fault", "text"),
    [
        ("", Fault(403), "^{url}: access denied .*; check the credentials, their rights"),
        ("/sat/x", None, "^{url}/sat/x: no .mp4 file in it"),
        ("-none/x", None, "^{url}-none/x: no such bucket; create it"),
        ("/sat", Fault(403, path="labels/"), "^{url}/sat/a/B/labels/00.txt: access denied"),
    ],
)
def test_sources_that_cannot_be_read_name_the_fix(bucket, source, fault, text):
    _, server = bucket
    server.faults = [] if fault is None else [fault]
    with pytest.raises(ValueError, match=text.format(url=server.url)) as caught:
        VideoFolder([server.url + source], **CLIP)
    assert "\n" not in str(caught.value)


def test_a_manifest_that_names_a_missing_bucket_is_named(bucket, tmp_path):
    file = tmp_path / "clips.csv"
    file.write_text(f"path,caption\n{bucket[1].url}-none/0.mp4,a clip\n")
    with pytest.raises(ValueError, match=f"^{file}: {bucket[1].url}-none/0.mp4: no such bucket"):
        VideoManifest([str(file)], **CLIP)


@pytest.mark.soak
def test_a_run_of_two_ranks_is_that_of_a_disk(bucket, tmp_path):
    """Losses and weights bit for bit, with a cold and a warm local cache; a source that fails ends in one line."""
    _, server = bucket
    folder = write_clips(tmp_path / "clips", 6)
    for file in folder.rglob("*.*"):
        store.upload(file, f"{server.url}/run/{file.relative_to(folder)}")
    run = Run(folder, tmp_path).with_args(train_iters=4, num_workers=2, split="5,1,0")
    run, found = run.with_words(f"args.local_cache={tmp_path}/c:1GB"), {}
    for kind in ("disk", "cold", "warm"):
        server.requests.clear()
        source = folder if kind == "disk" else f"{server.url}/run"
        found[kind] = run.into(tmp_path / kind).with_words(f"args.train_data=[{source}]")
        found[kind].launch(2, "deepspeed.train_micro_batch_size_per_gpu=2")
        gets = [path for method, path in server.requests if method == "GET"]
        assert any(path.endswith(".mp4") for path in gets) == (kind == "cold")
    for kind in ("cold", "warm"):
        assert found[kind].losses == found["disk"].losses
        assert_same(found[kind].weights(), found["disk"].weights())
    store.write(f"{server.url}/run/labels/0.txt", b"changed")
    server.faults = [Fault(403, path="labels/")]
    ended = launch(found["warm"].command(), processes=2)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("cogfast: command")]
    assert len({*lines}) == 1
    assert "args.train_data=s3://" in lines[0] and "access denied" in lines[0]


def test_an_index_of_headers_lies_beside_the_data(bucket, monkeypatch, tmp_path):
    """Machines that have no disk in common, or come one after the other, read headers once."""
    folder, server = bucket
    data = VideoFolder([f"{server.url}/sat/b"], **CLIP)
    for is_read_only in (True, False):
        server.faults = [Fault(403, method="PUT")] if is_read_only else []
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"home-{is_read_only}"))
        first = read_headers(data.clips)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"home-{is_read_only or 'another'}"))
        with monkeypatch.context() as patch:
            patch.setattr(headers, "_probe", lambda *_: headers.Header(reason="opened"))
            assert read_headers(data.clips) == first
    assert first == read_headers(VideoFolder([f"{folder}/sat/b"], **CLIP).clips)


def test_labels_beside_a_folder_of_videos_are_found(bucket):
    _, server = bucket
    videos = ("videos/sub/1.mp4", "x/videos/sub/2.mp4")
    for name in (*videos, "labels/sub/1.txt", "x/labels/sub/2.txt"):
        store.write(f"{server.url}/deep/{name}", name.encode())
    for name in videos:
        data = VideoFolder([store.parent(f"{server.url}/deep/{name}")], **CLIP)
        label = name.replace("videos", "labels").replace("mp4", "txt")
        assert [*data.captions] == [label]

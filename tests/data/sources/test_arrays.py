"""Tensors of a manifest's columns: how they are read, also with a latent cache, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cogfast.__main__ import main
from cogfast.data.bad_samples import BadSample
from cogfast.data.batches import BatchLoader
from cogfast.data.buckets import survey
from cogfast.data.datasets import VideoFolder, VideoManifest
from cogfast.data.global_order import GlobalOrder
from cogfast.train.trainer import Trainer
from tests.support.runs import Run
from tests.support.tiny_run import SIDE

CLIP = {"video_size": [SIDE, SIDE], "fps": 8, "max_num_frames": 9}
SHAPE = [2, 3, 4]
VALUES = np.arange(24, dtype=np.float64).reshape(SHAPE)


def write(folder: Path, data: Path, row: Callable[[int], dict]) -> Path:
    rows = [{"path": str(data / "videos" / f"{i}.mp4"), "caption": "x", **row(i)} for i in range(6)]
    file = folder / "clips.jsonl"
    file.write_text("".join(f"{json.dumps(one)}\n" for one in rows))
    return file


@pytest.fixture
def manifest(data: Path, tmp_path: Path) -> Path:
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", np.asfortranarray(VALUES + i))
    return write(tmp_path, data, lambda i: {"flow": f"{i}.npy"})


def dataset(file: Path, **params: object) -> VideoManifest:
    return VideoManifest([str(file)], **CLIP, **{"tensors": {"flow": SHAPE}, **params})


def test_samples_have_the_values_of_their_files(manifest: Path) -> None:
    found = dataset(manifest).part([4, 1])
    loader = BatchLoader(found, GlobalOrder(2, 0, 2), micro_batch=2, num_workers=0)
    batch = next(loader)
    numbers = [int(Path(path).stem) for path in batch["paths"]]
    assert sorted(numbers) == [1, 4]
    expected = np.stack([VALUES + number for number in numbers]).astype(np.float32)
    assert batch["flow"].numpy().dtype == np.float32
    assert np.array_equal(batch["flow"].numpy(), expected)
    twice = VideoManifest([str(manifest)] * 2, **CLIP, tensors={"flow": SHAPE})
    assert len(twice) == 12 and np.array_equal(twice[10]["flow"].numpy(), VALUES + 4)


def object_array(file: Path) -> None:
    np.save(file, np.array([{"a": 1}], dtype=object))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    {
        "shape": (
            lambda file: np.save(file, VALUES[:, :2]),
            "has the shape [2, 2, 4], but data.params.tensors gives flow the shape [2, 3, 4]",
        ),
        "objects": (object_array, "is not a readable .npy file"),
        "text": (lambda file: np.save(file, np.full(SHAPE, "a")), "is not an array of numbers"),
        "archive": (
            lambda file: np.savez(file.open("wb"), VALUES),
            "is not an array of numbers; write it with numpy.save",
        ),
        "cut off": (
            lambda file: file.write_bytes(file.read_bytes()[:-8]),
            "is not a readable .npy file",
        ),
        "part of an archive": (
            lambda file: file.write_bytes(b"PK\x03\x04"),
            "is not a readable .npy file of numbers; write",
        ),
        "missing": (lambda file: file.unlink(), "does not exist"),
        "infinite": (
            lambda file: np.save(file, np.full(SHAPE, 1e39)),
            "has values that are not finite in float32",
        ),
    }.values(),
)
def test_bad_files_are_bad_samples(
    manifest: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    file = manifest.parent / "3.npy"
    spoil(file)
    found = dataset(manifest)
    with pytest.raises(BadSample) as raised:
        _ = found[3]
    assert f"its flow {file} {reason}" in str(raised.value)
    # Headers show all but values.
    known = survey(found).reasons
    assert ("finite" in reason and not known) or (list(known) == [3] and reason in known[3])
    assert "flow" in found[2]


@pytest.mark.parametrize(
    ("change", "reason"),
    {
        "empty": (
            lambda: {"row": {"flow": ""}},
            "line 1 has no flow; data.params.tensors needs one per row",
        ),
        "name": (lambda: {"tensors": {"fps": [1]}}, "fps is the name of a key of a batch"),
        "column": (
            lambda: {"tensors": {"weight": [1]}},
            "weight names another column; rename",
        ),
        "values": (lambda: {"tensors": {"flow": [0]}}, "data.params.tensors.flow"),
        "sizes": (
            lambda: {"buckets": [[9, SIDE, SIDE]]},
            "one shape for all samples; remove data.params.buckets",
        ),
    }.values(),
)
def test_refused(manifest: Path, data: Path, change: Callable[[], dict], reason: str) -> None:
    given = change()
    if "row" in given:
        write(manifest.parent, data, lambda i: given["row"])
        given = {}
    with pytest.raises(ValueError) as raised:
        dataset(manifest, **given)
    assert reason in str(raised.value)


def test_other_layouts_have_none(data: Path) -> None:
    with pytest.raises(ValueError, match="VideoFolder lists no flow; give a manifest"):
        VideoFolder([str(data)], **CLIP, tensors={"flow": SHAPE})


def test_a_latent_cache_does_not_hold_them(manifest: Path, run: Run, tmp_path: Path) -> None:
    section = {
        "target": "cogfast.data.datasets.VideoManifest",
        "params": {**CLIP, "tensors": {"flow": SHAPE}},
    }
    run = run.with_args(dataset=section, train_data=[str(manifest)])
    run = run.with_words(f"args.latent_cache={tmp_path / 'cache'}")
    seen = []

    class Recorded(Trainer):
        def losses(self, batch, noised, conditioning):
            assert "latent_mean" in batch
            seen.extend(zip(batch["paths"], conditioning.tensors["flow"], strict=True))
            return super().losses(batch, noised, conditioning)

    # A file that changes after the clips are encoded is read as it is.
    (tmp_path / "0.npy").rename(tmp_path / "away.npy")
    assert main(run.command(name="cache")) == 0
    for i in range(6):
        np.save(tmp_path / f"{i}.npy", VALUES - i)
    assert len(run.by(Recorded).train(steps=1).losses) == 1 and len(seen) == 4
    for path, values in seen:
        assert np.array_equal(values.numpy(), (VALUES - int(Path(path).stem)).astype(np.float32))

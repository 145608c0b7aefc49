"""Tensors of a manifest's columns: how they are read, also with a latent cache, and what is refused."""

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
from tests.support.refusals import Refusal, assert_refused, refusals
from tests.support.runs import Run
from tests.support.tiny_run import SIDE

CLIP = {"video_size": [SIDE, SIDE], "fps": 8, "max_num_frames": 9}
TABLE = Path(__file__).with_name("refusals.txt")
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


SPOILS: dict[str, Callable[[Path], object]] = {
    "shape": lambda file: np.save(file, VALUES[:, :2]),
    "objects": object_array,
    "text": lambda file: np.save(file, np.full(SHAPE, "a")),
    "archive": lambda file: np.savez(file.open("wb"), VALUES),
    "cut off": lambda file: file.write_bytes(file.read_bytes()[:-8]),
    "part of an archive": lambda file: file.write_bytes(b"PK\x03\x04"),
    "missing": Path.unlink,
    "infinite": lambda file: np.save(file, np.full(SHAPE, 1e39)),
}


@refusals(TABLE, "files of tensors")
def test_bad_files_are_bad_samples(manifest: Path, refusal: Refusal) -> None:
    file = manifest.parent / "3.npy"
    SPOILS[refusal.words[0]](file)
    found = dataset(manifest)
    assert_refused(lambda: found[3], refusal.fill(file=file).line, BadSample)
    # Headers show all but values.
    known, reason = survey(found).reasons, refusal.line.partition("} ")[2]
    assert ("finite" in reason and not known) or (list(known) == [3] and reason in known[3])
    assert "flow" in found[2]


@refusals(TABLE, "params of tensors")
def test_refused(manifest: Path, data: Path, refusal: Refusal) -> None:
    given = json.loads(refusal.words[0])
    if row := given.pop("row", None):
        write(manifest.parent, data, lambda i: row)
    assert_refused(lambda: dataset(manifest, **given), refusal.line)


def test_other_layouts_have_none(data: Path) -> None:
    with pytest.raises(ValueError, match="VideoFolder lists no flow; give a manifest"):
        VideoFolder([str(data)], **CLIP, tensors={"flow": SHAPE})


def test_a_latent_cache_does_not_hold_them(manifest: Path, run: Run, tmp_path: Path) -> None:
    run = run.with_manifest(manifest, tensors={"flow": SHAPE}).cached_in(tmp_path / "cache")
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

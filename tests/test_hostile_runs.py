"""Damaged and hostile run folders: each is used as it should be, or refused in one line."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfast.config import load_config
from cogfast.model.weights.run import open_run
from cogfast.model.weights.run_checkpoint import newest_checkpoint
from cogfast.train.trainer import Trainer
from tests.tiny_run import losses, run_folder, write_clips, write_config

UMASK = 0o027


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    data = write_clips(folder / "data", num_clips=4, num_frames=9)
    return write_config(folder / "base.yaml", data, train_iters=4, save_interval=2)


@pytest.fixture(scope="module")
def good(base: Path) -> Path:
    """A run with the checkpoints 2 and 4, made with a umask of its own; tests copy it."""
    before = os.umask(UMASK)
    try:
        Trainer(load_config([base])).train()
    finally:
        os.umask(before)
    return run_folder(base.parent / "runs")


def copy_of(good: Path, folder: Path) -> Path:
    return Path(shutil.copytree(good, folder / good.name))


def resume(base: Path, run: Path, *words: str) -> None:
    Trainer(load_config([base], [f"args.resume={run}", "args.train_iters=5", *words])).train()


def flip_bit(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def read_weights(checkpoint: Path) -> None:
    source = open_run(checkpoint)
    source.read(next(iter(source.shapes)), None)


def test_files_follow_the_umask(good: Path) -> None:
    modes = {path: path.stat().st_mode & 0o777 for path in good.rglob("*")}
    assert len([p for p in modes if p.suffix == ".safetensors"]) == 2
    wanted = {path: (0o777 if path.is_dir() else 0o666) & ~UMASK for path in modes}
    assert modes == wanted


def flipped_bits(folder: Path, draw: random.Random, number: int) -> Iterator[tuple[Path, int]]:
    """Of each file: bits of its first kilobyte (a header), its last one, and anywhere."""
    for path in sorted(folder.iterdir()):
        size, places = 8 * path.stat().st_size, []
        for _ in range(number):
            places += [draw.randrange(8192), size - 1 - draw.randrange(8192), draw.randrange(size)]
        yield from ((path, place) for place in places)


def check_flipped_bits(good: Path, folder: Path, seed: int, number: int) -> None:
    run = copy_of(good, folder)
    old, new = run / "checkpoints" / "00000002", run / "checkpoints" / "00000004"
    read_weights(new)
    for path, place in flipped_bits(new, random.Random(seed), number):
        flip_bit(path, place)
        with pytest.raises(ValueError) as refused:
            read_weights(new)
        message = str(refused.value)
        assert message.startswith(f"{new}: cannot be read: {path.name}"), message
        assert message.endswith(f"the last good one is that of step 2: --resume {old}"), message
        flip_bit(path, place)
    read_weights(new)


def test_a_flipped_bit_is_refused_wherever_it_is(good: Path, tmp_path: Path) -> None:
    check_flipped_bits(good, tmp_path, seed=0, number=5)


@pytest.mark.soak
def test_many_flipped_bits_are_refused(good: Path, tmp_path: Path) -> None:
    check_flipped_bits(good, tmp_path, seed=1, number=1000)


def test_a_resume_refuses_a_flipped_bit_of_a_tensor(base: Path, good: Path, tmp_path: Path) -> None:
    """The file's size and header are whole: without checksums the run would go on from it, as it
    does where it is asked to. The last good checkpoint is one whose bits are right, too."""
    run = copy_of(good, tmp_path)
    old, new = run / "checkpoints" / "00000002", run / "checkpoints" / "00000004"
    weights = new / "rank-00000.safetensors"
    flip_bit(weights, 8 * weights.stat().st_size - 100)
    match = f"rank-00000.safetensors is damaged.*step 2: --resume {old}$"
    with pytest.raises(ValueError, match=match):
        resume(base, run)
    resume(base, run, "args.verify_checkpoints=false", "args.keep_last=0")
    assert len(losses(run)) == 5
    flip_bit(old / "rank-00000.safetensors", 8 * 200_000)
    shutil.rmtree(run / "checkpoints" / "00000005")
    with pytest.raises(ValueError, match="there is no other one in its folder"):
        resume(base, new)


def test_a_checkpoint_without_checksums_is_resumed(base: Path, good: Path, tmp_path: Path) -> None:
    """As versions before wrote them; one of today that has lost its checksums is refused."""
    run = copy_of(good, tmp_path)
    file = newest_checkpoint(run) / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"its manifest.json has no checksums; the last good"):
        resume(base, run)
    del manifest["checksums"]
    file.write_text(json.dumps(manifest | {"format": "cogfast-checkpoint-2"}))
    resume(base, run)
    assert len(losses(run)) == 5

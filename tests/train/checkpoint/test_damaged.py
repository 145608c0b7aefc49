"""Damaged files of a run: the error names the last good checkpoint; logs are set aside."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.model.weights.checkpoint_manifest import (
    RESUMABLE,
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from cogfast.model.weights.run_checkpoint import open_run
from cogfast.train.run.metrics_file import history_until
from tests.cli.hostile.forked_case import faults, preload, run_case
from tests.support.refusals import assert_line, assert_refused
from tests.support.runs import Run
from tests.support.tiny_run import write_clips

pytestmark = pytest.mark.forks

UMASK = 0o027


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("hostile")
    data = write_clips(folder / "data", num_clips=4, num_frames=9)
    return Run(data, folder).with_args(save_interval=2)


@pytest.fixture(scope="module")
def good(run: Run) -> Path:
    """A run with the checkpoints 2 and 4, made with a umask of its own; tests copy it."""
    preload()
    before = os.umask(UMASK)
    try:
        outcome = run_case(lambda: main(run.command()), run.folder)
    finally:
        os.umask(before)
    assert outcome.status == 0, outcome.output
    return run.path


def copy_of(good: Path, folder: Path) -> Path:
    return Path(shutil.copytree(good, folder / good.name))


def assert_not_resumed(run: Run, path: Path, root: Path, line: str) -> None:
    """Resume a run or a checkpoint below `root` in a fork: this process never has process groups."""
    command = run.command(f"args.resume={path}", "args.train_iters=5")
    outcome = run_case(lambda: main(command), root)
    assert not faults(outcome) and outcome.status == 2, outcome.output
    assert_line(outcome.last_line, line)


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
    """Choose bits of each file: in its first kilobyte (a header), its last one, and anywhere."""
    for path in sorted(folder.iterdir()):
        size, places = 8 * path.stat().st_size, []
        for _ in range(number):
            places += [draw.randrange(8192), size - 1 - draw.randrange(8192), draw.randrange(size)]
        yield from ((path, place) for place in places)


@pytest.mark.parametrize(
    ("seed", "number"), [(0, 5), pytest.param(1, 1000, marks=pytest.mark.soak)]
)
def test_flipped_bits_are_refused_wherever_they_are(
    good: Path, tmp_path: Path, seed: int, number: int
) -> None:
    copy = copy_of(good, tmp_path)
    old, new = copy / "checkpoints" / "00000002", copy / "checkpoints" / "00000004"
    read_weights(new)
    for path, place in flipped_bits(new, random.Random(seed), number):
        flip_bit(path, place)
        # "its manifest.json has no checksums", where a key is damaged
        line = f"^{new}: cannot be read: <...>{path.name}<...>the last good one is that of step 2: give {old} (training: with --resume)$"
        assert_refused(lambda: read_weights(new), line)
        flip_bit(path, place)
    read_weights(new)


def test_a_resume_refuses_a_flipped_bit_of_a_tensor(run: Run, good: Path, tmp_path: Path) -> None:
    """The file's size and header are intact: without checksums the run would resume from it, as it
    does on request. The last good checkpoint that the error names has correct checksums."""
    copy = copy_of(good, tmp_path)
    old, new = copy / "checkpoints" / "00000002", copy / "checkpoints" / "00000004"
    weights = new / "rank-00000.safetensors"
    flip_bit(weights, 8 * weights.stat().st_size - 100)
    line = f"rank-00000.safetensors is damaged<...>step 2: give {old} (training: with --resume)$"
    assert_not_resumed(run, copy, tmp_path, line)
    flip_bit(old / "rank-00000.safetensors", 8 * 200_000)
    assert_not_resumed(run, new, tmp_path, "its folder has no other checkpoint")


def test_a_checkpoint_without_checksums_is_refused(run: Run, good: Path, tmp_path: Path) -> None:
    copy = copy_of(good, tmp_path)
    file = newest_checkpoint(copy) / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    file.write_text(json.dumps(manifest))
    line = "its manifest.json has no checksum; the last good"
    assert_not_resumed(run, copy, tmp_path, line)


# Bytes that are no text, another list, no step, text for a number, deep nesting, beyond floats
METRICS = (b"\xff\xfe\x00 1\n", b"[1, 2]\n", b'{"loss": 1.0}\n', b'{"step": 1, "loss": "x"}\n')
METRICS += (b"[" * 100_000 + b"\n", b'{"step": 1e999}\n')


def test_damaged_metrics_are_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Readable lines are kept, and the damaged file is renamed."""
    file = tmp_path / "metrics.jsonl"
    for number, line in enumerate(METRICS, start=1):
        caplog.clear()
        lines = b'{"step": 1, "loss": 2.0}\n' + line + b'{"step": 2, "loss": null}\n'
        file.write_bytes(lines + b'{"step": 3, "loss": 2.0}\n{"step": 4')
        assert history_until(2, file) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
        assert len(file.read_text().splitlines()) == 2
        assert (tmp_path / f"metrics.damaged-{number}.jsonl").read_bytes().startswith(lines)
        assert caplog.text.count("is damaged (line 2: ") == 1
        caplog.clear()
        assert len(history_until(2, file)) == 2 and caplog.text == ""


def test_a_pipe_in_place_of_a_log_is_set_aside(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert history_until(2, tmp_path / "metrics.jsonl") == []
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"metrics.jsonl", "metrics.damaged-1.jsonl"}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"../../x", b"{}", b"-1", b"9" * 100])
def test_a_damaged_latest_names_the_last_good_checkpoint(
    good: Path, tmp_path: Path, content: bytes
) -> None:
    run = copy_of(good, tmp_path)
    latest = run / "checkpoints" / "latest"
    latest.write_bytes(content)
    line = f"latest: damaged<...>: give {run}/checkpoints/00000004 (training: with --resume)$"
    assert_refused(lambda: newest_checkpoint(run), line)
    latest.unlink()
    assert_refused(
        lambda: newest_checkpoint(run), "latest: missing<...>00000004 (training: with --resume)$"
    )
    os.mkfifo(latest)
    assert_refused(lambda: newest_checkpoint(run), line)
    shutil.rmtree(run / "checkpoints" / "00000004")
    latest.unlink()
    assert newest_checkpoint(run) == run / "checkpoints" / "00000002"  # there is no other


MANIFESTS = {
    "no key": (lambda m: m.pop("counters"), "key counters is missing"),
    "no slices": (lambda m: m.pop("slices"), "key slices is missing"),
    "another type": (lambda m: m.update(parameters=[1]), "parameters=<...> must be"),
    "a negative start": (lambda m: piece_of(m).update(start=-1), "start=-1 must be"),
    "a huge slice": (lambda m: piece_of(m).update(numel=2**40), "a slice that does not fit"),
    "a huge share": (lambda m: piece_of(m).update(share=[0, 2**23]), "a slice that does not fit"),
    "another file": (lambda m: m["slices"].update({"../x": {}}), "names ../x, which is not in"),
    "another size": (lambda m: m["bytes"].update(dict.fromkeys(m["bytes"], 5)), "instead of 5"),
    "a file unlisted": (lambda m: m["bytes"].clear(), "the bytes in its manifest.json are not"),
    "no counters of one": (lambda m: m["counters"].popitem(), "has no counters of"),
}


def piece_of(manifest: dict) -> dict:
    return next(iter(next(iter(manifest["slices"].values())).values()))


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_wrong_manifest_is_refused(good: Path, tmp_path: Path, what: str) -> None:
    """A wrong manifest is refused even if its checksum is right."""
    run = copy_of(good, tmp_path)
    checkpoint = run / "checkpoints" / "00000004"
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    del manifest["checksum"]
    change, line = MANIFESTS[what]
    change(manifest)
    write_manifest(checkpoint, manifest)
    line = f"{line}<...>give {run}/checkpoints/00000002 (training: with --resume)$"
    assert_refused(lambda: read_manifest(checkpoint, RESUMABLE), line)


def test_what_is_missing_names_the_last_good_checkpoint(good: Path, tmp_path: Path) -> None:
    """Damaged ones before it are skipped."""
    run = copy_of(good, tmp_path)
    old, damaged, new = (run / "checkpoints" / f"0000000{step}" for step in (2, 3, 4))
    shutil.copytree(old, damaged)
    weights = damaged / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    lines = {"rank-00000.safetensors": "is missing", "manifest.json": "it has no man"}
    for gone, line in lines.items():
        (new / gone).unlink()
        line = f"{line}<...>that of step 2: give {old} (training: with --resume)$"
        assert_refused(lambda: read_manifest(new, RESUMABLE), line)
    shutil.rmtree(new)
    line = f"no such folder<...>that of step 2: give {old} (training: with --resume)$"
    assert_refused(lambda: read_manifest(new, RESUMABLE), line)

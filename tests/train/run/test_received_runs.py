"""A received run folder: nothing is written through its links and pipes, wherever they lie."""

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.core.files import open_own, refuse_links
from cogfast.extensions.stores import store
from cogfast.model.weights.checkpoint_manifest import read_manifest, write_manifest
from tests.support.runs import Run
from tests.support.tiny_run import part

PLANTS: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, victim: path.symlink_to(victim),
    "a dangling link": lambda path, victim: path.symlink_to(victim.with_name("new")),
    "a link to a folder": lambda path, victim: path.symlink_to(victim.parent),
    "a pipe": lambda path, victim: os.mkfifo(path),
}
_opened: list[str] = []
_is_recording = False


def _note(event: str, arguments: tuple) -> None:
    if not _is_recording:
        return
    if event == "open":
        path, mode, flags = arguments
        is_written = (flags or 0) & (os.O_WRONLY | os.O_RDWR) or set(mode or "") & set("wax+")
        if is_written and isinstance(path, str | bytes | os.PathLike):
            _opened.append(os.fsdecode(path))
    elif event == "os.rename":
        _opened.append(os.fsdecode(arguments[1]))
    elif event == "os.mkdir":
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note)


@pytest.fixture(scope="module")
def written(shared_run: Run) -> tuple[Run, set[str]]:
    """Return a run with all that a run writes, and the names below its folder that it has opened."""
    global _is_recording
    run = shared_run.with_args(
        train_iters=4,
        save_interval=2,
        eval_interval=2,
        eval_num_samples=1,
        eval_sampling_steps=2,
        valid_data=[str(shared_run.data)],
        log_interval=1,
        export="last",
    )
    _opened.clear()
    _is_recording = True
    try:
        run = run.train()
        run.resume(steps=6)
    finally:
        _is_recording = False
    root = os.path.realpath(run.path)
    below = {os.path.relpath(os.path.realpath(p), root) for p in _opened if os.path.isabs(p)}
    below |= {os.path.relpath(os.path.realpath(p), root) for p in _opened if not os.path.isabs(p)}
    return run, {name for name in below if not name.startswith("..") and name != "."}


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Path]:
    """A file of the user's, beside another one; neither changes."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "notes").write_text("mine\n")
    yield home / "notes"
    assert {p.name: p.read_text() for p in home.iterdir()} == {"notes": "mine\n"}


def plant(path: Path, how: str, victim: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    PLANTS[how](path, victim)


@pytest.mark.parametrize("how", PLANTS)
def test_no_name_that_a_run_opens_may_be_planted(
    written: tuple[Run, set[str]], tmp_path: Path, victim: Path, how: str
) -> None:
    run, names = written
    tops = {name.partition("/")[0] for name in names}
    assert {"log.txt", "run.lock", "hang", "checkpoints", "samples", "metrics.jsonl"} <= tops
    for number, name in enumerate(sorted(names)):
        copy = tmp_path / str(number)
        shutil.copytree(run.path, copy)
        plant(copy / name, how, victim)
        with pytest.raises(ValueError, match="a run writes into its own folder alone") as caught:
            refuse_links(copy)
        assert str(copy / name) in str(caught.value)
        shutil.rmtree(copy)


@pytest.mark.parametrize("name", ["log.txt", "run.lock", "samples", "hang/rank-0.txt"])
def test_a_resume_of_such_a_run_is_refused(
    written: tuple[Run, set[str]], tmp_path: Path, victim: Path, name: str, capsys
) -> None:
    run, _ = written
    for how in PLANTS:
        copy = tmp_path / how / "run"
        shutil.copytree(run.path, copy)
        plant(copy / name, how, victim)
        words = run.command("--resume", str(copy), "args.run_folder=null", "args.train_iters=8")[1:]
        assert main(["train", *words]) == 2
        error = capsys.readouterr().err
        assert "is a link; a run writes" in error or "nor a folder; a run writes" in error, error


def test_links_above_a_run_are_the_users_own(run: Run, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    run = run.with_args(save_interval=2).train(steps=2)
    assert len(run.resume(steps=3).losses) == 3
    assert list((tmp_path / "disk").iterdir())


@pytest.mark.parametrize("mode", ["w", "wb", "ab", "a+", "a+b"])
def test_files_of_a_run_are_regular(tmp_path: Path, victim: Path, mode: str) -> None:
    for how in PLANTS:
        plant(tmp_path / "log.txt", how, victim)
        with pytest.raises(OSError, match="it is a link|not a regular file|No such device"):
            open_own(tmp_path / "log.txt", mode)
        (tmp_path / "log.txt").unlink()
    with open_own(tmp_path / "log.txt", mode) as file:
        file.write(b"line\n" if "b" in mode else "line\n")
    assert (tmp_path / "log.txt").read_text() == "line\n"


def test_a_received_file_a_dry_run_and_a_plan_reach_no_network(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    done = run.with_args(save_interval=1).train(steps=1)
    asked: list[str] = []
    monkeypatch.setattr(store, "_call", lambda url, call: asked.append(url) or 1 / 0)
    address = "s3://bucket/weights"
    manifest = read_manifest(done.checkpoint)
    stage = part("cogfast.model.autoencoder.VideoAutoencoder", path=address)
    manifest["config"]["model"]["first_stage_config"] = stage
    write_manifest(done.checkpoint, manifest)
    sample = ["sample", str(done.path), "--prompt", "a", "--out", str(tmp_path / "out")]
    for words in (sample, [*sample, "--dry-run"]):
        assert main(words) == 2
        assert "the file of a run starts no download; add to the" in capsys.readouterr().err
    data = f"args.train_data=[{address}]"
    assert main(["train", *done.command("--dry-run", f"args.load={address}", data)[1:]]) == 0
    assert f"load: {address}" in capsys.readouterr().out
    for words in (["plan", address, "--gpu", "24"], ["train", address, "--data", "x", "--dry-run"]):
        assert main(words) == 2
        assert "--dry-run and cogfast plan reach no network" in capsys.readouterr().err
    assert not asked

"""Runs in an object store: a real S3 server, faults that are planted, and kills within uploads."""

import errno
import json
import os
import random
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from cogfast.__main__ import main
from cogfast.core import run_lock
from cogfast.core.addresses import url_of
from cogfast.core.run_lock import RunLock
from cogfast.distributed.process_groups import ProcessGroups
from cogfast.extensions.stores import mirror, store
from cogfast.extensions.stores.mirror import Uploads, copy_of, download_run, folder_of
from cogfast.extensions.stores.stored_folder import StoredFolder
from cogfast.model.weights.checkpoint_manifest import is_in_run, read_manifest
from cogfast.model.weights.open import open_source
from cogfast.train.checkpoint.snapshot import DamagedWeights, Snapshot
from cogfast.train.keys import TrainKeys
from cogfast.train.phases import _take_adapters
from cogfast.train.run import folder
from cogfast.train.run.folder import adapters_to_resume, checkpoint_to_resume, open_run_folder
from cogfast.train.run.trackers import RunLog
from cogfast.train.trainer import Trainer
from tests.support.interrupted.kills import assert_same_run
from tests.support.refusals import assert_refused
from tests.support.runs import Run
from tests.support.s3_server import Fault, S3Server
from tests.support.tiny_run import launch_ranks, start
from tests.support.tiny_run import run as launch

STEPS = 6
ALONE = ProcessGroups(0, 1, 0, torch.device("cpu"), None, False)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(store, "_PATIENCE", 1.0)
    monkeypatch.setattr(store, "_PART_TRIES", 1)
    yield
    mirror._local_folder.cache_clear()


@pytest.fixture(scope="module")
def stored(shared_run: Run) -> Run:
    """A run whose folders tests put into a store."""
    return shared_run.with_args(train_iters=STEPS, save_interval=2)


@pytest.fixture(scope="module")
def whole(stored: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run on a disk."""
    save = tmp_path_factory.mktemp("whole")
    stored.into(save).train()
    return save


def read_weights(url: str) -> dict[str, torch.Tensor]:
    mirror._local_folder.cache_clear()
    source = open_source(Path(copy_of(url)))
    return {name: source.read(name, None) for name in source.shapes}


def names(url: str) -> set[str]:
    return {name[len(url) + 1 :] for name in store.find(url)}


def run_url(save: str) -> str:
    (name,) = {name.partition("/")[0] for name in names(save)}
    return f"{save}/{name}"


def download(save: str, folder: Path) -> Path:
    """A whole copy of what is in the store, made file by file."""
    for name in names(save):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(store.read(f"{save}/{name}"))
    return folder


def test_a_run_in_a_store_is_that_on_a_disk(server, stored, whole, tmp_path, log, monkeypatch):
    """An upload that fails for good, of step 2, costs that checkpoint alone; other errors pass."""
    monkeypatch.setattr(store, "_PATIENCE", 0.3)
    save = f"{server.url}/runs"
    server.faults = [
        Fault(503, "PUT", "00000002/manifest"),
        Fault("cut", "PUT", "00000004", times=1),
        Fault(503, "PUT", "log.txt", times=1),
    ]
    lines, run = {}, stored.into(save)

    def watch(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/latest"):
            url = f"s3:/{path.rpartition('/checkpoints')[0]}"
            text = store.read(f"{url}/metrics.jsonl").decode()
            lines[len(lines)] = [json.loads(line)["step"] for line in text.splitlines()]

    server.watch = watch
    # The thread that uploads comes late.
    monkeypatch.setattr(Uploads, "ask", lambda self: self._is_over and self._asked.set())
    run.train("args.exit_interval=4", "args.export=all")
    # The store has the lines up to step 4 before it has that checkpoint.
    assert lines[0][:4] == [1, 2, 3, 4]
    url = run_url(save)
    assert "checkpoint of step 2 failed: s3://" in log.text
    # The next save has removed what was left of it.
    assert not any("00000002" in name for name in names(url))
    assert "run.lock" not in names(url)
    # Another machine: nothing of the run is here.
    shutil.rmtree(tmp_path / "local")
    run.resume()
    found = names(url)
    kept = {name.split("/")[1] for name in found if name.startswith("checkpoints/")}
    assert kept == {"00000004", "00000006", "latest"}
    assert {"log.txt", "metrics.jsonl", "training_config.yaml"} <= found
    assert any(name.startswith("tensorboard/") for name in found)
    assert any(name.startswith("checkpoints/00000004/transformer/") for name in found)
    assert store.read(f"{url}/checkpoints/latest") == b"00000006"
    # No two saves of a step have the same files.
    assert "checkpoints/00000006/rank-00000.safetensors" not in found
    assert "resumed s3://" in store.read(f"{url}/log.txt").decode()
    assert f"--resume {url}" in log.text
    assert_same_run(whole, Path(download(save, tmp_path / "all")), STEPS)
    # This machine keeps no weights.
    assert not [*(tmp_path / "local" / "runs").rglob("rank-*")]


@pytest.mark.soak
def test_latest_stays_with_a_run_that_has_taken_the_lock(server, stored):
    save = f"{server.url}/taken"

    def watch(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("00000004/manifest.json"):
            store.write(f"{run_url(save)}/run.lock", b"process 7 on elsewhere 00 1.0\n")

    server.watch = watch
    line = "process 7 on elsewhere has taken the folder"
    assert_refused(stored.into(save).train, line, RuntimeError)
    assert store.read(f"{run_url(save)}/checkpoints/latest") == b"00000002"


@pytest.mark.soak
def test_a_step_that_is_saved_again_stays_whole_until_its_manifest_is_replaced(server, stored):
    save = f"{server.url}/again"
    run = stored.into(save)
    run.train(steps=4)
    url = run_url(save)
    before = names(f"{url}/checkpoints/00000004")
    weights = read_weights(f"{url}/checkpoints/00000004")
    # Like a kill before the manifest: the new file lies beside the old one.
    server.faults = [Fault(403, "PUT", "00000004/manifest")]
    run = run.with_words(f"args.resume={url}/checkpoints/00000002")
    assert_refused(lambda: run.train(steps=4), "step 4 could not be saved", RuntimeError)
    assert names(f"{url}/checkpoints/00000004") > before
    found = read_weights(f"{url}/checkpoints/00000004")
    assert all(torch.equal(found[name], value) for name, value in weights.items())
    server.faults = []
    run.train(steps=4)
    assert len(names(f"{url}/checkpoints/00000004")) == 2


def test_commands_read_a_run_in_a_store_and_find_damage_by_checksums_and_sizes(
    server, tmp_path, capsys
):
    url = run_url(f"{server.url}/runs")
    assert main(["convert", url, str(tmp_path / "out"), "--to", "diffusers"]) == 0
    written = open_source(tmp_path / "out")
    assert torch.equal(
        written.read("patch_embedding.weight", None), read_weights(url)["patch_embedding.weight"]
    )
    assert main(["convert", f"{url}x", str(tmp_path / "none"), "--to", "peft"]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"cogfast: {url}x: no such folder or file; correct the address"
    (file,) = (n for n in store.find(f"{url}/checkpoints/00000006") if n.endswith(".safetensors"))
    content = bytearray(store.read(file))
    content[-5] ^= 1
    store.write(file, bytes(content))
    line = "is damaged<...>last good one<...>give s3://<...>/00000004"
    assert_refused(lambda: read_weights(url), line)
    store.write(file, bytes(content[:-1]))
    assert_refused(lambda: read_weights(url), f"has {len(content) - 1} bytes instead of")
    content[-5] ^= 1
    store.write(file, bytes(content))


def test_places_that_cannot_be_written_are_named_first(server, stored):
    def assert_no_run(save: str, line: str, *words: str) -> None:
        assert_refused(lambda: stored.into(save).train(*words), line)

    for save, reason in (
        ("s3://no-such-bucket/x", "no such bucket; create it"),
        ("none://x/y", "<...>install the package"),
    ):
        assert_no_run(save, f"args.save={save}: cannot be written: {reason}")
    server.faults = [Fault(403, "PUT")]
    assert_no_run(f"{server.url}/x", "args.save=<...>access denied<...>check the credentials")
    server.faults = []
    store.write(f"{server.url}/data/0.mp4", b"x")
    server.requests.clear()
    nowhere = f"{server.url}/none"
    # A folder that is no run is neither downloaded nor locked.
    for place in ("data", "data/checkpoints/3"):
        line = f"args.resume=<...>/{place}: <...> set it to the folder of"
        assert_no_run(nowhere, line, f"args.resume={server.url}/{place}")
    assert not is_in_run(Path("checkpoints/experiment"))
    assert not [path for _, path in server.requests if path.endswith(("0.mp4", "run.lock"))]
    assert_no_run(nowhere, "no run of 'tiny'", "args.resume=latest")
    assert_no_run(nowhere, "has no checkpoint of cogfast", f"args.resume={nowhere}")


def test_a_file_that_cannot_be_uploaded_holds_up_no_other_and_is_named(
    server, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    run = folder_of(f"{server.url}/left")
    run.mkdir(parents=True)
    server.faults = [Fault(503, "PUT", "/log.txt")]
    with closing(Uploads(run)):
        for name in ("a/video.mp4", "log.txt", "metrics.jsonl"):
            (run / name).parent.mkdir(exist_ok=True)
            (run / name).write_text(name)
    assert names(str(url_of(run))) == {"a/video.mp4", "metrics.jsonl"}
    puts = [path.rpartition("/")[2] for method, path in server.requests if method == "PUT"]
    assert puts[-2:] == ["metrics.jsonl", "video.mp4"]  # a video waits for what is small
    assert f"not all uploaded (first: log.txt); they are in {run}" in caplog.text


def test_a_checkpoint_that_no_upload_takes_stays_on_the_machine(server, stored, monkeypatch, log):
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    save = f"{server.url}/away"

    def watch(method: str, path: str) -> None:
        if method == "PUT" and "/checkpoints/" in path:  # from then on nothing is answered
            server.faults = [Fault(503)]

    server.faults, server.watch = [Fault(503, "PUT", "/checkpoints/")], watch
    run = stored.into(save)
    with pytest.raises(RuntimeError, match="step 3 could not be saved") as caught:
        run.train("args.exit_interval=3")
    # A line of its own has the whole command, however long the paths are.
    pattern = r"run `aws s3 cp --recursive (\S+) (\S+)`, then .* --resume (\S+)$"
    (copy,) = re.finditer(pattern, log.text, re.MULTILINE)
    server.faults, server.watch = [], lambda method, path: None
    assert copy[2] == copy[3] == f"{run_url(save)}/checkpoints/00000003"
    assert not any("/checkpoints/" in name for name in names(save))
    here = Path(copy[1])
    assert copy[0] in (here.parents[1] / "log.txt").read_text()
    assert f"its files are in {here}, but not in the store" in str(caught.value)
    # That of step 2, which failed as well, is gone.
    assert [path.name for path in here.parent.iterdir()] == ["00000003"]
    for file in here.iterdir():  # what the command does
        store.upload(file, f"{copy[2]}/{file.name}")
    # Nothing is left to train, but later commands find what was copied.
    run.train(f"args.resume={copy[3]}", steps=3)
    assert store.read(f"{run_url(save)}/checkpoints/latest") == b"00000003"
    run.resume()
    assert "checkpoints/00000006/manifest.json" in names(run_url(save))
    assert "00000003 at step 3" in store.read(f"{run_url(save)}/log.txt").decode()


def test_any_error_names_the_files_that_are_not_uploaded(caplog):
    def fail() -> None:
        raise error

    error, hint = ValueError("of a sample"), "its files are in /here"
    writer = SimpleNamespace(saved=None, folder=SimpleNamespace(unsent=Path("/here")))
    given = {"how_to_upload": lambda: "run `copy`", "how_to_resume": lambda: hint}
    launch = SimpleNamespace(log=RunLog(), held=ExitStack(), groups=ALONE)
    parts = SimpleNamespace(hints=SimpleNamespace(**given), launch=launch, writer=writer)
    with pytest.raises(ValueError, match="of a sample"):
        Trainer.train(SimpleNamespace(_train=fail, parts=parts))
    assert error.__notes__ == [hint] and "run `copy`" in caplog.text


def test_files_that_are_not_uploaded_stay_until_a_later_save_is_complete(
    server, stored, monkeypatch, caplog
):
    monkeypatch.setattr(store, "_PATIENCE", 0.1)
    save, check, rounds = f"{server.url}/damaged", Snapshot._check_finite, []

    def check_finite(snapshot: Snapshot) -> None:
        (folder,) = folder_of(save).glob("*/checkpoints")
        rounds.append(sorted(path.parent.name for path in folder.glob("*/rank-*")))
        if len(rounds) == 2:
            raise DamagedWeights("its weights are not finite")
        if len(rounds) == 3:  # a disk for one checkpoint
            server.faults = []
            raise OSError(errno.ENOSPC, "No space left on device")
        check(snapshot)

    monkeypatch.setattr(Snapshot, "_check_finite", check_finite)
    server.faults = [Fault(503, "PUT", "/checkpoints/")]
    stored.into(save).train()
    # That of step 2 is there when that of step 4 is refused, and after it, until there is no place for both.
    assert rounds == [[], ["00000002"], ["00000002"], []]
    assert "not finite; the previous one is kept, and /" in caplog.text
    assert "00000002 stays until a later one is complete here" in caplog.text
    assert not [*folder_of(save).rglob("rank-*")] and not [*folder_of(save).rglob("00000002")]
    url = run_url(save)
    assert store.read(f"{url}/checkpoints/latest") == b"00000006"


TWO_MACHINES = """
import os, sys
from contextlib import closing
from types import SimpleNamespace
from cogfast.extensions.stores.mirror import Uploads, folder_of
from cogfast.data.bad_samples import BadSampleLog
from cogfast.distributed.model_batches import ModelBatches
from cogfast.distributed.process_groups import start_processes
from cogfast.extensions.sample.generate import take_to_main
rank = os.environ["RANK"]
os.environ |= {"LOCAL_RANK": "0", "COGFAST_LOCAL_CACHE": f"{sys.argv[2]}/{rank}"}
groups, run = start_processes(), folder_of(sys.argv[1])
with closing(Uploads(run, is_main=groups.is_main)):
    log = BadSampleLog(run / "bad_samples.jsonl", num_samples=10, max_bad_fraction=0.3)
    batches = ModelBatches(SimpleNamespace(bad_samples=log), groups, has_own_files=True)
    (run / f"{rank}.mp4").write_text(rank)
    take_to_main(run, ["0.mp4", "1.mp4"], [f"{rank}.mp4"], groups)
    log.add(f"a{rank}", "cut")
    batches.share_bad()
    log.add(f"b{rank}", "cut")
    try:
        batches.share_bad()
    except ValueError as error:
        (run / f"error-{rank}").write_text(str(error))
groups.close()
"""


def test_machines_with_folders_of_their_own_share_bad_samples_and_videos(server, tmp_path):
    url = f"{server.url}/two"
    launch_ranks(2, "-c", TWO_MACHINES, url, str(tmp_path))
    lines = store.read(f"{url}/bad_samples.jsonl").decode().splitlines()
    assert sorted(json.loads(line)["path"] for line in lines) == ["a0", "a1", "b0", "b1"]
    # All samples count: 2 of a machine's own would be within the limit of 3.
    for rank in (0, 1):
        assert store.read(f"{url}/error-{rank}").decode().startswith("4/10 videos unreadable")
    (scored,) = tmp_path.glob("0/runs/*/*/two")
    assert [(scored / f"{rank}.mp4").read_text() for rank in (0, 1)] == ["0", "1"]


def test_an_empty_lock_in_a_store_is_named_once(server, monkeypatch, log):
    monkeypatch.setattr(run_lock, "_LEASE", 0.6)
    monkeypatch.setattr(run_lock, "_SETTLING", 0.2)
    run = folder_of(f"{server.url}/unnamed")
    run.mkdir(parents=True)
    store.write(f"{url_of(run)}/run.lock", b"")
    with RunLock(run) as lock:
        lock.check()
    line = f"{url_of(run)}: an unknown process (the lock is empty) has trained in it; waiting up to"
    assert log.text.count("has trained in it") == 1 and line in log.text


def test_a_lock_in_a_store(server, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 20.0)
    # Much longer than a renewal takes beside other work
    monkeypatch.setattr(run_lock, "_LEASE", 3.0)
    monkeypatch.setattr(run_lock, "_BETWEEN_RENEWALS", 0.2)
    monkeypatch.setattr(run_lock, "_SETTLING", 0.3)
    run = folder_of(f"{server.url}/locked")
    other = tmp_path / "other" / "runs" / f"{server.url}/locked"  # as on another machine
    for place in (run, other):
        place.mkdir(parents=True)
    with RunLock(run) as lock:
        line = "s3://<...>/locked: process <...> on <...> is training in it"
        assert_refused(lambda: RunLock(other), line)
        lock.check()
    assert names(str(url_of(run))) == set()
    # The holder on another machine is gone: its object stays the same.
    store.write(f"{url_of(run)}/run.lock", b"process 1 on elsewhere 00 1.0\n")
    with RunLock(run) as lock:
        lock.check()
        store.write(f"{url_of(run)}/run.lock", b"process 1 on elsewhere 00 2.0\n")
        line = "process 1 on elsewhere has taken the folder"
        assert_refused(lock.check, line, RuntimeError)
    assert names(str(url_of(run))) == {"run.lock"}
    # One that was killed on this machine is known to be gone.
    monkeypatch.setattr(run_lock, "_LEASE", 60.0)
    (run / "run.lock").write_text("process 1 on elsewhere 00\n")
    start = time.monotonic()
    with RunLock(run) as lock:
        assert time.monotonic() - start < 30
        # A run that took the folder has ended since.
        store.remove([f"{url_of(run)}/run.lock"])
        assert_refused(lock.check, "another process has taken the folder", RuntimeError)


def test_objects_of_files_that_this_machine_has_lost_stay(server):
    run = folder_of(f"{server.url}/cleaned")
    (run / "hang").mkdir(parents=True)
    with closing(Uploads(run)) as uploads:
        for name in ("log.txt", "hang/rank-0.txt", "hang/rank-1.txt"):
            (run / name).write_text("x" * ("1" not in name))
        uploads.upload()
        assert names(str(url_of(run))) == {"log.txt", "hang/rank-0.txt"}, "no empty ones"
        (run / "hang" / "rank-0.txt").write_text("")
        uploads.upload()
        shutil.rmtree(run)
    assert names(str(url_of(run))) == {"log.txt"}


def test_an_object_with_dots_in_its_name_is_not_written_beside_the_folder(server, tmp_path):
    import boto3

    s3 = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    s3.put_object(Bucket=server.bucket, Key="dots/run/../../evil", Body=b"x")
    place = folder_of(f"{server.url}/dots/run")
    assert_refused(lambda: download_run(place), "/evil: has .. in its name", store.StoreError)
    assert not [*tmp_path.rglob("evil")]


def test_adapters_of_another_trainer_are_copied_to_each_machine(server):
    file = f"{server.url}/theirs/checkpoint-3/pytorch_lora_weights.safetensors"
    store.write(file, b"adapters")
    step, args = _take_adapters(file, TrainKeys(), ALONE)
    assert step == 3 and Path(args.load_lora).read_bytes() == b"adapters"
    # Their folder, which may be large, is neither locked nor downloaded.
    store.write(large := f"{server.url}/theirs/checkpoint-3/pytorch_model/0_states.pt", b"x")
    server.requests.clear()
    for place in ({"save": f"{server.url}/ours"}, {"run_folder": f"{server.url}/own"}):
        args = TrainKeys(resume=f"{server.url}/theirs/checkpoint-3/", **place)
        with ExitStack() as held:
            run, checkpoint, _ = open_run_folder(args, ALONE, held)
            assert str(url_of(run)).startswith([*place.values()][0])
            assert adapters_to_resume(checkpoint).read_bytes() == b"adapters"
            assert adapters_to_resume(checkpoint_to_resume(args)) is not None
    assert not [p for _, p in server.requests if p.endswith((large[-12:], "theirs/run.lock"))]


def test_a_url_is_read_again_once_its_files_have_changed(server):
    for content in (b"2", b"4"):
        store.write(f"{server.url}/model/latest", content)
        assert Path(copy_of(f"{server.url}/model"), "latest").read_bytes() == content


def test_nothing_is_uploaded_after_the_lock_is_lost(server, caplog):
    run = folder_of(f"{server.url}/fenced")
    run.mkdir(parents=True)
    with RunLock(run) as lock:
        for holder in (None, b"process 7 on elsewhere 00 1.0\n"):
            if holder is not None:
                store.write(f"{server.url}/fenced/run.lock", holder)
            with closing(Uploads(run, lock.check)):
                (run / f"file-{holder is None}").write_text("x")
    assert names(f"{server.url}/fenced") == {"run.lock", "file-True"}

    # It may be lost while many files are uploaded.
    def watch(method: str, path: str) -> None:
        if method == "PUT" and path.endswith("/1.mp4"):
            server.watch = lambda method, path: None
            store.write(f"{server.url}/fenced/run.lock", b"process 7 on elsewhere 00 2.0\n")

    (run / "run.lock").unlink()
    store.remove([f"{server.url}/fenced/run.lock"])
    with RunLock(run) as lock, closing(Uploads(run, lock.check)):
        for number in range(4):
            (run / f"{number}.mp4").write_text("x")
        server.watch = watch
    assert names(f"{server.url}/fenced") == {"run.lock", "file-True", "0.mp4", "1.mp4"}
    assert "process 7 on elsewhere has taken the folder" in caplog.text
    # An upload that outlives the run writes nothing over the next one's files.
    assert_refused(lock.check, "/fenced: the run has ended", RuntimeError)


def test_each_machine_opens_the_folder_of_a_run_in_its_own_place(
    server, stored, tmp_path, monkeypatch
):
    """The first test has written the run. New runs of one second have two names."""
    url = run_url(f"{server.url}/runs")

    def opened(**given: str) -> tuple[Path, Path | None]:
        with ExitStack() as held:
            return open_run_folder(TrainKeys(**given), ALONE, held)[:2]

    # Its checkpoints are read where another run continues from them.
    for target in (f"{server.url}/two", str(tmp_path / "two")):
        run, checkpoint = opened(run_folder=target, resume=url)
        assert run == folder_of(target) and read_manifest(checkpoint)["step"] == STEPS
    run, checkpoint = opened(save=f"{server.url}/other", resume=f"{url}/checkpoints")
    assert run == folder_of(url) and checkpoint == run / "checkpoints" / "00000006"

    # A machine that shares the cache of the first one leaves its files alone.
    class OnSecond(ProcessGroups):
        def on_main(self, make):
            names = [url, f"{url}/checkpoints/00000006"]
            return names, f"{url}/run.lock", "process 1 on first 00"

        def gather(self, value):
            return [value, value]

    second = OnSecond(1, 2, 0, torch.device("cpu"), None, False)
    theirs, _, check_owner = open_run_folder(TrainKeys(), second, ExitStack())
    assert url_of(theirs) == url and theirs != run and (run / "metrics.jsonl").is_file()
    # It writes only while the lock is rank 0's.
    store.write(f"{url}/run.lock", b"process 1 on first 00 2.0\n")
    check_owner()
    store.write(f"{url}/run.lock", b"process 1 on third 00 2.0\n")
    assert_refused(check_owner, "process 1 on third has taken the folder", RuntimeError)
    store.remove([f"{url}/run.lock"])
    text = stored.config(f"args.load={url}").describe()
    assert f"load: {url} " in text and "/folders/" not in text

    times = iter([datetime(2026, 1, 1), datetime(2026, 1, 1), datetime(2026, 1, 2)])
    monkeypatch.setattr(folder, "datetime", SimpleNamespace(now=lambda zone: next(times)))
    with ExitStack() as held:
        for day in (1, 2):
            monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / f"machine-{day}"))
            args = TrainKeys(save=f"{server.url}/new", experiment_name="a")
            run, _, check_owner = open_run_folder(args, ALONE, held)
            assert run.name == f"a-2026-01-0{day}-00-00-00" and check_owner.__self__.run == run


def test_checkpoints_of_other_trainers_stay_in_the_layout_finetune(server):
    source = f"{run_url(f'{server.url}/runs')}/checkpoints/00000006"
    url = f"{server.url}/finetune/a-2026-01-01-00-00-00"
    for step in (8, 10):
        for name in names(source):
            store.write(f"{url}/checkpoint-{step}/{name}", store.read(f"{source}/{name}"))
    store.write(f"{url}/latest", b"checkpoint-10")
    args = TrainKeys(save=f"{server.url}/finetune", experiment_name="a", resume="auto")
    newest = checkpoint_to_resume(args)
    assert newest.name == "checkpoint-10"
    for name in ("3/lora", "4/lora", "4/rank-00000.safetensors"):
        store.write(f"{url}/checkpoint-{name}", b"x")
    StoredFolder(newest.parent, "finetune", ALONE).prune(newest, 1, lambda _: set())
    left = {name.partition("/")[0] for name in names(url)}
    assert left == {"checkpoint-3", "checkpoint-4", "checkpoint-10", "latest"}
    assert names(f"{url}/checkpoint-4") == {"lora"}


def kill_at(
    server: S3Server, process: list, is_wanted: Callable[[str, str], bool], number: int
) -> None:
    """Kill the launcher and all ranks when the server gets the wanted request of that number."""
    count, lock = [0], threading.Lock()

    def watch(method: str, path: str) -> None:
        if not process or not is_wanted(method, path):
            return
        with lock:
            count[0] += 1
            if count[0] != number:
                return
            launcher = psutil.Process(process[0].pid)
            for each in (launcher, *launcher.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    each.kill()

    server.watch = watch


@pytest.mark.soak
@pytest.mark.parametrize("first", range(0, 10, 5))
def test_kills_within_uploads_change_nothing(server, stored, tmp_path, monkeypatch, first):
    """SIGKILL of two ranks at the n-th PUT of a checkpoint's files, 5 times in a run; 10 in all."""
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    monkeypatch.delenv(store.CACHE_VARIABLE)
    rng = random.Random(first)
    run = stored.with_words("deepspeed.train_micro_batch_size_per_gpu=2", "args.train_iters=16")
    disk, save = tmp_path / "disk", f"{server.url}/kills-{first}"
    assert launch(run.into(disk).command(), 2).returncode == 0
    words = run.into(save).command("--resume", "auto")
    is_part = lambda method, path: (
        method in ("PUT", "POST") and f"kills-{first}/" in path and ("/checkpoints/" in path)
    )
    for i in range(5):
        # Every second machine is a new one.
        monkeypatch.setenv(store.CACHE_VARIABLE, str(tmp_path / f"machine-{i // 2}"))
        before, process = set(names(save)), []
        kill_at(server, process, is_part, rng.randint(1, 8))
        process.append(start(words, 2, is_fresh=True))
        output, _ = process[0].communicate(timeout=300)
        assert process[0].returncode != 0, output
        saved = [name for name in before if name.endswith("/latest")]
        # The newest checkpoint before is still whole.
        for name in saved:
            folder = f"{save}/{name}".rpartition("/")[0]
            newest = store.read(f"{save}/{name}").decode()
            assert f"{folder}/{newest}/manifest.json" in store.find(folder)
    server.watch = lambda method, path: None
    done = launch(words, 2, timeout=300)
    assert done.returncode == 0, done.stdout
    assert_same_run(disk, download(save, tmp_path / "all"), 16)

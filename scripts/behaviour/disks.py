"""Compares what lies on disks: runs, caches and indices that an earlier commit wrote are resumed and read.

`before` of a case made its files; a comparison unpacks them, runs `after`, and compares what is
printed and every file with what the commit that recorded them did. It also runs `before` from the data
alone and compares that with the recorded files.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from scripts.behaviour.difference import Difference
from scripts.behaviour.on_disk.archive import (
    TIME,
    name_user_indices,
    pack,
    rename_user_indices,
    set_times,
    unpack,
)
from scripts.behaviour.on_disk.cases import CASES, SOURCES, Case, Stage, train
from scripts.behaviour.on_disk.launch import (
    BUCKET,
    Bucket,
    bucket,
    command,
    launch,
    pin,
    pinned_machine,
)
from scripts.behaviour.on_disk.snapshot import compare_texts, output_text, plain_name, snapshot

DATA = ("data", "configs", "own", "fakes")
_PROCESSES = 2
_EXPECTED = "expected"  # folder of an archive
_STORE = threading.Lock()  # all servers of a process have the same buckets
_ID = re.compile(r"\b(?<=evaluated-)[0-9a-f]{8}\b")  # of a run in W&B, drawn


def record(folder: Path, work: Path, names: Sequence[str] = ()) -> None:
    """Write the archives of all cases, or of those with these names; "data" is what they start from."""
    pin()
    root = work / "recorded"
    if names and "data" not in names:
        unpack(folder / "data.tar.xz", root)
    else:
        from scripts.behaviour.on_disk.data import write_data

        if not names:
            shutil.rmtree(folder, ignore_errors=True)
        write_data(root)
        set_times(root)
        _write_base(root)
        set_times(root)
        pack(folder / "data.tar.xz", root, list(DATA), {})
        (folder / "machine.json").write_text(json.dumps(pinned_machine(), indent=1) + "\n")
    unpack(folder / "data.tar.xz", root.with_name("unpacked"))
    losses = json.loads((folder / "losses.json").read_text()) if names else {}
    cases = [case for case in CASES if not names or case.name in names]
    with ThreadPoolExecutor(_PROCESSES) as pool:
        recorded = pool.map(lambda case: _record(case, folder, root), cases)
        losses |= {case.name: found for case, found in zip(cases, recorded, strict=True)}
    text = json.dumps(losses, indent=1, sort_keys=True) + "\n"
    (folder / "losses.json").write_text(text)


def record_again(folder: Path, work: Path, small: bool) -> None:
    """Keep the files that earlier commits wrote, and record again what this tree makes of them."""
    pin()
    for case in (case for case in CASES if case.is_small or not small):
        archive = folder / f"{case.name}.tar.xz"
        kept, run, new = (work / name / case.name for name in ("kept", "recorded", "again"))
        for root in (kept, run, new):
            unpack(folder / "data.tar.xz", root)
        for root in (kept, run):
            unpack(archive, root)
        texts = {
            f"{_EXPECTED}/{case.name}/{kind}/{name}.json": json.dumps(found, indent=1)
            for kind, stages in (
                ("before", _run_stages(case, case.before, new, None)),
                ("after", _run_stages(case, case.after, run, TIME)),
            )
            for name, found in stages.items()
        }
        shutil.rmtree(kept / _EXPECTED)
        pack(archive, kept, list(case.folders), texts)
        for root in (kept, run, new):
            shutil.rmtree(root)
        print(f"{case.name}: {archive.stat().st_size} bytes", flush=True)
    (folder / "machine.json").write_text(json.dumps(pinned_machine(), indent=1) + "\n")


def _write_base(root: Path) -> None:
    """Write the weights from which adapters start, and the indices of headers of all data."""
    for number, words in enumerate(SOURCES):
        _run_once(root, train(f"base{number}", *words))
    _run_once(root, train("base-i2v", family="5b_i2v"))
    for name, run in (("base", "base0"), ("base-i2v", "base-i2v")):
        _run_once(root, command("convert", f"runs/{run}", f"data/{name}", "--to", "sat"))


def _run_once(root: Path, program: list[str]) -> None:
    status, output = launch(root, root / "user" / "base", program, 1, {})
    assert status == 0, output


def _record(case: Case, folder: Path, root: Path) -> list[float]:
    """Run a case: `after` in another scratch folder, into which its archive was unpacked."""
    start = time.monotonic()
    before = _run_stages(case, case.before, root, None)
    names = [[str(path)] for path in (root / "data").rglob("*") if path.is_file()]
    for shard in (root / "data").rglob("*.tar"):
        places = (shard, shard.relative_to(root))
        names += [[str(place), key] for place in places for key in ("caption", "")]
    names += [[f"s3://{BUCKET}/data/videos"], [""]]
    name_user_indices(root, root / case.user, names)
    archive = folder / f"{case.name}.tar.xz"
    pack(archive, root, list(case.folders), {})
    unpacked = root.with_name("unpacked")
    unpack(archive, unpacked)
    after = _run_stages(case, case.after, unpacked, TIME)
    texts = {
        f"{_EXPECTED}/{case.name}/{kind}/{name}.json": json.dumps(found, indent=1)
        for kind, stages in (("before", before), ("after", after))
        for name, found in stages.items()
    }
    pack(archive, root, list(case.folders), texts)
    for found in (*before.values(), *after.values()):
        if found["status"] not in (0, -9):
            print(f"{case.name}: status {found['status']}\n{found['output']}", file=sys.stderr)
    losses = _losses({**before, **after})
    seconds = time.monotonic() - start
    size = archive.stat().st_size
    print(f"{case.name}: {len(losses)} losses, {size} bytes, {seconds:.1f} s", flush=True)
    return losses


def _run_stages(
    case: Case, stages: Sequence[Stage], root: Path, mtime: int | None
) -> dict[str, dict]:
    """Run stages one by one. mtime: that of the files of an archive; None if there are none yet."""
    rename_user_indices(root, root / case.user)
    with ExitStack() as held:
        store = _store(case, root, held)
        return {stage.name: _do(case, stage, root, store, mtime) for stage in stages}


def _losses(expected: dict[str, dict]) -> list[float]:
    """Return the losses of the run that the stages of a case have written."""
    for files in [found["files"] for found in reversed(expected.values())]:
        for name, text in files.items():
            if name.endswith("/metrics.jsonl"):
                rows = map(json.loads, text.splitlines())
                return [row["loss"] for row in rows if "loss" in row]
    return []


def _store(case: Case, root: Path, held: ExitStack) -> Bucket | None:
    if not case.is_stored:
        return None
    held.enter_context(_STORE)
    store = held.enter_context(bucket())
    if not (root / "bucket").is_dir():
        shutil.copytree(root / "data" / "clips", root / "bucket" / "data")
    store.upload(root / "bucket")
    return store


def _do(
    case: Case, stage: Stage, root: Path, store: Bucket | None, mtime: int | None = None
) -> dict:
    """Run a stage and return what it has printed and left. mtime: also list the files of caches and
    indices that do not have it, since they were written again."""
    variables = dict(case.variables) | (store.variables if store else {})
    for name in case.folders:
        if name.startswith("out/"):
            (root / name).mkdir(parents=True, exist_ok=True)
    status, output = launch(
        root, root / case.user, stage.program, stage.ranks, variables, stage.fault
    )
    if store is not None:
        store.download(root / "bucket")
    files = snapshot(root, list(case.folders))
    # torchrun's lines have times and files of its own; the run's are in its log.txt.
    text = "" if "torch.distributed.run" in stage.program else output_text(output, root)
    if status not in (0, -9):
        text = output_text(output, root)
    found = {"status": status, "output": text, "files": files}
    if mtime is not None:
        # Indices of data lie beside it.
        watched = ("data", *(name for name in case.folders if not name.startswith(("runs", "out"))))
        every = (path for name in watched for path in (root / name).rglob("*") if path.is_file())
        written = {plain_name(path, root) for path in every if path.stat().st_mtime != mtime}
        found["written again"] = sorted(
            name
            for name in written
            if "/kernels/" not in name and not name.startswith("bucket/runs")
        )
    return found


def compare(folder: Path, work: Path, small: bool) -> tuple[int, list[Difference]]:
    """Return the number of compared launches, and the differences."""
    if not small:
        pin()
    is_exact = pinned_machine() == json.loads((folder / "machine.json").read_text())
    rule = "in all bits" if is_exact else "by what another processor rounds: 1e-6 in float32"
    print(f"disks: numbers are compared {rule}", flush=True)
    cases = [case for case in CASES if case.is_small or not small]
    with ThreadPoolExecutor(1 if small else _PROCESSES) as pool:
        jobs = [
            (case, is_new) for case in cases for is_new in ((False,) if small else (False, True))
        ]
        roots = {True: work / "again", False: work / "recorded"}
        found = [
            pool.submit(_compare, *job, folder, roots[job[1]], is_exact, small) for job in jobs
        ]
        every = [one.result() for one in found]
    differences = [difference for _, some in every for difference in some]
    return sum(count for count, _ in every), differences


def _compare(
    case: Case, is_new: bool, folder: Path, root: Path, is_exact: bool, is_small: bool
) -> tuple[int, list[Difference]]:
    differences: list[Difference] = []
    kind = "before" if is_new else "after"
    root = (
        root / case.name
    )  # data of its own, too: indices in the format of today are written there
    unpack(folder / "data.tar.xz", root)
    unpack(folder / f"{case.name}.tar.xz", root, f"{_EXPECTED}/" if is_new else "")
    stages = case.before if is_new else case.after
    if is_small:
        stages = tuple(stage for stage in stages if stage.name in ("resume", "cache again"))
    rename_user_indices(root, root / case.user)
    # Which clips and captions are encoded together, and so their last bits, depends on the threads that read.
    is_exact = is_exact and not (is_new and case.has_cache)
    with ExitStack() as held:
        store = _store(case, root, held)
        for count, stage in enumerate(stages):
            expected = root / _EXPECTED / case.name / kind / f"{stage.name}.json"
            found = _do(case, stage, root, store, None if is_new else TIME)
            name = f"{case.name}, {'made again' if is_new else 'recorded'}, {stage.name}"
            recorded = json.loads(expected.read_text())
            if stage.fault:
                recorded, found = _without_logs(recorded), _without_logs(found)
            differences += _differences(name, recorded, found, is_exact, is_new)
            if differences:
                return count + 1, differences  # what follows would repeat them
    return len(stages), differences


def _without_logs(left: dict) -> dict:
    """Keep the checkpoints: how many steps are logged before their thread is killed depends on time."""
    files = {name: text for name, text in left["files"].items() if "/checkpoints/" in name}
    return left | {"output": "", "files": files}


def _differences(
    case: str, recorded: dict, found: dict, is_exact: bool, is_new: bool
) -> Iterator[Difference]:
    if recorded["status"] != found["status"]:
        texts = [f"{one['status']}: {one['output'][-300:]}" for one in (recorded, found)]
        yield Difference("disks", case, "exit status", *texts)
        return
    yield from compare_texts(case, "output", recorded["output"], found["output"], is_exact)
    texts = [json.dumps(one.get("written again")) for one in (recorded, found)]
    if texts[0] != texts[1]:
        yield Difference("disks", case, "files of data and caches that were written again", *texts)
    ours, theirs = recorded["files"], found["files"]
    if list(ours) != list(theirs):
        yield Difference(
            "disks",
            case,
            "files",
            json.dumps([name for name in ours if name not in theirs]),
            json.dumps([name for name in theirs if name not in ours]),
        )
    for name in [name for name in ours if name in theirs]:
        texts = ours[name], theirs[name]
        if is_new:  # a run that is resumed keeps its own
            texts = tuple(re.sub(_ID, "<id>", text) for text in texts)
        yield from compare_texts(case, name, *texts, is_exact)

"""Damaged and hostile run folders: each is used correctly or refused in one line."""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from cogfast.__main__ import main
from cogfast.data.bad_samples import BadSampleLog
from cogfast.model.weights.formats.checkpoint_manifest import (
    RESUMABLE,
    newest_checkpoint,
    read_manifest,
    write_manifest,
)
from cogfast.model.weights.formats.run_checkpoint import open_run
from cogfast.train.run.metrics import _history_until
from tests.support.hostile import Outcome, faults, preload, run_case
from tests.support.tiny_run import losses, run_folder, write_clips, write_config

pytestmark = pytest.mark.forks

UMASK = 0o027


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    data = write_clips(folder / "data", num_clips=4, num_frames=9)
    return write_config(folder / "base.yaml", data, train_iters=4, save_interval=2)


@pytest.fixture(scope="module")
def good(base: Path) -> Path:
    """A run with the checkpoints 2 and 4, made with a umask of its own; tests copy it."""
    preload()
    before = os.umask(UMASK)
    try:
        outcome = run_case(lambda: main(["train", "--base", str(base)]), base.parent)
    finally:
        os.umask(before)
    assert outcome.status == 0, outcome.output
    return run_folder(base.parent / "runs")


def copy_of(good: Path, folder: Path) -> Path:
    return Path(shutil.copytree(good, folder / good.name))


def resume(base: Path, path: Path, root: Path, *overrides: str) -> Outcome:
    """Resume a run or a checkpoint below `root` in a fork: this process never has process groups."""
    argv = ["train", "--base", str(base), f"args.resume={path}", "args.train_iters=5", *overrides]
    return run_case(lambda: main(argv), root)


def assert_refused(outcome: Outcome, match: str) -> None:
    assert not faults(outcome) and outcome.status == 2, outcome.output
    assert re.search(match, outcome.last_line), outcome.last_line


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


def check_flipped_bits(good: Path, folder: Path, seed: int, number: int) -> None:
    run = copy_of(good, folder)
    old, new = run / "checkpoints" / "00000002", run / "checkpoints" / "00000004"
    read_weights(new)
    for path, place in flipped_bits(new, random.Random(seed), number):
        flip_bit(path, place)
        with pytest.raises(ValueError) as refused:
            read_weights(new)
        message = str(refused.value)
        assert message.startswith(f"{new}: cannot be read: "), message
        assert path.name in message  # "its manifest.json has no checksums", where a key is damaged
        assert message.endswith(f"the last good one is that of step 2: --resume {old}"), message
        flip_bit(path, place)
    read_weights(new)


def test_a_flipped_bit_is_refused_wherever_it_is(good: Path, tmp_path: Path) -> None:
    check_flipped_bits(good, tmp_path, seed=0, number=5)


@pytest.mark.soak
def test_many_flipped_bits_are_refused(good: Path, tmp_path: Path) -> None:
    check_flipped_bits(good, tmp_path, seed=1, number=1000)


def test_a_resume_refuses_a_flipped_bit_of_a_tensor(base: Path, good: Path, tmp_path: Path) -> None:
    """The file's size and header are intact: without checksums the run would resume from it, as it
    does on request. The last good checkpoint that the error names has correct checksums."""
    run = copy_of(good, tmp_path)
    old, new = run / "checkpoints" / "00000002", run / "checkpoints" / "00000004"
    weights = new / "rank-00000.safetensors"
    flip_bit(weights, 8 * weights.stat().st_size - 100)
    match = f"rank-00000.safetensors is damaged.*step 2: --resume {old}$"
    assert_refused(resume(base, run, tmp_path), match)
    outcome = resume(base, run, tmp_path, "args.verify_checkpoints=false", "args.keep_last=0")
    assert outcome.status == 0 and len(losses(run)) == 5, outcome.output
    flip_bit(old / "rank-00000.safetensors", 8 * 200_000)
    shutil.rmtree(run / "checkpoints" / "00000005")
    assert_refused(resume(base, new, tmp_path), "its folder has no other checkpoint")


def test_a_checkpoint_without_checksums_is_resumed(base: Path, good: Path, tmp_path: Path) -> None:
    """Earlier versions wrote no checksums; a current checkpoint without them is refused."""
    run = copy_of(good, tmp_path)
    file = newest_checkpoint(run) / "manifest.json"
    manifest = json.loads(file.read_text())
    del manifest["checksum"]
    file.write_text(json.dumps(manifest))
    assert_refused(resume(base, run, tmp_path), "its manifest.json has no checksums; the last good")
    del manifest["checksums"]
    file.write_text(json.dumps(manifest | {"format": "cogfast-checkpoint-2"}))
    outcome = resume(base, run, tmp_path)
    assert outcome.status == 0 and len(losses(run)) == 5, outcome.output


METRICS = {
    "bytes that are no text": b"\xff\xfe\x00 1\n",
    "another list": b"[1, 2]\n",
    "no step": b'{"loss": 1.0}\n',
    "text for a number": b'{"step": 1, "loss": "x"}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
    "a number beyond floats": b'{"step": 1e999}\n',
}


@pytest.mark.parametrize("what", METRICS)
def test_damaged_metrics_are_set_aside(
    tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readable lines are kept, and the damaged file is renamed."""
    file = tmp_path / "metrics.jsonl"
    lines = b'{"step": 1, "loss": 2.0}\n' + METRICS[what] + b'{"step": 2, "loss": null}\n'
    file.write_bytes(lines + b'{"step": 3, "loss": 2.0}\n{"step": 4')
    assert _history_until(2, file) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]
    assert len(file.read_text().splitlines()) == 2
    assert (tmp_path / "metrics.damaged-1.jsonl").read_bytes().startswith(lines)
    assert caplog.text.count("is damaged (line 2: ") == 1
    caplog.clear()
    assert len(_history_until(2, file)) == 2 and caplog.text == ""


def test_a_pipe_or_folder_in_place_of_a_log_is_set_aside(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    (tmp_path / "bad_samples.jsonl").mkdir()
    assert _history_until(2, tmp_path / "metrics.jsonl") == []
    log = BadSampleLog(tmp_path / "bad_samples.jsonl", 100)
    assert log.add("a", "broken")
    assert {path.name for path in tmp_path.iterdir()} == {
        "metrics.jsonl",
        "metrics.damaged-1.jsonl",
        "bad_samples.jsonl",
        "bad_samples.damaged-1.jsonl",
    }


@pytest.mark.parametrize("line", [b"\xff\n", b"[]\n", b"7\n", b'{"path": "a"}\n', b"null\n"])
def test_a_damaged_list_of_bad_samples_is_set_aside(
    tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "bad_samples.jsonl"
    file.write_bytes(b'{"path": "b", "reason": "x"}\n' + line)
    assert BadSampleLog(file, 100).add("a", "broken")
    assert json.loads(file.read_text()) == {"path": "a", "reason": "broken"}
    assert (tmp_path / "bad_samples.damaged-1.jsonl").read_bytes().endswith(line)
    assert "is damaged" in caplog.text


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"../../x", b"{}", b"-1", b"9" * 100])
def test_a_damaged_latest_names_the_last_good_checkpoint(
    good: Path, tmp_path: Path, content: bytes
) -> None:
    run = copy_of(good, tmp_path)
    latest = run / "checkpoints" / "latest"
    latest.write_bytes(content)
    match = f"latest: damaged.*: --resume {run}/checkpoints/00000004$"
    with pytest.raises(ValueError, match=match):
        newest_checkpoint(run)
    latest.unlink()
    with pytest.raises(ValueError, match="latest: missing.*00000004$"):
        newest_checkpoint(run)
    os.mkfifo(latest)
    with pytest.raises(ValueError, match=match):
        newest_checkpoint(run)
    shutil.rmtree(run / "checkpoints" / "00000004")
    latest.unlink()
    assert newest_checkpoint(run) == run / "checkpoints" / "00000002"  # there is no other


MANIFESTS = {
    "no key": (lambda m: m.pop("counters"), "key counters is missing"),
    "no slices": (lambda m: m.pop("slices"), "key slices is missing"),
    "another type": (lambda m: m.update(parameters=[1]), "parameters=.* must be"),
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
    change, match = MANIFESTS[what]
    change(manifest)
    write_manifest(checkpoint, manifest)
    with pytest.raises(ValueError, match=f"{match}.*--resume {run}/checkpoints/00000002$"):
        read_manifest(checkpoint, RESUMABLE)


def damage(run: Path, draw: random.Random) -> str:
    """Damage something in a run's folder; returns what was done."""
    files = sorted(path for path in run.rglob("*") if path.is_file())
    needed = [p for p in files if p.suffix in (".json", ".safetensors", ".yaml", ".jsonl")]
    path = draw.choice([*needed, run / "checkpoints" / "latest"])
    content = path.read_bytes()
    how = draw.choice(list(DAMAGES))
    path.unlink()
    changed = DAMAGES[how](content, draw)
    if changed is not None:
        path.write_bytes(changed)
    elif how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "another file":
        shutil.copy(draw.choice([other for other in files if other != path]), path)
    return f"{path.relative_to(run)}: {how}"


def _flipped(content: bytes, draw: random.Random) -> bytes:
    damaged = bytearray(content)
    damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    return bytes(damaged)


def _huge_number(content: bytes, draw: random.Random) -> bytes:
    places = [m.span() for m in re.finditer(rb"\d+", content)]
    start, end = draw.choice(places) if places else (0, 0)
    return content[:start] + draw.choice([b"9" * 30, b"-1", b"1e999", b"2e9"]) + content[end:]


# {damage: function from a file's bytes to the damaged ones; None: the file is removed}
DAMAGES = {
    "a flipped bit": _flipped,
    "a huge number": _huge_number,
    "cut short": lambda content, draw: content[: draw.randrange(len(content))],
    "missing": lambda content, draw: None,
    "another file": lambda content, draw: None,
    "a folder": lambda content, draw: None,
    "a pipe": lambda content, draw: None,
    "no text": lambda content, draw: draw.randbytes(50),
    "other JSON": lambda content, draw: draw.choice([b"[]", b"null", b"{}", b'"x"', b"[[[[" * 999]),
    "a path": lambda content, draw: draw.choice([b"../../x", b"/etc/passwd", b"00000099"]),
    "hostile YAML": lambda content, draw: (
        b"a: &a [x]\nmodel: !!python/object/apply:os.system [ls]\n"
    ),
}


def examine(base: Path, good: Path, folder: Path, seed: int, number: int) -> None:
    """Damaged run folders are used, or refused in one line: nothing else is done."""
    found = []
    for case in range(number):
        draw = random.Random(f"{seed}/{case}")
        root = folder / str(case) / "root"
        root.mkdir(parents=True)
        run = copy_of(good, root)
        what = damage(run, draw)
        arguments = draw.choice(
            [
                ["train", "--base", str(base), f"args.resume={run}", "args.train_iters=5"],
                ["convert", str(run), str(root / "out"), "--to", "cogfast"],
                ["sample", str(run), "--prompt", "a", "--out", str(root / "out")],
            ]
        )
        arguments += ["model.sampler_config.params.num_steps=1"] if arguments[0] == "sample" else []
        outcome = run_case(lambda arguments=arguments: main(arguments), root)
        found += [f"case {case} ({arguments[0]}, {what}): {fault}" for fault in faults(outcome)]
        shutil.rmtree(root.parent)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_damaged_run_folders(base: Path, good: Path, tmp_path: Path) -> None:
    examine(base, good, tmp_path, seed=0, number=12)


@pytest.mark.soak
def test_300_damaged_run_folders(base: Path, good: Path, tmp_path: Path) -> None:
    examine(base, good, tmp_path, seed=1, number=300)


# --- a user without rights ---


def drop_rights() -> None:
    """Give up root's right to read and write files of every mode, as no user has it."""
    library = ctypes.CDLL(None, use_errno=True)
    version_3, nothing = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert library.capset(version_3, nothing) == 0, os.strerror(ctypes.get_errno())


def commands(base: Path, run: Path, out: Path) -> dict[str, list[str]]:
    few = "model.sampler_config.params.num_steps=1"
    prompts = str(base.with_name("prompts.txt"))
    found = {f"to {to}": ["convert", str(run), str(out), "--to", to] for to in ("sat", "cogfast")}
    return found | {
        "train": ["train", "--base", str(base), "args.train_iters=1", f"args.save={out}"],
        "resume": ["train", "--base", str(base), f"args.resume={run}", "args.train_iters=5"],
        "sample": ["sample", str(run), "--prompt-file", prompts, "--out", str(out), few],
        "cache": ["cache", "--base", str(base), f"args.latent_cache={out}"],
        "report": ["report", str(run)],
    }


def examine_rights(good: Path, folder: Path, cases: Iterable[tuple[Path, int, str]]) -> None:
    """Give one file or folder at a time another mode, and run a command on it."""
    found, source = [], good.parents[1]
    for case, (entry, mode, name) in enumerate(cases):
        root = folder / str(case) / "root"
        shutil.copytree(source, root)
        base = root / "base.yaml"
        base.write_text(base.read_text().replace(str(source), str(root)))
        (root / "prompts.txt").write_text("a")
        argv = commands(base, root / good.relative_to(source), root / "out")[name]
        (root / entry).chmod(mode)
        outcome = run_case(lambda argv=argv: (drop_rights(), main(argv))[1], root)
        found += [f"{name}, {entry} has mode {mode:o}: {fault}" for fault in faults(outcome)]
        shutil.rmtree(root.parent)
    assert not found, "\n".join(found)


@pytest.mark.slow
def test_files_without_rights_end_a_command_in_one_line(good: Path, tmp_path: Path) -> None:
    run = good.relative_to(good.parents[1])
    cases = [
        (Path(), 0o555, "to sat"),
        (run / "checkpoints", 0, "report"),
        (run / "checkpoints" / "00000004", 0, "sample"),
        (Path("data/wavelet.safetensors"), 0, "train"),
    ]
    examine_rights(good, tmp_path, cases)


@pytest.mark.soak
def test_every_file_and_command_without_rights(good: Path, tmp_path: Path) -> None:
    source = good.parents[1]
    entries = [path.relative_to(source) for path in (source, *sorted(source.rglob("*")))]
    cases = [
        (entry, mode, name)
        for entry in (*entries, Path("prompts.txt"))
        if entry.parts[:1] != ("scratch",)
        for mode in ((0, 0o555) if (source / entry).is_dir() else (0,))
        for name in commands(source, source, source)
    ]
    examine_rights(good, tmp_path, cases)

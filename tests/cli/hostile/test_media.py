"""Damaged and odd media, captions, manifests and shards beside good clips.

`cogfast train` (two steps) and `cogfast cache` must read the good clips and record the bad ones with
a reason, or end with a one-line error.
"""

import io
import json
import logging
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

from cogfast.__main__ import main
from cogfast.data.datasets import VideoFolder
from tests.cli.hostile.forked_case import Outcome, faults, preload, run_case
from tests.cli.hostile.media_kinds import BAD, EITHER, LEVELS, READ, encode
from tests.support.tiny_run import write_clips, write_config

pytestmark = pytest.mark.forks

CLIP = {"video_size": [32, 32], "fps": 8, "max_num_frames": 9}
NUM_GOOD = 3
FOLDER = "data_video.SFTDataset"
MANIFEST = "cogfast.data.datasets.VideoManifest"
SHARDS = "data_video.VideoDataset"
MANY = READ | BAD | EITHER


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write good clips 0.mp4 to 2.mp4 with captions, and the weights of the wavelet autoencoder."""
    preload()
    logging.getLogger("libav").setLevel(logging.CRITICAL)
    root = write_clips(tmp_path_factory.mktemp("good"), num_clips=NUM_GOOD)
    for number in range(NUM_GOOD):
        encode(root / f"videos/{number}.mp4")
    return root


def _folder(root: Path, good: Path) -> Path:
    """Make a data folder in `root` that links to the good clips."""
    data = root / "data"
    for name in ("videos", "labels"):
        (data / name).mkdir(parents=True)
        for file in (good / name).iterdir():
            (data / name / file.name).symlink_to(file)
    return data


def _config(root: Path, good: Path, source: str | Path, target: str, number: int, **data) -> Path:
    section = {"target": target, "params": {**CLIP, **data}}
    args = {"train_data": [str(source)], "train_iters": 2, "save_interval": None}
    args |= {"max_bad_fraction": 1.0, "decode_timeout": 20.0, "latent_cache": None}
    path = write_config(root / "config.yaml", good, dataset=section, **args)
    # A batch holds all samples, so two steps read every sample twice.
    text = path.read_text().replace("per_gpu: 4", f"per_gpu: {number}")
    path.write_text(text)
    return path


def _both(root: Path, config: Path) -> list[Outcome]:
    """Train, and encode to a cache if training succeeds."""
    base, cache = ["--base", str(config)], f"args.latent_cache={root / 'cache'}"
    outcomes = [run_case(lambda: main(["train", *base]), root, max_wait=120.0)]
    if outcomes[0].status == 0:
        outcomes.append(run_case(lambda: main(["cache", *base, cache]), root, max_wait=120.0))
    for outcome in outcomes:
        assert not faults(outcome), (faults(outcome), outcome.output)
        shown = outcome.output.replace("\n", "").replace("\t", "").replace("\r", "")
        assert shown.isprintable(), outcome.output
    return outcomes


def _recorded(file: Path) -> dict[str, str]:
    """Read bad_samples.jsonl as {name of a clip: reason}; every line must be complete."""
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else [""]
    assert lines.pop() == ""
    rows = [json.loads(line) for line in lines]
    assert all(row["reason"].isprintable() and 0 < len(row["reason"]) < 400 for row in rows), rows
    return {Path(row["path"]).stem: row["reason"] for row in rows}


def test_odd_clips_beside_good_ones(tmp_path: Path, good: Path) -> None:
    """Train and cache with all kinds in one folder: each is read correctly or recorded."""
    root = tmp_path / "case"
    data = _folder(root, good)
    for kind, make in MANY.items():
        make(data / f"videos/{kind}.mp4")
        (data / f"labels/{kind}.txt").write_text(f"the caption of {kind}\n")
    outcomes = _both(root, _config(root, good, data, FOLDER, number=NUM_GOOD + len(MANY)))
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes[-1].output
    assert outcomes[0].output.count("  loss ") == 2, outcomes[0].output
    of_run = _recorded(next(iter(root.glob("runs/*/bad_samples.jsonl")), root / "none"))
    lines = re.findall(r"skipped (.*?\.mp4): (.+)", outcomes[1].output)
    for found in (of_run, {Path(path).stem: reason for path, reason in lines}):
        assert found.keys() >= BAD.keys(), found
        assert not found.keys() & {*READ, *(str(i) for i in range(NUM_GOOD))}, found
    for index, path in enumerate(VideoFolder(data, **CLIP).paths):
        if Path(path).stem in READ:
            clip = VideoFolder(data, **CLIP)[index]["video"].float().mean(dim=(1, 2, 3))
            assert np.abs(clip.numpy() - LEVELS).max() < 6, (path, clip)


# {kind of a fourth clip's caption: (its file, part of the one-line error; None: the run must continue)}
CAPTIONS: dict[str, tuple[bytes, str | None]] = {
    "10 MB": (b"word " * 2 * 2**20, "10485760 bytes; a caption may have at most 1048576"),
    "escapes": (b"\x1b[31mred\x1b]0;title\x07 \xc2\x9b2J", None),
}
GOOD_LINES = [{"path": f"videos/{i}.mp4", "caption": "a"} for i in range(2)]
_row = lambda path, caption="c": json.dumps({"path": path, "caption": caption})
# {kind of a manifest's third line: (the line, part of the error; None: the run must continue)}
MANIFESTS: dict[str, tuple[str, str | None]] = {
    "nested deeply": ("[" * 100_000, "line 3 is not JSON"),
    "a command": (_row("pipe:touch made"), None),
    "a name of escapes": (_row("\x1b[31m\n"), None),
}
# Kind of a tar shard -> its members beside four good samples
TARS: dict[str, list[tuple[str, bytes]]] = {
    "names of escapes": [("\x1b[31m\n.mp4", b"no video"), ("\x1b[31m\n.txt", b"a")]
}


@pytest.mark.parametrize("kind", [*CAPTIONS, *MANIFESTS, *TARS])
def test_sources(tmp_path: Path, good: Path, kind: str) -> None:
    root, target, number, message = tmp_path / "case", FOLDER, 4, None
    source = data = _folder(root, good)
    if kind in CAPTIONS:
        text, message = CAPTIONS[kind]
        encode(data / "videos/odd.mp4")
        (data / "labels/odd.txt").write_bytes(text)
    elif kind in MANIFESTS:
        line, message = MANIFESTS[kind]
        source, target, number = data / "clips.jsonl", MANIFEST, 2
        source.write_text("\n".join([*map(json.dumps, GOOD_LINES), line]))
    else:
        source, target = root / "s.tar", SHARDS
        clip = (good / "videos/0.mp4").read_bytes()
        members = [(f"{i}.{end}", c) for i in range(4) for end, c in (("mp4", clip), ("txt", b"a"))]
        with tarfile.open(source, "w") as tar:
            for name, content in [*members, *TARS[kind]]:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    outcomes = _both(root, _config(root, good, source, target, number))
    if message is None:
        assert outcomes[-1].status == 0, outcomes[-1].output
    else:
        assert outcomes[-1].status == 2 and message in outcomes[-1].last_line, outcomes[-1].output

"""Packs files of a scratch folder into an archive whose bytes depend on their names and contents alone."""

from __future__ import annotations

import hashlib
import io
import json
import lzma
import os
import re
import tarfile
from pathlib import Path

TIME = 1_700_000_000  # of every file: indices of data hold it
_ROOT = "@scratch-folder@"  # in place of the scratch folder's path
_MOVED = (
    ".jsonl",
    ".cogfast-index",
    "log.txt",
)  # files that have absolute names, without a checksum of all
_NAMES = "user_index.json"


def set_times(folder: Path) -> None:
    """Give all files below a folder the same time."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (TIME, TIME))


def pack(archive: Path, root: Path, folders: list[str], texts: dict[str, str]) -> None:
    """Write an archive of the folders of `root`, and of `texts` as files beside them."""
    members = {name: text.encode() for name, text in texts.items()}
    for folder in folders:
        for file in (path for path in (root / folder).rglob("*") if path.is_file()):
            name = str(file.relative_to(root))
            if "/kernels/" in name or _is_left_out(name):
                continue
            content = file.read_bytes()
            if name.endswith(_MOVED):
                content = content.replace(str(root).encode(), _ROOT.encode())
            assert str(root).encode() not in content, f"{name} has the path of {root}"
            members[name] = _without_moment(name, content)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name in sorted(members):
            about = tarfile.TarInfo(name)
            about.size, about.mtime, about.mode = len(members[name]), TIME, 0o644
            file.addfile(about, io.BytesIO(members[name]))
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def unpack(archive: Path, root: Path, start: str = "") -> None:
    """Write the files of an archive whose names have this start below `root`, with the times of `pack`."""
    with tarfile.open(archive, "r:xz") as file:
        for about in (one for one in file if one.name.startswith(start)):
            content = file.extractfile(about).read()
            if about.name.endswith(_MOVED):
                content = content.replace(_ROOT.encode(), str(root).encode())
            path = root / about.name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, (about.mtime, about.mtime))


def _is_left_out(name: str) -> bool:
    """TensorBoard's files have host and time in their names; the page is large and made of the others."""
    return "tfevents" in name or name.endswith(("index.html", ".diff"))


def _without_moment(name: str, content: bytes) -> bytes:
    """Replace what differs between two recordings and is not read by a run that resumes."""
    base = name.rpartition("/")[2]
    if base == "log.txt":
        return re.sub(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", b"2026-01-01 00:00:00", content)
    if base.startswith("environment"):
        content = re.sub(rb'("host": )"[^"]*"', rb'\1"machine"', content)
        return re.sub(rb'("has_local_changes": )\w+', rb"\1false", content)
    if base == "run.lock":
        return re.sub(rb"process \d+ on \S+ \w+", b"process 1 on machine 0123456789abcdef", content)
    if base == "metrics.jsonl":
        pattern = rb'("[\w/]*(?:_ms|_per_s|tflops|_gib|communication)": )[-\d.e]+'
        return re.sub(pattern, rb"\g<1>1.5", content)
    return content


def name_user_indices(root: Path, user: Path, names: list[list[str]]) -> None:
    """Write down which names the user's index files are about: their own names are hashes of these."""
    known = {_digest(each): each for each in names}
    found = {}
    for file in sorted(user.glob("cogfast/*.jsonl")):
        kind, _, digest = file.stem.rpartition("-")
        assert digest in known, f"{file}: a hash of unknown names"
        about = [name.replace(str(root), _ROOT) for name in known[digest]]
        found[file.name] = [kind, about]
    if found:
        (user / _NAMES).write_text(json.dumps(found, indent=1) + "\n")


def rename_user_indices(root: Path, user: Path) -> None:
    """Give the user's index files the names that they have for this `root`."""
    if not (user / _NAMES).is_file():
        return
    for name, (kind, names) in json.loads((user / _NAMES).read_text()).items():
        own = _digest([each.replace(_ROOT, str(root)) for each in names])
        (user / "cogfast" / name).rename(user / "cogfast" / f"{kind}-{own}.jsonl")
    (user / _NAMES).unlink()


def _digest(names: list[str]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=10).hexdigest()

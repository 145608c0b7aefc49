"""The latent cache, a folder of encoded samples: its format, index, shards and writer lock.

index.jsonl              a header with the specs, then {"file", "spec", "keys"} for every shard
video-00000.safetensors  "<row>.mean", "<row>.logvar" [C, T, h, w], and for image-to-video
                         "<row>.first_frame" or "<row>.noised_image_mean" and "..._logvar"
text-00000.safetensors   "<row>.embedding" [L, E]
sources.json             {file: [bytes, mtime, content hash]}
bad_samples.jsonl        samples that could not be encoded, with the reason
writer                   lock file, touched regularly while `cogfast cache` runs
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import socket
import threading
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired

import torch
from torch import Tensor

from cogfast.core.files import WriteError, write_text, write_whole
from cogfast.data.cache.source_hashes import hash_text, unreadable
from cogfast.schema.json_files import brief, parse_json

if TYPE_CHECKING:
    from safetensors import safe_open

logger = logging.getLogger(__name__)

# The index lists a shard before it is written. A shard gets its name once it is complete, and holds
# a checksum of each row. Its bytes depend on the index and the sources alone, not on which rank
# wrote it or what was interrupted.
FORMAT = "cogfast-latents-2"
# Samples per shard: large enough for few files, small enough that a killed rank loses little and
# training can start early. Captions are quick to encode.
SHARD_SAMPLES = {"video": 8, "text": 32}
SILENCE = 60.0  # seconds without a touch after which a writer counts as dead
_SHARDS_KEPT_OPEN = 64  # per reading process; opening takes longer than reading a small row
# Files that are written in place; all other files are replaced whole.
_WRITTEN_IN_PLACE = ("writer", "bad_samples.jsonl")
_BEAT = 5.0  # seconds between two touches of the lock file

_SHARD = re.compile(r"(video|text)-\d{5,12}\.safetensors")
_TRUSTED = "trusted-"
_HEADER = {"format": str, "specs": NotRequired[dict[str, dict[str, Any]]]}

# The entry of a spec for how clips were encoded, "frames" or "tiles"; without it, whole. A
# configuration that asks for "auto" takes entries of any of these.
ENCODE_CHUNKS = "encode_chunks"
# Values that entries depend on besides their source file, such as weights and dtype: {name: plain value}.
Spec = dict[str, object]


@dataclass(frozen=True, slots=True)
class Shard:
    """A line of the index. file: name, which starts with the kind. keys: one per row, in order.

    The key of a video row is the content hash of the file and of the sample's own settings; the
    key of a text row is the hash of the caption. See `trusted_key` for entries of args.trusted_cache.
    """

    file: str
    spec: str  # id of the spec
    keys: list[str]

    @classmethod
    def parse(cls, line: str, specs: Mapping[str, Spec]) -> Shard:
        """Parse a line of the index; ValueError if it is malformed or names no shard file."""
        # json_files would take a minute for the 100,000 lines of a large cache.
        try:
            row = json.loads(line)
            file, spec, keys = row["file"], row["spec"], row["keys"]
            is_sound = _SHARD.fullmatch(file) and spec in specs and isinstance(keys, list)
            if is_sound and all(isinstance(key, str) for key in keys):
                return cls(file, spec, keys)
        except (ValueError, KeyError, TypeError, RecursionError):
            pass
        raise ValueError(
            f"{brief(line)} is not a shard such as video-00000.safetensors of its specs"
        )

    @property
    def kind(self) -> str:
        return self.file.partition("-")[0]


@dataclass(slots=True)
class CacheIndex:
    """The index of a cache: the shard and row of every entry. specs: {id: spec}."""

    specs: dict[str, Spec] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> CacheIndex:
        """Read the index of a cache; returns an empty one if there is none."""
        file = folder / "index.jsonl"
        try:
            if not file.is_file():
                return cls()
            header, *lines = file.read_text(encoding="utf-8").splitlines() or [""]
            header = parse_json(header, _HEADER, "line 1", "line 1 is its header")
            found = header["format"]
            if found == FORMAT:
                specs = header.get("specs", {})
                return cls(specs, [Shard.parse(line, specs) for line in lines])
        except OSError as error:
            raise ValueError(unreadable(file, error)) from None
        except ValueError as error:
            found = f"nothing readable ({brief(str(error))})"
        raise ValueError(
            f"{file} contains {found[:200]}, not {FORMAT}; remove the folder, whose shards cannot be "
            "used without it, or set args.latent_cache to another"
        )

    def write(self, folder: Path) -> None:
        lines = [{"format": FORMAT, "specs": self.specs}]
        lines += [{"file": s.file, "spec": s.spec, "keys": s.keys} for s in self.shards]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_text(folder / "index.jsonl", text)

    def plan(self, kind: str, spec: Spec, keys: Iterable[str], folder: Path) -> list[Shard]:
        """Assign keys without an entry to new shards; returns the shards that hold any of `keys`.

        Drops planned shards that are not written yet and have a key that is no longer wanted: they
        could never be completed.
        """
        wanted = list(dict.fromkeys(keys))
        known, name = set(wanted), spec_id(spec)
        self.specs[name] = spec
        self.shards = [
            shard
            for shard in self.shards
            if (shard.kind, shard.spec) != (kind, name)
            or known.issuperset(shard.keys)
            or is_complete(folder, shard)
        ]
        placed = {key for shard in self._of(kind, name) for key in shard.keys}
        new = [key for key in wanted if key not in placed]
        # Continue after the highest file number on disk: shards of a lost index must not be
        # overwritten or reused.
        files = [s.file for s in self.shards if s.kind == kind]
        files += [path.name for path in folder.glob(f"{kind}-*") if _SHARD.fullmatch(path.name)]
        numbers = (int(file.split("-")[1].split(".")[0]) for file in files)
        number = 1 + max(numbers, default=-1)
        for start in range(0, len(new), SHARD_SAMPLES[kind]):
            part = new[start : start + SHARD_SAMPLES[kind]]
            self.shards.append(Shard(f"{kind}-{number:05d}.safetensors", name, part))
            number += 1
        return [shard for shard in self._of(kind, name) if not known.isdisjoint(shard.keys)]

    def settled(self, kind: str, spec: Spec, keys: Iterable[str], *, trusts: bool = False) -> Spec:
        """Return `spec` with "auto" replaced by how the entries of this spec were encoded: the newest
        that have all `keys`, else the newest. Without such entries, return `spec` itself."""
        if spec.get(ENCODE_CHUNKS) != "auto":
            return spec
        names = dict.fromkeys(s.spec for s in reversed(self.shards) if s.kind == kind)
        made = [
            found
            for name in names
            if {**(found := self.specs[name]), ENCODE_CHUNKS: "auto"} == spec
        ]
        wanted = set(keys)
        whole = (found for found in made if wanted <= self.places(kind, found, trusts).keys())
        return next(whole, made[0] if made else spec)

    def places(self, kind: str, spec: Spec, trusts: bool = False) -> dict[str, tuple[str, int]]:
        """Map the keys of all entries made with `spec` to (file, row).

        trusts: a key without an entry gets the trusted one.
        """
        shards = self._of(kind, spec_id(spec))
        found = {key: (s.file, row) for s in shards for row, key in enumerate(s.keys)}
        if trusts:
            own = ((k.removeprefix(_TRUSTED), at) for k, at in found.items() if is_trusted(k))
            found = dict(own) | found
        return found

    def complete_keys(self, kind: str, spec: Spec, folder: Path) -> set[str]:
        """Return the keys of all entries made with `spec` whose shards are written."""
        shards = self._of(kind, spec_id(spec))
        return {key for shard in shards if is_complete(folder, shard) for key in shard.keys}

    def _of(self, kind: str, spec: str) -> list[Shard]:
        return [s for s in self.shards if (s.kind, s.spec) == (kind, spec)]

    def difference(self, kind: str, spec: Spec) -> str | None:
        """Describe how `spec` differs from that of the newest entries; None if entries match."""
        names = [shard.spec for shard in self.shards if shard.kind == kind]
        if not names or spec_id(spec) in names:
            return None
        made = self.specs[names[-1]]
        if spec.get(ENCODE_CHUNKS) == "auto":  # differs from none
            made = {**made, ENCODE_CHUNKS: "auto"}
        missing = {ENCODE_CHUNKS: "whole"}
        return "; ".join(
            f"cache made by {name} {made.get(name, missing.get(name, 'none'))}, the config has "
            f"{spec.get(name, missing.get(name, 'none'))}"
            for name in {**made, **spec}
            if made.get(name) != spec.get(name)
        )


def trusted_key(key: str) -> str:
    """Return the key of an entry from args.trusted_cache, which only runs with that key use."""
    return _TRUSTED + key


def is_trusted(key: str) -> bool:
    return key.startswith(_TRUSTED)


def spec_id(spec: Spec) -> str:
    return hash_text(json.dumps(spec, sort_keys=True))


def write_shard(path: Path, tensors: Mapping[str, Tensor], rows: Sequence[Mapping]) -> None:
    """Write a shard. rows: plain values about each row; {"bad": reason} for one without tensors."""
    from safetensors.torch import save

    own: list[dict[str, Tensor]] = [{} for _ in rows]
    for key, tensor in tensors.items():
        row, _, name = key.partition(".")
        own[int(row)][name] = tensor
    # safetensors has no checksums: a flipped bit would train on a wrong latent unseen.
    marked = [
        {**row, "crc32": _checksum(path, parts)} for row, parts in zip(rows, own, strict=True)
    ]
    # safetensors does not fix the order of metadata entries, so all rows share one.
    content = save(dict(tensors), metadata={"rows": json.dumps(marked)})
    write_whole(path, lambda draft: draft.write_bytes(content))


def read_row(path: Path, row: int) -> tuple[dict[str, Tensor], dict]:
    """Read a row: {name: tensor} and the plain values stored about it.

    Raises ValueError if the checksum does not match.
    """
    found = os.stat(path)
    file, names, rows = _opened(path, found.st_size, found.st_mtime_ns)
    tensors = {name: file.get_tensor(f"{row}.{name}") for name in names[row]}
    if rows[row].get("crc32") != _checksum(path, tensors):
        raise ValueError("checksum mismatch")
    return tensors, rows[row]


def _checksum(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """The CRC-32 of a row's bytes and of the shard's name, which detects renamed shards."""
    found = zlib.crc32(path.name.encode())
    for name in sorted(tensors):
        content = tensors[name].contiguous().flatten().view(torch.uint8)
        found = zlib.crc32(content.numpy().data, zlib.crc32(name.encode(), found))
    return found


@lru_cache(maxsize=_SHARDS_KEPT_OPEN)
def _opened(path: Path, size: int, mtime_ns: int) -> tuple:
    """Open a shard: the file, the names of each row's tensors, and the rows' plain values.

    size, mtime_ns: part of the key of lru_cache, so that a changed file is opened again.
    """
    from safetensors import safe_open

    file = safe_open(path, framework="pt")
    rows = _rows_in(file)
    names: list[list[str]] = [[] for _ in rows]
    for key in file.keys():  # noqa: SIM118 - not a dict
        row, _, name = key.partition(".")
        names[int(row)].append(name)
    return file, names, rows


def _rows_in(file: safe_open) -> list[dict]:
    """The plain values of an open shard's rows; ValueError if the metadata has none."""
    text = (file.metadata() or {}).get("rows", "null")
    return parse_json(text, list[dict[str, Any]], "its rows")


def rows_of(path: Path) -> list[dict]:
    """Read the plain values of a shard's rows."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return _rows_in(file)


def is_complete(folder: Path, shard: Shard) -> bool:
    """Whether a shard exists, is not truncated, and has a row for every key."""
    from safetensors import SafetensorError

    try:
        # safetensors compares the header with the file's length; the rows need not be read.
        return len(rows_of(folder / shard.file)) == len(shard.keys)
    except (OSError, SafetensorError, ValueError):
        return False


class Writer:
    """Context manager that locks a cache for writing and shows readers that it is being written."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "writer"
        self._is_over = threading.Event()

    def __enter__(self) -> Writer:
        for name in _WRITTEN_IN_PLACE:
            # A cache may come from elsewhere: writing through its links could damage any file.
            if (self.path.parent / name).is_symlink():
                raise ValueError(
                    f"args.latent_cache={self.path.parent}: {name} is a link, and writing it would "
                    "change its target; remove it"
                )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # "w" would erase the line of another writer before the lock shows that it is running.
            self._file = open(self.path, "a+")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise ValueError(
                f"args.latent_cache={self.path.parent}: cannot be written ({error.strerror}); "
                "set it to another folder"
            ) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            raise ValueError(
                f"args.latent_cache={self.path.parent}: another `cogfast cache` "
                f"({self._file.read().strip()}) is writing it; wait for it or end it"
            ) from None
        except OSError as error:  # the file system has no locks
            logger.warning("%s cannot be locked (%s)", self.path, error.strerror)
        try:
            self._file.truncate(0)
            self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
            self._file.flush()
        except OSError as error:
            raise WriteError(self.path, error) from None
        self._thread = threading.Thread(target=self._beat, name="cache writer", daemon=True)
        self._thread.start()
        return self

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT):
            with suppress(OSError):  # without it readers only give up earlier
                os.utime(self.path)

    def __exit__(self, *exc_info: object) -> None:
        self._is_over.set()
        self._thread.join()
        # While the lock is held: afterwards the file may be another writer's.
        self.path.unlink(missing_ok=True)
        self._file.close()


def is_being_written(folder: Path) -> bool:
    """Whether a writer has touched its file in the last minute."""
    try:
        return time.time() - (folder / "writer").stat().st_mtime < SILENCE
    except OSError:
        return False

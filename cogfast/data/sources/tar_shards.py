"""Tar shards in webdataset's form, read by random access: an index of their members is made once.

A sample is what members share up to the first dot of their name: x.mp4 (or avi, mov, mkv, webm),
with its caption in x.caption, in SHARD.meta.jsonl beside the shard (a line {"key": "x", "caption":
...}), in x.json or in x.txt, the first that is there. Shards are local files or what fsspec opens.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import numpy as np

from cogfast.data.bad_samples import BadSample
from cogfast.data.sources.clip_list import ClipList, PackedStrings
from cogfast.data.sources.folders import check_caption_size, decoded, named
from cogfast.data.sources.store import Store, index_file

logger = logging.getLogger(__name__)

VIDEO_KINDS = ("mp4", "avi", "mov", "mkv", "webm")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)$")
_TO_SAT_KEY = re.compile(r"-\$#%@&.*")  # what SAT's shards append to a key
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
MEMBER = "::"  # between a shard and what is in it
_MOST_SHARDS = 10**6  # that a range names
_MOST_BYTES = 2**30  # of a member, which is read whole
_MOST_HEADER_BYTES = 2**20  # of a member: its name and pax attributes


def expand_braces(pattern: str) -> list[str]:
    """a-{000..002}.tar -> a-000.tar, a-001.tar, a-002.tar; {x,y} names them one by one."""
    found = _BRACES.search(pattern)
    if found is None:
        return [pattern]
    numbers = _RANGE.match(found[1])
    if numbers:
        first, last = numbers.groups()
        names = range(int(first), int(last) + 1)
        if len(names) > _MOST_SHARDS:
            raise ValueError(
                f"data_dir={pattern[:80]}: {found[0][:40]} names {len(names)} shards; {_MOST_SHARDS} "
                "at most are read"
            )
        names = [f"{i:0{len(first)}d}" for i in names]
    else:
        names = found[1].split(",")
    if not names or len(names) == 1:
        raise ValueError(
            f"data_dir={pattern}: {found[0]} names no shards; use {{000..099}} or {{a,b}}"
        )
    start, end = pattern[: found.start()], pattern[found.end() :]
    return [rest for name in names for rest in expand_braces(start + name + end)]


def shards_of(source: str) -> list[str]:
    """The shards that a folder holds (.tar, also deeper) or a pattern names."""
    if Path(source).is_dir():
        found = sorted(str(path) for path in Path(source).rglob("*.tar"))
        packed = [str(p) for p in Path(source).rglob("*.t*") if p.name.endswith(_COMPRESSED)]
        text = f"{len(packed)} compressed shards are not read ({named(packed)}); unpack them"
        if not found:
            raise ValueError(
                f"data_dir={source}: no .tar file in it{packed and f', but {text}' or ''}"
            )
        if packed:
            logger.warning("data_dir=%s: %s", source, text)
        return found
    return expand_braces(source)


class Member(io.RawIOBase):
    """A member of a shard, SHARD::NAME, as a file that is read here and there."""

    def __init__(self, file: str, offset: int, size: int) -> None:
        self._file, self._offset, self._size, self._at = file, offset, size, 0
        self._store = Store(file.partition(MEMBER)[0]).open()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: memoryview) -> int:
        self._store.seek(self._offset + self._at)
        data = self._store.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._store.close()
        super().close()


def read_member(file: str, offset: int, size: int) -> bytes:
    """The bytes of a member, SHARD::NAME; BadSample where the shard does not give them."""
    if size > _MOST_BYTES:
        raise BadSample(file, f"a member of {size} bytes; {_MOST_BYTES} at most are read")
    try:
        data = Store(file.partition(MEMBER)[0]).read(offset, size)
    except OSError as error:
        raise BadSample(file, f"the shard cannot be read ({str(error)[:200]})") from None
    if len(data) < size:
        raise BadSample(file, f"the shard ends early: {len(data)} of {size} bytes are there")
    return data


def list_shard(url: str, caption_key: str, image_key: str | None = None) -> ClipList:
    """The samples of a shard, by key; caption "" where there is none."""
    if MEMBER in url:
        raise ValueError(f"data_dir={url[:200]}: a shard's name must not hold {MEMBER}; rename it")
    store = Store(url)
    try:
        if not store.is_remote and Path(url).exists() and not Path(url).is_file():
            raise IsADirectoryError("not a file but a folder, pipe or device")
        version = store.version()
    except OSError as error:
        raise ValueError(f"data_dir={url}: the shard cannot be read ({error})") from None
    file = index_file("shard", [url, caption_key])
    kept = _kept_rows(file, version)
    if kept is None:
        try:
            kept = _rows(store, caption_key)
        except OSError as error:
            raise ValueError(f"data_dir={url}: the shard cannot be read ({error})") from None
        _keep_rows(file, version, *kept)
    rows, faults = kept
    for fault in faults:
        logger.warning("%s %s", url, fault)
    files, captions, places, others = [], [], [], []
    for key, caption, members in rows:
        kind = next((k for k in VIDEO_KINDS if k in members), None)
        if kind is None:
            others.append(f"{key}: {', '.join(members)}")
            continue
        image = members.get(image_key, (-1, -1)) if image_key else (-1, -1)
        if image_key and image_key not in members:
            raise ValueError(
                f"{url}: sample {key} has no {key}.{image_key}; data.params.image_key={image_key} "
                "names what every sample has"
            )
        files.append(f"{url}{MEMBER}{key}.{kind}")
        captions.append(caption)
        places.append((*members[kind], *image))
    if not files:
        raise ValueError(f"{url}: no video in it ({', '.join(VIDEO_KINDS)})")
    if others:
        text = "%s: %d samples have no video, a sample being what shares a name up to the first dot: %s"
        logger.warning(text, url, len(others), named(others))
    return ClipList(
        files=PackedStrings(files),
        captions=PackedStrings(captions),
        places=np.array(places, dtype=np.int64),
    )


Row = tuple[str, str, dict[str, tuple[int, int]]]  # key, caption, {kind: (offset, bytes)}


def _rows(store: Store, caption_key: str) -> tuple[list[Row], list[str]]:
    """The samples, and what is wrong with the shard, a line each."""
    meta = _meta(store, caption_key)
    members, faults, is_whole = _members(store)
    rows = []
    for key, kinds in members.items():
        caption = ""
        sat_key = _TO_SAT_KEY.sub("", key)
        if caption_key in kinds:
            caption = _member_text(store, key, caption_key, kinds)
        elif key in meta or sat_key in meta:
            caption = meta[key if key in meta else sat_key]
        elif "json" in kinds:
            caption = _of_json(_member_text(store, key, "json", kinds), caption_key)
        elif "txt" in kinds:
            caption = _member_text(store, key, "txt", kinds)
        if any("\ud800" <= c <= "\udfff" for c in caption):  # by JSON's escapes
            raise ValueError(f"{store.url}: the caption of {key!r} is no text; write it as UTF-8")
        rows.append((key, " ".join(caption.split()), kinds))
    if not is_whole:
        if len(rows) > 1 and not rows[-1][1]:
            rows.pop()  # its caption may have stood behind the end
        text = "ends early, after %d samples; what followed is lost: write the shard again"
        faults.append(text % len(rows))
    return rows, faults


def _members(store: Store) -> tuple[dict[str, dict[str, tuple[int, int]]], list[str], bool]:
    """{key: {kind: (offset, bytes)}} in the shard's order, incomplete ones included; what is wrong
    with it; and whether it has its end."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    twice = []
    with store.open() as file:
        num_bytes, is_whole = file.seek(0, 2), True
        file.seek(0)
        try:
            for member, end in _headers(file):
                _check_member(store.url, member)
                key, dot, kind = _split_name(member.name)
                if member.isreg() and dot and not _is_meta(member.name):
                    if kind in found.get(key, ()):
                        twice.append(member.name)
                    found.setdefault(key, {})[kind] = (member.offset_data, member.size)
                is_whole = end + tarfile.BLOCKSIZE <= num_bytes  # a block of zeros ends a tar
        except tarfile.ReadError as error:
            is_whole = False
            if not found:
                raise ValueError(
                    f"{store.url}: not a tar file, or a compressed one, which cannot be read by "
                    f"random access ({error}); unpack it with gzip -d"
                ) from None
    text = f"has {len(twice)} members twice, of which the later one is read: {named(twice)}"
    return found, [text] if twice else [], is_whole


def _split_name(name: str) -> tuple[str, str, str]:
    """folder/x.a.b -> (folder/x, ".", a.b)."""
    folder, slash, last = name.removeprefix("./").rpartition("/")
    stem, dot, kind = last.partition(".")
    return folder + slash + stem, dot, kind.lower()


def _is_meta(name: str) -> bool:
    """webdataset's own entries, __x__, and what macOS adds."""
    first, last = name.partition("/")[0], name.rpartition("/")[2]
    return (first.startswith("__") and first.endswith("__")) or last.startswith("._")


class _HeaderReads:
    """What tarfile reads of a shard: headers, of which pax's may claim to be as long as the file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _headers(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Every member, and where it ends; ReadError at one whose header is damaged."""
    tar, end = None, 0
    while True:
        try:
            tar = tar or tarfile.open(fileobj=_HeaderReads(file), mode="r:")  # noqa: SIM115
            member = tar.next()
        # What tarfile raises for numbers and text that are none, and for headers of headers.
        except (ValueError, OverflowError, RecursionError, LookupError, TypeError) as error:
            raise tarfile.ReadError(f"a damaged header ({error})") from None
        if member is None:
            return
        if member.size < 0 or tar.offset <= end:  # a negative size would lead back
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        end, tar.members = tar.offset, []  # else tarfile keeps all of them
        yield member, end


def _check_member(url: str, member: tarfile.TarInfo) -> None:
    path, name = PurePosixPath(member.name), repr(member.name[:100])
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{url}: member {name} leaves the folder that it would be unpacked into; write the shard "
            "again with names below it"
        )
    if member.issym() or member.islnk():
        raise ValueError(
            f"{url}: member {name} is a link to {member.linkname[:100]!r}; write the shard again with "
            "the files themselves (tar --dereference --hard-dereference)"
        )
    if member.issparse():
        raise ValueError(
            f"{url}: member {name} is sparse, its bytes are not stored as they are; write the shard "
            "again without tar --sparse"
        )


def _member_text(store: Store, key: str, kind: str, kinds: dict[str, tuple[int, int]]) -> str:
    """A caption; "" where the shard ended before it."""
    offset, size = kinds[kind]
    name = f"{store.url}{MEMBER}{key}.{kind}"
    check_caption_size(size, name)
    data = store.read(offset, size)
    return decoded(data, name) if len(data) == size else ""


def _meta(store: Store, caption_key: str) -> dict[str, str]:
    """{key: caption} of the shard's .meta.jsonl, SAT's, where there is one."""
    name = store.url.rpartition("/")[2].partition(".")[0] + ".meta.jsonl"
    data = store.beside(name)
    captions: dict[str, str] = {}
    for number, line in enumerate(decoded(data or b"", name).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = str(row["key"])
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(
                f"{name} beside {store.url}: line {number} is not an object with a key; mend it"
            ) from None
        if row.get(caption_key) is not None:
            captions[key] = str(row[caption_key])
    return captions


def _of_json(text: str, caption_key: str) -> str:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    value = row.get(caption_key) if isinstance(row, dict) else None
    return "" if value is None else str(value)


def _kept_rows(file: Path, version: str) -> tuple[list[Row], list[str]] | None:
    """What is kept of a shard, where that is of its present version."""
    try:
        first, *lines = file.read_text(encoding="utf-8").split("\n")
        head = json.loads(first)
        if (head["version"], head["samples"]) != (version, len(lines)):
            return None
        return [tuple(json.loads(line)) for line in lines], head["faults"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _keep_rows(file: Path, version: str, rows: list[Row], faults: list[str]) -> None:
    head = json.dumps({"version": version, "samples": len(rows), "faults": faults})
    text = "\n".join([head, *(json.dumps(row) for row in rows)])
    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        logger.warning("the index of a shard is not kept: %s", error)

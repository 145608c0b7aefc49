"""Tar shards in webdataset's format, read by random access through an index of their members.

Members whose names are equal up to the first dot form a sample: x.mp4 (or avi, mov, mkv, webm) with
its caption in x.caption, in SHARD.meta.jsonl beside the shard (a line {"key": "x", "caption": ...}),
in x.json or in x.txt, in this order, and maybe a control video in x.control.mp4 and a mask in
x.mask.mp4. Where pictures are trained on, x.jpg (or png, ...) may take the place of x.mp4. Shards are
local files, or URLs that fsspec opens.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np

from cogfast.core.addresses import distinct
from cogfast.core.values import counted, cut
from cogfast.data.sources import folders
from cogfast.data.sources.clip_list import (
    MEMBER,
    OTHER_VIDEOS,
    ClipList,
    OtherFiles,
    PackedStrings,
    join,
)
from cogfast.data.sources.file_index import user_index
from cogfast.data.sources.folders import PICTURE_ENDINGS, SourceError, in_data, named
from cogfast.extensions.stores import store
from cogfast.extensions.stores.store import Stat, Versions

logger = logging.getLogger(__name__)

VIDEO_KINDS = ("mp4", "avi", "mov", "mkv", "webm")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d{1,18})\.\.(\d{1,18})$")
_SAT_KEY_SUFFIX = re.compile(r"-\$#%@&.*")  # what SAT's shards append to a key
_COMPRESSED = (".tar.gz", ".tgz", ".tar.xz", ".tar.bz2", ".tar.zst")
_FIX = "correct the source, or remove the shard from it"
_MAX_SHARDS = 10**6  # that a name with braces may stand for
_MAX_HEADER_BYTES = 2**20  # of a member: its name and pax attributes


def expand_braces(pattern: str) -> list[str]:
    """Expand a-{000..002}.tar to a-000.tar, a-001.tar, a-002.tar, and a-{x,y}.tar likewise."""
    # Each pair of braces stands for two names or more.
    names = [*islice(_expanded(pattern), _MAX_SHARDS + 1)] if pattern.count("{") <= 20 else []
    if not 0 < len(names) <= _MAX_SHARDS:
        text = f"stands for more than {_MAX_SHARDS} shards; correct its braces"
        raise SourceError(f"{pattern[:80]}: {text}")
    return names


def _expanded(pattern: str) -> Iterator[str]:
    if (found := _BRACES.search(pattern)) is None:
        yield pattern
        return
    names, number = iter(found[1].split(",")), found[1].count(",") + 1
    if numbers := _RANGE.match(found[1]):
        first, last = numbers.groups()
        number = int(last) - int(first) + 1
        # Names have as many digits as the first number: {000..010} starts at 000, not at 0.
        names = (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
    if number < 2:
        rule = "is not a range or list; use {000..099} or {a,b}"
        raise SourceError(f"{pattern[:200]}: {found[0][:40]} {rule}")
    for name in names:
        yield from _expanded(pattern[: found.start()] + name + pattern[found.end() :])


def shards_of(source: str) -> list[str]:
    """List the .tar files below a folder, or those that a pattern names."""
    is_url = store.is_url(source)
    is_file = store.without_query(source).endswith(".tar") or "{" in source or MEMBER in source
    if not is_file if is_url else Path(source).is_dir():
        names = list(store.find(source)) if is_url else map(str, Path(source).rglob("*.t*"))
        folder = source.rstrip("/") if is_url else str(Path(source))  # without ./, as names
        names = in_data(sorted(names), "" if folder == "." else folder)
        found = [name for name in names if name.endswith(".tar")]
        packed = [name for name in names if name.endswith(_COMPRESSED)]
        number = counted(len(packed), "compressed shard")
        text = f"{number}: {named(packed)}; decompress to .tar (gzip -d FILE.tar.gz)"
        if not found:
            raise SourceError(f"{source}: no .tar file in it{f', but {text}' if packed else ''}")
        if packed:
            logger.warning("%s: not read: %s", source, text)
        return found
    return expand_braces(source)


def _meta_file(shard: str) -> str:
    name = store.without_query(shard).rpartition("/")[2].partition(".")[0] + ".meta.jsonl"
    return store.join(store.parent(shard), name)


def missing_source(key: str, source: str) -> str | None:
    """Return an error message if `source` of the config key `key` does not exist, else None."""
    # Listing the shards opens remote files and checks the folders after ";".
    if store.is_url(source) or ";" in source:
        return None
    try:
        gone = next((shard for shard in shards_of(source) if not Path(shard).is_file()), None)
    except SourceError as error:
        return f"{key}={error}"
    if gone is None:
        return None
    fix = "set it to existing shards (s-{000..099}.tar stands for many), or to their folder"
    return f"{key}={cut(source, 160)}: file {cut(str(gone), 160)} does not exist; {fix}"


def list_source(source: str, caption_key: str, has_pictures: bool) -> ClipList:
    """List the samples of a source: of shards as in shards_of, and of folders in SAT's notation (_folders)."""
    shards = [shard for name in _folders(source) for shard in shards_of(name)]
    for url in (url for url in shards if MEMBER in url):
        raise ValueError(f"{url[:200]}: a shard's name must not contain {MEMBER}; rename it")
    found = store.stats([*shards, *map(_meta_file, shards)])
    list_one = lambda url: _list_shard(url, caption_key, has_pictures, found)
    # Their headers are read by many small requests.
    each = store.in_threads if found else map
    return replace(join([*each(list_one, shards)]), versions=Versions(found))


def _folders(source: str) -> list[str]:
    """Expand SAT's notation: pattern;A,B*2 -> pattern, A, B, B."""
    pattern, semicolon, listed = source.partition(";")
    names = [pattern] if pattern else []
    for folder in listed.split(",") if semicolon else []:
        name, star, times = folder.partition("*")
        if not (store.is_url(name) or Path(name).is_dir()) or (star and not times.isdigit()):
            fix = "write folders after ; as A,B*2 (B is read twice)"
            raise SourceError(f"{source}: no folder {folder}; {fix}")
        names += [name] * (int(times) if star else 1)
    return names


def _list_shard(
    url: str, caption_key: str, has_pictures: bool, found: Mapping[str, Stat]
) -> ClipList:
    """List the samples of a shard in its order; the caption is "" if there is none. has_pictures:
    samples without a video may have a picture. found: the URLs that are there.

    The list is read from the index in the user's cache folder if the shard and its .meta.jsonl have not changed.
    """
    meta = _meta_file(url)
    # Another key selects other captions, which the index holds.
    name = url if store.is_url(url) else os.path.abspath(url)
    index, known = user_index("shard", [name, caption_key]), distinct(url)  # it may be signed
    try:
        about = found.get(url) or store.stat(url)
        of_meta = store.stat(meta) if os.path.exists(meta) else found.get(meta)
        version = about.version + (f"-{of_meta.version}" if of_meta else "")
        if (kept := index.get(known, version)) is None:
            kept = _rows(url, about.num_bytes, caption_key, of_meta is not None)
            index.keep([(known, version, *kept)])
    except OSError as error:
        raise ValueError(f"{url}: the shard cannot be read ({error}); {_FIX}") from None
    rows, faults = kept
    # Logged at every start, also when they come from the index.
    for fault in faults:
        logger.warning("%s %s", url, fault)
    pictures = tuple(end[1:] for end in PICTURE_ENDINGS)
    kinds = VIDEO_KINDS + (pictures if has_pictures else ())
    # Kinds of the video and of further files, by what stands before them. A mask may be a picture for all frames.
    kinds_of = {f"{name}.": kinds for name in OTHER_VIDEOS}
    kinds_of |= {"": kinds, "mask.": VIDEO_KINDS + pictures}
    columns = {start: ([], []) for start in kinds_of}  # files and places
    captions, others = [], []
    kept = {*in_data((f"{url}/{key}.{k}" for key, _, members in rows for k in members), url)}
    for key, caption, members in rows:
        if f"{url}/{key}.{next(iter(members))}" not in kept:
            continue
        if not any(k in members for k in kinds):
            others.append(f"{key}: {', '.join(members)}")
            continue
        captions.append(folders.worded(caption))
        for start, (files, places) in columns.items():
            # A sample with several videos is read from the first kind in VIDEO_KINDS.
            kind = next((start + k for k in kinds_of[start] if start + k in members), None)
            files.append("" if kind is None else f"{url}{MEMBER}{key}.{kind}")
            places.append((-1, -1) if kind is None else members[kind])
    if not captions:
        text = f"{url}: contains no video ({', '.join(kinds)})"
        raise ValueError(f"{text}; leave the shard out of the data")
    if others:
        text = "%s: not read: %s (names up to the first dot) without a video: %s"
        logger.warning(text, url, counted(len(others), "sample"), named(others))
    further = {
        start[:-1]: OtherFiles(PackedStrings(files), np.array(places, dtype=np.int64))
        for start, (files, places) in columns.items()
        if any(files)
    }
    videos, packed = further.pop(""), PackedStrings(captions)
    return ClipList(files=videos.files, captions=packed, places=videos.places, others=further)


Row = tuple[str, str, dict[str, tuple[int, int]]]  # key, caption, {kind: (offset, bytes)}


def _rows(
    url: str, num_bytes: int, caption_key: str, has_meta: bool
) -> tuple[list[Row], list[str]]:
    """Read a shard's samples and captions; returns them with one line per fault of the shard."""
    meta = _meta(url, caption_key) if has_meta else {}
    members, faults, is_whole = _members(url, num_bytes)
    rows = []
    for key, kinds in members.items():
        caption = ""
        sat_key = _SAT_KEY_SUFFIX.sub("", key)
        if caption_key in kinds:
            caption = _member_text(url, key, caption_key, kinds)
        elif key in meta or sat_key in meta:
            caption = meta[key if key in meta else sat_key]
        elif "json" in kinds:
            text = _member_text(url, key, "json", kinds)
            with suppress(ValueError, RecursionError):  # counted with those without a caption
                row = json.loads(text)
                value = row.get(caption_key) if isinstance(row, dict) else None
                caption = "" if value is None else str(value)
        elif "txt" in kinds:
            caption = _member_text(url, key, "txt", kinds)
        # JSON escapes can spell single surrogates, which a tokenizer refuses.
        if any("\ud800" <= c <= "\udfff" for c in caption):
            text = f"{url}: the caption of {key!r} is not valid Unicode"
            raise ValueError(f"{text}; write it again as UTF-8")
        # Captions are one line, as those of other layouts.
        rows.append((key, " ".join(caption.split()), kinds))
    if not is_whole:
        if len(rows) > 1 and not rows[-1][1]:
            rows.pop()  # its caption may have been in the lost part
        faults.append(f"ends early, after {counted(len(rows), 'sample')}; write the shard again")
    return rows, faults


def _members(
    url: str, num_bytes: int
) -> tuple[dict[str, dict[str, tuple[int, int]]], list[str], bool]:
    """Read the headers of a shard's members.

    Returns {key: {kind: (offset, bytes)}} in the shard's order, including members that are cut off;
    a line per fault; and whether the shard is complete.
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    twice: list[str] = []
    with store.open_file(url, num_bytes) as file:
        is_whole = True
        try:
            for member, end in _headers(file):
                _check_member(url, member)
                # folder/x.a.b: key folder/x, kind a.b
                folder, slash, last = member.name.removeprefix("./").rpartition("/")
                stem, dot, kind = last.partition(".")
                # webdataset's metadata is named __x__, a file that macOS adds ._x.
                first = member.name.partition("/")[0]
                is_meta = first[:2] == "__" == first[-2:] or last.startswith("._")
                if member.isreg() and dot and not is_meta:
                    kinds = found.setdefault(folder + slash + stem, {})
                    twice += [member.name] * (kind.lower() in kinds)
                    kinds[kind.lower()] = (member.offset_data, member.size)
                is_whole = end + tarfile.BLOCKSIZE <= num_bytes  # a block of zeros ends a tar
        except tarfile.ReadError as error:
            is_whole = False
            if not found:
                fix = "decompress a shard (gzip -d FILE.tar.gz), since samples are read by random access"
                raise ValueError(f"{url}: not a tar file ({error}); {fix}") from None
    text = f"has {counted(len(twice), 'member')} twice; the later one is read: {named(twice)}"
    return found, [text] if twice else [], is_whole


class _HeaderReads:
    """A file for tarfile that limits the size of headers: a pax header may claim to be huge."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size} bytes")
        return self._file.read(size)


def _headers(file: BinaryIO) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """Yield every member with the offset of its end; ReadError at a damaged header."""
    # Any: the stubs ask for a file with write(), which reading does not call, and lack `members`.
    reads: Any = _HeaderReads(file)
    tar: Any = None
    end = 0
    while True:
        try:
            tar = tar or tarfile.open(fileobj=reads, mode="r:")  # noqa: SIM115
            member = tar.next()
        # tarfile raises these for invalid numbers and text, and for deeply nested pax headers.
        except (ValueError, OverflowError, RecursionError, LookupError, TypeError) as error:
            raise tarfile.ReadError(f"a damaged header ({error})") from None
        if member is None:
            return
        if member.size < 0 or tar.offset <= end:  # a negative size would loop forever
            raise tarfile.ReadError(f"a member of {member.size} bytes")
        # tarfile would keep every member in memory.
        end, tar.members = tar.offset, []
        yield member, end


def _check_member(url: str, member: tarfile.TarInfo) -> None:
    path = PurePosixPath(member.name)
    faults = {
        "has an absolute path or .. in its name": path.is_absolute() or ".." in path.parts,
        "is a link": member.issym() or member.islnk(),
        "is a sparse file": member.issparse(),
    }
    for fault in (fault for fault, is_found in faults.items() if is_found):
        text = f"{url}: member {member.name[:100]!r} {fault}; write the shard again from plain files with relative "
        raise ValueError(f"{text}names (tar --dereference --hard-dereference, without --sparse)")


def _member_text(url: str, key: str, kind: str, kinds: dict[str, tuple[int, int]]) -> str:
    """Read a caption; "" if the shard ends within it."""
    offset, size = kinds[kind]
    name = f"{url}{MEMBER}{key}.{kind}"
    folders.check_caption_size(size, name)
    data = store.read(url, offset, size)
    return folders.decoded(data, name) if len(data) == size else ""


def _meta(shard: str, caption_key: str) -> dict[str, str]:
    """Read {key: caption} from SAT's .meta.jsonl beside the shard."""
    file = _meta_file(shard)
    name, captions = os.path.basename(file), {}
    # splitlines would also split at U+2028, which JSON text may hold.
    for number, line in enumerate(folders.text_of(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key = str(row["key"])
        except (ValueError, KeyError, TypeError, RecursionError):
            text = f"{name} beside {shard}: line {number} is not a JSON object with a key; write "
            raise ValueError(f'{text}{{"key": NAME, "{caption_key}": TEXT}}') from None
        if row.get(caption_key) is not None:
            captions[key] = str(row[caption_key])
    return captions

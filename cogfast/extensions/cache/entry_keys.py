"""The keys of a latent cache: hashes of what a sample is made of, wherever its files lie."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from cogfast.core.addresses import distinct, is_url
from cogfast.core.files import WriteError, open_regular
from cogfast.data.datasets import CaptionedVideos
from cogfast.data.sources.clip_list import file_of, member_of
from cogfast.data.sources.file_index import FileIndex, to_lines
from cogfast.extensions.stores import store

_HASHING_THREADS = 8
_BLOCK = 2**20  # bytes read at once
_UNREADABLE = "unreadable-"  # prefix of the hash of a file that cannot be read

# The files of samples: {name: (offset, bytes) of a member of a tar shard, SHARD::MEMBER, else ()}
Files = Mapping[str, tuple[int, ...]]
HashedFile = tuple[str, str, str]  # absolute name, version, content hash


def hash_text(text: str) -> str:
    # surrogatepass: file names need not be valid UTF-8.
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def used_samples(videos: CaptionedVideos) -> list[int]:
    """The samples that training can ask for: weight above 0, and assigned to a bucket."""
    clips = videos.clips
    is_used = np.ones(len(videos), dtype=bool)
    is_used &= True if clips.weights is None else clips.weights > 0
    is_used &= True if clips.buckets is None else clips.buckets >= 0
    return np.flatnonzero(is_used).tolist()


def source_files(videos: CaptionedVideos, indices: Sequence[int]) -> Files:
    """Return the files that samples are read from: a video each, and images and controls of their own."""
    clips, found = videos.clips, {}
    for index in indices:
        found[clips.files[index]] = member_of(clips, index) or ()
        if clips.images is not None and clips.images[index]:
            found[clips.images[index]] = ()
    for name, other in videos.encoded.items():
        found |= {} if name == "video" else source_files(other, indices)
    return found


def sample_key(
    videos: CaptionedVideos, index: int, sources: Sources, is_control: bool = False
) -> str:
    """The key of a sample's clip: a hash of its file's content and of its own settings. Its
    further videos have keys of their own: those of samples of `videos.encoded`.

    Copies of a file, even in different data sets, share an entry.
    """
    clips, settings, common = videos.clips, videos.settings_of(index), videos.settings
    # Settings common to all samples are in the spec; only deviations from them are hashed here.
    own: dict[str, object] = {}
    if clips.spans is not None and not np.isnan(clips.spans[index]).all():
        own["span"] = [str(second) for second in clips.spans[index]]
    for name in ("fps", "max_num_frames", "video_size"):
        # With buckets the common size is only what evaluations sample, so it is not in the spec.
        is_buckets = common.buckets is not None and name != "fps"
        if is_buckets or getattr(settings, name) != getattr(common, name):
            own[name] = str(getattr(settings, name))
    if is_control:
        own["is_control"] = True  # the entry of a clip may hold frames, too
    if clips.images is not None and clips.images[index]:
        own["image"] = sources.recorded(clips.images[index])
    return hash_text(json.dumps([sources.recorded(clips.files[index]), own], sort_keys=True))


class Sources:
    """Content hashes of files, read again only if size or mtime changed.

    They are in sources.jsonl of the cache's folder: [absolute name, version, hash]. Objects of a store
    cannot be appended to: there, each call of `add` writes an object of such lines below sources/.
    """

    def __init__(self, folder: str | Path) -> None:
        is_in_store = is_url(folder)
        self._folder = store.join(str(folder), "sources") if is_in_store else None
        self._objects: set[str] = set()  # those that were read or written
        self._stale: dict[str, str] | None = None  # {name: version} of what `changed` has found
        self._index = FileIndex(None if is_in_store else Path(folder) / "sources.jsonl")

    def _refresh(self) -> None:
        """Read what other processes have added to a store since."""
        if self._folder is None:
            return
        new = [url for url in store.find(self._folder) if url not in self._objects]
        # They never change.
        for copy in store.in_threads(lambda url: store.local_copy(url, "-"), new):
            # Another process may have seen other versions: their hashes are not those of this run's files.
            stale, rows = self._stale, FileIndex(copy).rows()
            self._index.add(row for row in rows if stale is None or stale.get(row[0]) == row[1])
        self._objects |= {*new}

    def changed(self, files: Files, trust_index: bool = False) -> list[str]:
        """Forget and return the files that are new, or changed since they were hashed. trust_index: only new ones."""
        self._stale = None
        self._refresh()
        is_known = lambda name: trust_index and self._index.last(_absolute(name))
        read = {n: file_of(n, part) for n, part in files.items() if not is_known(n)}
        there = store.stats(read.values())
        every = [*dict.fromkeys(read.values())]  # many members of a tar shard share its version
        version = lambda file: there[file].version if file in there else version_of(file)
        versions = dict(zip(every, store.in_threads(version, every), strict=True))
        found, self._stale = [], {}
        for name, file in read.items():
            own = _absolute(name)
            if not self._index.get(own, versions[file]):
                self._index.forget(own)
                self._stale[own] = versions[file]
                found.append(name)
        return found

    def left(self, names: Sequence[str]) -> list[str]:
        """Return those of changed or unreadable files that no other process has hashed since."""
        self._refresh()
        return [n for n in names if not self.recorded(n) or self.unreadable([n])]

    def unreadable(self, files: Iterable[str]) -> list[str]:
        return [name for name in files if self.recorded(name).startswith(_UNREADABLE)]

    def recorded(self, name: str) -> str:
        """The content hash of a file as of when it was last read; "" if it is not known."""
        return str(*(self._index.last(_absolute(name)) or [""])[:1])

    def add(self, found: Sequence[HashedFile]) -> None:
        """Add what hash_files returned."""
        try:
            self._index.add(found)
        except OSError as error:
            path = self._index.path
            assert path is not None, "an index without a file writes nothing"
            raise WriteError(path, error) from None
        if self._folder is not None and found:
            # A name that sorts behind all earlier ones: the last line of a file counts.
            url = f"{self._folder}/{time.time_ns():020}-{os.urandom(4).hex()}.jsonl"
            store.write(url, to_lines(found))
            self._objects.add(url)


def hash_files(names: Sequence[str], files: Files) -> list[HashedFile]:
    """Hash files in parallel. files: the parts to hash."""

    def row(name: str) -> HashedFile:
        part = files[name]
        file = file_of(name, part)
        # Take the version first: a file that changes while it is read is then hashed again.
        version = version_of(file)
        return _absolute(name), version, hash_file(file, *part, version=version)

    with ThreadPoolExecutor(_HASHING_THREADS) as pool:
        return list(pool.map(row, names))


def hash_file(path: str, *part: int, version: str | None = None) -> str:
    """Hash the content of a file or of a part (offset, bytes) of it; if it cannot be read, hash its name.

    version: what version_of returns for the file, if it is known.
    """
    # hashlib releases the interpreter lock for large blocks, so that threads hash in parallel.
    digest = hashlib.blake2b(digest_size=16)
    try:
        if not (version := version_of(path) if version is None else version):
            raise FileNotFoundError(path)
        # The copy of an object stays for the reader of the clip.
        copy = store.local_copy(path, version, part or None)  # pyright: ignore[reportArgumentType]
        start, num_bytes = (0, 2**63) if is_url(path) or not part else part
        with open_regular(copy) as file:
            file.seek(start)
            while block := file.read(min(num_bytes, _BLOCK)):
                digest.update(block)
                num_bytes -= len(block)
    except OSError:
        return _UNREADABLE + hash_text(path)
    return digest.hexdigest()


def _absolute(name: str) -> str:
    return distinct(name) if is_url(name) else os.path.abspath(name)


def version_of(file: str) -> str:
    """A text that changes with the file; "" if there is none."""
    try:
        return store.stat(file).version
    except OSError:
        return ""

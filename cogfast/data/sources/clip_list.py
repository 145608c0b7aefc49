"""The samples of a data set as columns, whose memory forked workers share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain, pairwise
from typing import Any

import numpy as np

import cogfast.extensions.stores.store as store
from cogfast.data.bad_samples import BadSample, Unavailable
from cogfast.extensions.stores.store import Versions


class PackedStrings(Sequence[str]):
    """An immutable sequence of strings in two arrays.

    A list of a million paths would be copied into every forked worker: reading an element changes
    its reference count, which copies the memory page that it is on.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        # surrogatepass: file names need not be valid UTF-8.
        encoded = [s.encode("utf-8", "surrogatepass") for s in strings]
        self._bytes = np.frombuffer(b"".join(encoded), dtype=np.uint8)
        self._ends = np.cumsum([0, *(len(e) for e in encoded)], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of all strings, and where each begins and ends."""
        return self._bytes, self._ends

    def __iter__(self) -> Iterator[str]:
        view = self._bytes.data
        for start, end in pairwise(self._ends.tolist()):
            yield str(view[start:end], "utf-8", "surrogatepass")

    # No slices: a part of a column is taken by ClipList.take.
    def __getitem__(self, index: int) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not -len(self) <= index < len(self):
            raise IndexError(f"{index=} of {len(self)} strings")
        index %= len(self)
        text = self._bytes[self._ends[index] : self._ends[index + 1]].tobytes()
        return text.decode("utf-8", "surrogatepass")


MEMBER = "::"  # separates the name of a shard from that of its member
_MOST_BYTES = 2**30  # of a member, which is read into memory as a whole
Member = tuple[int, int]  # where a file lies in its shard: offset and bytes
SPLITS = ("train", "valid", "test")
OTHER_VIDEOS = ("control", "mask")  # that a sample may have beside its clip
TYPES = ("", "video", "image")  # what a manifest says that a file is
# Values that stand for a missing column where sources with and without it are joined; of others 0.
_NONE = {"spans": np.nan, "fps": np.nan, "weights": 1.0, "places": -1}


def _taken(column: Any, indices: Sequence[int] | np.ndarray) -> Any:
    """Return the entries of a column at `indices`, in that order; None for no column."""
    if isinstance(column, PackedStrings):
        return PackedStrings(column[int(i)] for i in indices)
    return None if column is None else column[np.asarray(indices, dtype=np.int64)]


@dataclass(frozen=True, slots=True)
class OtherFiles:
    """One further file for each sample, such as its control video. files: named as ClipList.files;
    "": none. places: as ClipList.places. shape: of .npy files (arrays.py); None: they are videos."""

    files: PackedStrings
    places: np.ndarray | None = None
    shape: tuple[int, ...] | None = None

    def take(self, indices: Sequence[int] | np.ndarray) -> OtherFiles:
        return OtherFiles(_taken(self.files, indices), _taken(self.places, indices), self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipList:
    """One entry per sample in every column; a column that no sample needs is None."""

    files: PackedStrings  # a video file, or a member of a tar shard as SHARD::MEMBER
    captions: PackedStrings
    images: PackedStrings | None = None  # for image-to-video; "": use the first frame
    spans: np.ndarray | None = None  # float64 [n, 2] start and end in seconds; nan: no bound
    fps: np.ndarray | None = None  # float64 [n] frames per second of the clip; nan: the settings'
    weights: np.ndarray | None = None  # float64 [n] how often an epoch reads the sample
    splits: np.ndarray | None = None  # int8 [n], indices into SPLITS
    prior: np.ndarray | None = None  # bool [n], whether the base model's own estimate is the target
    types: np.ndarray | None = None  # int8 [n], indices into TYPES
    # int64 [n, 2]: offset and bytes of the video in its shard; -1: a file of its own
    places: np.ndarray | None = None
    buckets: np.ndarray | None = None  # int16 [n], indices into the settings' sizes; -1: left out
    # {"control", "mask" or the name of a tensor: its files}
    others: Mapping[str, OtherFiles] = field(default_factory=dict)
    versions: Versions = field(default_factory=Versions)  # of the URLs

    def __len__(self) -> int:
        return len(self.files)

    @property
    def columns(self) -> dict[str, PackedStrings | np.ndarray | None]:
        names = [each.name for each in fields(self) if each.name not in ("others", "versions")]
        return {name: getattr(self, name) for name in names}

    def local(self, name: str, part: Member | None = None) -> str:
        """Return the path of a file of this machine with the content of a file, or of (start, bytes) of it;
        BadSample if its store does not give it, or it has changed since the run began."""
        if not store.is_url(name):
            return name
        about = self.versions.get(name)
        if given_up := self.versions.given_up.pop((name, part), None):
            raise given_up
        try:
            if about is None:
                raise FileNotFoundError(f"{name}: no such object, or it was refused")
            return str(store.local_copy(name, about.version, part, about.num_bytes))
        except OSError as error:
            kind = Unavailable if isinstance(error, store.StoreError) else BadSample
            raise kind(name, str(error)) from None

    def prefetch(self, name: str, part: Member | None = None) -> None:
        """Call `local`, ahead of its use; the next call of it for this file raises its error."""
        self.versions.given_up.pop((name, part), None)
        try:
            self.local(name, part)
        except BadSample as error:
            if error.reason.startswith(name):  # not an error of the local cache
                self.versions.given_up[name, part] = error

    def read_member(self, file: str, member: Member) -> bytes:
        """Read a file that is a member of a shard, SHARD::NAME; BadSample if that fails."""
        offset, size = member
        if size > _MOST_BYTES:
            raise BadSample(file, f"a member of {size} bytes; at most {_MOST_BYTES} are supported")
        try:
            shard = file.partition(MEMBER)[0]
            if store.is_url(shard):
                data = store.read(self.local(shard, member))
            else:
                data = store.read(shard, offset, size)
        except BadSample as error:
            raise type(error)(file, f"the shard cannot be read ({error.reason})") from None
        except OSError as error:
            raise BadSample(file, f"the shard cannot be read ({str(error)[:200]})") from None
        if len(data) < size:
            raise BadSample(file, f"the shard ends early: {len(data)} of {size} bytes are there")
        return data

    @property
    def largest_copy(self) -> int:
        """Most bytes of a file that `local` copies; 0 if it copies none."""
        parts = 0 if self.places is None else int(self.places[:, 1].max(initial=0))
        return parts if parts > 0 else self.versions.largest

    def take(self, indices: Sequence[int] | np.ndarray) -> ClipList:
        """Return the samples at `indices`, in that order."""
        columns = {name: _taken(column, indices) for name, column in self.columns.items()}
        others = {name: files.take(indices) for name, files in self.others.items()}
        return ClipList(**columns, others=others, versions=self.versions)

    def without(self, names: Collection[str]) -> ClipList:
        """Leave out further files of these names."""
        return replace(self, others={n: f for n, f in self.others.items() if n not in names})

    def in_split(self, name: str) -> ClipList:
        """Return the samples of a split; without a column of splits all samples are "train"."""
        if self.splits is None:
            return self if name == SPLITS[0] else self.take([])
        return self.take(np.flatnonzero(self.splits == SPLITS.index(name)))


def member_of(files: ClipList | OtherFiles, index: int) -> Member | None:
    """Return where a sample's file lies in its shard; None if it is a file of its own."""
    if files.places is None or files.places[index, 0] < 0:
        return None
    offset, size = files.places[index].tolist()
    return offset, size


def file_of(name: str, member: Sequence[int] | None) -> str:
    """Return the file that holds a sample's file: the shard of a member, SHARD::NAME, else the file itself."""
    return name.partition(MEMBER)[0] if member else name


def join(lists: Sequence[ClipList]) -> ClipList:
    """Concatenate lists of samples."""
    if len(lists) == 1:
        return lists[0]
    sizes, others = [len(one) for one in lists], {}
    for name in dict.fromkeys(name for one in lists for name in one.others):
        found = [one.others.get(name) for one in lists]
        files = _joined("files", [other and other.files for other in found], sizes)
        places = _joined("places", [other and other.places for other in found], sizes)
        others[name] = OtherFiles(files, places, next(other.shape for other in found if other))
    columns = {n: _joined(n, [one.columns[n] for one in lists], sizes) for n in lists[0].columns}
    versions = Versions({}, *(one.versions for one in lists))
    return ClipList(**columns, others=others, versions=versions)


def _joined(name: str, parts: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Concatenate a column. Lists that lack it get its default where another list has it."""
    like = next((part for part in parts if part is not None), None)
    if like is None:
        return None
    pairs = zip(parts, sizes, strict=True)
    if isinstance(like, PackedStrings):
        return PackedStrings(chain.from_iterable(part or [""] * size for part, size in pairs))
    none = lambda size: np.full((size, *like.shape[1:]), _NONE.get(name, 0), like.dtype)
    return np.concatenate([none(size) if part is None else part for part, size in pairs])

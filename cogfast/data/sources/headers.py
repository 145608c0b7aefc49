"""Reads the container headers of a data set: frame count, frame rate and shown size of every video.

Only the first frame is decoded. Headers are saved in an index beside the data, or in the user's cache folder, under each
file's name, size and mtime, so that only new and changed files are opened at the next start.
"""

from __future__ import annotations

import io
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache, partial
from itertools import chain, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import cogfast.extensions.stores.store as store
from cogfast.core.addresses import distinct
from cogfast.data.bad_samples import BadSample
from cogfast.data.clip_notes import NOTES
from cogfast.data.sources.clip_list import MEMBER, ClipList, file_of, member_of
from cogfast.data.sources.file_index import FileIndex, to_lines, user_index
from cogfast.data.video.picture import holds_picture, picture_size
from cogfast.data.video.reader import (
    MAX_FRAMES,
    check_file,
    check_sides,
    decode_errors,
    look_of,
    one_line,
    open_container,
    video_stream,
)
from cogfast.extensions.stores.store import StoreError

if TYPE_CHECKING:
    import av
    from av.container import InputContainer

logger = logging.getLogger(__name__)

_NUM_THREADS = 16  # more than cores, because they wait for disks and networks
_SECONDS = 10.0  # between log lines of progress, and writes of the index
_AT_ONCE = 1024  # files whose results are collected together
_INDEX = ".cogfast-index"
_MAX_SIDE = 2**16  # rows or columns of a video


class Header(NamedTuple):
    """Header of one video or picture, which has one frame and no rate.

    height, width: as players show it. reason: "" for a readable one, else why it is not; then the other fields
    are 0. notes: what readers do not apply (clip_notes.py), with blanks between.
    """

    num_frames: int = 0
    fps: float = 0.0
    height: int = 0  # rows
    width: int = 0  # columns
    reason: str = ""
    notes: str = ""

    @property
    def is_picture(self) -> bool:
        return self.num_frames == 1 and not self.fps


class _Scan:
    def __init__(self, clips: ClipList, samples: range, trust_index: bool) -> None:
        self._clips, self._samples, self._trusts = clips, samples, trust_index
        self._left: dict[str, tuple[int, str]] = {}  # files to open: a sample of each, its version
        self._found: dict[str, Header] = {}
        self._seen: dict[tuple, Header] = {}  # equal headers are one object
        # Many members of a tar shard share its version.
        self._version = cache(partial(_version, clips))

    def look_up(self) -> int:
        """Take what the index has, and return how many files are to be opened."""
        self.index, folder = index_of(self._clips)
        self.is_beside = self.index.path == Path(folder, _INDEX)
        # On hf:// each write is a commit in the data set's history.
        can_be_written = store.is_url(folder) and not folder.startswith(("hf:", "http"))
        self.shared = store.join(folder, _INDEX) if can_be_written else None
        # The name in the index: the data may move, and an address may be signed.
        self._known_as = partial(distinct, start=len(folder))
        deque(store.in_threads(self._look_up, self._samples), maxlen=0)
        return len(self._left)

    def _look_up(self, sample: int) -> None:
        name, member = self._clips.files[sample], member_of(self._clips, sample)
        known_as = self._known_as(name)
        if not name or (self._trusts and self._take(name, self.index.last(known_as))):
            return
        stamp = self._version(file_of(name, member)) if member else _version(self._clips, name)
        if isinstance(stamp, Header):
            self._found[name] = stamp
            return
        # Members of a shard share its version; the offset tells them apart.
        stamp += f"-{member[0]}" if member else ""
        if not self._take(name, self.index.get(known_as, stamp)):
            self._left[name] = sample, stamp

    def _take(self, name: str, values: list | None) -> bool:
        """Take a header of the index; False if it is none that a video can have."""
        try:
            num_frames, fps, height, width, reason, notes = values or []
            is_one = 0 < num_frames <= MAX_FRAMES and 0 < height <= _MAX_SIDE >= width > 0
            is_one &= reason == "" and set(notes.split()) <= NOTES.keys()
            is_one &= 0 < fps < math.inf or num_frames == 1 and fps == 0
            key = int(num_frames), float(fps), int(height), int(width), "", notes
        except (AttributeError, TypeError, ValueError, OverflowError):
            return False
        if is_one:
            self._found[name] = self._seen.setdefault(key, Header(*key))
        return is_one

    def read_some(self) -> tuple[list[tuple], int]:
        """Open files for some seconds; return their rows of the index, and how many files are left."""
        rows, until = [], time.monotonic() + _SECONDS
        with ThreadPoolExecutor(_NUM_THREADS) as pool:
            while self._left and time.monotonic() < until:
                some = [self._left.popitem() for _ in range(min(len(self._left), _AT_ONCE))]
                headers = pool.map(lambda one: _probe(self._clips, one[1][0]), some)
                for (name, (_, stamp)), header in zip(some, headers, strict=True):
                    self._found[name] = header
                    # Files that failed are tried again: a change of permissions keeps the stamp.
                    if not header.reason:
                        rows.append((self._known_as(name), stamp, *header))
        return rows, len(self._left)

    @property
    def headers(self) -> list[Header | None]:
        return [self._found.get(self._clips.files[i]) for i in self._samples]


def read_headers(
    clips: ClipList,
    samples: range | None = None,
    trust_index: bool = False,
    gather: Callable[[Callable[[], Any]], list] = lambda make: [make()],
    is_main: bool = True,
    is_first: bool = True,
) -> list[Header | None]:
    """Return the header of each sample's file, or of some samples; None for one without a file.

    trust_index: do not look whether files have changed since their headers were saved. gather: calls a function
    on each of the processes that read other samples meanwhile, and returns all results. is_main, is_first:
    whether this process is the first of them, and of its machine.
    """
    scan = _Scan(clips, range(len(clips)) if samples is None else samples, trust_index)
    total, start, has_new = sum(gather(scan.look_up)), time.monotonic(), False
    left = total
    while left:
        each, numbers = zip(*gather(scan.read_some), strict=True)
        rows, left = [*chain(*each)], sum(numbers)
        # Appends of several machines to one file would overwrite each other on a network file system.
        if is_main or (is_first and not scan.is_beside):
            scan.index.keep(rows)
        has_new |= bool(rows)
        if left and is_main:
            done, seconds = total - left, time.monotonic() - start
            logger.info("headers: %d of %d videos, %.0f/s", done, total, done / seconds)
    if is_main and has_new and scan.shared:  # for other machines
        with suppress(StoreError):  # a place that is read-only
            store.write(scan.shared, to_lines(scan.index.rows()))
    return scan.headers


def index_of(clips: ClipList) -> tuple[FileIndex, str]:
    """Open the index in the deepest folder that holds all files of a data set, or the one about it in the
    user's cache folder if it is read-only or in a store; return it with the folder."""
    # The least and the greatest are enough. What follows the last slash may be a part of a name.
    ends = [end(filter(None, clips.files), default="") for end in (min, max)]
    folder = os.path.commonprefix(ends).partition(MEMBER)[0].rpartition("/")[0]
    if store.is_url(folder):
        shared = None
        with suppress(OSError):  # there is none yet, or it cannot be read
            shared = store.local_copy(store.join(folder, _INDEX))
        return user_index("headers", [folder], shared), folder
    # Relative names would be those of other files in another folder.
    root = [] if store.is_url(ends[0]) or os.path.isabs(ends[0]) else [os.getcwd()]
    # Two buckets, or a disk and a store, have no folder in common.
    if not folder or store.is_url(f"{folder}/"):
        return user_index("headers", [*root, folder]), folder
    beside = Path(folder, _INDEX)
    is_own = os.access(beside if beside.exists() else folder, os.W_OK)
    return FileIndex(beside) if is_own else user_index("headers", [*root, folder], beside), folder


def _version(clips: ClipList, file: str) -> str | Header:
    if store.is_url(file):
        about = clips.versions.get(file)
        return about.version if about else Header(reason="no such object, or it was refused")
    try:
        return store.stat(file).version
    except OSError as error:
        return Header(reason=f"cannot be opened ({error.strerror or error})")


def _probe(clips: ClipList, index: int) -> Header:
    name, member = clips.files[index], member_of(clips, index)
    file = file_of(name, member)
    about = clips.versions.get(file)
    try:
        if about is None and member is None:
            return probe(name, check_file(name))
        num_bytes = None if about is None else about.num_bytes
        with store.open_file(file, num_bytes) as opened:
            if member is None:
                return probe(opened, num_bytes or 0)
            with store.open_part(opened, *member) as part:
                return probe(part, member[1])
    except StoreError as error:
        return Header(reason=str(error).removeprefix(f"{file}: "))
    except BadSample as error:
        return Header(reason=error.reason)
    except OSError as error:
        return Header(reason=f"the shard cannot be read ({str(error)[:200]})")


def probe(source: str | io.BufferedReader, num_bytes: int) -> Header:
    """Read the header of an open file or a path; a Header with a reason if that fails."""
    import av
    from av.error import FFmpegError

    if num_bytes == 0:
        return Header(reason="the file is empty (0 bytes)")
    try:
        if holds_picture(source) and (size := picture_size(source)) is not None:
            return Header(1, 0.0, *size)
    except ValueError as error:
        return Header(reason=str(error))
    try:
        with open_container(source) as container:
            stream = video_stream("", container)
            rate = stream.average_rate or stream.guessed_rate
            # Matroska gives the duration of the file only, and often no frame count.
            if stream.duration and stream.time_base:
                seconds = float(stream.duration * stream.time_base)
            else:
                seconds = (container.duration or 0) / av.time_base
            fps = float(rate or 0)
            # stream.frames counts what an edit list cuts off, too, and not what fragments add.
            index = stream.index_entries
            cut = sum(1 for _ in takewhile(lambda each: each.is_discard, index))
            num_frames = min(stream.frames, len(index) or MAX_FRAMES) - cut
            is_counted = 0 < stream.frames >= len(index)
            height, width, notes = _shown(container, stream)
            check_sides(height, width)
            if not is_counted and not seconds:  # a browser's recording
                container.seek(0)
                ends = ((p.pts or 0) + (p.duration or 0) for p in container.demux(stream))
                seconds = float(max(ends, default=0) * (stream.time_base or 0))
            num_frames = num_frames if is_counted else round(seconds * fps)
    except BadSample as error:
        return Header(reason=error.reason)
    except StoreError:
        raise
    except (FFmpegError, ValueError, OSError) as error:
        return Header(reason=f"not a readable video ({one_line(error)})")
    if not num_frames or not fps or not height or not width:
        return Header(reason="no frame in it")
    # A damaged header may claim billions of frames.
    if num_frames > MAX_FRAMES:
        return Header(reason=f"header claims {num_frames} frames; at most {MAX_FRAMES} are read")
    return Header(num_frames, fps, height, width, "", notes)


def _shown(container: InputContainer, stream: av.VideoStream) -> tuple[int, int, str]:
    """Return rows and columns as players show the video, and its notes: its first frame has what containers lack."""
    height, width = stream.height or 0, stream.width or 0
    try:
        look = look_of(next(container.decode(stream)), stream)
    except StoreError:
        raise
    except (StopIteration, *decode_errors()):  # the reader reports it
        return height, width, ""
    height, width = (width, height) if look.is_transposed else (height, width)
    aspect = look.pixel_aspect
    return round(height / min(1, aspect)), round(width * max(1, aspect)), " ".join(look.notes)

"""Reads the container headers of a data set: frame count, frame rate and size of every video.

Nothing is decoded. Headers are saved in an index in the user's cache folder, under each file's
name, size and mtime, so that only new and changed files are opened at the next start.
"""

from __future__ import annotations

import io
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import NamedTuple

from cogfast.core import store
from cogfast.core.store import StoreError
from cogfast.data.bad_samples import BadSample
from cogfast.data.sources.clip_list import ClipList
from cogfast.data.sources.file_index import FileIndex, user_index
from cogfast.data.sources.tar_shards import MEMBER, Member
from cogfast.data.video.file import (
    MAX_FRAMES,
    check_file,
    one_line,
    open_container,
    video_stream,
)
from cogfast.data.video.picture import holds_picture, picture_size

logger = logging.getLogger(__name__)

_NUM_THREADS = 16  # more than cores, because they wait for disks and networks
_SECONDS = 10.0  # between log lines of progress


class Header(NamedTuple):
    """Header of one video or picture, which has one frame and no rate.

    reason: "" for a readable one, else why it is not; then the other fields are 0.
    """

    num_frames: int = 0
    fps: float = 0.0
    height: int = 0  # rows
    width: int = 0  # columns
    reason: str = ""

    @property
    def is_picture(self) -> bool:
        return self.num_frames == 1 and not self.fps


def read_headers(clips: ClipList) -> list[Header]:
    """Return the header of every sample's file, from the index or from the file."""
    index = index_of(clips)
    version = cache(partial(_version, clips))  # many members of a tar shard share its version
    stamps: dict[str, str] = {}  # of the files that must be opened
    samples: dict[str, int] = {}  # the first sample of each of these files
    found: dict[str, Header] = {}
    for i, name in enumerate(clips.files):
        place = _place(clips, i)
        stamp = version(name.partition(MEMBER)[0] if place else name)
        if isinstance(stamp, Header):
            found[name] = stamp
            continue
        # Members of a shard share its version; the offset tells them apart.
        stamp += f"-{place[0]}" if place else ""
        known = index.get(name, stamp)
        if known and len(known) == len(Header._fields):  # else the line is damaged
            found[name] = Header(*known)
        else:
            stamps[name] = stamp
            samples.setdefault(name, i)
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        headers = pool.map(lambda i: _probe(clips, i), samples.values())
        new, start = [], time.monotonic()
        last = start
        for number, (name, header) in enumerate(zip(samples, headers, strict=True), 1):
            found[name] = header
            # Files that failed are tried again: a change of permissions keeps the stamp.
            if not header.reason:
                new.append((name, stamps[name], *header))
            now = time.monotonic()
            if now - last > _SECONDS:
                last = now
                rate = number / (now - start)
                logger.info("headers: %d of %d videos, %.0f/s", number, len(samples), rate)
                index.keep(new)
                new = []
    index.keep(new)
    return [found[name] for name in clips.files]


def index_of(clips: ClipList) -> FileIndex:
    """Open the index of the deepest folder that holds all files of a data set."""
    # commonprefix compares characters: what follows the last slash may be a part of a name.
    folder = os.path.commonprefix([*clips.files]).rpartition("/")[0]
    return user_index("headers", [folder])


def _place(clips: ClipList, index: int) -> tuple[int, int] | None:
    """Offset and bytes of a sample's video in its shard; None if it is a file of its own."""
    if clips.places is None or clips.places[index, 0] < 0:
        return None
    offset, size = clips.places[index].tolist()
    return offset, size


def _version(clips: ClipList, file: str) -> str | Header:
    if store.is_url(file):
        about = clips.versions.get(file)
        return Header(reason="no such object") if about is None else about.version
    try:
        return store.stat(file).version
    except OSError as error:
        return Header(reason=f"cannot be opened ({error.strerror or error})")


def _probe(clips: ClipList, index: int) -> Header:
    name, place = clips.files[index], _place(clips, index)
    file = name if place is None else name.partition(MEMBER)[0]
    about = clips.versions.get(file)
    try:
        if about is None and place is None:
            return probe(name, check_file(name))
        num_bytes = None if about is None else about.num_bytes
        with store.open_file(file, num_bytes) as opened:
            if place is None:
                return probe(opened, num_bytes or 0)
            with Member(opened, *place) as member:
                return probe(io.BufferedReader(member), place[1])
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
        if holds_picture(source):
            size = picture_size(source)
            if size is not None:
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
            num_frames = stream.frames or round(seconds * fps)
            height, width = stream.height or 0, stream.width or 0
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
    return Header(num_frames, fps, height, width)

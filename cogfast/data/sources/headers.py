"""Reads the container headers of a data set: frame count, frame rate and size of every video.

Nothing is decoded. Headers are saved in an index in the user's cache folder, under each file's
name, size and mtime, so that only new and changed files are opened at the next start.
"""

from __future__ import annotations

import io
import json
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from cogfast.data.bad_samples import BadSample
from cogfast.data.sources.clip_list import ClipList
from cogfast.data.sources.store import Store, index_file
from cogfast.data.sources.tar_shards import MEMBER, Member
from cogfast.data.video.file import (
    MAX_FRAMES,
    check_file,
    one_line,
    open_container,
    video_stream,
)

logger = logging.getLogger(__name__)

_NUM_THREADS = 16  # more than cores, because they wait for disks and networks
_SECONDS = 10.0  # between log lines of progress


class Header(NamedTuple):
    """Header of one video.

    reason: "" for a readable video, else why it is not; then the other fields are 0.
    """

    num_frames: int = 0
    fps: float = 0.0
    height: int = 0  # rows
    width: int = 0  # columns
    reason: str = ""


def read_headers(clips: ClipList) -> list[Header]:
    """Return the header of every sample's file, from the index or from the file."""
    file = index_of(clips)
    known = _read_index(file)
    wanted: dict[str, tuple[int, str]] = {}  # sample and stamp of each file that must be opened
    found: dict[str, Header] = {}
    for i, (name, stamp) in enumerate(zip(clips.files, _stamps(clips), strict=True)):
        if isinstance(stamp, Header):
            found[name] = stamp
        elif known.get(name, ("",))[0] == stamp:
            found[name] = known[name][1]
        else:
            wanted[name] = i, stamp
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        headers = pool.map(lambda of: _probe(clips, of[0]), wanted.values())
        new, start = [], time.monotonic()
        last = start
        for number, (name, header) in enumerate(zip(wanted, headers, strict=True), 1):
            found[name] = header
            # Files that failed are tried again: a change of permissions keeps the stamp.
            if not header.reason:
                new.append([name, wanted[name][1], *header])
            now = time.monotonic()
            if now - last > _SECONDS or number == len(wanted):
                _append(file, new)
                new = []
            if now - last > _SECONDS:
                last = now
                rate = number / (now - start)
                logger.info("headers: %d of %d videos, %.0f/s", number, len(wanted), rate)
    return [found[name] for name in clips.files]


def index_of(clips: ClipList) -> Path:
    """Return the path of the index of the deepest folder that holds all files of a data set."""
    # commonprefix compares characters: what follows the last slash may be a part of a name.
    folder = os.path.commonprefix([*clips.files]).rpartition("/")[0]
    return index_file("headers", [folder])


def _stamps(clips: ClipList) -> Iterator[str | Header]:
    """Yield each sample's stamp (size and mtime), or a Header with the reason if it has none."""
    versions: dict[str, str | Header] = {}
    for i, name in enumerate(clips.files):
        offset = -1 if clips.places is None else clips.places[i, 0]
        is_member = offset >= 0
        store = name.partition(MEMBER)[0] if is_member else name
        if store not in versions:
            try:
                versions[store] = Store(store).version()
            except OSError as error:
                versions[store] = Header(reason=f"cannot be opened ({error.strerror or error})")
        version = versions[store]
        # Members of a shard share its version; the offset tells them apart.
        is_text = is_member and isinstance(version, str)
        yield f"{version}-{offset}" if is_text else version


def _probe(clips: ClipList, index: int) -> Header:
    name = clips.files[index]
    if clips.places is not None and clips.places[index, 0] >= 0:
        offset, size = (int(x) for x in clips.places[index, :2])
        try:
            with Member(name, offset, size) as file:
                return probe(io.BufferedReader(file), size)
        except (OSError, BadSample) as error:
            return Header(reason=f"the shard cannot be read ({str(error)[:200]})")
    try:
        return probe(name, check_file(name))
    except BadSample as error:
        return Header(reason=error.reason)


def probe(source: str | io.BufferedReader, num_bytes: int) -> Header:
    """Read the header of an open video file or path; a Header with a reason if that fails."""
    import av
    from av.error import FFmpegError

    if num_bytes == 0:
        return Header(reason="the file is empty (0 bytes)")
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
    except (FFmpegError, ValueError, OSError) as error:
        return Header(reason=f"not a readable video ({one_line(error)})")
    if not num_frames or not fps or not height or not width:
        return Header(reason="no frame in it")
    # A damaged header may claim billions of frames.
    if num_frames > MAX_FRAMES:
        return Header(reason=f"header claims {num_frames} frames; at most {MAX_FRAMES} are read")
    return Header(num_frames, fps, height, width)


def _read_index(file: Path) -> dict[str, tuple[str, Header]]:
    """Read the index: {name: (stamp, header)}.

    The last line of a name counts. Torn lines are skipped.
    """
    try:
        lines = file.read_bytes().splitlines()
    except OSError:
        return {}
    known = {}
    for line in lines:
        # A start that was killed, or two at once, may have left a part of a line.
        try:
            name, stamp, *header = json.loads(line)
            known[name] = stamp, Header(*header)
        except (ValueError, TypeError):
            continue
    return known


def _append(file: Path, rows: list[list]) -> None:
    """Append lines to the index. If that fails, the next start reads these headers again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "ab") as index:
            # Names that are not UTF-8 are escaped.
            index.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    except OSError as error:
        text = "%s cannot be written, so the next start reads headers again: %s"
        logger.warning(text, file, error)

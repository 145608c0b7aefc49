"""Finds the videos and captions of a data set in folders and text files."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import cogfast.extensions.stores.store as store
from cogfast.config.values import counted
from cogfast.extensions.stores.store import Stat

DataDir = str | Path | Sequence[str | Path]

_NUM_NAMED = 5  # samples that an error lists
_MAX_CAPTION_BYTES = 2**20  # a tokenizer would take minutes for more

# str.splitlines also splits at characters that captions may hold, such as U+2028.
_LINE_END = re.compile(r"\r\n|\r|\n")
_OTHER_VIDEOS = (".avi", ".mov", ".mkv", ".webm")
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
ADD_BUCKET = "add [1, rows, columns] to data.params.buckets"


class SourceError(ValueError):
    """A source of data cannot be read. The message is `SOURCE: reason; fix`.

    A caller that knows the key that lists the source prepends `KEY=`.
    """


def data_sources(data_dir: DataDir) -> list[str]:
    """Return data_dir as a list of at least one source."""
    sources = [data_dir] if isinstance(data_dir, (str, Path)) else list(data_dir)
    if not sources:
        raise ValueError("data_dir=[] must list at least one source; give a folder or file")
    return [str(source) for source in sources]


def data_folders(data_dir: DataDir) -> list[str]:
    """Return the folders of data_dir; ValueError if one on this machine does not exist."""
    dirs = data_sources(data_dir)
    for folder in dirs:
        if not store.is_url(folder) and not Path(folder).is_dir():
            raise SourceError(f"{folder}: no such folder; set it to the folder of your data")
    return [d.rstrip("/") if store.is_url(d) else str(Path(d)) for d in dirs]


def find_videos(files: Iterable[str], has_pictures: bool = False) -> Iterator[str]:
    """Yield every .mp4 file of `files`; with has_pictures every picture, too."""
    endings = (".mp4", *PICTURE_ENDINGS) if has_pictures else ".mp4"
    return (path for path in files if path.lower().endswith(endings))


def list_files(folder: str) -> dict[str, Stat | None]:
    """Return the files below a folder: those of a folder by name, then those of its folders. Only URLs have a Stat."""
    if not store.is_url(folder):
        return dict.fromkeys(walk_files(folder))

    def place(url: str) -> list[tuple[int, str]]:
        *above, name = url[len(folder) + 1 :].split("/")
        return [*((1, part) for part in above), (0, name)]

    found = store.find(folder)
    names = sorted(found, key=place)
    return {name: found[name] for name in names if "/._" not in name[name.rfind("/") :]}


def walk_files(folder: str) -> Iterator[str]:
    """Yield every file below a folder of this machine, as list_files does.

    Follows links to folders and visits each folder once.
    """
    seen = set()
    for root, dirs, files in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        # A link may lead back to a folder above it.
        place = os.path.realpath(root)
        if place in seen:
            dirs.clear()
            continue
        seen.add(place)
        dirs.sort()  # os.walk's own order differs between machines
        # macOS writes ._x.mp4 beside x.mp4 on disks of other systems.
        yield from (os.path.join(root, n) for n in sorted(files) if not n.startswith("._"))


def _refuse_folder(error: OSError) -> None:
    raise ValueError(
        f"{error.filename}: the folder cannot be read ({error.strerror}); make it readable, or move "
        "it out of the data"
    ) from None


def other_videos(files: Iterable[str]) -> str:
    """Describe the videos of a folder that are not read, because of their format; "" if there are none."""
    others = [file for file in files if file.lower().endswith(_OTHER_VIDEOS)]
    if not others:
        return ""
    number = counted(len(others), "video")
    return f"{number} not in .mp4 format: {named(others)}; convert to .mp4"


def in_place_of_videos(files: Iterable[str]) -> str:
    """Return what an error about a folder without a video adds: what it has, and what training needs."""
    others = other_videos(files)
    if others:
        return f", but {others}"
    number = sum(file.lower().endswith(PICTURE_ENDINGS) for file in files)
    if number:
        text = f", but {counted(number, 'picture')}; training needs clips, also for image-to-video, which"
        text += " takes their first frames, or the pictures of a manifest's column image; to train on the"
        return f"{text} pictures themselves, {ADD_BUCKET}"
    return "; give a folder of .mp4 clips, each with its caption in a .txt file beside it"


def sat_label(path: str) -> str:
    """The path at which SAT looks for the caption of a video. In a store, it is in the same bucket."""
    start = path.find("/", path.find("://") + 3) if store.is_url(path) else 0
    stem, _ = os.path.splitext(path[start:])
    return path[:start] + (stem.replace(".mp4", ".txt") + ".txt").replace("videos", "labels")


def label_of(path: str, folder: str, files: Mapping[str, Stat | None]) -> str | None:
    """Find the label file of a video; None if there is none. files: those of the folder.

    Tries SAT's path first, then the path with only the last videos/ replaced.
    """
    is_url = store.is_url(path)
    is_there = lambda name: name in files or (not is_url and os.path.exists(name))
    if is_there(label := sat_label(path)):
        return label
    # SAT replaces "videos" everywhere, also in a parent folder such as /my_videos/.
    below = path[len(folder.rstrip("/")) + 1 :]
    parts = list(PurePosixPath(below).with_suffix(".txt").parts)
    if "videos" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("videos")] = "labels"
    elif PurePosixPath(folder).name == "videos":
        folder = store.join(store.parent(folder), "labels")
    label = store.join(folder, "/".join(parts))
    return label if is_there(label) else None


def read_labels(
    videos: Sequence[str], folder: str, files: Mapping[str, Stat | None]
) -> Iterator[tuple[str | None, str, bool]]:
    """Yield the label file of each video (None: there is none), its first line, and whether more text follows."""
    if store.is_url(folder):
        beside = {store.parent(sat_label(f"{folder}/x")), folder}
        beside |= (
            {store.join(store.parent(folder), "labels")} if folder.endswith("/videos") else set()
        )
        for other in beside - {folder}:
            files = {**files, **store.find(other)}

    def read(video: str) -> tuple[str | None, str, bool]:
        label = label_of(video, folder, files)
        return (None, "", False) if label is None else (label, *first_line(label, files.get(label)))

    yield from store.in_threads(read, videos)


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8 text, with or without a byte order mark. name: its source, for the error."""
    at = data.find(b"\0")  # a zero byte means UTF-16 or UTF-32
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, text = error.start, ""
    if at < 0:
        return text
    line = 1 + len(_LINE_END.findall(data[:at].decode("latin-1")))
    raise ValueError(
        f"{name}: line {line} is not UTF-8 (byte 0x{data[at]:02x}); save the captions as UTF-8"
    )


def check_caption_size(num_bytes: int, name: str) -> None:
    """Raise ValueError if a caption is too long for a tokenizer."""
    if num_bytes > _MAX_CAPTION_BYTES:
        raise ValueError(
            f"{name}: {num_bytes} bytes; a caption may have at most {_MAX_CAPTION_BYTES}; shorten it"
        )


def text_of(file: str, is_caption: bool = False, about: Stat | None = None) -> str:
    """Read a UTF-8 file; ValueError if it cannot be read. about: that of a URL whose content is kept in the
    local cache."""
    try:
        local = None if store.is_url(file) else os.stat(file)
        if local and not (stat.S_ISREG(local.st_mode) or stat.S_ISDIR(local.st_mode)):
            raise OSError(errno.ESPIPE, "a pipe or device")  # reading it might never end
        if is_caption:
            size = local.st_size if local else (about or store.stat(file)).num_bytes
            check_caption_size(size, file)
        given = {} if about is None else {"version": about.version, "num_bytes": about.num_bytes}
        data = store.read(str(store.local_copy(file, **given)) if given else file)
    except OSError as error:
        if error.errno is None:  # the line of a store
            raise SourceError(str(error)) from None
        raise ValueError(
            f"{file}: cannot be read ({error.strerror}); replace it by a readable text file"
        ) from None
    return decoded(data, file)


def first_line(file: str, about: Stat | None = None) -> tuple[str, bool]:
    """Return the first line of a file ("" if it is empty), and whether more text follows. about: as of text_of."""
    first, _, rest = _LINE_END.sub("\n", text_of(file, True, about)).partition("\n")
    return first.strip(), bool(rest.strip())


def text_lines(file: str) -> list[str]:
    """Return the lines of a file, including blank ones except at its end."""
    # Blank lines at the end are dropped; those between stay, so that lines can be compared by number.
    text = text_of(file).rstrip()
    return [line.strip() for line in _LINE_END.split(text)] if text else []


def are_missing(paths: Iterable[str], found: Collection[str]) -> list[bool]:
    """Return for each path whether no file has it. found: the URLs that are there.

    Folders are listed: a call for each file would take long.
    """

    @cache
    def files_of(folder: str) -> Collection[str]:
        with suppress(OSError):
            return {*os.listdir(folder or ".")}
        return ()

    split = ((path, *os.path.split(path)) for path in paths)
    return [p not in found and name not in files_of(folder) for p, folder, name in split]


def refuse_samples(
    names: Sequence[str], num_samples: int, what: str, fix: str = "add them"
) -> None:
    """Raise ValueError with the number of faulty samples and the first `names`, if there are any."""
    if names:
        raise ValueError(f"{len(names)}/{num_samples} {what}: {named(names)}; {fix}")


def named(names: Sequence[str]) -> str:
    """The first few names, for a message."""
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


ADD_CAPTIONS = "add them or set data.params.allow_empty_captions=true"


def is_picture(name: str) -> bool:
    """Whether a mask is a picture, by the end of its name; a GIF is read as a video."""
    return name.lower().endswith(PICTURE_ENDINGS) and not name.lower().endswith(".gif")

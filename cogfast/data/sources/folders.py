"""Finds the videos and captions of a data set in folders and text files."""

from __future__ import annotations

import logging
import os
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path, PurePosixPath

import cogfast.extensions.stores.store as store
from cogfast.core.values import counted, cut
from cogfast.extensions.stores.store import Stat

logger = logging.getLogger(__name__)

DataDir = str | Path | Sequence[str | Path]

_NUM_NAMED = 5  # samples that an error lists
_MAX_CAPTION_BYTES = 2**20  # a tokenizer would take minutes for more

# str.splitlines also splits at characters that captions may hold, such as U+2028.
_LINE_END = re.compile(r"\r\n|\r|\n")
VIDEO_ENDINGS = (".mp4", ".avi", ".mov", ".mkv", ".webm")
_RUN = "/training_config.yaml"  # marks the folder of a run
# Schemes that a table in a store may name
_STORES = ("s3", "s3a", "gs", "gcs", "hf", "http", "https", "az", "abfs", "abfss")
_NO_DATA = {"__MACOSX", "lost+found", "$RECYCLE.BIN", "System Volume Information", "@eaDir"}
NO_WORDS = "nan", "NaN", "None", "NULL", "null", "<NA>"  # what pandas writes for a missing value
PICTURE_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".gif")
ADD_BUCKET = "add [1, rows, columns] to data.params.buckets"


class SourceError(ValueError):
    """A source of data cannot be read. The message is `SOURCE: reason; fix`.

    A caller that knows the key that lists the source prepends `KEY=`.
    """


def data_sources(data_dir: DataDir) -> list[str]:
    """Return data_dir as a list of at least one source."""
    if not (sources := [data_dir] if isinstance(data_dir, (str, Path)) else list(data_dir)):
        raise ValueError("data_dir=[] must list at least one source; give a folder or file")
    return [str(source) for source in sources]


def data_folders(data_dir: DataDir) -> list[str]:
    """Return the folders of data_dir; ValueError if one on this machine does not exist."""
    dirs = data_sources(data_dir)
    for folder in dirs:
        if not store.is_url(folder) and not Path(folder).is_dir():
            raise SourceError(f"{folder}: no such folder; set it to the folder of your data")
    return [d.rstrip("/") if store.is_url(d) else str(Path(d)) for d in dirs]


def find_videos(files: Mapping[str, Stat | None], folder: str, has_pictures: bool) -> list[str]:
    """Return the videos of a folder and, with has_pictures, its pictures; log what is not read."""
    found, unread = [], []
    of_mp4 = {file[:-4] for file in files if file.lower().endswith(".mp4")}
    for file in in_data(files, folder):
        stem, ending = os.path.splitext(file)
        is_read = has_pictures or ending.lower() not in PICTURE_ENDINGS
        if is_read and of_mp4 and ending.lower() in VIDEO_ENDINGS[1:]:
            # The source of an .mp4, or one without a caption
            is_read = stem not in of_mp4 and label_of(file, folder, files) is not None
        if ending.lower() in VIDEO_ENDINGS + PICTURE_ENDINGS:
            (found if is_read else unread).append(file)
    if found and unread:
        text = "%s: not read: %s (pictures, unless you %s; other formats without a label or beside an .mp4): %s"
        logger.warning(text, folder, counted(len(unread), "file"), ADD_BUCKET, named(unread))
    return found


def in_data(files: Iterable[str], folder: str) -> list[str]:
    """Leave out files below a folder that are no data: hidden ones, those of operating systems, and those of runs."""
    files = list(files)
    runs = {file[: -len(_RUN)] for file in files if file.endswith(_RUN)}
    of_runs = tuple(f"{run}/samples/" if run == folder else f"{run}/" for run in runs)

    def is_left(file: str) -> bool:
        parts = file[len(folder) :].split("/")
        return file.startswith(of_runs) or any(p[:1] == "." or p in _NO_DATA for p in parts)

    left = {file for file in files if is_left(file)}
    endings = (".tar", *VIDEO_ENDINGS, *PICTURE_ENDINGS)
    if shown := [file for file in files if file in left and file.lower().endswith(endings)]:
        text = "%s: left out %s in folders of runs, of an operating system or hidden ones: %s"
        logger.warning(text, folder, counted(len(shown), "file"), named(shown))
    return [file for file in files if file not in left]


def list_files(folder: str) -> dict[str, Stat | None]:
    """Return the files below a folder: those of a folder by name, then those of its folders. Only URLs have a Stat."""
    if not store.is_url(folder):
        return dict.fromkeys(walk_files(folder))

    found = store.find(folder)
    parts = lambda url: url.split("/")
    place = lambda url: [*((1, part) for part in parts(url)[:-1]), (0, parts(url)[-1])]
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
    text = f"{error.filename}: the folder cannot be read ({error.strerror})"
    raise ValueError(f"{text}; make it readable, or move it out of the data") from None


def in_place_of_videos(files: Iterable[str]) -> str:
    """Return what an error about a folder without a video adds: what it has, and what training needs."""
    if number := sum(file.lower().endswith(PICTURE_ENDINGS) for file in files):
        text = f", but {counted(number, 'picture')}; training needs clips, also for image-to-video, which takes their "
        text += "first frames, or the pictures of a manifest's column image; to train on the pictures themselves, "
        return text + ADD_BUCKET
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
    is_there = lambda name: name in files or (not store.is_url(path) and os.path.exists(name))
    if is_there(label := sat_label(path)):
        return label
    # SAT replaces "videos" everywhere, also in a parent folder such as /my_videos/.
    below = PurePosixPath(path[len(folder.rstrip("/")) + 1 :])
    parts = list(below.with_suffix(".txt").parts)
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
        beside = {store.parent(sat_label(f"{folder}/x"))}
        if folder.endswith("/videos"):
            beside.add(store.join(store.parent(folder), "labels"))
        for other in beside - {folder}:
            files = {**files, **store.find(other)}

    def read(video: str) -> tuple[str | None, str, bool]:
        if (label := label_of(video, folder, files)) is None:
            return None, "", False
        text = _LINE_END.sub("\n", text_of(label, True, files.get(label)))
        first, _, rest = text.partition("\n")
        return label, worded(first), bool(rest.strip())

    yield from store.in_threads(read, videos)


def decoded(data: bytes, name: str) -> str:
    """Decode UTF-8 text, with or without a byte order mark. name: its source, for the error."""
    at = data.find(b"\0")  # a zero byte means UTF-16 or UTF-32
    try:
        text = (data if at < 0 else data[:at]).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at, text = error.start, ""
    if at < 0:
        return text
    line = 1 + len(_LINE_END.findall(data[:at].decode("latin-1")))
    text = f"{name}: line {line} is not UTF-8 (byte 0x{data[at]:02x})"
    raise ValueError(f"{text}; save the captions as UTF-8")


def check_caption_size(num_bytes: int, name: str) -> None:
    """Raise ValueError if a caption is too long for a tokenizer."""
    if num_bytes > _MAX_CAPTION_BYTES:
        rule = f"a caption may have at most {_MAX_CAPTION_BYTES}"
        raise ValueError(f"{name}: {num_bytes} bytes; {rule}; shorten it")


def text_of(file: str, is_caption: bool = False, about: Stat | None = None) -> str:
    """Read a UTF-8 file, or raise ValueError. about: that of a URL whose content the local cache keeps."""
    try:
        if is_caption:
            check_caption_size((about or store.stat(file)).num_bytes, file)
        given = {} if about is None else {"version": about.version, "num_bytes": about.num_bytes}
        data = store.read(str(store.local_copy(file, **given)) if given else file)
    except OSError as error:
        if error.errno is None:  # the line of a store
            raise SourceError(str(error)) from None
        text = f"{file}: cannot be read ({error.strerror})"
        raise ValueError(f"{text}; replace it by a readable text file") from None
    return decoded(data, file)


def worded(caption: str) -> str:
    """Return a caption without blanks around it; "" for what stands for a missing one."""
    return "" if (text := caption.strip()) in NO_WORDS else text


def text_lines(file: str) -> list[str]:
    """Return the lines of a file, including blank ones except at its end."""
    # Blank lines at the end are dropped; those between stay, so that lines can be compared by number.
    text = text_of(file).rstrip()
    return [line.strip() for line in _LINE_END.split(text)] if text else []


def find_missing(paths: list[str], found: Collection[str]) -> list[bool]:
    """Return for each path whether no file has it. found: the URLs that are there. A path whose file has the
    same letters in another Unicode form gets its name.

    Folders are listed: a call for each file would take long.
    """

    @cache
    def files_of(folder: str) -> Collection[str]:
        with suppress(OSError):
            return {*os.listdir(folder or ".")}
        return ()

    split = ((path, *os.path.split(path)) for path in paths)
    is_gone = [p not in found and name not in files_of(folder) for p, folder, name in split]
    for i in (i for i, gone in enumerate(is_gone) if gone and not paths[i].isascii()):
        forms = (unicodedata.normalize(form, paths[i]) for form in ("NFC", "NFD"))
        paths[i] = next(filter(os.path.exists, forms), paths[i])
        is_gone[i] = not os.path.exists(paths[i])
    return is_gone


def placed(folder: str, name: str, where: str) -> str:
    """Return the path that a table names: relative to its folder; ~ and $NAME are as in a shell. ValueError if
    a table in a store names a file of this machine. where: file and line of the name."""
    own, kind = (x.partition("://")[0] if store.is_url(x) else "" for x in (folder, name))
    if own in ("", "file"):
        if name[:1] in ("~", "$"):
            name = os.path.expandvars(os.path.expanduser(name))
    elif re.match(r"/|~/|\$\w+/", name) or kind not in ("", own, *_STORES):
        fix = "name it relative to the table, or by s3://, gs://, hf:// or https://"
        raise ValueError(f"{where}: {name[:80]} is in no store, but the table is; {fix}")
    return store.join(folder, name)


def no_source(key: str, what: str, source: str) -> str:
    """Return an error message about a source that does not exist."""
    shown = cut(source, 160) or repr(source)
    hints = {
        "write several as --data A --data B, or args.train_data=[A,B]": "," in source,
        "its name is empty, as that of a variable that is not set": not source.strip(),
        "write ~ without quotes, or $HOME": source.startswith("~"),
        "write / in place of \\": "\\" in source,
        f"a data set of the hub is hf://datasets/{shown}": re.fullmatch("[\\w-]+/[\\w.-]+", source),
        "a web page holds no data: download its clips": source.startswith("http"),
    }
    hint = next((f"; {text}" for text, is_one in hints.items() if is_one), "")
    return f"{key}: {what} {shown} does not exist; set it to the {what}s of your data{hint}"


def refuse_samples(names: Sequence[str], num_samples: int, what: str, fix: str) -> None:
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

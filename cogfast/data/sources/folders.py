"""Where the videos and captions of a data set lie."""

from __future__ import annotations

import errno
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

DataDir = str | Path | Sequence[str | Path]

_NUM_NAMED = 5  # samples that an error lists
_MOST_CAPTION_BYTES = 2**20  # a tokenizer would take minutes for more

# str.splitlines also splits at what captions may hold, U+2028 for one.
_LINE_END = re.compile(r"\r\n|\r|\n")
_OTHER_VIDEOS = (".avi", ".mov", ".mkv", ".webm")


def data_sources(data_dir: DataDir) -> list[str]:
    """What data_dir names, at least one."""
    sources = [data_dir] if isinstance(data_dir, (str, Path)) else list(data_dir)
    if not sources:
        raise ValueError("data_dir=[]: name a folder in args.train_data (args.valid_data)")
    names = [str(source) for source in sources]
    twice = [name for name, times in Counter(names).items() if times > 1]
    if twice:
        logger.warning("named more than once, so that its samples come as often: %s", twice[0])
    return names


def data_folders(data_dir: DataDir) -> list[Path]:
    """The folders of data_dir, which must exist."""
    dirs = data_sources(data_dir)
    for folder in dirs:
        if not Path(folder).is_dir():
            raise ValueError(
                f"data_dir={folder}: no such folder; args.train_data and args.valid_data name them"
            )
    return [Path(folder) for folder in dirs]


def find_videos(folder: Path) -> Iterator[str]:
    """Every .mp4 below `folder`, also behind links to folders, each folder once.

    Sorted: os.walk's own order differs between machines.
    """
    for path in _find_files(folder):
        if path.lower().endswith(".mp4"):
            yield path


def _find_files(folder: Path) -> Iterator[str]:
    seen = set()
    for root, dirs, files in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        place = os.path.realpath(root)
        if place in seen:
            dirs.clear()
            continue
        seen.add(place)
        dirs.sort()
        # ._x.mp4 is what macOS writes beside x.mp4 on other systems' disks
        yield from (os.path.join(root, n) for n in sorted(files) if not n.startswith("._"))


def _refuse_folder(error: OSError) -> None:
    raise ValueError(f"data_dir: {error.filename} cannot be read ({error.strerror})") from None


def left_over(folder: Path, labels: Collection[str] = ()) -> list[str]:
    """What a folder seems to hold besides its .mp4 files: videos of other formats, and labels that
    are not among those of its videos. A sentence each."""
    files = list(_find_files(folder))
    others = [file for file in files if file.lower().endswith(_OTHER_VIDEOS)]
    orphans = [
        file
        for file in files
        if file.endswith(".txt") and "labels" in Path(file).parts[:-1] and file not in labels
    ]
    sentences = []
    if others:
        formats = ", ".join(_OTHER_VIDEOS)
        sentences.append(f"{len(others)} of {formats} are not read ({named(others)}); convert them")
    if orphans and labels:
        sentences.append(f"{len(orphans)} label files have no .mp4 file ({named(orphans)})")
    return sentences


def sat_label(path: str) -> str:
    """Where SAT looks for the caption of a video."""
    stem, _ = os.path.splitext(path)
    return (stem.replace(".mp4", ".txt") + ".txt").replace("videos", "labels")


def label_of(path: str, folder: Path) -> Path | None:
    """The label file of a video: SAT's name for it, else with only the last videos/ replaced."""
    if os.path.exists(sat_label(path)):
        return Path(sat_label(path))
    # SAT replaces the word anywhere, also in /my_videos/ above the data set.
    parts = list(Path(path).relative_to(folder).with_suffix(".txt").parts)
    if "videos" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("videos")] = "labels"
    elif folder.name == "videos":
        folder = folder.parent / "labels"
    label = folder.joinpath(*parts)
    return label if label.exists() else None


def decoded(data: bytes, name: str) -> str:
    """UTF-8 text, a byte order mark left out; `name` says where it is from."""
    try:
        at, text = data.find(b"\0"), data.decode("utf-8-sig")  # other encodings have many zeros
    except UnicodeDecodeError as error:
        at = error.start
    if at < 0:
        return text
    line = 1 + len(_LINE_END.findall(data[:at].decode("latin-1")))
    raise ValueError(
        f"{name}: line {line} is not UTF-8 (byte 0x{data[at]:02x}); save the captions as UTF-8"
    )


def check_caption_size(num_bytes: int, name: str) -> None:
    """ValueError where a caption is more than anybody writes."""
    if num_bytes > _MOST_CAPTION_BYTES:
        raise ValueError(
            f"{name}: {num_bytes} bytes; a caption has at most {_MOST_CAPTION_BYTES}, shorten it"
        )


def text_of(file: Path, is_caption: bool = False) -> str:
    """The text of a UTF-8 file."""
    try:
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise OSError(errno.ESPIPE, "a pipe or device")  # reading would wait, or never end
        if is_caption:
            check_caption_size(file.stat().st_size, str(file))
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    return decoded(data, str(file))


def first_line(file: Path) -> tuple[str, bool]:
    """The first line of a file, or nothing, and whether there is more in it."""
    first, _, rest = _LINE_END.sub("\n", text_of(file, is_caption=True)).partition("\n")
    return first.strip(), bool(rest.strip())


def text_lines(file: Path) -> list[str]:
    """The lines of a file, blank ones included, but for those at its end."""
    text = text_of(file).rstrip()
    return [line.strip() for line in _LINE_END.split(text)] if text else []


def refuse_gaps(files: Mapping[str, Path], lines: Mapping[str, Sequence[str]]) -> None:
    """Blank lines count in no list; lists that have them in different places may be meant otherwise."""
    blank = {key: [i for i, line in enumerate(texts) if not line] for key, texts in lines.items()}
    for key, places in blank.items():
        if places and blank["video_column"] and places != blank["video_column"]:
            line = 1 + min(set(places) ^ set(blank["video_column"]))
            raise ValueError(
                f"{files[key]} and {files['video_column']} have blank lines in different places, "
                f"first in line {line}; remove them, so that each line is of one video"
            )


def refuse_samples(
    names: Sequence[str], num_samples: int, what: str, fix: str = "add them"
) -> None:
    """ValueError that counts samples with a fault and names the first; nothing where none has it."""
    if names:
        raise ValueError(f"{len(names)}/{num_samples} {what}: {named(names)}; {fix}")


def named(names: Sequence[str]) -> str:
    """The first few of them."""
    return ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")


ADD_CAPTIONS = "add them or set data.params.allow_empty_captions=true"

"""Where the videos and captions of a data set lie."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

DataDir = str | Path | Sequence[str | Path]

_NUM_NAMED = 5  # samples that an error lists

# str.splitlines also splits at what captions may hold, U+2028 for one.
_LINE_END = re.compile(r"\r\n|\r|\n")
_OTHER_VIDEOS = (".avi", ".mov", ".mkv", ".webm")


def data_sources(data_dir: DataDir) -> list[str]:
    """What data_dir names, at least one."""
    sources = [data_dir] if isinstance(data_dir, (str, Path)) else list(data_dir)
    if not sources:
        raise ValueError("data_dir=[]: name a folder in args.train_data (args.valid_data)")
    return [str(source) for source in sources]


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
    seen = set()
    for root, dirs, files in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        place = os.path.realpath(root)
        if place in seen:
            dirs.clear()
            continue
        seen.add(place)
        dirs.sort()
        # ._x.mp4 is what macOS writes beside x.mp4 on other systems' disks
        names = (n for n in files if n.lower().endswith(".mp4") and not n.startswith("._"))
        yield from (os.path.join(root, name) for name in sorted(names))


def _refuse_folder(error: OSError) -> None:
    raise ValueError(f"data_dir: {error.filename} cannot be read ({error.strerror})") from None


def other_videos(folder: Path) -> str:
    """The end of a message: videos of other formats that a folder holds, or nothing."""
    num = sum(n.endswith(_OTHER_VIDEOS) for _, _, names in os.walk(folder) for n in names)
    return f", but {num} of {', '.join(_OTHER_VIDEOS)}; convert them to .mp4" if num else ""


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
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + len(_LINE_END.findall(data[: error.start].decode("latin-1")))
        raise ValueError(
            f"{name}: line {line} is not UTF-8 (byte 0x{data[error.start]:02x}); save the captions "
            "as UTF-8"
        ) from None


def text_of(file: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    return decoded(data, str(file))


def first_line(file: Path) -> str:
    """The first line of a file, or nothing."""
    return _LINE_END.split(text_of(file), maxsplit=1)[0].strip()


def text_lines(file: Path, keeps_blank: bool = False) -> list[str]:
    """The lines of a file; those that are blank only where asked for, and never at its end."""
    lines = [line.strip() for line in _LINE_END.split(text_of(file).rstrip())]
    return lines if keeps_blank and lines != [""] else [line for line in lines if line]


def refuse_samples(
    names: Sequence[str], num_samples: int, what: str, fix: str = "add them"
) -> None:
    """ValueError that counts samples with a fault and names the first; nothing where none has it."""
    if names:
        named = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
        raise ValueError(f"{len(names)}/{num_samples} {what}: {named}; {fix}")


ADD_CAPTIONS = "add them or set data.params.allow_empty_captions=true"

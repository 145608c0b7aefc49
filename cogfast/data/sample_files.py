"""Where the videos and captions of a data set lie."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

DataDir = str | Path | Sequence[str | Path]

# str.splitlines also splits at what captions may hold, U+2028 for one.
_LINE_END = re.compile(r"\r\n|\r|\n")
_OTHER_VIDEOS = (".avi", ".mov", ".mkv", ".webm")


def data_folders(data_dir: DataDir) -> list[Path]:
    """The folders of data_dir, which must exist."""
    dirs = [data_dir] if isinstance(data_dir, (str, Path)) else list(data_dir)
    if not dirs:
        raise ValueError("data_dir=[]: name a folder in args.train_data (args.valid_data)")
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


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file}: not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}); "
            "save the captions as UTF-8"
        ) from None


def first_line(file: Path) -> str:
    """The first line of a file, or nothing."""
    return _LINE_END.split(_text(file), maxsplit=1)[0].strip()


def text_lines(file: Path) -> list[str]:
    """The lines of a file that are not blank."""
    return [line.strip() for line in _LINE_END.split(_text(file)) if line.strip()]
